"""The device that MLX computes on."""

from __future__ import annotations

import mlx.core as mx
import psutil


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    """Whether MLX computes with CUDA."""
    return on_gpu() and not mx.metal.is_available()


def multiplies_exactly(dtype: mx.Dtype) -> bool:
    """Whether matrices are multiplied with float32's own precision: CUDA uses TF32, whose fractions have as many bits
    as float16's."""
    return dtype == mx.float32 and not on_cuda()


def device_kind() -> str:
    """Returns `cpu`, `metal` or `cuda`."""
    return "cpu" if not on_gpu() else "cuda" if on_cuda() else "metal"


def device_name() -> str:
    """Returns MLX's name of the chip."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device().type.name)


def device_bytes(*, free: bool = False) -> int:
    """Returns the memory of the device that computes, in bytes: all of it, or what is free now."""
    if on_cuda():
        # A card with memory of its own, which MLX reports under one of these names.
        info = mx.device_info()
        for name in (*(["free_memory"] if free else []), "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int):
                return size
    memory = psutil.virtual_memory()
    return memory.available if free else memory.total


def size_class(count: int) -> int:
    """Returns the smallest power of two, or one and a half times one, that is at least `count`.

    Arrays of a GPU are padded to such sizes: it makes a plan or a kernel for every new shape, which takes longer than
    computing with it.
    """
    whole = 1 << max(0, count - 1).bit_length()
    return whole * 3 // 4 if count <= whole * 3 // 4 and whole >= 4 else whole
