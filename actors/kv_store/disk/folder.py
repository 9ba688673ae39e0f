"""The KV folder: created, locked for one process, and its errors translated."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ....cluster.errors import DiskError, DiskFull, StoreInUse
from .io import DiskIO

BAD_FILE = (errno.EIO, errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors of one file. Others, such as too many open files, say nothing about a file."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_folders(root: Path, io: DiskIO) -> None:
    """Creates missing folders, readable for this user only. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    io.folder(root / "segments")
    for folder in (root, root / "segments"):
        folder.chmod(0o700)


def take_lock(path: Path, wait_s: float) -> FileLock:
    """Takes the lock `path`. The kernel releases it when the process ends.

    Raises:
        StoreInUse: another process has held it for all of `wait_s` seconds.
    """
    lock = FileLock(path, wait_s, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise StoreInUse(f"another process uses {path.parent}") from None
    return lock


@contextmanager
def typed(action: str) -> Iterator[None]:
    """Translates OSErrors of the block.

    Args:
        action: what the block does, for the message.

    Raises:
        DiskFull: the disk is full.
        DiskError: any other failure.
    """
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in _FULL else DiskError
        raise kind(f"{action}: {error.strerror or error}") from error
