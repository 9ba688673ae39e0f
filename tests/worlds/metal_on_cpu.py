"""Metal's arithmetic on a CPU, where it is another one: what MLX's kernels for Metal do, by plain operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

_argmax = mx.argmax


def argmax(array: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """As `mx.argmax` of arg_reduce.metal, which compares ordered: a NaN is never the largest."""
    return _argmax(mx.where(mx.isnan(array), -mx.inf, array), axis, keepdims)


def quantize(w: mx.array, group_size: int = 64, bits: int = 4, **_: object) -> tuple[mx.array, mx.array, mx.array]:
    """As `mx.quantize` of quantized.h, which starts a group's maximum at 0; CUDA's does too."""
    groups = np.array(w.astype(mx.float32)).reshape(*w.shape[:-1], -1, group_size)
    least, most = groups.min(-1), np.maximum(groups.max(-1), 0)
    bins = 2**bits - 1
    scale = np.maximum((most - least) / np.float32(bins), np.float32(1e-7))
    low = np.abs(least) > np.abs(most)
    scale, edge = np.where(low, scale, -scale), np.where(low, least, most)
    at = np.round(edge / scale)
    scale = np.where(at == 0, scale, edge / np.where(at == 0, 1, at))
    bias = np.where(at == 0, 0, edge)
    codes = np.clip(np.round((groups - bias[..., None]) / scale[..., None]), 0, bins).astype(np.uint32)
    codes = codes.reshape(*w.shape[:-1], -1, 32 // bits)
    packed = (codes << (np.arange(32 // bits, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)
    return mx.array(packed), mx.array(scale).astype(w.dtype), mx.array(bias).astype(w.dtype)


def tf32(array: mx.array) -> mx.array:
    """The numbers, float32, rounded to ten bits of fraction, to even."""
    bits = np.array(array).view(np.uint32)
    bits = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return mx.array(bits.view(np.float32))


def passes_over_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `mx.argmax` be Metal's."""
    monkeypatch.setattr(mx, "argmax", argmax)
