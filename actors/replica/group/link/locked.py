"""Memory of the host that is locked in its place, so that CUDA's kernels read and write it while the host does too.

MLX's own arrays move between host and device, page by page or with a copy for which somebody waits. What passes between
stages does not: kernels copy it.
"""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np

from ...device.device import size_class
from ...kernels import gpu_kernels

WORD = 4

THREADS, GROUPS_MOST = 256, 512

_COPY = """
  unsigned* memory = (unsigned*)((unsigned long long)place[0] | ((unsigned long long)place[1] << 32));
  for (int at = GROUP * THREADS + THREAD; at < words[0]; at += GROUPS * THREADS) MOVE;
"""
_OUT = "  #define MOVE memory[at] = array[at]\n" + _COPY + "  if (GROUP == 0 && THREAD == 0) done[0] = 1;\n"
_IN = "  #define MOVE array[at] = memory[at]\n" + _COPY


def locked_memory(words: int) -> np.ndarray:
    """Returns memory that kernels may use at the same address, `(words,) uint32`, of zeros. It is never freed.

    Raises:
        OSError: there is none.
    """
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    # CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP (CUDA's driver API).
    if error := driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(WORD * words), ctypes.c_uint(1 | 2)):
        raise OSError(f"CUDA's error {error}")
    memory = np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(address.value or 0))
    memory[:] = 0
    return memory


def place_of(memory: np.ndarray) -> mx.array:
    """Returns the address of memory as kernels take it, `(2,) uint32`: its lower half and its upper one."""
    return mx.array(np.array([memory.ctypes.data], np.uint64).view(np.uint32))


def copy_out(array: mx.array, place: mx.array) -> mx.array:
    """Returns a number that is there once an array's words `(words,) uint32` are in memory of the host.

    Args:
        place: as `place_of`.
    """
    return _launched("copy_out", ("array", "place", "words"), "done", _OUT, [array, place], array.size, (1,))


def copy_in(place: mx.array, words: int) -> mx.array:
    """Returns the array `(words,) uint32` that lies in memory of the host. Arguments as for `copy_out`."""
    return _launched("copy_in", ("place", "words"), "array", _IN, [place], words, (words,))


def _launched(
    name: str, takes: tuple[str, ...], gives: str, body: str, given: list[mx.array], words: int, shape: tuple[int, ...]
) -> mx.array:
    groups = min(GROUPS_MOST, -(-words // THREADS))
    (found,) = gpu_kernels.kernel(name, takes, (gives,), body)(
        inputs=[*given, gpu_kernels.int_numbers(words)],
        template=[("THREADS", THREADS), ("GROUPS", groups)],
        grid=(groups * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return found


class Locker:
    """Locked memory for an array that is sent or has come.

    Attributes:
        memory: as words.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self._place = memory, place_of(memory)

    def put(self, words: mx.array) -> mx.array:
        """As `copy_out`, into this memory."""
        return copy_out(words, self._place)

    def get(self, nbytes: int) -> mx.array:
        """As `copy_in`, of so many bytes of this memory."""
        return copy_in(self._place, nbytes // WORD)


class Lockers:
    """Lockers that are used again and again.

    Args:
        bytes_max: of all of them.
    """

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._free: dict[int, list[Locker]] = {}

    def take(self, nbytes: int) -> Locker | None:
        """Returns a locker for so many bytes, until it is given back; None if none is free, or for a part of a word.
        From any thread."""
        free = self._free.get(size_class(nbytes // WORD), [])
        return free.pop() if free and not nbytes % WORD else None

    def give_back(self, locker: Locker) -> None:
        """Takes a locker back, from any thread."""
        self._free[len(locker.memory)].append(locker)

    def make(self, nbytes: int) -> None:
        """Makes another locker for so many bytes, if there is room. On the thread that computes."""
        words = size_class(nbytes // WORD)
        if WORD * words <= self._left:
            self._left -= WORD * words
            self._free.setdefault(words, []).append(Locker(locked_memory(words)))
