"""Attention on sealed blocks, hooked into the models' attention.

Models import `scaled_dot_product_attention` by name, so `install` rebinds that name in the modules of a loaded model. A
model that never calls it computes with the dequantized arrays, with the same result.

A decode step reads every sealed block of every sequence, and sequences have different numbers of blocks. So the blocks
of all sequences are one flat list: each block gives a partial softmax over its 256 tokens, and the partial results of a
sequence's blocks and of its open block are added up. Nothing is padded to the longest sequence or masked, and no block
is dequantized.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ...patches import rebound
from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import on_cuda, on_gpu
from ..kernels import decode_kernel, gpu_kernels, prefill_kernel, query_kernels
from ..kernels.decode_views import DecodeView, KernelView
from ..kernels.sealing import Plain, SealPolicy, put, value_group
from .paged_cache import PagedKVCache
from .query_pieces import Piece, is_padded, pieces_of
from .steps import mask_of, step_of

logger = logging.getLogger(__name__)

NAME = "scaled_dot_product_attention"

PREFILL_TOLERANCE = 2e-2
"""How far the kernel's outputs may be off, relative to the largest. It rounds probabilities to 16 bits."""

FEW_QUERIES = 128
"""With at most this many queries a sequence, padding included, `attend_few` computes attention on CUDA: a short turn
after a history."""

SCORES_MAX = 2**24
"""The most scores that `attend_few` materializes at once, 4 bytes each, about three times. cuDNN materializes none."""


def install(model: Any) -> bool:
    """Lets the model's layers attend to blocks in the pool, if their caches say so.

    Returns:
        Whether any module of the model calls MLX's attention by that name.
    """
    change = rebound(model, NAME, lambda before: before if isinstance(before, _Attend) else _Attend(before))
    if change is not None:
        change.make()
    return change is not None


@dataclass(frozen=True)
class Heads:
    """What a plan depends on besides the numbers of queries and columns."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    sinks: mx.Dtype | None

    @classmethod
    def of(cls, queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None) -> Heads:
        """Returns those of arrays, `(sequences, heads, queries or columns, dim)` each."""
        sizes = queries.shape[1], keys.shape[1], keys.shape[3], values.shape[3]
        return cls(*sizes, queries.dtype, None if sinks is None else sinks.dtype)

    @property
    def planned(self) -> bool:
        """Whether cuDNN computes it. Otherwise MLX does, without a plan."""
        sizes = self.key_dim, self.value_dim
        return self.dtype in (mx.float16, mx.bfloat16) and all(dim <= 128 and dim % 8 == 0 for dim in sizes)


def prepare_plans(model: Any, queries: int, columns: int) -> None:
    """Computes attention of made-up tokens, one sequence, in all kinds of heads that the model's prompts have had in
    pieces so far. So the plans exist on this thread."""
    code = {sys.modules[type(module).__module__] for _, module in model.named_modules()}
    for hook in {getattr(each, NAME, None) for each in code}:
        if isinstance(hook, _Attend):
            mx.eval([hook.of_zeros(heads, queries, columns) for heads in hook.met if heads.planned])


class _Attend:
    """The replacement of `plain`, the function that the model's module had imported.

    Attributes:
        met: the heads of all attention in pieces so far.
    """

    def __init__(self, plain: Callable[..., mx.array]) -> None:
        self._plain = plain
        self.met: set[Heads] = set()

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, *rest: Any, **named: Any
    ) -> mx.array:
        named |= zip(("scale", "mask", "sinks"), rest, strict=False)
        view = getattr(cache, "view", None)
        if view is None or keys is not view.keys:
            mask = named.get("mask")
            if isinstance(cache, PagedKVCache) and isinstance(mask, mx.array) and mask.dtype == mx.bool_:
                mask = cache.batch.whole_mask(cache.group, mask, keys.shape[2])
                if on_cuda():
                    return self._attend_on_cuda(queries, keys, values, cache, mask, named)
                named["mask"] = mask
            return self._plain(queries, keys, values, cache, **named)
        # Clearing the view shows later that the layer's attention came through here.
        cache.view = None
        if isinstance(view, KernelView):
            return decode_kernel.attend(queries, view, cache.policy, named["scale"], named.get("sinks"))
        return attend(queries, view, cache.policy, named["scale"], named.get("sinks"))

    def _attend_on_cuda(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: PagedKVCache,
        mask: mx.array,
        named: dict[str, Any],
    ) -> mx.array:
        """Attention with an array mask: by the kernel, or else in shapes that need no plan or that have plans already.

        Args:
            mask: (sequences or 1, 1, queries, columns) bool.
            named: the other arguments of `plain`.
        """
        sinks = named.get("sinks")
        heads = Heads.of(queries, keys, values, sinks)
        window = cache.batch.window_of(cache.group, mask)
        chunk = cache.chunk if queries.dtype == keys.dtype == values.dtype else None
        if chunk is not None and window is not None and prefill_kernel_works(heads, bool(window)):
            if missing := -keys.shape[2] % prefill_kernel.COLUMNS:
                keys, values = (mx.pad(each, [(0, 0), (0, 0), (0, missing), (0, 0)]) for each in (keys, values))
            return prefill_kernel.attend(queries, keys, values, chunk, named["scale"], window, sinks)
        if is_few(queries, keys):
            return attend_few(queries, keys, values, mask, named["scale"], sinks)
        if mask.shape[1:] == (1, queries.shape[2], keys.shape[2]) and is_padded(keys.shape[2]):
            sequences = range(len(queries))
            rows = [self._attend_in_pieces(row, queries, keys, values, cache, mask, named) for row in sequences]
            # What comes next wants the heads of a token together, as kernels leave them.
            return rows[0] if len(rows) == 1 else mx.concatenate([row.swapaxes(1, 2) for row in rows]).swapaxes(1, 2)
        # With booleans MLX would materialize the mask for every head of every layer.
        return self._plain(queries, keys, values, cache, **named | {"mask": cache.batch.bias(mask, queries.dtype)})

    def _attend_in_pieces(
        self,
        sequence: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: PagedKVCache,
        mask: mx.array,
        named: dict[str, Any],
    ) -> mx.array:
        """Attention of one sequence of a batch, piece by piece: (1, heads, queries, value_dim).

        Plans are kept by strides too, so all arrays are contiguous.
        """
        own, sinks = slice(sequence, sequence + 1), named.get("sinks")
        self.met.add(Heads.of(queries, keys, values, sinks))
        keys, values = mx.contiguous(keys[own]), mx.contiguous(values[own])
        seen = mask[min(sequence, len(mask) - 1), 0]
        pieces = pieces_of(queries.shape[2], few_at_once(queries[own], keys))
        outs = []
        for piece, some in zip(pieces, _cut(queries, sequence, pieces), strict=True):
            if piece.size:
                bias = cache.batch.piece_bias(mask, sequence, piece, queries.dtype)
                outs.append(self._plain(some, keys, values, cache, **named | {"mask": bias}))
            else:
                span = slice(piece.start, piece.stop)
                outs.append(attend_few(some, keys, values, seen[None, None, span], named["scale"], sinks))
        return _joined(outs, pieces)

    def of_zeros(self, heads: Heads, queries: int, columns: int) -> mx.array:
        """Attention of a piece of zeros, in the shapes and strides of real ones: (1, heads, queries, value_dim)."""
        shapes = (
            (1, heads.heads, queries, heads.key_dim),
            (1, heads.kv_heads, columns, heads.key_dim),
            (1, heads.kv_heads, columns, heads.value_dim),
        )
        arrays = [mx.zeros(shape, heads.dtype) for shape in shapes]
        bias = mx.zeros((queries, columns), heads.dtype)[None, None]
        sinks = None if heads.sinks is None else mx.zeros((heads.heads,), heads.sinks)
        return self._plain(*arrays, None, scale=1.0, mask=bias, sinks=sinks)


@cache
def prefill_kernel_works(heads: Heads, window: bool) -> bool:
    """Whether a kernel computes prompts' attention with these heads, and agrees with plain products. If it does not,
    the reason is logged. Computed once."""
    counts, dims = (heads.heads, heads.kv_heads), (heads.key_dim, heads.value_dim)
    if not (
        decode_kernel.has_tensor_cores()
        and gpu_kernels.is_available()
        and gpu_kernels.has_nvrtc()
        and prefill_kernel.fits(counts, dims, heads.dtype)
    ):
        return False
    try:
        off = max(_prefill_kernel_off(heads, 200 if window else 0, most) for most in (300, 20))
        reason = "" if off <= PREFILL_TOLERANCE else f"it is off by {off:.2g} of the largest output"
    except RuntimeError as error:
        reason = str(error)
    if reason:
        logger.warning("prompts attend without the kernel: %s", reason)
    return not reason


def _prefill_kernel_off(heads: Heads, window: int, most: int) -> float:
    """Returns how far the kernel's outputs are off those of plain products, relative to the largest, for two sequences
    of which one gets `most` tokens."""
    lengths, new, count = [520, 10], [most, 30], most + 20
    step = step_of(lengths, window, new, padded=True)
    mask = mask_of(step, lengths, step.first, count, window)
    assert mask is not None
    columns = BLOCK_TOKENS * step.used + step.columns
    sizes = (heads.heads, count, heads.key_dim), (heads.kv_heads, columns, heads.key_dim)
    shapes = [(2, *size) for size in (*sizes, (heads.kv_heads, columns, heads.value_dim))]
    queries, keys, values = [
        mx.random.normal(shape, key=mx.random.key(at)).astype(heads.dtype) for at, shape in enumerate(shapes)
    ]
    sinks = None if heads.sinks is None else mx.random.normal((heads.heads,), key=mx.random.key(9)).astype(heads.sinks)
    scale, chunk = heads.key_dim**-0.5, prefill_kernel.Chunk(lengths, new, step.first, BLOCK_TOKENS * step.used, False)
    got = prefill_kernel.attend(queries, keys, values, chunk, scale, window, sinks)
    plain = queries.astype(mx.float32), keys.astype(mx.float32), values.astype(mx.float32)
    expected = attend_few(*plain, mask, scale, sinks)
    pairs = [(got[at, :, :tokens], expected[at, :, :tokens]) for at, tokens in enumerate(new)]
    off = [float(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max()) for one, other in pairs]
    return math.inf if any(map(math.isnan, off)) else max(off)


def _cut(queries: mx.array, sequence: int, pieces: Sequence[Piece]) -> list[mx.array]:
    """Returns the pieces of one sequence's queries, `(sequences, heads, queries, key_dim)`, padded with zeros."""
    if query_kernels.work():
        return query_kernels.cut(queries, sequence, _spans(pieces))
    own = queries[sequence : sequence + 1]
    paddings = [[(0, 0), (0, 0), (0, max(0, each.size - (each.stop - each.start))), (0, 0)] for each in pieces]
    return [mx.pad(own[:, :, each.start : each.stop], pad) for each, pad in zip(pieces, paddings, strict=True)]


def _joined(outs: Sequence[mx.array], pieces: Sequence[Piece]) -> mx.array:
    """Returns what attention made of all pieces, without padding: `(1, heads, queries, value_dim)`."""
    if query_kernels.work():
        return query_kernels.join(outs, _spans(pieces)).transpose(0, 2, 1, 3)
    return mx.concatenate([out[:, :, : each.stop - each.start] for out, each in zip(outs, pieces, strict=True)], axis=2)


def _spans(pieces: Sequence[Piece]) -> query_kernels.Spans:
    return [(each.start, count := each.stop - each.start, each.size or count) for each in pieces]


def few_at_once(queries: mx.array, keys: mx.array) -> int:
    """How many queries of each sequence `attend_few` computes at once, without going from head to head: up to then it
    takes no longer than a padded piece with a plan."""
    sequences, heads, columns = *queries.shape[:2], keys.shape[2]
    return min(FEW_QUERIES, SCORES_MAX // (sequences * heads * columns))


def is_few(queries: mx.array, keys: mx.array) -> bool:
    """Whether `attend_few` computes these: queries (sequences, heads, queries, key_dim), keys (sequences, kv_heads,
    columns, key_dim)."""
    (heads, count), (kv_heads, columns) = queries.shape[1:3], keys.shape[1:3]
    return count <= FEW_QUERIES and heads // kv_heads * count * columns <= SCORES_MAX


def attend_few(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attention by plain products. MLX's own has cuDNN make a plan for every new shape, which takes 70 ms on an H200,
    and every history has another length.

    Args:
        queries: (sequences, heads, queries, key_dim).
        keys: (sequences, kv_heads, columns, key_dim).
        values: (sequences, kv_heads, columns, value_dim).
        mask: (sequences or 1, 1, queries, columns), which columns each query sees.
        sinks: (heads,), what every head adds to the softmax's sum; None for nothing.

    Returns:
        (sequences, heads, queries, value_dim), in the dtype of the queries.
    """
    sequences, heads, count, dim = queries.shape
    kv_heads, columns = keys.shape[1:3]
    if sequences * heads * count * columns > SCORES_MAX and max(sequences, kv_heads) > 1:
        # One sequence after another; if there is only one, one KV head after another.
        axis, parts = (0, sequences) if sequences > 1 else (1, kv_heads)
        masks = mx.split(mask, parts) if len(mask) > 1 else [mask] * parts
        of_heads = [sinks] * parts if sinks is None or sequences > 1 else mx.split(sinks, parts)
        arrays = (mx.split(array, parts, axis) for array in (queries, keys, values))
        given = zip(*arrays, masks, of_heads, strict=True)
        return mx.concatenate([attend_few(q, k, v, seen, scale, sink) for q, k, v, seen, sink in given], axis=axis)
    # In float32, because scores in the hundreds are usual. TF32 has all bits of 16-bit numbers.
    grouped = queries.astype(mx.float32).reshape(sequences, kv_heads, -1, dim)
    scores = (grouped @ keys.astype(mx.float32).swapaxes(2, 3)).reshape(sequences, heads, count, columns)
    scores = mx.where(mask, scores * scale, mx.finfo(mx.float32).min)
    if sinks is not None:
        sunk = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (sequences, heads, count, 1))
        scores = mx.concatenate([sunk, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., -columns:].astype(values.dtype)
    out = weights.reshape(sequences, kv_heads, -1, columns) @ values
    return out.reshape(sequences, heads, count, values.shape[3]).astype(queries.dtype)


def attend(
    queries: mx.array,
    view: DecodeView,
    policy: SealPolicy,
    scale: float,
    sinks: mx.array | None = None,
    *,
    cap: float = 0.0,
) -> mx.array:
    """Attention of one query a sequence to its own blocks and its open block.

    Args:
        queries: (sequences, heads, 1, key_dim).
        sinks: (heads,), what every head adds to the softmax's sum; None for nothing.
        cap: of scores, which become `cap * tanh(score / cap)`; 0 for none.

    Returns:
        (sequences, heads, 1, value_dim), in the dtype of the queries.
    """
    sequences, heads, _, dim = queries.shape
    kv_heads, value_dim, dtype = view.keys.shape[1], view.values.shape[3], queries.dtype
    grouped = (queries * scale).reshape(sequences, kv_heads, heads // kv_heads, dim)
    pool = view.pool
    if isinstance(pool, Plain):
        assert view.heads is not None
        of_sequences, of_slots, of_blocks = view.heads
        scores = _gathered(grouped, pool.block_keys, of_sequences, of_slots).astype(mx.float32)
    else:
        keys, asking = (pool.key_codes, pool.key_scales, pool.key_biases), grouped[view.sequences]
        scores = _multiply(asking, keys, view.slots, policy.key_group, policy.key_bits)
        exact = (asking * pool.key_exact[view.slots].swapaxes(2, 3)).sum(axis=-1, keepdims=True)
        scores = put(scores, (..., slice(0, 1)), exact).astype(mx.float32)
    opened = (grouped @ view.keys.swapaxes(2, 3)).astype(mx.float32)
    if cap:
        scores, opened = (cap * mx.tanh(each / cap) for each in (scores, opened))
    least = mx.finfo(mx.float32).min
    if view.behind is not None:
        scores = mx.where(view.behind, least, scores)
    if view.seen is not None:
        opened = mx.where(view.seen, opened, least)
    # The largest score of every sequence, over its blocks and its open block. The newest token in the latter is always
    # visible.
    most = opened.max(axis=-1).at[view.sequences].maximum(scores.max(axis=-1))
    if sinks is not None:
        most = mx.maximum(most, sinks.reshape(kv_heads, -1).astype(mx.float32))
    before, inside = mx.exp(scores - most[view.sequences][..., None]), mx.exp(opened - most[..., None])
    total = inside.sum(axis=-1).at[view.sequences].add(before.sum(axis=-1))
    if sinks is not None:
        total = total + mx.exp(sinks.reshape(kv_heads, -1).astype(mx.float32) - most)
    weights = before.astype(dtype)
    if isinstance(pool, Plain):
        parts = _gathered(weights, pool.block_values, of_blocks, of_slots)
    else:
        values = (pool.value_codes, pool.value_scales, pool.value_biases)
        parts = _multiply(weights, values, view.slots, value_group(value_dim), policy.value_bits)[..., :value_dim]
        parts = parts + weights[..., :1] * pool.value_exact[view.slots]
    out = (inside.astype(dtype) @ view.values).astype(mx.float32).at[view.sequences].add(parts.astype(mx.float32))
    return (out / total[..., None]).astype(dtype).reshape(sequences, heads, 1, value_dim)


def _gathered(left: mx.array, right: mx.array, of_left: mx.array, of_right: mx.array) -> mx.array:
    """As `mx.gather_mm`, which on a CPU only takes float32."""
    if left.dtype == mx.float32 or on_gpu():
        return mx.gather_mm(left, right, of_left, of_right)
    return left.flatten(0, -3)[of_left] @ right.flatten(0, -3)[of_right]


def _multiply(
    left: mx.array, right: tuple[mx.array, mx.array, mx.array], slots: mx.array, group: int, bits: int
) -> mx.array:
    """`left[i]` times the block in `slots[i]`: (n, kv_heads, group, k) by (slots, kv_heads, k, columns) quantized.

    The blocks' codes are gathered, which costs less than a tenth of the product on a CPU: `mx.gather_qmm` would read
    them in place, but needs scales in the dtype of `left`, and so would convert those of the whole pool in every step.
    """
    codes, scales, biases = (array[slots] for array in right)
    dtype = left.dtype
    return mx.quantized_matmul(
        left, codes, scales.astype(dtype), biases.astype(dtype), transpose=False, group_size=group, bits=bits
    )
