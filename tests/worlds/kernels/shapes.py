"""The shapes of which kernels are checked: those that models have (`kernel_check.py`), with every policy and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, cycle, product
from typing import NamedTuple

import mlx.core as mx

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kernels import block_kernels, decode_kernel, query_kernels, sealing, sum_norm
from satchel.actors.replica.kernels.decode_views import KernelStep, KernelView, NewTokens
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv.paged_batch import SLOTS_MIN
from satchel.actors.replica.kv.pool import slots_of
from satchel.actors.replica.selftest.kernel_check import DTYPES, GROUPED, HEAD_SIZES, WINDOWS, all_transforms

from . import metal_source
from .metal_source import Source

TRANSFORMS = 3
"""How many `all_transforms` there are."""

OTHER_SIZES = [(dim, dim) for dim in range(8, 257, 8) if (dim, dim) not in HEAD_SIZES]
"""Of heads for which the decode kernel is made too: a lane has eight of at most 256 channels."""


class Shape(NamedTuple):
    """A shape of the decode kernel. `transform` is a number among `all_transforms`; if `whole`, no sequence is divided
    among several groups of threads."""

    policy: str
    dtype: str
    dims: tuple[int, int]
    grouped: int
    window: int
    transform: int
    whole: bool


def every() -> Iterator[Shape]:
    """Yields all; only the window, which changes no kernel, takes turns."""
    windows = cycle(WINDOWS)
    for policy, dtype, dims, grouped in product(POLICIES, DTYPES, HEAD_SIZES, GROUPED):
        for transform, whole in product(range(TRANSFORMS), (False, True)):
            yield Shape(policy, dtype, dims, grouped, next(windows), transform, whole)


def usual() -> list[Shape]:
    """Returns a few, in which each two values of any two fields meet."""
    policies, dtypes, wholes = tuple(POLICIES), tuple(DTYPES), (False, True)
    shapes = []
    for (i, dims), (j, grouped) in product(enumerate(HEAD_SIZES), enumerate(GROUPED)):
        policy, dtype = policies[(i + j) % len(policies)], dtypes[(i + j) % len(dtypes)]
        # The terms differ so that no field follows from another one.
        window, transform = WINDOWS[(i // 2 + j) % len(WINDOWS)], (i + 2 * j) % TRANSFORMS
        shapes.append(Shape(policy, dtype, dims, grouped, window, transform, wholes[(i + i // 2 + j) % 2]))
    return shapes


def launch(policy: str, dtype: mx.Dtype, dims: tuple[int, int]) -> None:
    """Launches each kernel, in all of its forms, or in some for the other sizes: with few numbers, which Metal puts
    into another address space, and with many."""
    seal, transforms = POLICIES[policy], all_transforms(dims[0], dtype)
    forms = [*product(GROUPED, transforms, (False, True), ((3,), (9000, 3)), (None,))]
    forms += [(grouped, transforms[-1], False, (9000, 3), (9, 1)) for grouped in GROUPED[::3]]
    if dims in OTHER_SIZES:
        forms = [*product(GROUPED[::3], transforms[:1], (False,), ((3,), (9000, 3)), (None,))]
    for grouped, transform, sinks, lengths, new in forms:
        tails = zeros(len(lengths), 1, BLOCK_TOKENS, dims, dtype)
        pool = sealing.seal(*zeros(1, 1, BLOCK_TOKENS, dims, dtype), seal)
        read = blocks_of(lengths, new)
        step = KernelStep(tails, pool, read, mx.zeros((1,), mx.uint32))
        view = KernelView(*zeros(read.tokens, 1, 1, dims, dtype), step, lambda _, done=transform: done)
        queries, sink = mx.zeros((read.tokens, grouped, 1, dims[0]), dtype), mx.zeros((grouped,), dtype)
        decode_kernel.attend(queries, view, seal, 0.1, sink if sinks else None)
    for rows, dim in product((1, 9), (dims[0], 40 * dims[0])):
        x = mx.zeros((rows, 1, dim), dtype)
        sum_norm.sum_norm(x, x, mx.zeros((dim,)), mx.zeros((1,)))
    for kv_heads, blocks in product((1, 8), (1, 9)):
        fresh = zeros(1, kv_heads, blocks * BLOCK_TOKENS, dims, dtype)
        sealed = slots_of(sealing.seal(*fresh, seal, kernels=True), blocks)
        numbers, order = mx.zeros((blocks,), mx.uint32), mx.zeros((1,), mx.uint32)
        block_kernels.write(sealed, numbers, sealed, order)
        starts = list(accumulate((array.nbytes // blocks for array in sealed), initial=0))
        records = mx.zeros((blocks, starts.pop()), mx.uint8)
        block_kernels.write_records(sealed, numbers, records, starts, order)
        block_kernels.read_records(sealed, numbers, order)
        new, full = zeros(2, kv_heads, blocks, dims, dtype), [blocks - 1, 0]
        block_kernels.append(zeros(2, kv_heads, BLOCK_TOKENS, dims, dtype), new, [3, 0], full, blocks * BLOCK_TOKENS)
        block_kernels.stack(zeros(2, kv_heads, 3, dims, dtype), zeros(1, kv_heads, blocks, dims, dtype), 4)
        spans = [(0, blocks, 2 * blocks)] * blocks
        pieces = query_kernels.cut(mx.zeros((1, kv_heads, blocks, dims[0]), dtype), 0, spans)
        query_kernels.join(pieces, spans)
        if seal.quantizes:
            sealing.seal_into(sealed, numbers, *fresh, [(0, at) for at in range(blocks)], seal, order)
            block_kernels.unseal(sealed, numbers[None], *zeros(1, kv_heads, blocks, dims, dtype), seal, order)


def zeros(
    sequences: int, kv_heads: int, tokens: int, dims: tuple[int, int], dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Returns keys and values."""
    keys, values = (mx.zeros((sequences, kv_heads, tokens, dim), dtype) for dim in dims)
    return keys, values


def blocks_of(lengths: tuple[int, ...], new: tuple[int, ...] | None = None) -> NewTokens:
    """Returns the new tokens, one each or `new`, of sequences with these tokens before, whose blocks are in slot 0."""
    starts = [0, *accumulate(length // BLOCK_TOKENS for length in lengths)]
    slots = mx.zeros((max(SLOTS_MIN, starts[-1]),), mx.uint32)
    return NewTokens.of(slots, starts, lengths, [0] * len(lengths), 0, 1, new)


def sources(sizes: Iterable[tuple[int, int]]) -> dict[str, Source]:
    """Returns the text of every kernel in every shape with heads of these sizes, by MLX's own names."""
    found: dict[str, Source] = {}
    with metal_source.kernels(metal_source.recorded(found)):
        for policy, dtype, dims in product(POLICIES, DTYPES.values(), sizes):
            launch(policy, dtype, dims)
    return found
