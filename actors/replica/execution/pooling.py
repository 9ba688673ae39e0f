"""Texts to vectors: hidden states of a padded batch, or of one long text in chunks, and what is kept of them.

Of a text's hidden states only its vector stays: the last one, the first one, or the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ....cluster.errors import GenerationFailed
from ..kv.device import on_gpu, size_class
from .executor import CLEAR_EVERY_TOKENS, SHAPE_TOKENS
from .hidden_states import HiddenStates

LENGTH_MIN = 1e-12
"""A shorter vector is not made longer."""


@dataclass(frozen=True)
class PoolingText:
    """A text to be pooled.

    Attributes:
        skipped: how many of its first tokens do not count for the mean and the first; fewer than it has.
        score: as in `PoolingRequest`.
    """

    tokens: Sequence[int]
    skipped: int = 0
    score: tuple[int, ...] = ()


@dataclass
class LongText:
    """A text that is computed in chunks: `done` tokens are in `caches`. `pooled` is the sum `(1, dimensions)` of the
    hidden states that count so far, or the first."""

    text: PoolingText
    caches: list[Any]
    done: int = 0
    pooled: mx.array | None = None


class TextPooler:
    """Computes vectors. Used on the engine's thread.

    Args:
        pooling, normalizes: as in `SentenceModules`.
    """

    def __init__(self, hidden: HiddenStates, pooling: str, *, normalizes: bool) -> None:
        self._hidden = hidden
        self._pooling, self._normalizes = pooling, normalizes
        self._on_gpu = on_gpu()
        self._since_clear = 0

    def begin(self, text: PoolingText) -> LongText:
        """Returns the text with nothing computed yet."""
        return LongText(text, self._hidden.new_caches())

    def batch(self, texts: Sequence[PoolingText]) -> list[np.ndarray]:
        """Returns the vectors of whole texts, each `(dimensions,)` float32.

        Raises:
            GenerationFailed: a vector is not made of numbers.
            Exception: whatever the model raises.
        """
        if not self._hidden.batched:
            return [self._alone(text) for text in texts]
        width = self.width(max(len(text.tokens) for text in texts))
        padded = [[*text.tokens, *[0] * (width - len(text.tokens))] for text in texts]
        states = self._hidden(mx.array(padded, mx.uint32))
        stops = mx.array([len(text.tokens) for text in texts])
        last = pooled = states[mx.arange(len(texts)), stops - 1]
        if self._pooling != "last":
            pooled = self._counted(states, mx.array([text.skipped for text in texts]), stops)
        vectors = [self._vector((last if text.score else pooled)[row], text) for row, text in enumerate(texts)]
        mx.eval(vectors)
        self._note(len(texts) * width)
        return [_sound(vector) for vector in vectors]

    def _alone(self, text: PoolingText) -> np.ndarray:
        vector = self.advance(self.begin(text), len(text.tokens))
        assert vector is not None
        return vector

    def advance(self, long: LongText, stop: int) -> np.ndarray | None:
        """Computes a text's tokens up to `stop`. Returns its vector, `(dimensions,)` float32, if these are all.

        Raises:
            GenerationFailed, Exception: as `batch`.
        """
        text, start = long.text, long.done
        states = self._hidden(mx.array([list(text.tokens[start:stop])], mx.uint32), long.caches, start)
        kept = [cache.state for cache in long.caches]
        if self._pooling != "last" and not text.score and stop > text.skipped:
            new = self._counted(states, mx.array([max(0, text.skipped - start)]), mx.array([stop - start]))
            before = long.pooled
            long.pooled = new if before is None else before + new if self._pooling == "mean" else before
            kept.append(long.pooled)
        long.done = stop
        self._note(stop - start)
        if stop < len(text.tokens):
            mx.eval(kept)
            return None
        return _sound(self._vector(states[0, -1] if long.pooled is None else long.pooled[0], text))

    def width(self, longest: int) -> int:
        """Returns to how many tokens a batch is padded."""
        return SHAPE_TOKENS * size_class(-(-longest // SHAPE_TOKENS)) if self._on_gpu else longest

    def _counted(self, states: mx.array, starts: mx.array, stops: mx.array) -> mx.array:
        """Returns of the states that count the sum or the first: `(rows, dimensions)` float32.

        Args:
            states: `(rows, tokens, dimensions)`.
            starts, stops: where those that count begin and end, `(rows,)`.
        """
        if self._pooling == "cls":
            return states[mx.arange(states.shape[0]), starts].astype(mx.float32)
        at = mx.arange(states.shape[1])[None]
        counts = (at >= starts[:, None]) & (at < stops[:, None])
        # What padding gives may be no number, so it is not multiplied by 0.
        return mx.where(counts[..., None], states.astype(mx.float32), 0.0).sum(axis=1)

    def _vector(self, pooled: mx.array, text: PoolingText) -> mx.array:
        """Returns the vector of what was pooled, `(dimensions,)`."""
        if text.score:
            # Of one text at a time: a row of logits may have 250,000.
            logits = self._hidden.head(pooled[None])[0][mx.array(text.score)].astype(mx.float32)
            return logits[:1] - logits[1:] if len(text.score) > 1 else logits
        vector = pooled.astype(mx.float32)
        if self._pooling == "mean":
            vector = vector / (len(text.tokens) - text.skipped)
        return vector / mx.maximum(mx.linalg.norm(vector), LENGTH_MIN) if self._normalizes else vector

    def _note(self, tokens: int) -> None:
        self._since_clear += tokens
        if self._since_clear >= CLEAR_EVERY_TOKENS:
            self._since_clear = 0
            mx.clear_cache()


def _sound(vector: mx.array) -> np.ndarray:
    values = np.array(vector)
    if not np.isfinite(values).all():
        raise GenerationFailed("the model's output is not a number")
    return values
