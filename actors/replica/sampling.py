"""Drawing the next token of every row of a batch at once, each row by its own parameters and its own noise.

Noise is a pure function of (seed, position), so a row's tokens never depend on its batch mates, on preemption, or on
the replica it runs on. Sampling is the Gumbel-max trick: argmax(logits / temperature + noise) is a draw from the
softmax (Gumbel 1954; Maddison et al. 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..messages import Sampling

_MASK = (1 << 64) - 1
_NO_LIMIT = 2**31 - 1


def noise_key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position), by two rounds of SplitMix64 (Steele et al. 2014)."""
    value = (seed & _MASK) ^ ((position * 0x9E3779B97F4A7C15) & _MASK)
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


class BatchSampler:
    """The sampling parameters of a batch as arrays, built anew when the batch changes."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._seeds = [row.seed for row in rows]
        self._all_greedy = all(row.temperature == 0 for row in rows)
        self._filters = any((row.top_k > 0 or row.top_p < 1) and row.temperature > 0 for row in rows)
        temperature = mx.array([row.temperature for row in rows], dtype=mx.float32)[:, None]
        self._greedy = temperature == 0
        self._temperature = mx.where(self._greedy, 1.0, temperature)
        self._top_p = mx.array([row.top_p for row in rows], dtype=mx.float32)[:, None]
        self._top_k = mx.array([min(row.top_k or _NO_LIMIT, _NO_LIMIT) for row in rows], dtype=mx.int32)[:, None]

    def __call__(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Tokens of shape (rows,) for logits of shape (rows, vocabulary).

        Args:
            positions: how many tokens each row has drawn before.
        """
        best = mx.argmax(logits, axis=-1)
        if self._all_greedy:
            return best
        keys = [noise_key(seed, position) for seed, position in zip(self._seeds, positions, strict=True)]
        pairs = mx.array(np.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], dtype=np.uint32))
        vocabulary = logits.shape[-1]
        noise = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))(pairs)
        scaled = logits.astype(mx.float32) / self._temperature
        if self._filters:
            scaled = self._filtered(scaled)
        return mx.where(self._greedy[:, 0], best, mx.argmax(scaled + noise, axis=-1))

    def _filtered(self, scaled: mx.array) -> mx.array:
        """Minus infinity wherever top-k or top-p (nucleus, Holtzman et al. 2019) leave a token out."""
        descending = -mx.sort(-scaled, axis=-1)
        probabilities = mx.softmax(descending, axis=-1)
        before = mx.cumsum(probabilities, axis=-1) - probabilities
        rank = mx.arange(scaled.shape[-1])
        kept = ((before < self._top_p) | (self._top_p >= 1)) & (rank < self._top_k)
        kept = kept | (rank == 0)
        threshold = mx.min(mx.where(kept, descending, mx.inf), axis=-1, keepdims=True)
        return mx.where(scaled >= threshold, scaled, -mx.inf)
