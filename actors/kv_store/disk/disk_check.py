"""Tests whether a disk answers: the watchdog must not end a store that waits for a slow disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PROBE_S = 20.0
"""How long a disk may take to keep a byte."""


class DiskProbe:
    """A probe of one disk.

    Args:
        folder: on that disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._probing: threading.Thread | None = None

    def answers(self, within_s: float = PROBE_S) -> bool:
        """Returns whether the disk syncs a byte within `within_s` seconds. An error, such as a full disk, counts as an
        answer. Blocks."""
        if self._probing is None or not self._probing.is_alive():
            self._probing = threading.Thread(target=self._probe, name="probe", daemon=True)
            self._probing.start()
        self._probing.join(within_s)
        return not self._probing.is_alive()

    def _probe(self) -> None:
        path = self._folder / f".probe.{os.getpid()}"
        try:
            with path.open("wb") as file:
                file.write(b"\0")
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except OSError:
            return
