"""Sealed KV: full blocks quantized once, for ever.

Keys are quantized per channel, in groups along the *token* axis, because a channel of keys keeps its size from token to
token and channels differ much; so they are stored transposed. Values are quantized per token, in groups along the head
axis. Scales and biases are rounded to 16 bits as a part of sealing, and attention uses the rounded ones: 4.5 bits an
element with 4-bit codes in groups of 64.

Shapes, for `rows` rows of `blocks` blocks and T = 256 * blocks tokens:

    keys      (rows, kv_heads, T, key_dim)         codes    (rows, kv_heads, key_dim, T * bits / 32), uint32
                                                   scales   (rows, kv_heads, key_dim, T / 64), 16 bits; biases alike
    values    (rows, kv_heads, T, value_dim)       codes    (rows, kv_heads, T, padded * bits / 32), uint32
                                                   scales   (rows, kv_heads, T, padded / group); biases alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS

KEY_GROUP = 64

FORMAT_VERSION = 1
"""Of the layout and rounding here; a part of the model id."""


@dataclass(frozen=True)
class SealPolicy:
    """How many bits a code of keys and of values has."""

    name: str
    key_bits: int
    value_bits: int


POLICIES = {policy.name: policy for policy in (SealPolicy("q4", 4, 4), SealPolicy("k8v4", 8, 4))}
"""By the name that a model's config gives. Its `fp16` seals nothing."""


class Sealed(NamedTuple):
    """Sealed blocks of one layer; see the module's shapes."""

    key_codes: mx.array
    key_scales: mx.array
    key_biases: mx.array
    value_codes: mx.array
    value_scales: mx.array
    value_biases: mx.array

    @property
    def tokens(self) -> int:
        return self.value_codes.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


TOKEN_AXES = (3, 3, 3, 2, 2, 2)
"""The axis of every array that grows with the tokens."""


def value_group(dim: int) -> int:
    """The group size of values with `dim` channels: 64 where that divides it, else 32."""
    return 64 if dim % 64 == 0 else 32


def _padded(dim: int) -> int:
    return -(-dim // 32) * 32


def sealed_token_bytes(kv_heads: int, key_dim: int, value_dim: int, policy: SealPolicy) -> int:
    """What a token of one sealed layer takes, rounded up."""
    keys = key_dim * (policy.key_bits / 8 + 4 / KEY_GROUP)
    values = _padded(value_dim) * (policy.value_bits / 8 + 4 / value_group(value_dim))
    return -int(-kv_heads * (keys + values) // 1)


def _scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    return dtype if dtype.size == 2 else mx.float16


def seal(keys: mx.array, values: mx.array, policy: SealPolicy) -> Sealed:
    """Quantize whole blocks; keys and values as in the module's shapes."""
    if keys.shape[2] % BLOCK_TOKENS:
        raise ValueError(f"{keys.shape[2]} tokens are no whole blocks")
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
    return Sealed(
        key_codes,
        key_scales.astype(scale),
        key_biases.astype(scale),
        value_codes,
        value_scales.astype(scale),
        value_biases.astype(scale),
    )


def unseal(sealed: Sealed, policy: SealPolicy, value_dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys and values as attention takes them, in the compute dtype."""
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


def blocks_of(sealed: Sealed, start: int, stop: int) -> Sealed:
    """Blocks [start, stop), a view."""
    tokens = sealed.tokens
    if start == 0 and stop * BLOCK_TOKENS == tokens:
        return sealed
    parts = []
    for array, axis in zip(sealed, TOKEN_AXES, strict=True):
        width = array.shape[axis] * BLOCK_TOKENS // tokens
        span = [slice(None)] * 4
        span[axis] = slice(start * width, stop * width)
        parts.append(array[tuple(span)])
    return Sealed(*parts)


def rows_of(sealed: Sealed, rows: slice | mx.array) -> Sealed:
    return Sealed(*(array[rows] for array in sealed))


def join_tokens(parts: Sequence[Sealed]) -> Sealed:
    """Blocks after blocks."""
    if len(parts) == 1:
        return parts[0]
    arrays = zip(*parts, strict=True)
    return Sealed(*(mx.concatenate(list(pieces), axis=axis) for pieces, axis in zip(arrays, TOKEN_AXES, strict=True)))


def rows_joined(parts: Sequence[mx.array | None], rows: Sequence[int], axis: int) -> mx.array:
    """Rows after rows, with zeros behind those that are shorter along `axis` than the longest.

    Args:
        parts: of four axes; None where rows have nothing. At least one is something.
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


def join_rows(parts: Sequence[Sealed | None], rows: Sequence[int]) -> Sealed | None:
    """Rows of different numbers of blocks as one batch, as `rows_joined`; None where none has any."""
    if all(part is None for part in parts):
        return None
    pieces = zip(*(part or (None,) * len(TOKEN_AXES) for part in parts), strict=True)
    return Sealed(*(rows_joined(list(same), rows, axis) for same, axis in zip(pieces, TOKEN_AXES, strict=True)))


def pad_blocks(sealed: Sealed, blocks: int) -> Sealed:
    """The same with room for `blocks` blocks in all; the new ones are zero, so that they do no harm where masked."""
    more = blocks * BLOCK_TOKENS - sealed.tokens
    if more == 0:
        return sealed
    parts = []
    for array, axis in zip(sealed, TOKEN_AXES, strict=True):
        widths = [(0, 0)] * 4
        widths[axis] = (0, array.shape[axis] * more // sealed.tokens)
        parts.append(mx.pad(array, widths))
    return Sealed(*parts)


def part_of(sealed: Sealed, start: int, stop: int, blocks: int) -> Sealed:
    """The first `blocks` blocks of rows [start, stop), a view."""
    rows = sealed if stop - start == sealed.key_codes.shape[0] else rows_of(sealed, slice(start, stop))
    return blocks_of(rows, 0, blocks)


def place(sealed: Sealed, row: int, block: int, new: Sealed) -> Sealed:
    """The same with the blocks of `new` at `block` of its rows from `row` on."""
    rows = slice(row, row + new.key_codes.shape[0])
    parts = []
    for array, fresh, axis in zip(sealed, new, TOKEN_AXES, strict=True):
        start = block * (array.shape[axis] * BLOCK_TOKENS // sealed.tokens)
        span = [rows, slice(None), slice(None), slice(None)]
        span[axis] = slice(start, start + fresh.shape[axis])
        parts.append(put(array, tuple(span), fresh))
    return Sealed(*parts)


def put(array: mx.array, span: tuple[slice, ...], new: mx.array) -> mx.array:
    """The array with `new` at `span`; done in place where nobody else holds it."""
    # An assignment changes what a name stands for, and this is another name.
    changed = array[...]
    changed[span] = new
    return changed


def copied(array: mx.array) -> mx.array:
    """A copy that does not keep alive what it was cut from; a slice may already be contiguous."""
    # The one number that changes no other, and no zero's sign either.
    return array + (-0.0 if mx.issubdtype(array.dtype, mx.floating) else 0)


def copy(sealed: Sealed) -> Sealed:
    """Copies of all arrays, as `copied`."""
    return Sealed(*map(copied, sealed))
