"""Ends a sequence's reasoning once it has used its budget.

Only a block at the beginning of the answer counts. In the last part of the budget the block ends with the first line
that ends; once the budget is used, it ends at once: the tokens that close it are drawn, whatever the logits are.
Everything is computed on the device, so a draw does not wait for the one before it, and it is a function of the
sequence's tokens, so a sequence that moves or fails over continues in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ....protocol.replica_messages import ThinkingBudget

SOFT_PART, SOFT_TOKENS_MAX = 8, 256
"""The last part of a budget, in which a block ends with its line: an eighth, but not more tokens than this."""

START_TOKENS_MAX = 8
"""The opening marker ends within so many tokens of the answer, besides its own."""

_NONE = -1
"""Stands for no token, before the answer's first."""


class ThinkingLimit:
    """One sequence's budget and how much of it is used.

    Args:
        generated: token ids drawn before, here or elsewhere.
        vocabulary: length of the logits.
    """

    def __init__(self, budget: ThinkingBudget, generated: Sequence[int], vocabulary: int) -> None:
        self._budget = budget
        self._soft_from = budget.tokens - min(budget.tokens // SOFT_PART, SOFT_TOKENS_MAX)
        self._places = mx.arange(vocabulary)
        self._closing = mx.array(budget.closing, dtype=mx.int32)
        self._breaks = mx.array(budget.breaks or [_NONE], dtype=mx.int32)
        self._start, self._end = (mx.array(marker or [_NONE], dtype=mx.int32) for marker in (budget.start, budget.end))
        self._recent = mx.full(max(len(budget.start), len(budget.end), 1), _NONE, dtype=mx.int32)
        self._drawn = 0
        self._inside = mx.array(budget.inside)
        self._used = mx.array(0)
        """Tokens of reasoning, and behind the budget how many of the closing ones were drawn."""
        for token in generated:
            self.drawn(mx.array([token]))
            mx.eval(self._inside, self._used, self._recent)

    def __call__(self, logits: mx.array) -> mx.array:
        """Returns a sequence's logits, `(vocabulary,) float32`, with only the next closing token if one must be drawn.
        What a grammar excludes at this place, -inf, is not forced."""
        place = mx.clip(self._used - self._budget.tokens, 0, self._closing.size - 1)
        token = self._closing[place]
        forced = self._forcing & mx.isfinite(logits[token])
        return mx.where(forced & (self._places != token), -mx.inf, logits)

    def drawn(self, token: mx.array) -> None:
        """Notes a drawn token, `(1,)`, which may not be evaluated yet."""
        token, tokens = token.astype(mx.int32), self._budget.tokens
        forcing, before = self._forcing, self._inside
        place = mx.clip(self._used - tokens, 0, self._closing.size - 1)
        closed = forcing & (token[0] == self._closing[place])
        self._recent = mx.concatenate([self._recent[1:], token])
        self._drawn += 1
        # A grammar may exclude a closing token. The marker is begun again if the block is still open; else the rest of
        # the closing tokens is given up.
        forced = mx.where(closed, self._used + 1, tokens)
        used = mx.where(forcing, forced, mx.minimum(self._used + before, tokens))
        ended = before & mx.all(self._recent[-self._end.size :] == self._end)
        line = before & mx.any(token[0] == self._breaks) & (used >= self._soft_from)
        self._used = mx.where(line & ~ended, mx.maximum(used, tokens), used)
        opened = mx.array(False)
        if self._budget.start and (self._budget.again or self._drawn <= len(self._budget.start) + START_TOKENS_MAX):
            opened = mx.all(self._recent[-self._start.size :] == self._start)
        self._inside = (before & ~ended) | opened

    @property
    def _forcing(self) -> mx.array:
        """Whether the next token must be one that closes the block: none of these is left out once one was drawn."""
        tokens = self._budget.tokens
        begun = (self._used > tokens) & (self._used < tokens + self._closing.size)
        return begun | (self._inside & (self._used == tokens))


def thinking_limit_of(budget: ThinkingBudget | None, generated: Sequence[int], vocabulary: int) -> ThinkingLimit | None:
    """Returns a sequence's limit; None if it has none, or the model could not close a block."""
    if budget is None or not budget.closing or not all(0 <= token < vocabulary for token in budget.closing):
        return None
    return ThinkingLimit(budget, generated, vocabulary)
