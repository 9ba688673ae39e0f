"""Finds out whether a token's logits have the same bits whatever else a decode step computes.

If they have, drafts and the other sequences of a batch change no answer. Kernels see to it: the order in which they add
up depends on one token alone (`kernels/few_rows.py`, `kernels/decode_views.py`). But a model may compute more than they
do, and products of more rows than they take are left to other kernels.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...execution.recorded.compiled_step import CompiledStep
from ...kernels.decode_views import NEW_MOST
from ...kv.caches import ModelCacheSpec, merge, take_back
from ...proving.pieces import Pieces
from .trial_sequences import sequences_of

TOKENS_TRIED = (128, 64, 32, 16)
BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Of the sequences."""

ALONE, ALONE_STEPS = (0, 2, 7), 2
"""The numbers of the sequences that are computed alone too, and in how many steps: each records a graph of its own."""

STRIDE = 7919
"""A prime number: between two tokens."""


def tokens_alike(
    model: Any, spec: ModelCacheSpec, step: CompiledStep, most_blocks: int, most_tokens: int, pieces: Pieces
) -> int:
    """Returns up to how many tokens a recorded step's logits have the same bits as those of each token alone, in a
    sequence that is alone; 0 if they differ.

    Args:
        most_blocks: the most blocks of a sequence.
        most_tokens: steps of more tokens are not tried.
    """

    def computed(tokens: list[int], caches: list[Any], new: list[int] | None = None) -> mx.array | None:
        logits = step(tokens, caches, {}, new)
        if logits is not None:
            mx.eval(logits)
            pieces.pause()
        return logits

    blocks = [min(count, max(0, most_blocks)) for count in BLOCKS]
    count, batch = len(blocks), merge(sequences_of(model, spec, blocks, pieces))
    alone = [merge([caches]) for caches in sequences_of(model, spec, [blocks[number] for number in ALONE], pieces)]
    first = computed([0] * count, batch)
    if first is None or any(computed([0], caches) is None for caches in alone):
        return 0
    vocabulary = first.shape[-1]
    # Of other tokens, for models may treat some alike.
    steps = range(ALONE_STEPS + NEW_MOST)
    tokens = [[(1 + at * count + number) * STRIDE % vocabulary for number in range(count)] for at in steps]
    for at in range(ALONE_STEPS):
        together = computed(tokens[at], batch)
        single = [computed([tokens[at][number]], caches) for number, caches in zip(ALONE, alone, strict=True)]
        if not all(_are_same(one, 0, together, number) for number, one in zip(ALONE, single, strict=True)):
            return 0
    lengths = list(batch[0].lengths)
    one_each = [computed(tokens[ALONE_STEPS + at], batch) for at in range(NEW_MOST)]
    for most in (tokens for tokens in TOKENS_TRIED if tokens <= most_tokens):
        take_back(batch, lengths, clean=False)
        each = most // count
        given = [tokens[ALONE_STEPS + at][number] for number in range(count) for at in range(each)]
        logits = computed(given, batch, [each] * count)
        expected = [one_each[at] for _ in range(count) for at in range(each)]
        if all(_are_same(logits, place, one, place // each) for place, one in enumerate(expected)):
            return most
    return 0


def _are_same(one: mx.array | None, row: int, other: mx.array | None, other_row: int) -> bool:
    """Whether two rows of logits have the same bits."""
    return one is not None and other is not None and bool(mx.array_equal(one[row], other[other_row]))
