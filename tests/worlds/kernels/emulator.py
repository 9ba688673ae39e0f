"""A GPU's threads on a CPU (`threads.h`): kernels are compiled from their own text, and run on arrays in place.

It shows that indices, barriers and exchanges between lanes are right. It says nothing of time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
_BUILT = HERE.parents[2] / "build" / "kernels"
_COMMAND = ("g++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{HERE}")
_MARGIN = 256


class Refused(Exception):
    """A kernel's text cannot be compiled; the message has the compiler's first errors."""


def lacks() -> str | None:
    """Returns what this machine lacks for it, None for nothing."""
    if sys.platform != "linux":
        return "GPU threads take turns on a CPU only on Linux"
    return None if shutil.which("g++") else "kernels are compiled for a CPU by g++, which is not installed"


@cache
def built(text: str) -> ctypes.CDLL:
    """Returns a kernel's text, which defines `body` of `threads.h`, as a library. It is kept in build/.

    Raises:
        Refused: it cannot be compiled.
    """
    digest = hashlib.sha256(" ".join(_COMMAND).encode())
    for part in (text, *(header.read_text() for header in sorted(HERE.glob("*.h")))):
        digest.update(part.encode())
    library = _BUILT / f"{digest.hexdigest()[:24]}.so"
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        compiled = subprocess.run(
            [*_COMMAND, "-x", "c++", "-", "-o", str(new)], input=text, capture_output=True, text=True, timeout=300
        )
        if compiled.returncode:
            raise Refused(compiled.stderr[:2000])
        new.rename(library)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL,
    inputs: Sequence[mx.array],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Launches a kernel; its arguments are those of MLX's kernels. What it changes in place is changed, and outputs are
    memory in which something was before.

    Raises:
        RuntimeError: threads wait for each other for ever, a trap, or an output was written beyond its ends.
    """
    assert grid[1:] == threadgroup[1:] == (1, 1) and grid[0] % threadgroup[0] == 0, "whole groups along one axis"
    mx.eval(list(inputs))
    given = [_plain(array) for array in inputs]
    made = [
        np.full(2 * _MARGIN + int(np.prod(shape)) * dtype.size, 0xAB, np.uint8)
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]
    places = [*(array.ctypes.data for array in given), *(array.ctypes.data + _MARGIN for array in made)]
    failed = library.launch((ctypes.c_void_p * len(places))(*places), grid[0] // threadgroup[0], threadgroup[0])
    if failed:
        raise RuntimeError("the kernel ended by a trap" if failed == 2 else "threads wait for each other for ever")
    if any((array[:_MARGIN] != 0xAB).any() or (array[-_MARGIN:] != 0xAB).any() for array in made):
        raise RuntimeError("an output was written beyond its ends")
    return [
        mx.array(array[_MARGIN:-_MARGIN]).view(dtype).reshape(shape)
        for array, shape, dtype in zip(made, output_shapes, output_dtypes, strict=True)
    ]


def _plain(array: mx.array) -> np.ndarray:
    """Returns an array's own memory, or a copy in rows if it is not, as MLX passes arrays to kernels."""
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False))
