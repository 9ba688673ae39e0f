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
from ..kernels.decode_views import DecodeView, KernelStep, KernelView, NewTokens, padded_rows
from ..kernels.head_transform import NOTHING, HeadTransform, Norm, Rotation
from ..kernels.sealing import POLICIES, Plain, Sealed
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


@dataclass(frozen=True)
class World:
    """Queries of new tokens, which the kernel is to transform, and what the reference and the kernel read. The kernel's
    arrays have padding at the end.

    Attributes:
        positions: of the new tokens.
        keys, values: the open blocks as they are to be after the step.
    """

    queries: mx.array
    positions: list[int]
    reference: DecodeView
    view: KernelView
    keys: mx.array
    values: mx.array


def world(
    lengths: Sequence[int],
    kv_heads: int,
    dims: tuple[int, int],
    grouped: int,
    policy: str,
    window: int,
    dtype: mx.Dtype = mx.bfloat16,
    transform: HeadTransform = NOTHING,
    new: Sequence[int] | None = None,
) -> World:
    """Sequences with these tokens, the new ones too, in a pool in which their blocks lie anyhow.

    Args:
        new: how many of them are new, all in the open block; None for one each.
    """
    mx.random.seed(dims[0] + grouped)
    counts = [1] * len(lengths) if new is None else new
    blocks = [(length - 1) // BLOCK_TOKENS for length in lengths]
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
    # Of every new token: its sequence, its position, and its column in the open block.
    owners = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
    places = [length - count + at for length, count in zip(lengths, counts, strict=True) for at in range(count)]
    columns = [place - blocks[owner] * BLOCK_TOKENS for owner, place in zip(owners, places, strict=True)]
    at = mx.array(owners), slice(None), mx.array(columns)
    new_keys, new_values = (mx.contiguous(tail[at][:, :, None]) for tail in tails)
    # Without the new tokens.
    blank = [tail * 1 for tail in tails]
    for array in blank:
        array[at] = 0
    tails[0][at] = transform.of_keys(new_keys, mx.array(places))[:, :, 0]
    starts = [0, *accumulate(blocks)]
    reference = _reference(tails, pool, numbers, starts, owners, places, window)
    before, first = [length - count for length, count in zip(lengths, counts, strict=True)], [0] * len(lengths)
    read = NewTokens.of(slots, starts, before, first, window, kv_heads, new, padded_rows(len(lengths)))
    queries = mx.random.normal((len(owners), kv_heads * grouped, 1, dims[0])).astype(dtype)
    padding = [(0, read.tokens - len(owners)), *[(0, 0)] * 3]
    view = KernelView(
        mx.pad(new_keys, padding),
        mx.pad(new_values, padding),
        KernelStep((blank[0], blank[1]), pool, read, group.written(0)),
        lambda dim: transform,
    )
    mx.eval(queries, view.keys, view.values, tails, blank, reference.seen)
    del held
    return World(queries, places, reference, view, tails[0], tails[1])


def _reference(
    tails: Sequence[mx.array],
    pool: Sealed,
    numbers: Sequence[int],
    starts: Sequence[int],
    owners: Sequence[int],
    places: Sequence[int],
    window: int,
) -> DecodeView:
    """What the reference reads, for which every new token is a sequence of its own."""
    blocks = [starts[owner + 1] - starts[owner] for owner in owners]
    slots = mx.array([slot for owner in owners for slot in numbers[starts[owner] : starts[owner + 1]]], mx.uint32)
    hidden = [max(0, place + 1 - window) if window else 0 for place in places]
    token = mx.array([token for token, count in enumerate(blocks) for _ in range(count)], mx.uint32)
    first = [hidden[token] - at * BLOCK_TOKENS for token, count in enumerate(blocks) for at in range(count)]
    behind = mx.arange(BLOCK_TOKENS) < mx.array(first)[:, None, None, None] if window else None
    positions = mx.arange(BLOCK_TOKENS) + mx.array(blocks)[:, None] * BLOCK_TOKENS
    seen = (positions <= mx.array(list(places))[:, None]) & (positions >= mx.array(hidden)[:, None])
    heads = heads_of(token, slots, tails[0].shape[1])
    keys, values = (tail[mx.array(list(owners))] for tail in tails)
    return DecodeView(keys, values, seen[:, None, None], pool, slots, token, blocks, behind, heads)


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


def expected(
    queries: mx.array, view: DecodeView, policy: str, scale: float, sinks: mx.array | None, cap: float
) -> mx.array:
    """The reference's answer, (sequences, heads, 1, value_dim) float32."""
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float32) for array in (queries, view.keys, view.values)]
        pool = view.pool._make(a.astype(mx.float32) for a in view.pool) if isinstance(view.pool, Plain) else view.pool
        view = replace(view, keys=wide[1], values=wide[2], pool=pool)
        out = attention.attend(wide[0], view, POLICIES[policy], scale, sinks, cap=cap)
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
    new: Sequence[int] | None = None,
) -> float:
    """How far the kernel is off, of the largest output, and checks that it appends the new tokens; with sinks, or with
    capped scores, for some shapes."""
    # Behind a window sequences have few blocks.
    lengths = [min(length, 900 if window else length) for length in lengths]
    made = world(lengths, max(1, 8 // grouped), dims, grouped, policy, window, dtype, transform, new)
    queries, view = made.queries, made.view
    sinks = mx.random.normal((queries.shape[1],)).astype(dtype) if grouped == 8 else None
    cap = 1.0 if grouped == 2 else 0.0
    scale, seal, count = dims[0] ** -0.5, POLICIES[policy], len(queries)
    transformed = transform.of_queries(queries, mx.array(made.positions))
    wanted = expected(transformed, made.reference, policy, scale, sinks, cap)
    padded = mx.pad(queries, [(0, view.step.read.tokens - count), *[(0, 0)] * 3])
    got = decode_kernel.attend(padded, view, seal, scale, sinks, cap=cap)[:count].astype(mx.float32)
    mx.eval(got)
    for one, two in zip(view.step.tails, (made.keys, made.values), strict=True):
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
