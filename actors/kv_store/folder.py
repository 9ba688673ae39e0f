"""The folder of a home's KV: made, and one process's own for as long as that lives."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ...cluster.errors import StoreInUse
from .disk_io import DiskIO

_LOCK_POLL_S = 0.05


def make_folders(root: Path, io: DiskIO) -> None:
    """Make the folders that are not there, and let nobody else look into them."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    io.folder(root / "segments")
    for folder in (root, root / "segments"):
        folder.chmod(0o700)


def take_lock(path: Path, wait_s: float) -> int:
    """A descriptor that holds the lock `path`. The kernel gives it back when the process ends, however it ends.

    Raises:
        StoreInUse: another process has it, and has not left within `wait_s` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= ends:
                os.close(descriptor)
                raise StoreInUse(f"another process uses {path.parent}") from None
        except OSError:
            os.close(descriptor)
            raise
        time.sleep(_LOCK_POLL_S)
