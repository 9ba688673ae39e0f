"""The decode kernel beside the reference in plain MLX operations, on rows of any lengths; and how work is divided."""

from __future__ import annotations

import random
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kv import attention, decode_kernel, gpu_kernels, sealing
from satchel.actors.replica.kv.decode_kernel import RowBlocks
from satchel.actors.replica.kv.device import size_class
from satchel.actors.replica.kv.paged_cache import DecodeView, KernelStep, KernelView
from satchel.actors.replica.kv.pool import SlotGroup, slots_of
from satchel.actors.replica.kv.sealing import POLICIES

LENGTHS = (3, 256, 257, 1500, 4097, 90, 700)


@given(rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 256)), min_size=1, max_size=40))
def test_every_row_has_its_groups_and_a_long_one_most(rows: list[tuple[int, int]]):
    nothing = mx.zeros((1,), mx.uint32)
    blocks, opened = [count for count, _ in rows], [tokens for _, tokens in rows]
    made = RowBlocks.of(nothing, nothing, blocks, opened, [0] * len(rows), 8)
    begins: list[int] = np.array(made.jobs).tolist()
    owners: list[int] = np.array(made.job_rows).tolist()
    padded = len(owners)
    owners = owners[: begins[-1]]
    assert padded == (len(rows) if len(owners) == len(rows) else size_class(len(owners)))
    assert owners == [row for row in range(len(rows)) for _ in range(begins[row], begins[row + 1])]
    counts = [end - begin for begin, end in pairwise(begins)]
    assert min(counts) >= 1 and made.count == padded and len(owners) <= decode_kernel.GROUPS_WANTED + len(rows)
    units = [4 * count + -(-tokens // 32) for count, tokens in rows]
    assert counts[units.index(max(units))] == max(counts)


@pytest.mark.skipif(not gpu_kernels.is_available(), reason="this device runs no kernels")
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("policy", ["q4", "k8v4"])
@pytest.mark.parametrize("grouped, kv_heads", [(1, 8), (2, 4), (5, 2), (8, 2), (16, 1)])
@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_the_kernel_agrees_with_the_reference(
    key_dim: int, value_dim: int, grouped: int, kv_heads: int, policy: str, window: int
):
    """And appends the new token to the open blocks in place; with sinks for some shapes."""
    lengths = [min(length, 900 if window else length) for length in LENGTHS]
    queries, reference, view = world(lengths, kv_heads, key_dim, value_dim, grouped, policy, window)
    sinks = mx.random.normal((kv_heads * grouped,)).astype(mx.bfloat16) if grouped == 8 else None
    scale, seal = key_dim**-0.5, POLICIES[policy]
    wanted = attention.attend(queries, reference, seal, scale, sinks).astype(mx.float32)
    mx.eval(wanted)
    got = decode_kernel.attend(queries, view, seal, scale, sinks).astype(mx.float32)
    mx.eval(got)
    assert bool(mx.abs(got - wanted).max() <= 2e-2 * mx.abs(wanted).max())
    tails = zip(view.step.tails, (reference.keys, reference.values), strict=True)
    assert all(mx.array_equal(one, two) for one, two in tails), "it wrote them in place"


@pytest.mark.skipif(not gpu_kernels.is_available(), reason="this device runs no kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("policy", ["q4", "k8v4"])
@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_blocks_are_dequantized_as_by_mlx(key_dim: int, value_dim: int, policy: str, dtype: mx.Dtype):
    mx.random.seed(3)
    keys, values = (mx.random.normal((1, 2, 5 * BLOCK_TOKENS, dim)).astype(dtype) for dim in (key_dim, value_dim))
    group, seal = SlotGroup([0], kernels=True), POLICIES[policy]
    slots = group.take(5)
    numbers = mx.array([slot.number for slot in slots], mx.uint32)
    group.write(0, numbers, slots_of(sealing.seal(keys, values, seal), 5))
    mx.eval(group.arrays())
    table = mx.array([[4, 0, 2], [1, 1, 3]], mx.uint32)
    open_keys, open_values = (mx.random.normal((2, 2, 300, dim)).astype(dtype) for dim in (key_dim, value_dim))
    got = decode_kernel.unseal(group.layer(0), table, open_keys, open_values, seal, group.written(0))
    before = sealing.unseal(group.gather(0, table), seal, value_dim, dtype)
    for one, sealed, fresh in zip(got, before, (open_keys, open_values), strict=True):
        wanted = mx.concatenate([sealed, fresh], axis=2).astype(mx.float32)
        assert bool(mx.abs(one.astype(mx.float32) - wanted).max() <= 1e-2 * mx.abs(wanted).max())


def world(
    lengths: list[int], kv_heads: int, key_dim: int, value_dim: int, grouped: int, policy: str, window: int
) -> tuple[mx.array, DecodeView, KernelView]:
    """Rows with these tokens, the new one too, in a pool in which their blocks lie anyhow."""
    mx.random.seed(key_dim + grouped)
    rows, dtype = len(lengths), mx.bfloat16
    blocks = [(length - 1) // BLOCK_TOKENS for length in lengths]
    opened = [length - count * BLOCK_TOKENS for length, count in zip(lengths, blocks, strict=True)]
    numbers = list(range(sum(blocks)))
    random.Random(key_dim).shuffle(numbers)
    shape = (1, kv_heads, len(numbers) * BLOCK_TOKENS)
    keys, values = (mx.random.normal((*shape, dim)).astype(dtype) for dim in (key_dim, value_dim))
    group, slots = SlotGroup([0], kernels=True), mx.array(numbers, mx.uint32)
    held = group.take(len(numbers))
    group.write(0, slots, slots_of(sealing.seal(keys, values, POLICIES[policy]), len(numbers)))
    mx.eval(group.arrays())
    open_keys, open_values = (
        mx.random.normal((rows, kv_heads, BLOCK_TOKENS, dim)).astype(dtype) for dim in (key_dim, value_dim)
    )
    mx.eval(open_keys, open_values)
    hidden = [max(0, length - window) if window else 0 for length in lengths]
    owners = [row for row, count in enumerate(blocks) for _ in range(count)]
    starts = [0]
    for count in blocks:
        starts.append(starts[-1] + count)
    first = [hidden[row] - at * BLOCK_TOKENS for row, count in enumerate(blocks) for at in range(count)]
    behind = mx.arange(BLOCK_TOKENS) < mx.array(first)[:, None, None, None] if window else None
    columns, ends = mx.arange(BLOCK_TOKENS)[None], mx.array(opened)[:, None]
    seen = (columns < ends) & (columns + mx.array(blocks)[:, None] * BLOCK_TOKENS >= mx.array(hidden)[:, None])
    pool, owner = group.layer(0), mx.array(owners, mx.uint32)
    reference = DecodeView(open_keys, open_values, seen[:, None, None], pool, slots, owner, blocks, behind)
    places = mx.array(opened)[:, None, None, None] - 1
    new_keys, new_values = (mx.take_along_axis(tail, places, axis=2) for tail in (open_keys, open_values))
    read = RowBlocks.of(slots, mx.array(starts, mx.int32), blocks, opened, hidden, kv_heads)
    # Without the new token.
    tails = [
        mx.put_along_axis(tail, places, mx.zeros_like(tail[:, :, :1]), axis=2) for tail in (open_keys, open_values)
    ]
    view = KernelView(new_keys, new_values, KernelStep((tails[0], tails[1]), pool, read, group.written(0)))
    queries = mx.random.normal((rows, kv_heads * grouped, 1, key_dim)).astype(dtype)
    mx.eval(queries, tails, new_keys, new_values)
    del held
    return queries, reference, view
