"""On CUDA prompts attend in pieces of a few shapes, with the same result."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv import attention
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv.paged_cache import PagedBatch, PagedKVCache
from satchel.actors.replica.kv.pool import BlockPool
from satchel.actors.replica.kv.query_pieces import PIECES, is_padded, padded_blocks, pieces_of

TOLERANCE = 1e-5
HEADS, KV_HEADS = 4, 2


def heads_of(tokens: int, dims: tuple[int, int]) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, (1, heads, tokens, dim), as a model makes them: tokens before heads in memory."""
    shapes = ((HEADS, dims[0]), (KV_HEADS, dims[0]), (KV_HEADS, dims[1]))
    queries, keys, values = (mx.random.normal((1, tokens, *shape)).transpose(0, 2, 1, 3) for shape in shapes)
    return queries, keys + 3, values


@pytest.mark.parametrize("policy", ["q4", "fp16"])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 12))])
def test_pieces_attend_as_the_whole(seed: int, policy: str, monkeypatch: pytest.MonkeyPatch):
    """Sequences with any history and any number of tokens, windows, sinks, pictures and sizes of heads."""
    rng = random.Random(seed)
    mx.random.seed(seed)
    dims, window = rng.choice([(32, 32), (64, 40), (80, 80), (96, 64)]), rng.choice([0, 0, 300, 700])
    monkeypatch.setattr(attention, "SCORES_MAX", rng.choice([2**24, 2**18]))
    sinks = rng.choice([None, mx.array([-1.0, 0.5, 3.0, 8.0])])
    pool, caches = BlockPool([[0]]), []
    lengths = [rng.choice([0, 0, 5, 256, 700, rng.randrange(1500)]) for _ in range(rng.choice([1, 1, 2, 3]))]
    for length in lengths:
        cache = PagedKVCache(0, POLICIES[policy], window, batch=PagedBatch.of_sequences(pool, 1))
        if length:
            cache.update_and_fetch(*heads_of(length, dims)[1:])
        caches.append(cache)
    new = [rng.choice([1, 60, 200, 256, 300, 700, rng.randrange(1, 1400)]) for _ in lengths]
    new[0] = max(new[0], 150)
    cache, count = kv_cache.merge([[cache] for cache in caches])[0], max(new) + rng.randrange(60)
    if rng.random() < 0.5:
        cache.batch.set_bidirectional(
            [[(length + more // 3, length + more)] for length, more in zip(lengths, new, strict=True)]
        )
    met: list[tuple[tuple[int, ...], ...]] = []

    def plain(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **named: Any) -> mx.array:
        met.append((queries.shape, keys.shape, named["mask"].shape))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, **named)

    cache.prepare(lengths=new, right_padding=[count - more for more in new])
    parts = [heads_of(count, dims) for _ in lengths]
    queries, keys, values = (mx.concatenate([part[which] for part in parts]) for which in range(3))
    mask = cache.make_mask(count, window_size=window or None)
    keys, values = cache.update_and_fetch(keys, values)
    hook = attention._Attend(plain)
    outs = []
    for cuda in (False, True):
        monkeypatch.setattr(attention, "on_cuda", lambda cuda=cuda: cuda)
        outs.append(hook(queries, keys, values, cache, scale=0.125, mask=mask, sinks=sinks))
    assert np.abs(np.array(outs[0]) - np.array(outs[1])).max() <= TOLERANCE * np.abs(np.array(outs[0])).max()
    whole, *pieces = met
    assert whole[0][2] == count and is_padded(keys.shape[2])
    for asked, read, seen in pieces:
        assert asked[0] == read[0] == seen[0] == 1 and asked[2] in PIECES
        assert read[2] == keys.shape[2] and seen == (1, 1, asked[2], read[2])


def test_the_layers_of_a_call_share_the_masks_of_their_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    batch = PagedBatch.of_sequences(BlockPool([[0, 1]]), 1)
    caches = [PagedKVCache(layer, POLICIES["q4"], batch=batch) for layer in range(2)]
    met = list[mx.array]()

    def plain(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **named: Any) -> mx.array:
        met.append(named["mask"])
        return mx.fast.scaled_dot_product_attention(queries, keys, values, **named)

    hook = attention._Attend(plain)
    for cache in caches:
        cache.prepare(lengths=[700], right_padding=[4])
    mask = caches[0].make_mask(704)
    for cache in caches:
        queries, keys, values = heads_of(704, (32, 32))
        hook(queries, *cache.update_and_fetch(keys, values), cache, scale=0.125, mask=mask)
    assert [bias.shape[2] for bias in met] == [512, 256] * 2
    assert met[0] is met[2] and met[1] is met[3]


def test_pieces_have_every_query_once_and_one_of_four_sizes():
    for few in (0, 64, 128):
        for count in range(1, 5000, 7):
            pieces = pieces_of(count, few)
            ends = [0, *(piece.stop for piece in pieces)]
            assert [piece.start for piece in pieces] == ends[:-1] and ends[-1] == count
            assert all(start < stop for start, stop in pairwise(ends))
            planned = [piece for piece in pieces if piece.size]
            assert all(piece.size in PIECES and piece.stop - piece.start <= piece.size for piece in planned)
            assert all(piece.stop - piece.start == piece.size for piece in planned[:-1])
            assert sum(piece.size for piece in planned) < count + PIECES[-1]
            rest = [piece.stop - piece.start for piece in pieces if not piece.size]
            assert rest == ([count % 256] if 0 < count % 256 <= few else [])


def test_classes_of_columns_are_few_and_waste_little():
    classes = sorted({padded_blocks(blocks) for blocks in range(1, 513)})
    assert classes[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16] and len(classes) == 32
    for blocks in range(1, 513):
        padded = padded_blocks(blocks)
        assert blocks <= padded <= 1.25 * blocks and padded_blocks(padded) == padded
        assert is_padded(blocks * BLOCK_TOKENS) == (padded == blocks)
    assert not is_padded(BLOCK_TOKENS + 1)
