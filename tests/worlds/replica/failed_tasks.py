"""MLX's count of running tasks, which a task that failed on a CPU never leaves (0.32.4).

From two such tasks on, a launch may wait for one of them to end, without end: it waits if it sees more than ten tasks,
and until there are fewer than when it began to wait. So what a test breaks would hang a later one in its process.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx.core as mx

STILL_S = 0.02
"""Tasks that run are fewer or more after this time."""


@cache
def _count() -> ctypes.c_int:
    """Returns the first field of MLX's scheduler. Nothing that MLX publishes gives it."""
    (library,) = Path(mx.__file__).parent.glob("lib/libmlx.*")
    scheduler = ctypes.CDLL(str(library))._ZN3mlx4core9scheduler9schedulerEv
    scheduler.restype = ctypes.c_void_p
    return ctypes.c_int.from_address(scheduler())


def running_tasks() -> int:
    """Returns how many tasks MLX takes to be running."""
    return _count().value


def forget_failed_tasks() -> None:
    """Sets the count to zero, if tasks are counted and none runs."""
    if not (counted := running_tasks()):
        return
    with suppress(RuntimeError):
        # Raises the error of a task that nobody waited for.
        mx.synchronize()
    time.sleep(STILL_S)
    if running_tasks() == counted:
        _count().value = 0
