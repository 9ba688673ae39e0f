"""Encodes guarded texts, in which a break (a lone surrogate) keeps callers' markers text: control tokens are found only
in what the template wrote, never across a break.

First, each break is replaced by another character, and the tokenizer finds the control tokens. Then the stretches
between them that have a break are encoded again, without breaks, by a tokenizer of the same model without control
tokens. So a caller's text is encoded by its characters, and all other tokens are unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .control_tokens import BREAK, breaks_of

_FILLERS = "\U0010fffd\U00010137"
"""Characters that can replace a break while control tokens are searched: the first one that the normalizer does not
drop is used. The choice does not matter, because no marker contains them."""

_PRIVATE_LAST = 0x10FFFC


@dataclass
class GuardedIds:
    """Token ids, each with the number of the pre-tokenizer's word that it belongs to."""

    ids: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)

    def add(self, ids: list[int], words: list[int | None]) -> None:
        """Appends a stretch, whose words may be numbered from any number on."""
        last, number = object(), self.words[-1] if self.words else -1
        for word in words:
            if word != last or word is None:
                last, number = word, number + 1
            self.words.append(number)
        self.ids += ids


class GuardedEncoder:
    """Encodes the guarded texts (texts with breaks) of one model. Thread-safe.

    Args:
        backend: the `tokenizers.Tokenizer`.
        added: the `AddedToken` of each added token's id.
        control: the control tokens.
    """

    def __init__(self, backend: Any, added: Mapping[int, Any], control: frozenset[int]) -> None:
        self._backend, self._added, self._control = backend, added, control
        self._plain: dict[str, _PlainTokenizer] = {}
        normalizer = backend.normalizer
        kept = [each for each in _FILLERS if normalizer is None or each in normalizer.normalize_str(f"a{each}a")]
        self._filler = kept[0] if kept else _FILLERS[-1]

    def encode(self, text: str, *, special_tokens: bool = False) -> GuardedIds:
        """Returns the tokens of a guarded text that is valid Unicode but for its breaks. `special_tokens` as in
        `Tokenizer.encode`."""
        filled = text.replace(BREAK, self._filler)
        whole = self._backend.encode_batch([filled], add_special_tokens=special_tokens)[0]
        ids, offsets, words = whole.ids, whole.offsets, whole.word_ids
        # The tokens that the tokenizer puts around a text.
        head = _run(whole.special_tokens_mask)
        tail = max(head, len(ids) - _run(whole.special_tokens_mask[::-1]))
        breaks = [at + index for index, at in enumerate(breaks_of(text))]
        out = GuardedIds()

        def take(first: int, last: int, start: int, end: int) -> None:
            """Adds the tokens of the characters between two control tokens."""
            at = bisect_left(breaks, start)
            if at == len(breaks) or breaks[at] >= end:
                out.add(ids[first:last], words[first:last])
            elif piece := text[start:end].replace(BREAK, ""):
                out.add(*self._without_control(piece, first=not start))

        out.add(ids[:head], [None] * head)
        first, start = head, 0
        for index in range(head, tail):
            if ids[index] in self._control and self._is_spelled(filled, ids[index], *offsets[index]):
                take(first, index, start, offsets[index][0])
                out.add([ids[index]], [None])
                first, start = index + 1, offsets[index][1]
        take(first, tail, start, len(text))
        out.add(ids[tail:], [None] * (len(ids) - tail))
        return out

    def _is_spelled(self, text: str, token: int, start: int, end: int) -> bool:
        """Returns whether a control token stands for its own text, and not for a character that the tokenizer does not
        know."""
        entry = self._added[token]
        return entry.normalized or entry.content in text[start:end]

    def _without_control(self, piece: str, *, first: bool) -> tuple[list[int], list[int | None]]:
        """Returns the tokens of a text without control tokens, and their words.

        Args:
            first: whether the text is the beginning of the whole.
        """
        lead = chr(next(code for code in range(_PRIVATE_LAST, 0, -1) if chr(code) not in piece))
        if (plain := self._plain.get(lead)) is None:
            plain = _PlainTokenizer(self._backend, self._added, self._control, lead)
            if lead == chr(_PRIVATE_LAST):
                self._plain[lead] = plain
        return plain.encode(piece, first=first)


def _run(mask: list[int]) -> int:
    """Returns how many set items the mask begins with."""
    return next((at for at, item in enumerate(mask) if not item), len(mask))


class _PlainTokenizer:
    """The model's tokenizer without its control tokens. It shares the vocabulary, so it takes no memory.

    Args:
        lead: a character that no text has which is encoded here. A text that is not at the beginning of the whole is
            encoded behind it, because some tokenizers put a space before the first character.
    """

    def __init__(self, source: Any, added: Mapping[int, Any], control: frozenset[int], lead: str) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._control = control
        self._contents = {token: added[token].content for token in control}
        self._model = source.model
        self._lead = lead
        self._tokenizer = Tokenizer(source.model)
        if source.normalizer is not None:
            self._tokenizer.normalizer = source.normalizer
        if source.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = source.pre_tokenizer
        self._tokenizer.encode_special_tokens = source.encode_special_tokens
        others = {token: entry for token, entry in added.items() if token not in control and entry.content}
        for special, add in ((True, self._tokenizer.add_special_tokens), (False, self._tokenizer.add_tokens)):
            add([entry for entry in others.values() if entry.special is special])
        self._tokenizer.add_tokens([AddedToken(lead, normalized=False)])
        # Added tokens that the vocabulary does not have get new numbers.
        self._own: dict[int, int] = {}
        for token, entry in others.items():
            if (number := self._tokenizer.token_to_id(entry.content)) is not None and number != token:
                self._own[number] = token

    def encode(self, text: str, *, first: bool) -> tuple[list[int], list[int | None]]:
        """Returns the tokens of `text` and their words."""
        behind = "" if first else self._lead
        found = self._tokenizer.encode_batch([behind + text], add_special_tokens=False)[0]
        ids, words = found.ids[len(behind) :], found.word_ids[len(behind) :]
        if self._own:
            ids = [self._own.get(token, token) for token in ids]
        if self._control.isdisjoint(ids):
            return ids, words
        offsets = found.offsets[len(behind) :]
        out: list[int] = []
        whose: list[int | None] = []
        for token, word, (start, end) in zip(ids, words, offsets, strict=True):
            shown = text[max(0, start - len(behind)) : end - len(behind)]
            # The vocabulary may have a control token as an ordinary entry too. The token for unknown characters is not
            # meant.
            parts = self._split(token) if token in self._control and self._contents[token] in shown else [token]
            out += parts
            whose += [word] * len(parts)
        return out, whose

    def _split(self, token: int) -> list[int]:
        """Returns ordinary tokens for a control token's text."""
        return [
            part.id
            for character in self._contents[token]
            for part in self._model.tokenize(character)
            if part.id not in self._control
        ]
