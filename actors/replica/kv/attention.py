"""Attention on sealed blocks, hooked into the models' attention.

Models import `scaled_dot_product_attention` by name, so `install` rebinds that name in the modules of a loaded model. A
model that never calls it computes with the dequantized arrays, with the same result.

A decode step reads every sealed block of every row. It can multiply the codes directly, or dequantize them for MLX's
fused kernel; which is faster depends on device, batch and length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .device import on_gpu
from .sealed_cache import SealedKVCache, View
from .sealing import KEY_GROUP, SealPolicy, value_group

NAME = "scaled_dot_product_attention"


def install(model: Any) -> bool:
    """Lets the model's layers attend to sealed blocks directly if their caches say so.

    Returns:
        Whether any of its modules calls MLX's attention by that name.
    """
    names = {type(module).__module__ for _, module in model.named_modules()}
    callers = [module for name in names if callable(getattr(module := sys.modules[name], NAME, None))]
    for module in callers:
        before = getattr(module, NAME)
        if not isinstance(before, _Attend):
            setattr(module, NAME, _Attend(before))
    return bool(callers)


class _Attend:
    """The replacement of `plain`, the function that the model's module had imported."""

    def __init__(self, plain: Callable[..., mx.array]) -> None:
        self._plain = plain

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, *rest: Any, **named: Any
    ) -> mx.array:
        """Returns `(rows, heads, N, value_dim)` in the queries' dtype. Arguments as mlx-lm's function has them: queries
        `(rows, heads, N, key_dim)`, keys and values as `SealedKVCache.update_and_fetch` returns them."""
        view, direct = (cache.view, cache.shared.direct) if isinstance(cache, SealedKVCache) else (None, None)
        if (
            view is not None
            and direct is not None
            and not rest
            and keys is view.plain_keys
            and queries.shape[2] == 1
            and named.get("sinks") is None
            and direct(queries.shape[0], view.sealed.tokens)
        ):
            return attend(queries, view, cache.policy, named["scale"], named.get("mask"))
        return self._plain(queries, keys, values, cache, *rest, **named)


def attend(queries: mx.array, view: View, policy: SealPolicy, scale: float, mask: mx.array | None) -> mx.array:
    """Attends with one query per row to codes and tail.

    Args:
        queries: `(rows, heads, 1, key_dim)` in the model's dtype.
        mask: `(rows, 1, 1, columns) bool`, True for columns to see; None to see all.

    Returns:
        `(rows, heads, 1, value_dim)` in the queries' dtype.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, sealed = view.keys.shape[1], view.sealed
    dtype, value_dim = queries.dtype, view.values.shape[3]
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    keys = (sealed.key_codes, sealed.key_scales.astype(dtype), sealed.key_biases.astype(dtype))
    before = _multiply(grouped, keys, KEY_GROUP, policy.key_bits)
    scores = mx.concatenate([before, grouped @ view.keys.swapaxes(2, 3)], axis=3)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    tokens = sealed.tokens
    values = (sealed.value_codes, sealed.value_scales.astype(dtype), sealed.value_biases.astype(dtype))
    out = _multiply(weights[..., :tokens], values, value_group(value_dim), policy.value_bits)
    out = out[..., :value_dim] + weights[..., tokens:] @ view.values
    return out.reshape(rows, heads, 1, value_dim)


def _multiply(left: mx.array, right: tuple[mx.array, mx.array, mx.array], group: int, bits: int) -> mx.array:
    """Returns `left` `(rows, kv_heads, M, K)` times the quantized matrices `right` (codes, scales, biases) of K x N,
    `(rows, kv_heads, M, N)` in the dtype of `left`."""
    if on_gpu():
        # CUDA cannot multiply slices, and fails only at evaluation.
        right = (mx.contiguous(right[0]), mx.contiguous(right[1]), mx.contiguous(right[2]))
    return mx.quantized_matmul(left, *right, transpose=False, group_size=group, bits=bits)
