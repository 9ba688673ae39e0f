"""A row's KV in and out of MLX's caches: restore a prefix, merge rows into a batch, cut blocks out again.

Shapes: keys and values of one layer are (1, kv_heads, tokens, head_dim). A *slab* is the KV of some consecutive
tokens, one (keys, values) pair a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

Slab = list[tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class ModelCacheSpec:
    """What a model's layers keep. `reusable` is True when every layer is plain attention, whose KV can be cut.

    Models with other layers (sliding windows, recurrent state) run, but their prefixes are computed each time.
    """

    layers: tuple[str, ...]
    bytes_per_token: int
    reusable: bool


def read_spec(caches: Sequence[Any], tokens: int) -> ModelCacheSpec:
    """The spec of a model from caches that hold `tokens` tokens."""
    plain = all(type(cache) is KVCache for cache in caches)
    if plain:
        per_token = sum(
            cache.keys.shape[1] * (cache.keys.shape[3] + cache.values.shape[3]) * cache.keys.itemsize
            for cache in caches
        )
    else:
        per_token = max(1, sum(cache.nbytes for cache in caches) // max(tokens, 256))
    return ModelCacheSpec(tuple(type(cache).__name__ for cache in caches), per_token, plain)


def restore(caches: Sequence[KVCache], slabs: Sequence[Slab], tail: Slab | None, tail_tokens: int) -> int:
    """Fill empty `caches` with blocks and the first `tail_tokens` of a tail.

    Returns:
        How many tokens the caches hold now.
    """
    for layer, cache in enumerate(caches):
        keys = [slab[layer][0] for slab in slabs]
        values = [slab[layer][1] for slab in slabs]
        if tail is not None and tail_tokens:
            keys.append(tail[layer][0][:, :, :tail_tokens])
            values.append(tail[layer][1][:, :, :tail_tokens])
        if not keys:
            return 0
        joined = mx.concatenate(keys, axis=2)
        cache.state = (joined, mx.concatenate(values, axis=2), joined.shape[2])
    return caches[0].offset


def join(batch: list[Any], row: Sequence[Any]) -> list[Any]:
    """`batch` (one cache a layer, or empty) with `row`'s caches as its new last row."""
    single = [cache.merge([cache]) for cache in row]
    if not batch:
        return single
    for cache, other in zip(batch, single, strict=True):
        cache.extend(other)
    return batch


def _copy(array: mx.array) -> mx.array:
    # With one head a slice is already contiguous and would keep the whole cache alive.
    return mx.contiguous(array) if array.shape[1] > 1 else array + mx.zeros((), dtype=array.dtype)


def cut(caches: Sequence[KVCache | BatchKVCache], row: int, spans: Sequence[tuple[int, int]]) -> list[Slab]:
    """Copies of token spans [start, stop) of one row, evaluated.

    Args:
        caches: a batch's caches, or one row's own (then `row` is 0).
    """
    slabs: list[Slab] = [[] for _ in spans]
    for cache in caches:
        if isinstance(cache, BatchKVCache):
            padding = cache.left_padding[row].item()
        else:
            padding = 0
        for slab, (start, stop) in zip(slabs, spans, strict=True):
            where = (slice(row, row + 1), slice(None), slice(padding + start, padding + stop))
            assert cache.keys is not None and cache.values is not None
            slab.append((_copy(cache.keys[where]), _copy(cache.values[where])))
    mx.eval(slabs)
    return slabs


def slab_bytes(slab: Slab) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in slab)
