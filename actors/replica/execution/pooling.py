"""Turns texts into vectors: computes the hidden states of a padded batch, or of one long text in chunks, and pools
them.

A text's vector is its last hidden state, its first one, or their mean; the other states are dropped. If the logprobs
of its tokens are wanted instead, each state but the last becomes those of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ....cluster.errors import GenerationFailed
from ..device.device import as_numpy, on_gpu, size_class
from .hidden_states import HiddenStates
from .padding import SHAPE_TOKENS
from .prefilling import CLEAR_EVERY_TOKENS
from .sampling.sampling import likeliest, log_sum

LOGPROB_ROWS = 64
"""For how many tokens of a text at a time logits are computed."""

HEAD_ROWS = 8
"""For how many texts at a time logits are computed: a row of them may have 250,000."""

LENGTH_MIN = 1e-12
"""A shorter vector is divided by this instead of its length."""


@dataclass(frozen=True)
class PoolingText:
    """A text to be pooled.

    Attributes:
        skipped: how many of its first tokens do not count for the mean and as the first; fewer than all.
        score, logprobs: as in `PoolingRequest`.
    """

    tokens: Sequence[int]
    skipped: int = 0
    score: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass
class LongText:
    """A text that is computed in chunks: `done` tokens are in `caches`. `pooled` is the sum `(1, dimensions)` of the
    hidden states that count so far, or the first; `logprobs` are those so far, if they are wanted."""

    text: PoolingText
    caches: list[Any]
    done: int = 0
    pooled: mx.array | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)


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
        """Returns the vectors of whole texts, each `(dimensions,)` float32, or `(tokens - 1, dimensions)` of logprobs.

        Raises:
            GenerationFailed: a vector has values that are not finite.
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
        made: dict[int, np.ndarray] = {
            at: self._logprobs(states[at], text.tokens[1:], text.logprobs)
            for at, text in enumerate(texts)
            if text.logprobs is not None
        }
        for scored in (False, True):
            sequences = [at for at, text in enumerate(texts) if at not in made and bool(text.score) is scored]
            if sequences:
                given = (last if scored else pooled)[mx.array(sequences)]
                made |= zip(sequences, self._vectors(given, [texts[sequence] for sequence in sequences]), strict=True)
        self._note(len(texts) * width)
        return [made[sequence] for sequence in range(len(texts))]

    def _alone(self, text: PoolingText) -> np.ndarray:
        vector = self.advance(self.begin(text), len(text.tokens))
        assert vector is not None
        return vector

    def advance(self, long: LongText, stop: int) -> np.ndarray | None:
        """Computes a text's tokens up to `stop`. Returns its vector, as `batch`, if these are all.

        Raises:
            GenerationFailed, Exception: as `batch`.
        """
        text, start = long.text, long.done
        states = self._hidden(mx.array([list(text.tokens[start:stop])], mx.uint32), long.caches, start)
        kept = [cache.state for cache in long.caches]
        if text.logprobs is not None:
            long.logprobs.append(self._logprobs(states[0], text.tokens[start + 1 : stop + 1], text.logprobs))
        elif self._pooling != "last" and not text.score and stop > text.skipped:
            new = self._counted(states, mx.array([max(0, text.skipped - start)]), mx.array([stop - start]))
            before = long.pooled
            long.pooled = new if before is None else before + new if self._pooling == "mean" else before
            kept.append(long.pooled)
        long.done = stop
        self._note(stop - start)
        if stop < len(text.tokens):
            mx.eval(kept)
            return None
        if text.logprobs is not None:
            return np.concatenate(long.logprobs)
        return self._vectors(states[:, -1] if long.pooled is None else long.pooled, [text])[0]

    def width(self, longest: int) -> int:
        """Returns to how many tokens a batch is padded."""
        # A size class, because attention without our caches needs a plan for every width.
        return SHAPE_TOKENS * size_class(-(-longest // SHAPE_TOKENS)) if self._on_gpu else longest

    def _counted(self, states: mx.array, starts: mx.array, stops: mx.array) -> mx.array:
        """Returns the sum of the states that count, or the first of them: `(sequences, dimensions)` float32.

        Args:
            states: `(sequences, tokens, dimensions)`.
            starts, stops: where the states that count begin and end, `(sequences,)`.
        """
        if self._pooling == "cls":
            return states[mx.arange(states.shape[0]), starts].astype(mx.float32)
        at = mx.arange(states.shape[1])[None]
        counts = (at >= starts[:, None]) & (at < stops[:, None])
        # States of padding may be NaN, so they are not multiplied by 0.
        return mx.where(counts[..., None], states.astype(mx.float32), 0.0).sum(axis=1)

    def _vectors(self, pooled: mx.array, texts: Sequence[PoolingText]) -> np.ndarray:
        """Returns the vectors of texts, of which all or none ask for scores, `(texts, dimensions)` float32.

        Args:
            pooled: their pooled hidden states, `(texts, dimensions)`.
        """
        if texts[0].score:
            starts = range(0, len(texts), HEAD_ROWS)
            parts = [self._scores(pooled[at : at + HEAD_ROWS], texts[at : at + HEAD_ROWS]) for at in starts]
            vectors = np.concatenate(parts)
        else:
            made = pooled.astype(mx.float32)
            if self._pooling == "mean":
                made = made / mx.array([[float(len(text.tokens) - text.skipped)] for text in texts])
            if self._normalizes:
                made = made / mx.maximum(mx.linalg.norm(made, axis=1, keepdims=True), LENGTH_MIN)
            vectors = as_numpy(made)
        if not np.isfinite(vectors).all():
            raise GenerationFailed("the model's output is not a number")
        return vectors

    def _logprobs(self, states: mx.array, following: Sequence[int], count: int) -> np.ndarray:
        """Returns the logprobs of tokens, each after the state before it, as vectors of `PooledTexts`.

        Args:
            states: `(tokens, dimensions)`; those behind the last that is followed do not count.
            count: of the likeliest tokens.
        """
        parts = [np.zeros((0, 1 + 2 * count), np.float32)]
        for start in range(0, len(following), LOGPROB_ROWS):
            tokens = mx.array(list(following[start : start + LOGPROB_ROWS]), mx.uint32)[:, None]
            logits = self._hidden.head(states[start : start + len(tokens)]).astype(mx.float32)
            total = log_sum(logits)
            numbers = [mx.take_along_axis(logits, tokens, axis=-1) - total]
            if count:
                among = likeliest(logits, count)
                values = mx.take_along_axis(logits, among, axis=-1) - total
                order = mx.argsort(-values, axis=-1)
                numbers += [mx.take_along_axis(each, order, axis=-1) for each in (among.astype(mx.float32), values)]
            parts.append(as_numpy(mx.concatenate(numbers, axis=-1)))
        made = np.concatenate(parts)
        # A token's logprob may be -inf, but not NaN.
        if np.isnan(made).any():
            raise GenerationFailed("the model's output is not a number")
        return made

    def _scores(self, last: mx.array, texts: Sequence[PoolingText]) -> np.ndarray:
        """Returns the scores `(texts, 1)` of last hidden states."""
        yes = mx.array([text.score[0] for text in texts])
        no = mx.array([text.score[-1] for text in texts])
        logits, texts_at = self._hidden.head(last).astype(mx.float32), mx.arange(len(texts))
        # With one token the score is its logit, with two their difference.
        two = mx.array([float(len(text.score) > 1) for text in texts])
        return as_numpy((logits[texts_at, yes] - two * logits[texts_at, no])[:, None])

    def _note(self, tokens: int) -> None:
        self._since_clear += tokens
        if self._since_clear >= CLEAR_EVERY_TOKENS:
            self._since_clear = 0
            mx.clear_cache()
