"""Errors of the device, which are told late and once.

MLX computes after the call that asked for it. If a GPU's command buffer fails (out of memory, a time limit, a
neighbour's fault), whoever waits next for that stream is told, and nobody else: all who wait later read memory that was
never written. So the engine's thread is the only one that waits for its stream, and what it is told passes every
handler of ordinary failures up to the engine, which drops what the device may have touched (`recovery.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_OF_PYTHON = (NotImplementedError, RecursionError)
"""Errors that Python derives from `RuntimeError`."""


class DeviceFailed(BaseException):
    """The device failed at something that was computed since the last time that the engine waited for it. No
    `Exception`: nobody who goes on after one may go on after this."""


@contextmanager
def on_device() -> Iterator[None]:
    """Computes something with MLX, which tells what its device fails at as `RuntimeError`.

    Raises:
        DeviceFailed: MLX raised one, or there was no memory. It may be about anything that was launched before.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, _OF_PYTHON):
            raise
        raise DeviceFailed(str(error)) from error
