"""Devices that can wait for what has not come yet, on a CPU: the thread that launches waits in their place."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.group.link import gates, locked

WAIT_S = 20.0


def memory_at(place: mx.array, words: int) -> np.ndarray:
    """Returns the memory of an address, as kernels get it."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(int(np.array(place).view(np.uint64)[0])))


def copies_here(array: mx.array, place: mx.array) -> mx.array:
    """Stands for `locked.copy_out`."""
    memory_at(place, array.size)[:] = np.array(array)
    return mx.array([1], mx.uint32)


def waits_here(place: mx.array, turn: int, words: int, **how: Any) -> mx.array:
    """Stands for `gates.wait_and_copy`."""
    memory = memory_at(place, 4 + words)
    until = time.monotonic() + WAIT_S
    while memory[0] not in (turn, gates.GIVEN_UP) and time.monotonic() < until:
        time.sleep(0.001)
    if memory[0] != turn:
        raise RuntimeError("the device has failed")
    return mx.array(memory[4:])


@contextmanager
def waiting_devices() -> Iterator[list[int]]:
    """While this is open, gates work. Gives the words of all arrays that were awaited."""
    waited = list[int]()

    def wait_and_copy(place: mx.array, turn: int, words: int, **how: Any) -> mx.array:
        waited.append(words)
        return waits_here(place, turn, words, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "why_not", lambda: "")
        patch.setattr(gates, "wait_and_copy", wait_and_copy)
        patch.setattr(locked, "copy_out", copies_here)
        patch.setattr(locked, "copy_in", lambda place, words: mx.array(memory_at(place, words)))
        patch.setattr(locked, "locked_memory", lambda words: np.zeros(words, np.uint32))
        yield waited
