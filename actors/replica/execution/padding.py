"""Which prompts run as one padded batch, and how far they are padded."""

from __future__ import annotations

from collections.abc import Sequence

from ..device.device import size_class
from ..kv.attention import FEW_QUERIES

PADDING_MAX = 2.0
"""A padded batch of prompts may have at most this many times its real tokens."""

SHAPE_TOKENS = 64
"""Batches of prompts are padded to a `size_class` of units of this many tokens."""


def padded_tokens(longest: int) -> int:
    """Returns to how many tokens a batch of prompts is padded."""
    return SHAPE_TOKENS * size_class(-(-longest // SHAPE_TOKENS))


def count_together(sequences: Sequence[tuple[int, int]]) -> int:
    """Returns how many of these sequences, from the first on, form the next batch: as many as need little padding.

    Args:
        sequences: of each the tokens that have KV, and those to compute.
    """
    held, lengths = zip(*sequences, strict=True)
    places = len(sequences) * max(lengths), len(sequences) * max(held)
    if places[0] > PADDING_MAX * sum(lengths) or places[1] > PADDING_MAX * (sum(held) + sum(lengths)):
        return 1
    if padded_tokens(max(lengths)) <= FEW_QUERIES:
        return len(sequences)
    # A power of two, for few different shapes: CUDA makes a plan for every new one.
    return 1 << (len(sequences).bit_length() - 1)
