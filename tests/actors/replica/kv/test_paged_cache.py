"""The position law for one layer: what a query sees depends only on its position, not on chunks or batches.

The reference is attention written out: for every position, full blocks before its own as sealed, its own block as it
is. Sequences that go through caches in any other way must equal it within rounding, and each other to the last bit.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kernels.decode_views import DecodeView
from satchel.actors.replica.kernels.sealing import POLICIES, SealPolicy
from satchel.actors.replica.kv import attention, paged_cache
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv.paged_cache import PagedBatch, PagedKVCache, Reads
from satchel.actors.replica.kv.pool import BlockPool, SlotGroup, slots_of
from satchel.actors.replica.kv.steps import first_block, mask_of, step_of
from tests.worlds.replica import metal_on_cpu

KV_HEADS, HEADS = 2, 4
TOLERANCE = 2e-6
Q4 = POLICIES["q4"]

POOLS: defaultdict[tuple[Any, ...], BlockPool] = defaultdict(lambda: BlockPool([[0], [1, 2]]))
"""By the policy and the sizes of keys and values."""


@pytest.fixture(autouse=True)
def pool_adds_up() -> Iterator[None]:
    """After every test each slot is free or held, once."""
    yield
    for pool in POOLS.values():
        pool.check()


def new_cache(policy: SealPolicy = Q4, window: int = 0, dims: tuple[int, int] = (64, 64)) -> PagedKVCache:
    return PagedKVCache(0, policy, window, batch=PagedBatch.of_sequences(POOLS[policy.name, *dims], 1))


def merged(caches: Sequence[PagedKVCache]) -> PagedKVCache:
    return kv_cache.merge([[cache] for cache in caches])[0]


Heads = tuple[mx.array, mx.array, mx.array]
"""Queries, keys and values of one sequence, (1, heads, tokens, dim)."""


def make_sequence(seed: int, tokens: int, key_dim: int = 64, value_dim: int = 64) -> Heads:
    """Keys with a constant part a channel, as models with biases have them."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(1, KV_HEADS, tokens, key_dim)) + 4 * rng.normal(size=(1, KV_HEADS, 1, key_dim))
    queries = rng.normal(size=(1, HEADS, tokens, key_dim))
    values = rng.normal(size=(1, KV_HEADS, tokens, value_dim))
    arrays = [mx.array(array.astype(np.float32)) for array in (queries, keys, values)]
    return arrays[0], arrays[1], arrays[2]


def attend(cache: PagedKVCache, sequences: Sequence[Heads], starts: Sequence[int], count: int) -> mx.array:
    """One call of a model's layer: (sequences, heads, count, value_dim)."""
    parts = []
    for which in range(3):
        spans = [
            sequence[which][:, :, start : start + count] for sequence, start in zip(sequences, starts, strict=True)
        ]
        widths = [[(0, 0), (0, 0), (0, count - span.shape[2]), (0, 0)] for span in spans]
        # What stands in the padding must not matter.
        parts.append(mx.concatenate([mx.pad(s, w, constant_values=7.0) for s, w in zip(spans, widths, strict=True)]))
    queries, keys, values = parts
    mask = cache.make_mask(count, window_size=cache.window or None)
    keys, values = cache.update_and_fetch(keys, values)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[3] ** -0.5, mask=mask)
    mx.eval(out, cache.state)
    return out


def run_alone(
    sequence: Heads, chunks: Iterator[int], policy: SealPolicy = Q4, window: int = 0
) -> tuple[np.ndarray, PagedKVCache]:
    cache, done, outs = new_cache(policy, window, (sequence[1].shape[3], sequence[2].shape[3])), 0, []
    while done < sequence[0].shape[2]:
        count = min(next(chunks), sequence[0].shape[2] - done)
        outs.append(attend(cache, [sequence], [done], count))
        done += count
    return np.array(mx.concatenate(outs, axis=2)), cache


def filled(sequence: Heads, policy: SealPolicy = Q4, window: int = 0) -> PagedKVCache:
    """A cache that holds the sequence, which nothing has attended to."""
    cache, tokens = new_cache(policy, window, (sequence[1].shape[3], sequence[2].shape[3])), sequence[1].shape[2]
    for start in range(0, tokens, 1000):
        cache.make_mask(min(1000, tokens - start), window_size=window or None)
        cache.update_and_fetch(sequence[1][:, :, start : start + 1000], sequence[2][:, :, start : start + 1000])
        mx.eval(cache.state)
    return cache


def chunks_of(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


def expected(sequence: Heads, policy: SealPolicy = Q4, window: int = 0) -> np.ndarray:
    queries, keys, values = (np.array(array)[0].astype(np.float64) for array in sequence)
    tokens = queries.shape[1]
    whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    sealed_keys, sealed_values = np.zeros((2, 0)), np.zeros((2, 0))
    if whole:
        sealed = sealing.seal(sequence[1][:, :, :whole], sequence[2][:, :, :whole], policy)
        pair = sealing.unseal(sealed, policy, sequence[2].shape[3], mx.float32)
        sealed_keys, sealed_values = (np.array(array)[0].astype(np.float64) for array in pair)
    out = np.zeros((HEADS, tokens, values.shape[2]))
    for block in range(0, tokens, BLOCK_TOKENS):
        own = slice(block, min(block + BLOCK_TOKENS, tokens))
        seen_keys, seen_values = keys[:, own], values[:, own]
        if block:
            seen_keys = np.concatenate([sealed_keys[:, :block], seen_keys], axis=1)
            seen_values = np.concatenate([sealed_values[:, :block], seen_values], axis=1)
        back = np.arange(own.start, own.stop)[:, None] - np.arange(own.stop)
        hidden = (back < 0) | (back >= window) if window else back < 0
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = queries[head, own] @ seen_keys[group].T * queries.shape[2] ** -0.5
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[head, own] = weights @ seen_values[group] / weights.sum(axis=1, keepdims=True)
    return out[None]


def held(cache: PagedKVCache, sequence: int = 0) -> tuple[int, list[int]]:
    """The first block that the sequence's next token can see, and the slots from that one on."""
    table, first = cache.batch.tables[sequence][0], first_block(cache.lengths[sequence], cache.window)
    return first, table.numbers(first, cache.lengths[sequence] // BLOCK_TOKENS)


def sealed_bytes(cache: PagedKVCache, sequence: int = 0) -> list[bytes]:
    _, slots = held(cache, sequence)
    if not slots:
        return []
    return [np.array(array).tobytes() for array in cache.batch.pool.groups[0].gather(0, mx.array([slots], mx.uint32))]


def _policies_with(cases: Sequence[tuple[Any, ...]], every_time: int, others: int) -> list[Any]:
    """All policies with all cases; every time q4 with the first `every_time` ones, the other policies with `others`."""
    params = []
    for name, policy in POLICIES.items():
        for number, case in enumerate(cases):
            slow = number >= (every_time if name == "q4" else others)
            named = "-".join(map(str, (name, *case)))
            params.append(pytest.param(policy, *case, marks=[pytest.mark.slow] if slow else [], id=named))
    return params


HEAD_SIZES = [(64, 64), (40, 40), (192, 128), (80, 80), (96, 96), (128, 128), (256, 256)]


@pytest.mark.variants(7)
@pytest.mark.parametrize(("policy", "key_dim", "value_dim"), _policies_with(HEAD_SIZES, len(HEAD_SIZES), 3))
def test_every_head_size_attends_as_the_law_says(policy: SealPolicy, key_dim: int, value_dim: int):
    sequence = make_sequence(1, 700, key_dim, value_dim)
    out, _ = run_alone(sequence, chunks_of(300, 1, 77), policy)
    want = expected(sequence, policy)
    assert np.abs(out - want).max() <= TOLERANCE * np.abs(want).max()


LAWS = [POLICIES["q4"], POLICIES["fp16"]]


@pytest.mark.variants(3)
@pytest.mark.parametrize("policy", LAWS, ids=lambda policy: policy.name)
@pytest.mark.parametrize("window", [0, 256, 300, *(pytest.param(each, marks=pytest.mark.slow) for each in (100, 600))])
def test_chunks_do_not_matter(window: int, policy: SealPolicy):
    """Neither for what attention gives nor for what is sealed."""
    sequence = make_sequence(2, 900)
    want = expected(sequence, policy, window)
    whole, cache = run_alone(sequence, chunks_of(2000), policy, window)
    if not policy.quantizes and not window:
        plain = mx.fast.scaled_dot_product_attention(*sequence, scale=sequence[0].shape[3] ** -0.5, mask="causal")
        assert np.array_equal(whole, np.array(plain))
    assert np.abs(whole - want).max() <= TOLERANCE * np.abs(want).max()
    rng = random.Random(4)
    sizes = {
        # Over the ends of two blocks, or of a block and the window.
        "one by one": chain([200], repeat(1, 150 if window in (100, 256, 300) else 450), repeat(1000)),
        "64": chunks_of(64),
        "256": chunks_of(256),
        "512": chunks_of(512),
        "800": chunks_of(800),
        "ragged": iter(lambda: rng.choice([1, 2, 50, 255, 256, 257, 500]), 0),
    }
    for name, chunks in sizes.items():
        out, other = run_alone(sequence, chunks, policy, window)
        assert np.abs(out - want).max() <= TOLERANCE * np.abs(want).max(), name
        if window == 0:
            assert np.array_equal(out, whole), name
        assert held(other)[0] == held(cache)[0]
        assert sealed_bytes(other) == sealed_bytes(cache), name


@pytest.mark.variants(2)
@pytest.mark.parametrize("policy", LAWS, ids=lambda policy: policy.name)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_do_not_matter(window: int, seed: int, policy: SealPolicy):
    """Sequences join and leave at random, prefill together and decode together, and come out with their own bytes."""
    rng = random.Random(seed)
    lengths = [1, 255, 256, 257, 511, 700, 900, 30]
    sequences = {name: make_sequence(name, length) for name, length in enumerate(lengths)}
    alone = {name: run_alone(sequence, chunks_of(200, 1), policy, window) for name, sequence in sequences.items()}
    outs: dict[int, list[np.ndarray]] = {name: [] for name in sequences}
    waiting, batch, names = list(sequences), new_cache(policy, window), list[int]()
    rng.shuffle(waiting)

    def done(name: int) -> int:
        return sum(part.shape[2] for part in outs[name])

    while waiting or names:
        joining = [waiting.pop() for _ in range(min(len(waiting), rng.choice([0, 1, 3])))]
        if joining:
            fresh = merged([new_cache(policy, window) for _ in joining])
            counts = [rng.randint(max(1, lengths[name] - 300), lengths[name]) for name in joining]
            fresh.prepare(lengths=counts, right_padding=[max(counts) - count for count in counts])
            out = np.array(attend(fresh, [sequences[name] for name in joining], [0] * len(joining), max(counts)))
            fresh.finalize()
            for index, (name, count) in enumerate(zip(joining, counts, strict=True)):
                outs[name].append(out[index : index + 1, :, :count])
            if names:
                kv_cache.extend([batch], [fresh])
            else:
                batch = fresh
            names += joining
        for _ in range(rng.choice([1, 5, 300])):
            stay = [index for index, name in enumerate(names) if done(name) < lengths[name]]
            for index in set(range(len(names))) - set(stay):
                (single,) = kv_cache.extract([batch], index)
                assert single.lengths == [lengths[names[index]]]
                assert sealed_bytes(single) == sealed_bytes(alone[names[index]][1])
                opened = lengths[names[index]] % 256
                for left, right in zip(single.tail(0, opened), alone[names[index]][1].tail(0, opened), strict=True):
                    assert np.array_equal(np.array(left), np.array(right))
            if len(stay) < len(names):
                kv_cache.keep([batch], stay)
                names = [names[index] for index in stay]
            if not names:
                break
            out = np.array(attend(batch, [sequences[name] for name in names], [done(name) for name in names], 1))
            for index, name in enumerate(names):
                outs[name].append(out[index : index + 1])
    for name, (want, _) in alone.items():
        got = np.concatenate(outs[name], axis=2)
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), name
        if window == 0:
            assert np.array_equal(got, want), name


DIMS, WINDOWS = (64, 80, 128), (300, 0, 100, 513)
DIMS_AND_WINDOWS = [
    (DIMS[(at + turn) % len(DIMS)], window) for turn in range(len(DIMS)) for at, window in enumerate(WINDOWS)
]
"""The first ones have each window once, and each dim."""


@pytest.mark.variants(4)
@pytest.mark.parametrize(("policy", "dim", "window"), _policies_with(DIMS_AND_WINDOWS, len(WINDOWS), 2))
def test_a_decode_step_reads_each_sequences_own_blocks_where_they_lie(policy: SealPolicy, dim: int, window: int):
    """Sequences without a block, with a full open one, with many; as the law says, and within rounding as the sequence
    alone."""
    lengths = [300, 256, 700, 5, 1535, 512]
    sequences = [make_sequence(seed, tokens + 1, dim, dim) for seed, tokens in enumerate(lengths)]
    alone = [in_place(filled(short(sequence), policy, window), [sequence]) for sequence in sequences]
    together = in_place(merged([filled(short(sequence), policy, window) for sequence in sequences]), sequences)
    for index, sequence in enumerate(sequences):
        want = expected(sequence, policy, window)[:, :, -1:]
        assert np.abs(together[index] - want[0]).max() <= 2 * TOLERANCE * np.abs(want).max(), lengths[index]
        assert np.abs(together[index] - alone[index][0]).max() <= TOLERANCE * np.abs(want).max(), lengths[index]


def in_place(cache: PagedKVCache, sequences: Sequence[Heads]) -> np.ndarray:
    """The last token of every sequence, as a decode step that reads the pool."""
    cache.batch.reads = Reads.IN_PLACE
    queries, keys, values = (mx.concatenate([sequence[i][:, :, -1:] for sequence in sequences]) for i in range(3))
    mask, scale = cache.make_mask(1, window_size=cache.window or None), queries.shape[3] ** -0.5
    keys, values = cache.update_and_fetch(keys, values)
    if cache.view is None:
        # None of these sequences sees a sealed block.
        return np.array(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask))
    assert isinstance(cache.view, DecodeView)
    return np.array(attention.attend(queries, cache.view, cache.policy, scale))


@pytest.mark.parametrize("policy", LAWS, ids=lambda policy: policy.name)
def test_a_sequence_whose_padding_made_its_tail_wider_than_a_block_costs_no_other_its_own(policy: SealPolicy):
    """It fills its block while others decode beside it."""
    lengths = [1, 255, 300]
    sequences = [make_sequence(seed, tokens + 4) for seed, tokens in enumerate(lengths)]
    caches = [filled(short(sequence, 4), policy) for sequence in sequences]
    caches[1] = new_cache(policy)
    for start, count, padding in ((0, 64, 0), (64, 191, 65)):
        caches[1].prepare(lengths=[count], right_padding=[padding])
        attend(caches[1], [sequences[1]], [start], count + padding)
        caches[1].finalize()
    cache = merged(caches)
    outs = [np.array(attend(cache, sequences, [length + step for length in lengths], 1)) for step in range(4)]
    for index, sequence in enumerate(sequences):
        want = expected(sequence, policy)[:, :, -4:]
        got = np.concatenate([out[index : index + 1] for out in outs], axis=2)
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), lengths[index]


@pytest.mark.parametrize("policy", LAWS, ids=lambda policy: policy.name)
@pytest.mark.parametrize("count", [1, 20])
def test_sequences_too_long_to_be_joined_at_once_attend_as_alone(
    count: int, policy: SealPolicy, monkeypatch: pytest.MonkeyPatch
):
    """On Metal, which writes what lies too far from a whole's begin somewhere else: here beyond the numbers of two of
    five sequences, and of one and a half."""
    lengths = [600, 256, 700, 5, 640]
    sequences = [make_sequence(seed, tokens + count) for seed, tokens in enumerate(lengths)]
    want = [
        np.array(attend(filled(short(sequence, count), policy), [sequence], [sequence[0].shape[2] - count], count))
        for sequence in sequences
    ]
    for most in (2 * KV_HEADS * 1000 * 64, KV_HEADS * 1500 * 64):
        with monkeypatch.context() as patch:
            patch.setattr(mx, "concatenate", partial(metal_on_cpu.concatenate, most=most))
            patch.setattr(paged_cache, "JOINED_MAX", most)
            cache = merged([filled(short(sequence, count), policy) for sequence in sequences])
            got = attend(cache, sequences, lengths, count)
            assert np.array_equal(np.array(got), np.concatenate(want))


def test_a_sequence_that_is_too_long_by_itself_is_joined_head_by_head(monkeypatch: pytest.MonkeyPatch):
    before, opened = (mx.random.normal((2, 3, tokens, 4)) for tokens in (40, 7))
    want = mx.concatenate([before, opened], axis=2)
    for most in (3 * 47 * 4 - 1, 2 * 47 * 4, 47 * 4):
        with monkeypatch.context() as patch:
            patch.setattr(mx, "concatenate", partial(metal_on_cpu.concatenate, most=most))
            patch.setattr(paged_cache, "JOINED_MAX", most)
            assert mx.array_equal(paged_cache._with_open(before, opened), want)


def test_sinks_take_their_share_of_the_softmax():
    sequence = make_sequence(1, 601)
    cache = filled(short(sequence))
    cache.batch.reads = Reads.IN_PLACE
    cache.update_and_fetch(sequence[1][:, :, -1:], sequence[2][:, :, -1:])
    assert isinstance(cache.view, DecodeView)
    sinks = mx.array([-1.0, 0.5, 3.0, 8.0])
    queries = sequence[0][:, :, -1:]
    plain = np.array(attention.attend(queries, cache.view, Q4, 0.125))
    got = np.array(attention.attend(queries, cache.view, Q4, 0.125, sinks))
    scores = scores_of(sequence, 0.125)
    share = np.exp(scores).sum(axis=-1) / (np.exp(scores).sum(axis=-1) + np.exp(np.array(sinks)))
    assert np.allclose(got[0, :, 0], plain[0, :, 0] * share[:, None], rtol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scores_max", [2**24, 6001, 1])
def test_few_queries_attend_as_mlx_does(
    scores_max: int, kv_heads: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    """All at once, sequence by sequence, or head by head."""
    monkeypatch.setattr(attention, "SCORES_MAX", scores_max)
    mx.random.seed(kv_heads)
    queries, keys = (mx.random.normal((3, heads, *rest)) for heads, rest in ((4, (5, 64)), (kv_heads, (300, 64))))
    values = mx.random.normal((3, kv_heads, 300, 32)).astype(dtype)
    queries, keys = queries.transpose(0, 2, 1, 3).astype(dtype).transpose(0, 2, 1, 3), (keys - 20).astype(dtype)
    seen = mx.random.uniform(shape=(3, 1, 5, 300)) < mx.array([0.5, 0.01, 1.0])[:, None, None, None]
    seen[..., 0] = True
    for mask, sinks in ((seen, None), (seen[:1], mx.array([-1.0, 0.5, 3.0, 8.0]))):
        got = attention.attend_few(queries, keys, values, mask, 0.125, sinks)
        exact = [array.astype(mx.float32) for array in (queries, keys, values)]
        expected = mx.fast.scaled_dot_product_attention(*exact, scale=0.125, mask=mask, sinks=sinks)
        assert got.dtype == dtype and got.shape == (3, 4, 5, 32)
        off = np.abs(np.array(got.astype(mx.float32)) - np.array(expected)).max()
        assert off <= (TOLERANCE if dtype == mx.float32 else 0.02) * np.abs(expected).max()


def scores_of(sequence: Heads, scale: float) -> np.ndarray:
    """Of the last query: (heads, tokens)."""
    whole = (sequence[1].shape[2] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    sealed = sealing.seal(sequence[1][:, :, :whole], sequence[2][:, :, :whole], Q4)
    keys, _ = sealing.unseal(sealed, Q4, sequence[2].shape[3], mx.float32)
    keys = np.repeat(np.array(mx.concatenate([keys, sequence[1][:, :, whole:]], axis=2))[0], HEADS // KV_HEADS, axis=0)
    return np.einsum("htd,hd->ht", keys, np.array(sequence[0])[0, :, -1]) * scale


def short(sequence: Heads, by: int = 1) -> Heads:
    return sequence[0][:, :, :-by], sequence[1][:, :, :-by], sequence[2][:, :, :-by]


def test_sequences_that_fill_a_block_at_the_same_step_are_sealed_each_for_itself():
    """Neighbours of equal lengths together, between others."""
    sequences = [make_sequence(seed, length) for seed, length in enumerate([300, 270, 270, 290, 270])]
    starts = [length - 20 for length in (300, 270, 270, 290, 270)]
    alone = [run_alone(sequence, chunks_of(400))[0] for sequence in sequences]
    prefilled = [
        run_alone((r[0][:, :, :start], r[1][:, :, :start], r[2][:, :, :start]), chunks_of(400))[1]
        for r, start in zip(sequences, starts, strict=True)
    ]
    batch = merged(prefilled)
    for step in range(20):
        out = np.array(attend(batch, sequences, [start + step for start in starts], 1))
        for index, (want, start) in enumerate(zip(alone, starts, strict=True)):
            assert np.array_equal(out[index], want[0][:, start + step : start + step + 1])


@pytest.mark.parametrize("window", [1, 256, 257, 600])
def test_a_window_keeps_the_blocks_that_a_later_query_sees_and_no_others(window: int):
    for length in (1, 255, 256, 300, 511, 512, 513, 811, 812, 1100):
        cache = filled(make_sequence(3, length), window=window)
        seen = range(max(0, length + 1 - window), length)
        whole = length // BLOCK_TOKENS
        dropped = [block for block in range(whole) if not {*seen} & {*range(block * 256, block * 256 + 256)}]
        first, slots = held(cache)
        assert (first, len(slots)) == (len(dropped), whole - len(dropped)), length


@pytest.mark.parametrize("window", [0, 300])
def test_padding_sees_what_its_sequences_last_token_sees(window: int):
    """Never a column of the padding itself, and never nothing: that would be no number, which spreads to all
    sequences."""
    rng = random.Random(9)
    for _ in range(200):
        lengths = [rng.choice([0, 100, 255, 256, 300, 700]) for _ in range(rng.choice([1, 2, 4]))]
        new = [rng.choice([1, 30, 156, 256, 257]) for _ in lengths]
        count = max(new) + rng.choice([0, 7, 64])
        step = step_of(lengths, window, new, padded=True, exact=rng.random() < 0.5)
        mask = mask_of(step, lengths, step.first, count, window)
        if mask is None:
            continue
        seen = np.array(mx.broadcast_to(mask, (len(lengths), 1, count, mask.shape[3])))[:, 0]
        for sequence, own in enumerate(new):
            assert (seen[sequence, own:] == seen[sequence, own - 1]).all(), (lengths, new, count)
            assert seen[sequence].any(axis=-1).all(), (lengths, new, count)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_models_own_range_is_kept(dtype: mx.Dtype):
    """Scales of bfloat16 keys are bfloat16: as float16 those of large ones would be no numbers."""
    large = 3e4 if dtype == mx.float16 else 6e4 if dtype == mx.float32 else 1e30
    sequence = make_sequence(8, 256)
    keys, values = ((array * (large / 30)).astype(dtype) for array in sequence[1:])
    sealed = sealing.seal(keys, values, Q4)
    assert isinstance(sealed, sealing.Quantized)
    scales = (sealed.key_scales, sealed.key_biases, sealed.value_scales, sealed.value_biases)
    assert {array.dtype for array in scales} == {mx.float16 if dtype == mx.float32 else dtype}
    assert sealed.key_exact.dtype == sealed.value_exact.dtype == dtype
    for array, back in zip((keys, values), sealing.unseal(sealed, Q4, 64, dtype), strict=True):
        wide, other = np.array(array.astype(mx.float32)), np.array(back.astype(mx.float32))
        assert np.abs(other - wide).max() <= 0.1 * np.abs(wide).max()


def test_sealed_blocks_take_what_the_formula_says():
    keys, values = mx.zeros((1, 8, 256, 128), mx.bfloat16), mx.zeros((1, 8, 256, 128), mx.bfloat16)
    for policy, most in ((Q4, 0.302), (POLICIES["k6v4"], 0.348), (POLICIES["k8v4"], 0.411), (POLICIES["fp16"], 1.0)):
        nbytes = sum(array.nbytes for array in sealing.seal(keys, values, policy))
        assert nbytes == 256 * sealing.sealed_token_bytes(8, 128, 128, policy) <= most * (keys.nbytes + values.nbytes)
    with pytest.raises(ValueError, match="no whole blocks"):
        sealing.seal(keys[:, :, :255], values[:, :, :255], Q4)


def test_layers_share_what_they_have_in_common():
    batch = PagedBatch.of_sequences(BlockPool([[0], [1, 2]]), 2)
    caches = [PagedKVCache(layer, Q4, lengths=[3, 300], batch=batch) for layer in (1, 2)]
    assert caches[0].offset is caches[1].offset
    assert caches[0].make_mask(1) is caches[1].make_mask(1)


def test_one_padded_sequence_is_a_batch_like_any_other():
    """Its columns are rounded up, so that a device meets few numbers of them; what it computes is not changed."""
    sequence = make_sequence(6, 275)
    want, other = run_alone(sequence, chunks_of(275))
    cache, done = merged([new_cache()]), 0
    for count in (10, 64, 200, 1):
        cache.prepare(lengths=[count], right_padding=[-count % 64])
        part = (sequence[0][:, :, : done + count], sequence[1][:, :, : done + count], sequence[2][:, :, : done + count])
        out = np.array(attend(cache, [part], [done], count + -count % 64))[:, :, :count]
        cache.finalize()
        assert np.array_equal(out, want[:, :, done : done + count]), count
        done += count
    assert sealed_bytes(cache) == sealed_bytes(other)


def test_layers_that_are_alike_share_slots_and_a_fork_copies_none():
    pool = BlockPool([[0, 1]])
    batch = PagedBatch.of_sequences(pool, 1)
    caches = [PagedKVCache(layer, Q4, batch=batch) for layer in (0, 1)]
    sequence = make_sequence(5, 600)
    for cache in caches:
        attend(cache, [sequence], [0], 600)
    assert pool.groups[0].taken == 2
    other = kv_cache.extract(caches, 0)
    assert pool.groups[0].taken == 2
    del caches, cache, batch
    assert pool.groups[0].taken == 2 and len(sealed_bytes(other[0])) == len(sealing.Quantized._fields)
    del other
    assert pool.groups[0].taken == 0
    pool.check()


def test_a_pool_that_grows_keeps_what_it_has():
    pool = BlockPool([[0]])
    caches = []
    for seed in range(12):
        cache = PagedKVCache(0, Q4, batch=PagedBatch.of_sequences(pool, 1))
        attend(cache, [make_sequence(seed, 700)], [0], 700)
        caches.append(cache)
    assert pool.groups[0].capacity > 16 and pool.counts()["slots_free"] == pool.groups[0].capacity - 24
    for seed in (0, 5, 11):
        sequence = make_sequence(seed, 700)
        fresh = sealing.seal(sequence[1][:, :, :512], sequence[2][:, :, :512], Q4)
        assert sealed_bytes(caches[seed]) == [np.array(array).tobytes() for array in fresh]


def test_a_slot_that_another_thread_is_just_collecting_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    class Ring:
        """In a cycle, so that only the garbage collection ends it."""

        def __init__(self, slot: object) -> None:
            self.itself, self.slot = self, slot

    group, collecting = SlotGroup([0]), threading.Event()

    def linger(_: object) -> None:
        # Weak references are cleared now, and the slot is not freed yet.
        collecting.set()
        time.sleep(0.05)

    gc.disable()
    try:
        ring = Ring(group.take(1)[0])
        watch = weakref.ref(ring, linger)
        del ring
        collector = threading.Thread(target=gc.collect)
        collector.start()
        assert collecting.wait(10)
        group.check()
        collector.join()
    finally:
        gc.enable()
    assert watch() is None and group.taken == 0
    monkeypatch.setattr("satchel.actors.replica.kv.pool.CHECK_PAUSE_S", 0)
    (lost,) = group.take(1)
    group._taken.discard(lost)
    with pytest.raises(AssertionError, match="16 slots, of which 0 are held and 15 free"):
        group.check()


def test_writing_a_slot_copies_no_others():
    """Of a large pool that would take as long as computing."""
    pool = BlockPool([[0]])
    group = pool.groups[0]
    slots = group.take(2000)
    sequence = make_sequence(1, 256)
    block = slots_of(sealing.seal(sequence[1], sequence[2], Q4), 1)
    group.write(0, mx.array([slots[0].number], mx.uint32), block)
    mx.eval(group.arrays())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    group.write(0, mx.array([slots[1].number], mx.uint32), block)
    mx.eval(group.arrays())
    assert mx.get_peak_memory() - before < group.nbytes / 10


def test_a_copy_keeps_every_bit_and_what_is_put_changes_no_other_array():
    array = mx.array([[-0.0, 0.0, 1.5]], dtype=mx.bfloat16)
    assert np.array(sealing.copied(array).view(mx.uint16)).tobytes() == np.array(array.view(mx.uint16)).tobytes()
    changed = sealing.put(array, (slice(None), slice(0, 1)), mx.ones((1, 1), dtype=mx.bfloat16))
    assert changed[0, 0].item() == 1 and array[0, 0].item() == 0
