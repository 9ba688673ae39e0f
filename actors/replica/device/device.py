"""The device that MLX computes on."""

from __future__ import annotations

import platform
import re
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from ....cluster.devices.available_memory import available_bytes
from ....cluster.environment import mlx_rounding, set_unless_set
from .device_errors import on_device

TENSOR_GENERATION, TENSOR_GENERATION_PHONE, TENSOR_MACOS = 17, 18, (26, 2)
"""The first generation of Apple's GPUs, and the first macOS, with which MLX uses tensor units: M5 is the 17th."""


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    """Whether MLX computes with CUDA."""
    return on_gpu() and not mx.metal.is_available()


def multiplies_exactly(dtype: mx.Dtype) -> bool:
    """Whether matrices are multiplied in the full precision of float32: CUDA and the tensor units of Macs use TF32,
    whose fractions have as many bits as float16's."""
    if dtype != mx.float32 or on_cuda():
        return False
    return not (has_tensor_units() and mlx_rounding()["MLX_ENABLE_TF32"] != "0")


def has_tensor_units() -> bool:
    """Whether MLX multiplies with a Mac's tensor units."""
    if device_kind() != "metal":
        return False
    return uses_tensor_units(str(mx.device_info().get("architecture", "")), platform.mac_ver()[0])


def uses_tensor_units(architecture: str, macos: str) -> bool:
    """Whether MLX uses the tensor units of a GPU, as its `is_nax_available` decides. If MLX was built for an older
    macOS, it has no kernels for them; this function assumes that it has.

    Args:
        architecture: such as `applegpu_g17s`: a generation and a letter for the size, `p` for phones.
        macos: its version. Programs that were built for an older macOS see 16 instead of 26.
    """
    generation = re.search(r"(\d\d)([a-z])$", architecture)
    version = [int(part) for part in re.findall(r"\d+", macos)[:2]]
    if generation is None or not version:
        return False
    least = TENSOR_GENERATION_PHONE if generation[2] == "p" else TENSOR_GENERATION
    major = version[0] + 10 if version[0] == 16 else version[0]
    return int(generation[1]) >= least and (major, *version[1:]) >= TENSOR_MACOS


def device_kind() -> str:
    """Returns `cpu`, `metal` or `cuda`."""
    return "cpu" if not on_gpu() else "cuda" if on_cuda() else "metal"


def device_name() -> str:
    """Returns MLX's name of the chip."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device().type.name)


GRAPH_SHARE, GRAPH_LEAST = 32, 100
"""MLX ends a graph once its operations have inputs of so many million numbers, of mostly two bytes: as many as this
fraction of the memory has MB, but at least 100."""


def size_graphs(memory_bytes_max: int | None = None) -> None:
    """Sets how large MLX's CUDA graphs may be, unless that is set already. Call it before anything is computed: MLX
    reads it once.

    The host waits if ten graphs are launched, and weights and the pool's arrays count as inputs: with 1,000 a graph
    of an 8B model had an operation or two of each layer, so no prompt could be built while the device computed
    another. But what a graph computes in between is kept until it has ended.

    Args:
        memory_bytes_max: what may be used of the device's memory; None for all.
    """
    if on_cuda():
        memory = min(device_bytes(), memory_bytes_max or device_bytes())
        wanted = max(GRAPH_LEAST, memory // (GRAPH_SHARE * 2**20))
        set_unless_set("MLX_MAX_MB_PER_BUFFER", str(wanted))


def device_bytes(*, free: bool = False) -> int:
    """Returns the memory of the device that computes, in bytes: all of it, or what is free now."""
    if on_cuda():
        # A card with memory of its own, which MLX reports under one of these names.
        info = mx.device_info()
        for name in (*(["free_memory"] if free else []), "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int):
                return size
    return available_bytes() if free else psutil.virtual_memory().total


def as_numpy(array: mx.array) -> np.ndarray:
    """Waits for an array and returns it as a NumPy array.

    Use this instead of `np.array` for arrays that may still be computed: if the device has failed, `np.array` ignores
    the error, tries another way to read, and gets memory that was never written.

    Raises:
        RuntimeError: the device has failed.
    """
    mx.eval(array)
    return np.array(array)


def launched_as_numpy(array: mx.array) -> np.ndarray:
    """As `as_numpy`, for an array that was launched, and from any thread. The device's errors must be those that every
    thread gets, as CUDA's are."""
    view: Any = array
    return np.asarray(memoryview(view))


def settle() -> None:
    """Waits for all work that this thread has launched, so that later errors are not about it.

    Raises:
        DeviceFailed: the device has failed at this work.
    """
    with on_device():
        mx.synchronize()


def size_class(count: int) -> int:
    """Returns the smallest power of two, or one and a half times one, that is at least `count`.

    A GPU's arrays are padded to such sizes, because it makes a plan or a kernel for every new shape, which takes longer
    than computing the padding.
    """
    whole = 1 << max(0, count - 1).bit_length()
    return whole * 3 // 4 if count <= whole * 3 // 4 and whole >= 4 else whole
