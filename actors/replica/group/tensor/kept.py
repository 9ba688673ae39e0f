"""A process's side of its keeper: starts it, and tells it regularly that this process still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

from . import keeper


class Kept:
    """Has this process killed if all of its threads stand still, until `end`.

    Args:
        every_s: the time between two messages to the keeper.
        silent_s: after so long without one the process is killed if it is stopped; several times `every_s`.
        stalled_s: after so long without one it is killed anyway; an interpreter that collects garbage or compiles may
            be silent for a while.
    """

    def __init__(self, every_s: float, silent_s: float, stalled_s: float) -> None:
        self._every_s, self._silent_s, self._stalled_s = every_s, silent_s, stalled_s
        self._lock, self._ends = threading.Lock(), threading.Event()
        # Until then nothing shorter is said.
        self._until = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid())], stdin=subprocess.PIPE
        )
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The keeper's process."""
        return self._process.pid

    def allow(self, seconds: float) -> None:
        """Lets this process say nothing for so long from now on: MLX forms a group without letting other threads run.
        Ends with the next `resume`."""
        with self._lock:
            self._until = time.monotonic() + seconds
            self._say(seconds, seconds)

    def resume(self) -> None:
        """Ends `allow`."""
        with self._lock:
            self._until = 0.0
            self._say(self._silent_s, self._stalled_s)

    def end(self) -> None:
        """Ends the keeper."""
        self._ends.set()
        self._thread.join()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _run(self) -> None:
        while not self._ends.wait(self._every_s):
            with self._lock:
                if time.monotonic() >= self._until:
                    self._say(self._silent_s, self._stalled_s)

    def _say(self, stopped_s: float, stalled_s: float) -> None:
        assert self._process.stdin is not None
        # A keeper that was killed is missed by nobody but the operator: the group goes on.
        with suppress(OSError):
            self._process.stdin.write(f"{stopped_s} {stalled_s}\n".encode())
            self._process.stdin.flush()
