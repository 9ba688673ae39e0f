"""Sequences with which a model's ways to decode are tried when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ....protocol.block_ids import BLOCK_TOKENS
from ...kv.caches import ModelCacheSpec, Slab, new_caches, new_pool, restore
from ...kv.paged_cache import Reads
from ...kv.sequence_view import SequenceView
from ...proving.pieces import Pieces


def prefill(model: Any, caches: Sequence[Any], tokens: int, pieces: Pieces) -> None:
    """Computes a prompt of so many tokens; a piece ends after each layer."""
    model(mx.array([[number % 2 for number in range(tokens)]], mx.uint32), cache=caches)
    # The output layer is not computed.
    pieces.evaluate(caches)


def sequences_of(model: Any, spec: ModelCacheSpec, blocks: Sequence[int], pieces: Pieces) -> list[list[Any]]:
    """Returns the caches of sequences of so many blocks each, all the same block, and two tokens. Kernels read them."""
    pool = new_pool(spec, kernels=True)

    def sequence() -> list[Any]:
        return new_caches(spec, make_prompt_cache(model), pool, Reads.KERNEL)

    first = sequence()
    prefill(model, first, BLOCK_TOKENS, pieces)
    block = SequenceView(spec, first, None, BLOCK_TOKENS).cut(0, BLOCK_TOKENS)
    prefill(model, first, 2, pieces)
    return [far(spec, sequence(), first, block, count) for count in blocks]


def far(spec: ModelCacheSpec, caches: list[Any], source: Sequence[Any], block: Any, blocks: int) -> list[Any]:
    """Fills the caches of a sequence that has so many times the same block, so that it costs no memory.

    Args:
        source: caches of a sequence with that block and two tokens.
    """
    tail = SequenceView(spec, source, None, BLOCK_TOKENS + 2).cut(BLOCK_TOKENS, BLOCK_TOKENS + 2)
    assert isinstance(tail, Slab)
    restore(spec, caches, [block] * max(0, blocks), tail, tail.tokens)
    return caches
