"""Errors of the device, which are reported late and only once.

MLX computes after the call that asked for it. If a GPU's command buffer fails (out of memory, a time limit, another
program's fault), only the next wait for that stream raises the error; later waits read memory that was never written.
So only the engine's thread waits for its stream. On CUDA an error stays, and every thread that waits gets it: there
another thread may wait for what it sends to the next stage, and an error there breaks the group
(`group/link/connection.py`). The error passes every handler of ordinary failures up to the engine, which drops what the
device may have touched (`recovery.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_OF_PYTHON = (NotImplementedError, RecursionError)
"""Subclasses of `RuntimeError` that Python itself raises, not the device."""


class DeviceFailed(BaseException):
    """The device failed at something that was computed since the engine last waited for it. Not an `Exception`, because
    code that handles exceptions and continues must not continue after this."""


@contextmanager
def on_device() -> Iterator[None]:
    """A context in which MLX computes. MLX reports errors of its device as `RuntimeError`.

    Raises:
        DeviceFailed: MLX raised such an error, or there was no memory. It may be about anything launched before.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, _OF_PYTHON):
            raise
        raise DeviceFailed(str(error)) from error
