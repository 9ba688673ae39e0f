"""Drafts a sequence's next tokens from its own context: its prompt, and its answer so far.

An agent that edits a file repeats most of it. So the last few tokens are looked up in the sequence's context, and what
followed them there is the draft. As long as drafted tokens are the ones that come, the draft goes on from the same
place; else the last tokens are looked up again. (Prompt lookup decoding, Saxena 2023.)

The index is a table of positions by the hash of `LOOKED_UP` tokens, of which later ones replace earlier ones. What it
finds is compared with the tokens, so a collision is only a miss. Tokens and table take at most 80 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np

LOOKED_UP = 3
"""How many of the last tokens are looked up. With 2, 4.9 tokens are computed a step in place of 4.6 (48 edits of files
of Python, 7 drafted tokens), but of text that does not repeat twice as many are drafted in vain."""

TOKENS_MAX = 2**18
"""A longer context is looked up in its last tokens only, after some of which the table is made again."""

PLACES_LEAST = 8
"""The table has so many places for each token, so that few collide."""

SEEN_LESS = 0.95
"""How much less a guess counts with every later one."""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Drafter:
    """Drafts the next tokens of one sequence.

    Args:
        tokens: its tokens so far.

    Attributes:
        count: how many tokens it knows.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.count = len(tokens)
        self._tokens: list[int] = list(tokens[-TOKENS_MAX:])
        self._next: int | None = None
        self._right = self._guessed = 0.0
        self._make_table()
        self._look_up()

    @property
    def share(self) -> float:
        """The part of drafted tokens that was right lately, whether they were computed ahead or not; a half before the
        first."""
        return (self._right + 1.0) / (self._guessed + 2.0)

    def add(self, token: int) -> None:
        """Adds the token that came next."""
        if self._next is not None:
            right = self._tokens[self._next] == token
            self._right, self._guessed = self._right * SEEN_LESS + right, self._guessed * SEEN_LESS + 1.0
            self._next = self._next + 1 if right else None
        self._tokens.append(token)
        self.count += 1
        if len(self._tokens) > 2 * TOKENS_MAX or PLACES_LEAST * len(self._tokens) > len(self._table):
            self._make_table()
        self._look_up()

    def draft(self, most: int) -> list[int]:
        """Returns what may come next, at most `most` tokens. A repetition that is going on goes on."""
        if self._next is None:
            return []
        period = len(self._tokens) - self._next
        return [self._tokens[self._next + index % period] for index in range(most)]

    def since(self, count: int) -> list[int]:
        """Returns its tokens without the first `count`; at most `TOKENS_MAX`."""
        return self._tokens[max(0, len(self._tokens) - self.count + count) :]

    @property
    def drafts(self) -> bool:
        """Whether it has a draft."""
        return self._next is not None

    def _make_table(self) -> None:
        """Makes the table of all tokens but the last, which `_look_up` adds."""
        dropped = max(0, len(self._tokens) - TOKENS_MAX)
        del self._tokens[:dropped]
        if self._next is not None:
            self._next = self._next - dropped if self._next >= dropped else None
        size = 1 << max(10, (PLACES_LEAST * len(self._tokens)).bit_length())
        self._shift = 64 - size.bit_length() + 1
        self._table = np.zeros(size, np.int32)
        """By hash: the index of the token after the last occurrence; 0 for none."""
        tokens = np.asarray(self._tokens[:-1], np.uint64)
        if len(tokens) < LOOKED_UP:
            return
        starts = len(tokens) - LOOKED_UP + 1
        with np.errstate(over="ignore"):
            sums = sum(tokens[at : at + starts] * np.uint64(factor) for at, factor in enumerate(_FACTORS))
        self._table[sums >> np.uint64(self._shift)] = np.arange(LOOKED_UP, len(tokens) + 1)

    def _look_up(self) -> None:
        """Looks the last tokens up, unless a draft goes on, and notes that they are here now."""
        if len(self._tokens) < LOOKED_UP:
            return
        last = self._tokens[-LOOKED_UP:]
        place = (sum(map(mul, last, _FACTORS)) & _MASK) >> self._shift
        if self._next is None:
            found = int(self._table[place])
            if found and self._tokens[found - LOOKED_UP : found] == last:
                self._next = found
        self._table[place] = len(self._tokens)
