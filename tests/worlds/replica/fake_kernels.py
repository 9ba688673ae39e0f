"""The kernels of a GPU, on a CPU: the same arguments, results and changes in place, by numpy and the plain reference.

So everything around them runs where there is no GPU: padding, block tables, joining, sealing after a step. They
evaluate their inputs, which nothing that is recorded can: compiling is switched off meanwhile, and what a stage awaits
has come before its step is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.group.link.connection import Connection
from satchel.actors.replica.kernels import block_kernels, decode_kernel, gpu_kernels, seal_kernel, sealing, sum_norm
from satchel.actors.replica.kernels.decode_views import DecodeView, KernelView
from satchel.actors.replica.kernels.prefill_kernel import Chunk
from satchel.actors.replica.kernels.sealing import Sealed, SealPolicy
from satchel.actors.replica.kv import attention
from satchel.actors.replica.kv.paged_cache import heads_of
from satchel.actors.replica.kv.pool import SlotGroup
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.memory.slab_codec import to_numpy


@contextmanager
def kernels() -> Iterator[None]:
    """Lets this device have kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernels, "is_available", lambda: True)
        patch.setattr(decode_ways, "is_slower", lambda *_: False)
        patch.setattr(decode_ways, "is_faster", lambda *_: True)
        patch.setattr(decode_kernel, "attend", attend)
        patch.setattr(block_kernels, "write", write)
        patch.setattr(block_kernels, "write_records", write_records)
        patch.setattr(block_kernels, "read_records", read_records)
        patch.setattr(block_kernels, "unseal", unseal)
        patch.setattr(block_kernels, "append", append)
        patch.setattr(block_kernels, "stack", stack)
        patch.setattr(seal_kernel, "seal", seal)
        patch.setattr(seal_kernel, "seal_into", seal_into)
        patch.setattr(sum_norm, "sum_norm", sum_and_norm)
        patch.setattr(Connection, "_awaited_array", Connection._received)
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()


def attend(
    queries: mx.array,
    view: KernelView,
    policy: SealPolicy,
    scale: float,
    sinks: mx.array | None = None,
    *,
    cap: float = 0.0,
) -> mx.array:
    step, read = view.step, view.step.read
    transform = view.transform(queries.shape[3])
    numbers = np.array(read.numbers)
    tokens = read.tokens
    assert numbers[0] == tokens == len(queries)
    columns, rest = np.split(numbers[1:], [7 * tokens])
    jobs, groups = rest[: tokens + 1], rest[tokens + 1 :]
    real = int((np.diff(jobs) > 0).sum())
    opened, hidden, places, owners, new, begins, ends = (each[:real] for each in columns.reshape(7, tokens))
    positions = mx.array(columns.reshape(7, tokens)[2])
    queries, keys = transform.of_queries(queries, positions), transform.of_keys(view.keys, positions)
    mx.eval(queries, keys, view.values, step.tails, list(step.pool), read.slots)
    assert [tail.shape[2] for tail in step.tails] == [BLOCK_TOKENS] * 2, "the kernel counts on whole blocks"
    for token, (first, end) in enumerate(pairwise(jobs[: real + 1])):
        assert end > first and (groups[first:end] == token).all()
    assert (groups[jobs[-1] :] == -1).all() and (jobs[real:] == jobs[-1]).all()
    assert new.max() <= read.most and (places % BLOCK_TOKENS + 1 == opened).all()
    for tail, fresh in zip(step.tails, (keys, view.values), strict=True):
        assert tail.dtype == fresh.dtype
        place, made = to_numpy(tail), to_numpy(fresh)
        for token in range(real):
            place[owners[token], :, opened[token] - 1] = made[token, :, 0]
    counts = ends - begins
    owner = mx.array(np.repeat(np.arange(real), counts).astype(np.uint32))
    blocks = np.concatenate([np.arange(*span) for span in zip(begins, ends, strict=True)]).astype(np.uint32)
    slots = read.slots[mx.array(blocks)] if len(blocks) else read.slots[:0]
    columns_of = np.arange(BLOCK_TOKENS)
    seen = (columns_of < opened[:, None]) & (columns_of + counts[:, None] * BLOCK_TOKENS >= hidden[:, None])
    at = np.concatenate([np.arange(count) for count in counts]).astype(int) * BLOCK_TOKENS
    behind = at[:, None] + columns_of < np.repeat(hidden, counts)[:, None]
    seen_ones, behind_ones = mx.array(seen.tolist())[:, None, None], mx.array(behind.tolist())[:, None, None]
    keys, values = (tail[mx.array(owners)] for tail in step.tails)
    heads = heads_of(owner, slots, keys.shape[1])
    if not counts.any():
        # Sequences without a block: the reference wants one, and sees nothing of it.
        owner, slots, behind_ones = mx.zeros((1,), mx.uint32), mx.zeros((1,), mx.uint32), mx.array(True)
        heads = heads_of(owner, slots, keys.shape[1])
    reference = DecodeView(keys, values, seen_ones, step.pool, slots, owner, list(counts), behind_ones, heads)
    out = attention.attend(queries[:real], reference, policy, scale, sinks, cap=cap)
    # What comes out for padding has no meaning.
    return mx.pad(out, [(0, tokens - real), *[(0, 0)] * 3], constant_values=float("nan"))


def attend_prompts(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    chunk: Chunk,
    scale: float,
    window: int,
    sinks: mx.array | None,
) -> mx.array:
    """What the kernel for prompts' attention computes, in float32."""
    outs = []
    for sequence, (length, new, first) in enumerate(zip(chunk.lengths, chunk.new, chunk.first, strict=True)):
        own = length // 256 * 256
        sealed = mx.arange(chunk.sealed) + 256 * first
        inside = mx.arange(keys.shape[2] - chunk.sealed) + own
        asking = mx.minimum(mx.arange(queries.shape[2]), new - 1)[:, None] + length
        block = mx.full(asking.shape, own) if chunk.exact else asking // 256 * 256
        known = mx.concatenate([sealed < block, inside >= block], axis=1)
        places = mx.concatenate([sealed, inside])
        seen = known & (places <= asking) & ((places > asking - window) if window else True)
        row = slice(sequence, sequence + 1)
        outs.append(attention.attend_few(queries[row], keys[row], values[row], seen[None, None], scale, sinks))
    return mx.concatenate(outs)


def seal(
    keys: mx.array,
    values: mx.array,
    blocks: int,
    bits: tuple[int, int],
    groups: tuple[int, int],
    padded: int,
    scale: mx.Dtype,
) -> list[mx.array]:
    sealed = sealing.seal(keys, values, SealPolicy("", *bits, key_group=groups[0]), blocks=blocks)
    assert isinstance(sealed, sealing.Quantized) and groups[1] == sealing.value_group(values.shape[3])
    assert padded == sealed.value_codes.shape[3] * 8 and scale == sealing.scale_dtype(keys.dtype)
    return list(sealed)


def seal_into(
    pool: Sequence[mx.array],
    slots: mx.array,
    keys: mx.array,
    values: mx.array,
    places: Sequence[tuple[int, int]],
    bits: tuple[int, int],
    groups: tuple[int, int],
    order: mx.array,
) -> mx.array:
    policy = SealPolicy("", *bits, key_group=groups[0])
    spans = [
        (slice(row, row + 1), slice(None), slice(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS)) for row, at in places
    ]
    keys, values = (mx.concatenate([array[span] for span in spans]) for array in (keys, values))
    sealed = sealing.seal(keys, values, policy)
    assert isinstance(sealed, sealing.Quantized)
    return write(sealing.Quantized(*pool), slots, sealed, order)


def append(
    old: tuple[mx.array, mx.array] | None,
    new: tuple[mx.array, mx.array],
    opened: Sequence[int],
    full: Sequence[int],
    columns: int,
) -> tuple[list[mx.array], list[mx.array]]:
    assert columns % BLOCK_TOKENS == 0
    joined, rest = list[mx.array](), list[mx.array]()
    for before, fresh in zip(old or (None, None), new, strict=True):
        rows = []
        for sequence, count in enumerate(opened):
            assert before is not None or not count
            own = [] if before is None else [before[sequence : sequence + 1, :, :count]]
            row = mx.concatenate([*own, fresh[sequence : sequence + 1]], axis=2)[:, :, :columns]
            rows.append(mx.pad(row, [(0, 0), (0, 0), (0, columns - row.shape[2]), (0, 0)]))
        joined.append(mx.concatenate(rows))
        wide = mx.pad(joined[-1], [(0, 0), (0, 0), (0, BLOCK_TOKENS), (0, 0)], mode="edge")
        starts = [count * BLOCK_TOKENS for count in full]
        rest.append(
            mx.concatenate([wide[at : at + 1, :, first : first + BLOCK_TOKENS] for at, first in enumerate(starts)])
        )
    return joined, rest if any(full) else []


def stack(first: tuple[mx.array, mx.array], second: tuple[mx.array, mx.array], rows: int) -> tuple[mx.array, mx.array]:
    stacked = []
    for pair in zip(first, second, strict=True):
        wide = [mx.pad(each, [(0, 0), (0, 0), (0, BLOCK_TOKENS - each.shape[2]), (0, 0)]) for each in pair]
        both = mx.concatenate(wide)
        stacked.append(mx.pad(both, [(0, rows - len(both)), (0, 0), (0, 0), (0, 0)]))
    return stacked[0], stacked[1]


def sum_and_norm(x: mx.array, y: mx.array, weight: mx.array, epsilon: mx.array) -> list[mx.array]:
    total = x + y
    wide = total.astype(mx.float32)
    scale = mx.rsqrt(mx.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    return [total, (wide * scale * weight).astype(x.dtype)]


def write(pool: Sealed, slots: mx.array, blocks: Sealed, order: mx.array) -> mx.array:
    mx.eval(list(pool), list(blocks), slots, order)
    for array, new in zip(pool, blocks, strict=True):
        to_numpy(array)[np.array(slots)] = to_numpy(new)
    return mx.zeros((1,), mx.uint32)


def write_records(pool: Sealed, slots: mx.array, records: mx.array, starts: Sequence[int], order: mx.array) -> mx.array:
    assert all(start % 4 == 0 for start in starts) and records.shape[1] % 4 == 0
    fields = [
        records[:, start : start + array[0].nbytes].view(array.dtype).reshape(-1, *array.shape[1:])
        for start, array in zip(starts, pool, strict=True)
    ]
    return write(pool, slots, pool._make(fields), order)


def read_records(pool: Sealed, slots: mx.array, order: mx.array) -> mx.array:
    mx.eval(list(pool), slots, order)
    return mx.concatenate([array[slots].reshape(slots.size, -1).view(mx.uint8) for array in pool], axis=1)


def unseal(
    pool: Sealed, table: mx.array, keys: mx.array, values: mx.array, policy: SealPolicy, order: mx.array
) -> tuple[mx.array, mx.array]:
    mx.eval(list(pool), order)
    group = SlotGroup([0])
    group._arrays, group._kind = [list(pool)], type(pool)
    before = sealing.unseal(group.gather(0, table), policy, values.shape[3], keys.dtype)
    return mx.concatenate([before[0], keys], axis=2), mx.concatenate([before[1], values], axis=2)
