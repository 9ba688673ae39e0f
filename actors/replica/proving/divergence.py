"""Measures how much a model's next-token distributions differ between kinds of caches that read the same tokens.

All caches read in lockstep, a piece at a time, because the logits of a large vocabulary take much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..device.device import as_numpy
from .pieces import IN_ONE_PIECE, Pieces

CHUNK_TOKENS = 512
SCORED_TOKENS = 64
"""Tokens that are read at once if their logits are needed."""

NewCaches = Callable[[], list[Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Scores:
    """Scores of a span's positions, each an array `(positions,)`.

    Attributes:
        kl: KL(reference || other) in nats, float32; NaN if one of the two is not a distribution.
        same: whether both have the same likeliest token, bool; false if `kl` is NaN.
        loss: the loss of the text's next token with the other caches, in nats, float32; NaN at the text's end.
        reference_loss: the same with the reference caches.
    """

    kl: np.ndarray
    same: np.ndarray
    loss: np.ndarray
    reference_loss: np.ndarray


def logits_of(
    model: Any,
    tokens: Sequence[int],
    caches: list[Any],
    spans: Sequence[Span],
    scored_tokens: int = SCORED_TOKENS,
    work: Pieces = IN_ONE_PIECE,
) -> Iterator[mx.array]:
    """Reads the tokens up to the last span's end, and yields the logits after the tokens in spans piece by piece, each
    `(positions, vocabulary)` in the model's dtype. Spans are sorted and do not overlap. Equal arguments give equal
    pieces."""
    at = 0
    for start, stop in spans:
        while at < start:
            read(model, tokens[at : min(at + CHUNK_TOKENS, start)], caches, work)
            at = min(at + CHUNK_TOKENS, start)
        while at < stop:
            yield read(model, tokens[at : min(at + scored_tokens, stop)], caches, work)
            at = min(at + scored_tokens, stop)
    # Otherwise MLX would cache buffers of these sizes.
    mx.clear_cache()


def read(model: Any, tokens: Sequence[int], caches: list[Any], work: Pieces = IN_ONE_PIECE) -> mx.array:
    """Reads the next tokens of a sequence, and returns their logits, `(tokens, vocabulary)`, not evaluated yet. Each
    layer is a piece of `work`."""
    # Lazy: the output layer is computed only if the logits are used.
    logits: mx.array = model(mx.array([list(tokens)]), cache=caches)[0]
    work.evaluate(caches)
    return logits


def compare(
    model: Any,
    tokens: Sequence[int],
    spans: Sequence[Span],
    reference: NewCaches,
    others: Mapping[str, NewCaches],
    *,
    scored_tokens: int = SCORED_TOKENS,
    enough: Callable[[int], bool] = lambda places: False,
    work: Pieces = IN_ONE_PIECE,
) -> dict[str, list[Scores]]:
    """Compares the next-token distributions under other caches with those under `reference`'s.

    Args:
        scored_tokens: the tokens of a piece.
        enough: called after every piece with the number of scored positions; returns whether to skip the rest.
        work: ends a piece after each layer of what is read, and after each comparison.

    Returns:
        The scores of every span, by name.
    """
    readers = {name: logits_of(model, tokens, make(), spans, scored_tokens, work) for name, make in others.items()}
    pieces: dict[str, list[Scores]] = {name: [] for name in others}
    places = [place for start, stop in spans for place in range(start, stop)]
    done = 0
    for logits in logits_of(model, tokens, reference(), spans, scored_tokens, work):
        own, count = _log_softmax(logits), logits.shape[0]
        follow = [tokens[place + 1] if place + 1 < len(tokens) else -1 for place in places[done : done + count]]
        for name, reader in readers.items():
            pieces[name].append(_scores(own, _log_softmax(next(reader)), np.array(follow)))
            work.pause()
        done += count
        if enough(done):
            break
    ends = np.cumsum([stop - start for start, stop in spans])[:-1]
    return {name: _by_span(scored, ends) for name, scored in pieces.items()}


def _by_span(pieces: Sequence[Scores], ends: np.ndarray) -> list[Scores]:
    columns = [np.split(np.concatenate(parts), ends) for parts in zip(*map(_fields, pieces), strict=True)]
    return [Scores(*parts) for parts in zip(*columns, strict=True)]


def _fields(scores: Scores) -> tuple[np.ndarray, ...]:
    return scores.kl, scores.same, scores.loss, scores.reference_loss


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _scores(own: mx.array, other: mx.array, follow: np.ndarray) -> Scores:
    """Scores a piece of log probabilities, `(positions, vocabulary)`; `follow` has the next tokens, -1 for none."""
    probability = mx.exp(own)
    # A token masked out in both distributions (-inf) would give NaN.
    terms = mx.where(probability > 0, probability * (own - other), 0.0).sum(axis=-1)
    # Without this, a row of only NaN would have no terms: it is no distribution, and its sum is not 1.
    sums = mx.exp(other).sum(axis=-1) + probability.sum(axis=-1)
    kl = np.maximum(np.where(np.isfinite(as_numpy(sums)), as_numpy(terms), np.nan), 0.0).astype(np.float32)
    taken = mx.array(np.maximum(follow, 0))[:, None]
    losses = [-as_numpy(mx.take_along_axis(each, taken, axis=-1)[:, 0]) for each in (other, own)]
    losses = [np.where(follow >= 0, loss, np.nan).astype(np.float32) for loss in losses]
    # A GPU's argmax may ignore NaN.
    same = as_numpy(mx.argmax(own, -1) == mx.argmax(other, -1)) & ~np.isnan(kl)
    return Scores(kl, same, *losses)
