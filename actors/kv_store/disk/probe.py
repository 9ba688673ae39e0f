"""Whether a disk answers: a store that waits for one is not to be ended for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PROBE_S = 20.0
"""How long a disk may take to keep a byte."""


class DiskProbe:
    """
    Args:
        folder: on the disk in question; None where nothing is on a disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._probing: threading.Thread | None = None

    def answers(self, within_s: float = PROBE_S) -> bool:
        """Have the disk keep a byte. A disk that refuses, because it is full, answers too. Blocks."""
        if self._folder is None:
            return True
        if self._probing is None or not self._probing.is_alive():
            self._probing = threading.Thread(target=self._probe, args=(self._folder,), name="probe", daemon=True)
            self._probing.start()
        self._probing.join(within_s)
        return not self._probing.is_alive()

    @staticmethod
    def _probe(folder: Path) -> None:
        path = folder / f".probe.{os.getpid()}"
        try:
            with path.open("wb") as file:
                file.write(b"\0")
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except OSError:
            return
