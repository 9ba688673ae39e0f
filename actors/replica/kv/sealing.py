"""Sealed KV: full blocks, quantized once and never again, or kept as computed.

Keys are quantized per channel, in groups along the *token* axis, because a key channel keeps its magnitude from token
to token and channels differ much; so they are stored transposed. Values are quantized per token, in groups along the
channels. Sealing rounds scales and biases to 16 bits (float16, or bfloat16 for bfloat16 keys), and attention uses the
rounded ones: 4.5 bits per element with 4-bit codes in groups of 64. Keys as computed are stored transposed too: so a
decode step reads them fastest.

Shapes, for `rows` rows of `blocks` blocks and T = 256 * blocks tokens; keys and values are in the model's dtype, codes
are uint32, and `padded` is `value_dim` rounded up to a multiple of 32:

    keys      (rows, kv_heads, T, key_dim)         codes    (rows, kv_heads, key_dim, T * bits / 32)
                                                   scales   (rows, kv_heads, key_dim, T / 64); biases alike
                                                   plain    (rows, kv_heads, key_dim, T)
    values    (rows, kv_heads, T, value_dim)       codes    (rows, kv_heads, T, padded * bits / 32)
                                                   scales   (rows, kv_heads, T, padded / group); biases alike
                                                   plain    (rows, kv_heads, T, value_dim)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS

KEY_GROUP = 64


@dataclass(frozen=True)
class SealPolicy:
    """The bits of a key's and of a value's code; 0 for blocks as computed.

    Attributes:
        version: of the layout and rounding; a part of the model id.
    """

    name: str
    key_bits: int
    value_bits: int
    version: int = 1

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
    for policy in (SealPolicy("q4", 4, 4), SealPolicy("k8v4", 8, 4), SealPolicy(FULL_PRECISION, 0, 0, version=2))
}
"""Policies by the name in a model's config."""


class Quantized(NamedTuple):
    """Quantized blocks of one layer; shapes and dtypes as in the module's docstring."""

    key_codes: mx.array
    key_scales: mx.array
    key_biases: mx.array
    value_codes: mx.array
    value_scales: mx.array
    value_biases: mx.array


class Plain(NamedTuple):
    """Blocks of one layer as computed; shapes as in the module's docstring."""

    block_keys: mx.array
    block_values: mx.array


Sealed = Quantized | Plain
"""Sealed blocks of one layer. The token axis of the first half of its arrays is the last, of the others the third."""


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
    keys = key_dim * (policy.key_bits / 8 + 4 / KEY_GROUP)
    values = _padded(value_dim) * (policy.value_bits / 8 + 4 / value_group(value_dim))
    return -int(-kv_heads * (keys + values) // 1)


def _scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    return dtype if dtype.size == 2 else mx.float16


def seal(keys: mx.array, values: mx.array, policy: SealPolicy) -> Sealed:
    """Seals whole blocks; shapes and dtypes as in the module's docstring.

    Raises:
        ValueError: the tokens are not whole blocks.
    """
    if keys.shape[2] % BLOCK_TOKENS:
        raise ValueError(f"{keys.shape[2]} tokens are no whole blocks")
    if not policy.quantizes:
        return Plain(keys.swapaxes(2, 3), values)
    dim = values.shape[3]
    if _padded(dim) != dim:
        values = mx.pad(values, [(0, 0), (0, 0), (0, 0), (0, _padded(dim) - dim)])
    scale = _scale_dtype(keys.dtype)
    key_codes, key_scales, key_biases = mx.quantize(
        mx.contiguous(keys.swapaxes(2, 3)), group_size=KEY_GROUP, bits=policy.key_bits
    )
    value_codes, value_scales, value_biases = mx.quantize(
        mx.contiguous(values), group_size=value_group(dim), bits=policy.value_bits
    )
    return Quantized(
        key_codes,
        key_scales.astype(scale),
        key_biases.astype(scale),
        value_codes,
        value_scales.astype(scale),
        value_biases.astype(scale),
    )


def unseal(sealed: Sealed, policy: SealPolicy, value_dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Returns the keys and values as plain arrays, `(rows, kv_heads, T, dim)` in `dtype`."""
    if isinstance(sealed, Plain):
        return sealed.block_keys.swapaxes(2, 3), sealed.block_values
    keys = mx.dequantize(
        sealed.key_codes,
        sealed.key_scales.astype(dtype),
        sealed.key_biases.astype(dtype),
        group_size=KEY_GROUP,
        bits=policy.key_bits,
    ).swapaxes(2, 3)
    values = mx.dequantize(
        sealed.value_codes,
        sealed.value_scales.astype(dtype),
        sealed.value_biases.astype(dtype),
        group_size=value_group(value_dim),
        bits=policy.value_bits,
    )
    return keys, values if values.shape[3] == value_dim else values[..., :value_dim]


def rows_joined(parts: Sequence[mx.array | None], rows: Sequence[int], axis: int) -> mx.array:
    """Concatenates arrays along the rows, the first axis, padding shorter ones along `axis` with zeros.

    Args:
        parts: arrays with four axes, of equal dtypes and equal shapes but for the first axis and `axis`. None stands
            for rows of zeros; at least one is an array.
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


def put(array: mx.array, span: tuple[slice, ...], new: mx.array) -> mx.array:
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
