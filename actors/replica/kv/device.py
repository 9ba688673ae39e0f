"""The device that MLX computes on."""

from __future__ import annotations

import mlx.core as mx
import psutil


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    return on_gpu() and not mx.metal.is_available()


def device_kind() -> str:
    """`cpu`, `metal` or `cuda`."""
    return "cpu" if not on_gpu() else "cuda" if on_cuda() else "metal"


def device_name() -> str:
    """The chip, as MLX calls it."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device().type.name)


def device_bytes(*, free: bool = False) -> int:
    """The memory of the device that computes: all of it, or what is free now."""
    if on_cuda():
        # A card with memory of its own, which MLX names by one of these.
        info = mx.device_info()
        for name in (*(["free_memory"] if free else []), "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int):
                return size
    memory = psutil.virtual_memory()
    return memory.available if free else memory.total
