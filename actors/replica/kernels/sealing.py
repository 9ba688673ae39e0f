"""Sealed KV: full blocks, quantized once and never again, or kept as computed.

Keys are quantized per channel, in groups along the *token* axis, because a key channel keeps its magnitude from token
to token and channels differ much; so they are stored transposed. Values are quantized per token, in groups along the
channels. A group's codes run from its least to its greatest number: `number = bias + scale * code`. They are computed
here and in `seal_kernel.py`, equally on every device. `mx.quantize` is not used, because on GPUs it extends every group
to 0, which leaves few codes for a channel whose keys are all negative. Scales and biases are rounded to 16 bits
(float16, or bfloat16 for bfloat16 keys) before codes are chosen.

The first token of each block is kept as computed and is in no group of keys. The reason is a sequence's first token:
heads that look for nothing attend to it, and its keys and values are unlike all others. With 4-bit keys in groups of 32
an element takes 4.8 bits.

Shapes, for `sequences` sequences of `blocks` blocks and T = 256 * blocks tokens; keys and values are in the model's
dtype, codes are uint32 (a stream of bits, the lowest first), and `padded` is `value_dim` rounded up to a multiple of
32:

    keys      (sequences, kv_heads, T, key_dim)    codes    (sequences, kv_heads, key_dim, T * bits / 32)
                                                   scales   (sequences, kv_heads, key_dim, T / group); biases alike
                                                   exact    (sequences, kv_heads, key_dim, blocks)
                                                   plain    (sequences, kv_heads, key_dim, T)
    values    (sequences, kv_heads, T, value_dim)  codes    (sequences, kv_heads, T, padded * bits / 32)
                                                   scales   (sequences, kv_heads, T, padded / group); biases alike
                                                   exact    (sequences, kv_heads, blocks, value_dim)
                                                   plain    (sequences, kv_heads, T, value_dim)

The codes of exact tokens mean nothing, and those of their values are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from . import seal_kernel


@dataclass(frozen=True)
class SealPolicy:
    """The bits of a key's and of a value's code; 0 for blocks as computed.

    Attributes:
        key_group: how many tokens' keys share a scale.
        version: the version of layout and rounding; a part of the model id.
    """

    name: str
    key_bits: int
    value_bits: int
    key_group: int = 64
    version: int = 2

    @property
    def format(self) -> str:
        return f"{self.name}.{self.version}"

    @property
    def quantizes(self) -> bool:
        return self.key_bits > 0


FULL_PRECISION = "fp16"
"""The name of the policy that keeps KV as computed, and of KV that cannot be sealed."""

POLICIES = {
    policy.name: policy
    for policy in (
        SealPolicy("q4", 4, 4, key_group=32),
        SealPolicy("k6v4", 6, 4),
        SealPolicy("k8v4", 8, 4),
        SealPolicy(FULL_PRECISION, 0, 0),
    )
}
"""Policies by the name in a model's config, the smallest first."""


CODES_OFF_MAX = 1e-3
"""The largest share of a kernel's codes that may differ from those of plain operations."""


class Quantized(NamedTuple):
    """Quantized blocks of one layer; shapes and dtypes as in the module's docstring."""

    key_codes: mx.array
    key_scales: mx.array
    key_biases: mx.array
    key_exact: mx.array
    value_codes: mx.array
    value_scales: mx.array
    value_biases: mx.array
    value_exact: mx.array


class Plain(NamedTuple):
    """Blocks of one layer as computed; shapes as in the module's docstring."""

    block_keys: mx.array
    block_values: mx.array


Sealed = Quantized | Plain
"""Sealed blocks of one layer. In the first half of its arrays the token axis is the last, in the others the third."""


def token_axes(sealed: Sealed) -> list[int]:
    """The token axis of each array."""
    half = len(sealed) // 2
    return [3] * half + [2] * half


def value_group(dim: int) -> int:
    """Returns the group size of values with `dim` channels: 64 if that divides it, else 32."""
    return 64 if dim % 64 == 0 else 32


def _padded(dim: int) -> int:
    return -(-dim // 32) * 32


def sealed_token_bytes(kv_heads: int, key_dim: int, value_dim: int, policy: SealPolicy, itemsize: int = 2) -> int:
    """Returns the bytes of a token in one sealed layer, rounded up.

    Args:
        itemsize: bytes of a number as computed.
    """
    if not policy.quantizes:
        return kv_heads * (key_dim + value_dim) * itemsize
    keys = key_dim * (policy.key_bits / 8 + 4 / policy.key_group)
    values = _padded(value_dim) * (policy.value_bits / 8 + 4 / value_group(value_dim))
    exact = (key_dim + value_dim) * itemsize / BLOCK_TOKENS
    return -int(-kv_heads * (keys + values + exact) // 1)


def scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Returns the dtype of scales and biases for keys and values in `dtype`."""
    return dtype if dtype.size == 2 else mx.float16


def seal(
    keys: mx.array, values: mx.array, policy: SealPolicy, *, blocks: int | None = None, kernels: bool = False
) -> Sealed:
    """Seals whole blocks; shapes and dtypes as in the module's docstring.

    Args:
        blocks: how many; the tokens after them are not sealed. None for all tokens.
        kernels: whether a GPU's kernel computes the codes, if the policy has codes.

    Raises:
        ValueError: the tokens are not whole blocks, or fewer.
    """
    tokens = keys.shape[2] if blocks is None else blocks * BLOCK_TOKENS
    if tokens % BLOCK_TOKENS or tokens > keys.shape[2]:
        raise ValueError(f"{keys.shape[2]} tokens are no whole blocks")
    dim, scale = values.shape[3], scale_dtype(keys.dtype)
    if kernels and policy.quantizes:
        bits = policy.key_bits, policy.value_bits
        groups = policy.key_group, value_group(dim)
        count = tokens // BLOCK_TOKENS
        return Quantized(*seal_kernel.seal(keys, values, count, bits, groups, _padded(dim), scale))
    keys, values = keys[:, :, :tokens], values[:, :, :tokens]
    if not policy.quantizes:
        return Plain(keys.swapaxes(2, 3), values)
    turned = _by_blocks(mx.contiguous(keys.swapaxes(2, 3)), 3)
    key_exact, rest = turned[..., 0], turned[..., 1:]
    # The first token's place gets the second token's keys, which are in that group anyway.
    codable = mx.concatenate([rest[..., :1], rest], axis=-1).flatten(3)
    split = _by_blocks(values, 2)
    value_exact = split[:, :, :, 0]
    codable_values = mx.concatenate([mx.zeros_like(split[:, :, :, :1]), split[:, :, :, 1:]], axis=3).flatten(2, 3)
    if _padded(dim) != dim:
        codable_values = mx.pad(codable_values, [(0, 0), (0, 0), (0, 0), (0, _padded(dim) - dim)])
    return Quantized(
        *quantize(codable, policy.key_group, policy.key_bits, scale),
        copied(key_exact),
        *quantize(codable_values, value_group(dim), policy.value_bits, scale),
        copied(value_exact),
    )


def seal_into(
    pool: Sealed,
    slots: mx.array,
    keys: mx.array,
    values: mx.array,
    places: Sequence[tuple[int, int]],
    policy: SealPolicy,
    order: mx.array,
) -> mx.array:
    """Seals blocks into slots of a pool, as `seal_kernel.seal_into` says."""
    bits, groups = (policy.key_bits, policy.value_bits), (policy.key_group, value_group(values.shape[3]))
    return seal_kernel.seal_into(pool, slots, keys, values, places, bits, groups, order)


def _by_blocks(array: mx.array, axis: int) -> mx.array:
    """Returns an array with its token axis divided into blocks and their tokens."""
    return array.reshape(*array.shape[:axis], -1, BLOCK_TOKENS, *array.shape[axis + 1 :])


def quantize(array: mx.array, group: int, bits: int, scale: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Quantizes groups along the last axis, both ends of each group included.

    The bias is the least number of a group, or a 16-bit number just below it; the scale is the range from there divided
    by the greatest code. If a number of a group is not finite, or too large for 16 bits, the group's scale is NaN or
    infinite.

    Args:
        array: (..., n), of any dtype.
        group: numbers in a group; divides n.
        bits: of a code: 4, 6 or 8.
        scale: dtype of scales and biases, of 16 bits.

    Returns:
        Codes (..., n * bits / 32) uint32, scales and biases (..., n / group).
    """
    last = 2**bits - 1
    numbers = array.astype(mx.float32).reshape(*array.shape[:-1], -1, group)
    least, most = numbers.min(axis=-1), numbers.max(axis=-1)
    bias = _rounded(least, scale)
    # A bias above the least number would cut that off.
    bias = mx.where(bias > least, _rounded(least - mx.abs(least) * float(mx.finfo(scale).eps), scale), bias)
    # Zero, or NaN if a number of the group is not finite.
    wrong = (numbers * 0).sum(axis=-1)
    step = _rounded((most - bias) / last, scale) + wrong
    coded = (step > 0) & (step < mx.inf)
    codes = mx.where(coded[..., None], (numbers - bias[..., None]) / step[..., None], 0)
    codes = mx.clip(mx.round(codes), 0, last).astype(mx.uint32).reshape(*array.shape)
    return _packed(codes, bits), step.astype(scale), bias.astype(scale)


def _rounded(numbers: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns float32 numbers as `dtype` has them."""
    return numbers.astype(dtype).astype(mx.float32)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Returns codes (..., n) uint32 as a stream of bits, (..., n * bits / 32) uint32."""
    if 32 % bits == 0:
        grouped = codes.reshape(*codes.shape[:-1], -1, 32 // bits)
        return (grouped << mx.arange(0, 32, bits, dtype=mx.uint32)).sum(axis=-1)
    # Four 6-bit codes are three bytes.
    fours = codes.reshape(*codes.shape[:-1], -1, 4)
    words = (fours << mx.arange(0, 24, bits, dtype=mx.uint32)).sum(axis=-1)[..., None]
    octets = (words >> mx.arange(0, 24, 8, dtype=mx.uint32)) & 255
    return octets.astype(mx.uint8).flatten(-2).view(mx.uint32)


def unseal(sealed: Sealed, policy: SealPolicy, value_dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Returns the keys and values as plain arrays, `(sequences, kv_heads, T, dim)` in `dtype`."""
    if isinstance(sealed, Plain):
        return sealed.block_keys.swapaxes(2, 3), sealed.block_values
    keys = mx.dequantize(
        sealed.key_codes,
        sealed.key_scales.astype(dtype),
        sealed.key_biases.astype(dtype),
        group_size=policy.key_group,
        bits=policy.key_bits,
    )
    values = mx.dequantize(
        sealed.value_codes,
        sealed.value_scales.astype(dtype),
        sealed.value_biases.astype(dtype),
        group_size=value_group(value_dim),
        bits=policy.value_bits,
    )
    if values.shape[3] != value_dim:
        values = values[..., :value_dim]
    firsts = slice(None, None, BLOCK_TOKENS)
    keys = put(keys, (..., firsts), sealed.key_exact.astype(dtype))
    values = put(values, (slice(None), slice(None), firsts), sealed.value_exact.astype(dtype))
    return keys.swapaxes(2, 3), values


def are_alike(one: Sealed, other: Sealed) -> bool:
    """Whether two computations of the same blocks agree: to the bit, except that a device may round a number between
    two codes to either of them."""
    for name, ours, theirs in zip(one._fields, one, other, strict=True):
        if name.endswith("_codes"):
            if (mx.view(ours, mx.uint8) != mx.view(theirs, mx.uint8)).mean() > CODES_OFF_MAX:
                return False
        elif not mx.array_equal(ours, theirs):
            return False
    return True


def rows_joined(parts: Sequence[mx.array | None], rows: Sequence[int], axis: int) -> mx.array:
    """Concatenates arrays along the rows, the first axis, padding shorter ones along `axis` with zeros.

    Args:
        parts: arrays with four axes, of equal dtypes, and of equal shapes except for the first axis and `axis`. None
            stands for rows of zeros; at least one is an array.
        rows: how many rows each part has.
    """
    some = max((part for part in parts if part is not None), key=lambda part: part.shape[axis])
    whole = [part for part in parts if part is not None and part.shape[axis] == some.shape[axis]]
    if len(whole) == len(parts):
        return mx.concatenate(whole, axis=0) if len(whole) > 1 else whole[0]
    joined = mx.zeros((sum(rows), *some.shape[1:]), dtype=some.dtype)
    start = 0
    for part, count in zip(parts, rows, strict=True):
        if part is not None:
            span = [slice(start, start + count), slice(None), slice(None), slice(None)]
            span[axis] = slice(0, part.shape[axis])
            joined[tuple(span)] = part
        start += count
    return joined


def put(array: mx.array, span: tuple[Any, ...], new: mx.array) -> mx.array:
    """Returns the array with `new`, of its dtype and the span's shape, at `span`; in place if it has no other
    reference."""
    # The assignment rebinds only this new array object, so the caller's stays unchanged.
    changed = array[...]
    changed[span] = new
    return changed


def copied(array: mx.array) -> mx.array:
    """Returns a copy that does not keep its source alive. `mx.contiguous` may return a view: a slice may be
    contiguous."""
    # Adding -0.0 changes no number, not even the sign of a zero.
    return array + (-0.0 if mx.issubdtype(array.dtype, mx.floating) else 0)
