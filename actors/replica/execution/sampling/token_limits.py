"""Which tokens a sequence may draw at all: its allowed tokens, without words that must not appear in its answer.

If a word has several tokens, its last one is excluded when the answer ends with the others. This is compared on the
device, so a draw does not wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ....protocol.replica_messages import Sampling

_NONE = -1
"""Stands for no token: before the answer's first token, and as the padding of shorter words."""


class TokenLimits:
    """One sequence's limits. Tokens outside the vocabulary are ignored: these cannot be drawn.

    Args:
        generated: token ids drawn before, here or elsewhere.
        vocabulary: length of the logits.
    """

    def __init__(self, sampling: Sampling, generated: Sequence[int], vocabulary: int) -> None:
        self._allowed = frozenset(token for token in sampling.allowed_token_ids if 0 <= token < vocabulary)
        words = [word for word in sampling.bad_words if word and all(0 <= token < vocabulary for token in word)]
        self._single = {word[0] for word in words if len(word) == 1}
        if self._allowed and self._allowed <= self._single:
            # Otherwise the sequence could draw nothing.
            self._single = set()
        self._mask: mx.array | None = None
        if self._allowed or self._single:
            mask = np.full(vocabulary, not self._allowed)
            mask[list(self._allowed)] = True
            mask[list(self._single)] = False
            self._mask = mx.array(mask)
        longer = [word for word in words if len(word) > 1]
        self._recent: mx.array | None = None
        if longer:
            width = max(map(len, longer)) - 1
            before = [[_NONE] * (width + 1 - len(word)) + list(word[:-1]) for word in longer]
            self._before = mx.array(before, dtype=mx.int32)
            self._last = mx.array([word[-1] for word in longer])
            recent = [_NONE] * width + list(generated)
            self._recent = mx.array(recent[-width:], dtype=mx.int32)

    def held_back(self, banned: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of `banned` that can be held back: none if no other is allowed."""
        return () if self._allowed and self._allowed - self._single <= {*banned} else banned

    def __call__(self, logits: mx.array) -> mx.array:
        """Returns a sequence's logits, `(vocabulary,) float32`, with -inf for what cannot be drawn."""
        limited = logits if self._mask is None else mx.where(self._mask, logits, -mx.inf)
        if self._recent is None:
            return limited
        complete = mx.all((self._before == _NONE) | (self._before == self._recent), axis=-1)
        less = limited.at[self._last].add(mx.where(complete, -mx.inf, 0.0))
        # If every allowed token would complete an excluded word, one of these words must appear.
        return mx.where(mx.any(less > -mx.inf), less, limited)

    def drawn(self, token: mx.array) -> None:
        """Notes a drawn token, `(1,)`, which may not be evaluated yet."""
        if self._recent is not None:
            self._recent = mx.concatenate([self._recent[1:], token.astype(mx.int32)])


def limits_of(sampling: Sampling, generated: Sequence[int], vocabulary: int) -> TokenLimits | None:
    """Returns a sequence's limits; None if it has none."""
    if not sampling.allowed_token_ids and not sampling.bad_words:
        return None
    return TokenLimits(sampling, generated, vocabulary)
