"""The decode kernel beside the reference, `attention.attend` in float32 on the CPU, over all shapes that models have.

It needs a GPU, and compiles a kernel for every shape: some minutes on CUDA at the first time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...model_files.source import first_sentence
from ...protocol.block_ids import BLOCK_TOKENS
from ..kernels import decode_kernel, sealing
from ..kernels.decode_views import DecodeView, KernelStep, KernelView, SequenceBlocks
from ..kernels.head_transform import NOTHING, HeadTransform, Norm, Rotation
from ..kernels.sealing import POLICIES, Plain
from ..kv import attention
from ..kv.paged_cache import heads_of
from ..kv.pool import SlotGroup, slots_of

LENGTHS = (1, 256, 257, 1500, 5000, 90, 700)
HEAD_SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
GROUPED = (1, 2, 4, 5, 8, 16)
WINDOWS = (0, 700)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BOUND, BOUND_16 = 5e-4, 2e-2
"""Of the largest output: in float32, and in 16 bits."""


@dataclass(frozen=True)
class Shape:
    """A shape that was checked: heads of `dims` channels (keys, values), `grouped` queries for each of keys, a window
    or 0; how far the kernel was off, of the largest output, and the most that it may be; why it could not run."""

    policy: str
    dtype: str
    dims: tuple[int, int]
    grouped: int
    window: int
    off: float
    most: float
    failed: str = ""

    @property
    def agrees(self) -> bool:
        return self.off <= self.most

    def __str__(self) -> str:
        heads = f"heads of {self.dims[0]}/{self.dims[1]}, {self.grouped} queries each, window {self.window}"
        if self.failed:
            return f"{self.policy:5} {self.dtype:8} {heads}: {self.failed}"
        more = "" if self.agrees else f", more than {self.most:.0e}"
        return f"{self.policy:5} {self.dtype:8} {heads}: off by {self.off:.1e}{more}"


def world(
    lengths: Sequence[int],
    kv_heads: int,
    dims: tuple[int, int],
    grouped: int,
    policy: str,
    window: int,
    dtype: mx.Dtype = mx.bfloat16,
    transform: HeadTransform = NOTHING,
) -> tuple[mx.array, DecodeView, KernelView]:
    """Sequences with these tokens, the new one too, in a pool in which their blocks lie anyhow.

    Returns:
        Queries, which the kernel is to transform, and what the reference and the kernel read.
    """
    mx.random.seed(dims[0] + grouped)
    blocks = [(length - 1) // BLOCK_TOKENS for length in lengths]
    opened = [length - count * BLOCK_TOKENS for length, count in zip(lengths, blocks, strict=True)]
    numbers = list(range(sum(blocks)))
    random.Random(dims[0]).shuffle(numbers)
    shape = (1, kv_heads, len(numbers) * BLOCK_TOKENS)
    keys, values = (mx.random.normal((*shape, dim)).astype(dtype) for dim in dims)
    group, slots = SlotGroup([0], kernels=True), mx.array(numbers, mx.uint32)
    held = group.take(len(numbers))
    written = slots_of(sealing.seal(keys, values, POLICIES[policy]), len(numbers))
    group.write(0, slots, written)
    mx.eval(group.arrays())
    pool = group.layer(0)
    assert all(mx.array_equal(array[slots], new) for array, new in zip(pool, written, strict=True)), "it wrote them"
    tails = [mx.random.normal((len(lengths), kv_heads, BLOCK_TOKENS, dim)).astype(dtype) for dim in dims]
    mx.eval(tails)
    hidden = [max(0, length - window) if window else 0 for length in lengths]
    owner = mx.array([sequence for sequence, count in enumerate(blocks) for _ in range(count)], mx.uint32)
    starts = [0, *accumulate(blocks)]
    first = [hidden[sequence] - at * BLOCK_TOKENS for sequence, count in enumerate(blocks) for at in range(count)]
    behind = mx.arange(BLOCK_TOKENS) < mx.array(first)[:, None, None, None] if window else None
    columns, ends = mx.arange(BLOCK_TOKENS)[None], mx.array(opened)[:, None]
    seen = (columns < ends) & (columns + mx.array(blocks)[:, None] * BLOCK_TOKENS >= mx.array(hidden)[:, None])
    heads = heads_of(owner, slots, kv_heads)
    reference = DecodeView(tails[0], tails[1], seen[:, None, None], pool, slots, owner, blocks, behind, heads)
    places = mx.array(opened)[:, None, None, None] - 1
    new_keys, new_values = (mx.take_along_axis(tail, places, axis=2) for tail in tails)
    tails[0] = mx.put_along_axis(tails[0], places, transform.of_keys(new_keys, positions_of(lengths)), axis=2)
    reference = replace(reference, keys=tails[0])
    read = SequenceBlocks.of(slots, starts, [length - 1 for length in lengths], hidden, kv_heads)
    # Without the new token.
    blank = [mx.put_along_axis(tail, places, mx.zeros_like(tail[:, :, :1]), axis=2) for tail in tails]
    step = KernelStep((blank[0], blank[1]), pool, read, group.written(0))
    view = KernelView(new_keys, new_values, step, lambda dim: transform)
    queries = mx.random.normal((len(lengths), kv_heads * grouped, 1, dims[0])).astype(dtype)
    mx.eval(queries, new_keys, new_values, seen, heads, blank)
    del held
    return queries, reference, view


def positions_of(lengths: Sequence[int]) -> mx.array:
    return mx.array([length - 1 for length in lengths])


def all_transforms(dim: int, dtype: mx.Dtype) -> list[HeadTransform]:
    """What models do with heads of `dim` channels."""
    norms = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-5)
    for norm in norms:
        norm.weight = (1 + 0.2 * mx.random.normal((dim,))).astype(dtype)
    known = [Norm.of(norm) for norm in norms]
    ropes = nn.RoPE(dim), nn.RoPE(dim // 2, traditional=True, base=1e6, scale=0.25)
    turns = [Rotation.of(rope, dim, dtype) for rope in ropes]
    assert all([*known, *turns]), "MLX's own modules are known"
    return [NOTHING, HeadTransform(None, None, turns[0]), HeadTransform(known[0], known[1], turns[1])]


def expected(queries: mx.array, view: DecodeView, policy: str, scale: float, sinks: mx.array | None) -> mx.array:
    """The reference's answer, (sequences, heads, 1, value_dim) float32."""
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float32) for array in (queries, view.keys, view.values)]
        pool = view.pool._make(a.astype(mx.float32) for a in view.pool) if isinstance(view.pool, Plain) else view.pool
        view = replace(view, keys=wide[1], values=wide[2], pool=pool)
        out = attention.attend(wide[0], view, POLICIES[policy], scale, sinks)
        mx.eval(out)
    return out


def error(
    dims: tuple[int, int],
    grouped: int,
    policy: str,
    window: int,
    dtype: mx.Dtype,
    transform: HeadTransform = NOTHING,
    lengths: Sequence[int] = LENGTHS,
) -> float:
    """How far the kernel is off, of the largest output, and checks that it appends the new token; with sinks for some
    shapes."""
    # Behind a window sequences have few blocks.
    lengths = [min(length, 900 if window else length) for length in lengths]
    queries, reference, view = world(lengths, max(1, 8 // grouped), dims, grouped, policy, window, dtype, transform)
    sinks = mx.random.normal((queries.shape[1],)).astype(dtype) if grouped == 8 else None
    scale, seal = dims[0] ** -0.5, POLICIES[policy]
    wanted = expected(transform.of_queries(queries, positions_of(lengths)), reference, policy, scale, sinks)
    got = decode_kernel.attend(queries, view, seal, scale, sinks).astype(mx.float32)
    mx.eval(got)
    tails = zip(view.step.tails, (reference.keys, reference.values), strict=True)
    for one, two in tails:
        # A rotation is rounded otherwise than MLX's.
        most = 0.0 if transform is NOTHING else BOUND if dtype == mx.float32 else BOUND_16
        assert bool(mx.abs((one - two).astype(mx.float32)).max() <= most * mx.abs(two).max()), "it wrote them in place"
    return float(np.array(mx.abs(got - wanted).max() / mx.abs(wanted).max()))


def checked(policies: Sequence[str], dtypes: Sequence[str]) -> Iterator[Shape]:
    """Yields each shape with how far the kernel is off. Each shape gets one of the transforms."""
    for policy, dtype, dims, grouped, window in product(policies, dtypes, HEAD_SIZES, GROUPED, WINDOWS):
        transforms = all_transforms(dims[0], DTYPES[dtype])
        transform = transforms[(dims[0] // 16 + grouped) % len(transforms)]
        off, failed = math.inf, ""
        try:
            off = error(dims, grouped, policy, window, DTYPES[dtype], transform)
        except (RuntimeError, ValueError, AssertionError) as raised:
            # It cannot be compiled, or writes to a wrong place.
            failed = first_sentence(raised)
        yield Shape(policy, dtype, dims, grouped, window, off, BOUND if dtype == "float32" else BOUND_16, failed)
