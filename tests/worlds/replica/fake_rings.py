"""Rings between the cards of one machine, without cards: what kernels do is done by the host at their launch."""

from __future__ import annotations

import ctypes
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.group.link import device_ring
from satchel.actors.replica.group.link.ring_memory import (
    BROKEN,
    BYTES,
    CHUNK_BYTES,
    FLAGS,
    HEAD_BYTES,
    NUMBERS,
    READ,
    Place,
)


@contextmanager
def rings() -> Iterator[list[tuple[str, int]]]:
    """Lets connections have rings. Yields `sent` or `received` and the bytes of each array, as they pass."""
    passed: list[tuple[str, int]] = []

    def send(array: mx.array, order: mx.array, address: int, place: Place) -> mx.array:
        words, data = _memory(address, place)
        # A view, because NumPy has no bfloat16.
        data[: array.nbytes] = np.array(mx.contiguous(array).view(mx.uint8)).reshape(-1)
        words[FLAGS + place.first : FLAGS + place.first + place.chunks] = place.number % NUMBERS
        passed.append(("sent", array.nbytes))
        return mx.zeros(1, mx.uint32)

    def receive(
        shape: Sequence[int], dtype: mx.Dtype, order: mx.array, address: int, place: Place, trial: bool
    ) -> tuple[mx.array, mx.array]:
        words, data = _memory(address, place)
        words[READ] = (place.number - 1) % NUMBERS
        while not (words[FLAGS + place.first : FLAGS + place.first + place.chunks] == place.number % NUMBERS).all():
            if words[BROKEN]:
                raise RuntimeError("the device has failed")
            time.sleep(1e-4)
        nbytes = math.prod(shape) * dtype.size
        passed.append(("received", nbytes))
        return mx.array(data[:nbytes].copy()).view(dtype).reshape(shape), mx.zeros(1, mx.uint32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_ring, "on_cuda", lambda: True)
        patch.setattr(device_ring, "prepare", lambda *given: None)
        patch.setattr(device_ring, "_sends", lambda: None)
        patch.setattr(device_ring, "_receives", lambda: None)
        patch.setattr(device_ring, "_card", lambda: secrets.token_bytes(16))
        patch.setattr(device_ring, "_registered", lambda memory: memory.address)
        patch.setattr(device_ring, "_release", lambda memory: None)
        patch.setattr(device_ring, "_launched_send", send)
        patch.setattr(device_ring, "_launched_receive", receive)
        yield passed


def _memory(address: int, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words and a place's bytes."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * BYTES).from_address(address))
    start = HEAD_BYTES + place.first * CHUNK_BYTES
    return memory[:HEAD_BYTES].view(np.uint32), memory[start : start + place.chunks * CHUNK_BYTES]
