"""A model without weights, whose logits are known."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

VOCABULARY = 50


class Tape:
    """A cache that only counts the tokens it has seen."""

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness
        self.seen = 0

    @classmethod
    def alone(cls) -> list[Tape]:
        return [cls()]

    @property
    def state(self) -> list[mx.array]:
        return []


class Table:
    """A model whose logits follow from the token and its position alone."""

    def __init__(self) -> None:
        self.logits = np.random.default_rng(3).normal(size=(4096, VOCABULARY)).astype(np.float32)

    def logits_at(self, position: int, token: int, sharpness: float) -> np.ndarray:
        return self.logits[(position * 7 + token) % 4096] * np.float32(sharpness)

    def __call__(self, tokens: mx.array, cache: Sequence[Tape]) -> mx.array:
        read = np.array(tokens)[0].tolist()
        rows = [self.logits_at(cache[0].seen + at, token, cache[0].sharpness) for at, token in enumerate(read)]
        cache[0].seen += len(read)
        return mx.array(np.stack(rows)[None])
