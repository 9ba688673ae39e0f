"""Metal's arithmetic on a CPU, where it is another one: what MLX's kernels for Metal do, by plain operations."""

from __future__ import annotations

import ctypes
import ctypes.util

import mlx.core as mx
import numpy as np
import pytest

_argmax, _concatenate = mx.argmax, mx.concatenate


def rotate(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """As rope.metal rotates `(..., dim)` float32, whose pairs are half of `dim` apart: with fast cosines and sines."""
    half = x.shape[-1] // 2
    powers = -(np.arange(half, dtype=np.float32) / np.float32(half)) * np.log2(np.float32(base))
    # The C library's, which the kernel's text has here too: NumPy's differ in the last bit.
    exp2 = ctypes.CDLL(ctypes.util.find_library("m")).exp2f
    exp2.argtypes, exp2.restype = [ctypes.c_float], ctypes.c_float
    angles = np.float32(position) * np.array([exp2(power) for power in powers], dtype=np.float32)
    turns = angles * np.float32(0.15915494309189535)
    turned = (turns - np.floor(turns)).astype(np.float64) * 2 * np.pi
    cos, sin = np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)
    one, two = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)


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


def concatenate(arrays: list[mx.array], axis: int = 0, most: int = 2**31 - 1) -> mx.array:
    """As `mx.concatenate` of float32, whose parts are copied by kernels that count in 32 bits unless a part has more
    than `most` numbers: what lies further from a part's first number in the whole is not written."""
    whole = _concatenate(arrays, axis)
    if whole.size <= most or whole.dtype != mx.float32:
        return whole
    strides = [int(np.prod(whole.shape[at + 1 :])) for at in range(whole.ndim)]
    parts = []
    for array in arrays:
        places = sum(np.indices(array.shape)[at] * stride for at, stride in enumerate(strides))
        parts.append(mx.where(mx.array(places > most), mx.nan, array) if array.size <= most else array)
    return _concatenate(parts, axis)


def tf32(array: mx.array) -> mx.array:
    """The numbers, float32, rounded to ten bits of fraction, to even."""
    bits = np.array(array).view(np.uint32)
    bits = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return mx.array(bits.view(np.float32))


def passes_over_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `mx.argmax` be Metal's."""
    monkeypatch.setattr(mx, "argmax", argmax)
