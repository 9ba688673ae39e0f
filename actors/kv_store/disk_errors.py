"""How the errors of the system and of SQLite become ours."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from ...cluster.errors import DiskError, DiskFull

BAD_FILE = (errno.EIO, errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors that speak of one file. Others, such as too many open files, say nothing about it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, 0 where the error has none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def says_full(error: sqlite3.Error) -> bool:
    """Whether SQLite finds no room on the disk, be it for the memory that connections share, which is a file too."""
    whole = getattr(error, "sqlite_errorcode", None)
    return primary_code(error) == sqlite3.SQLITE_FULL or whole == sqlite3.SQLITE_IOERR_SHMSIZE


@contextmanager
def typed(action: str) -> Iterator[None]:
    """Turn the system's and SQLite's errors of the block into `DiskError` or `DiskFull`.

    Args:
        action: what was being done, for the message.
    """
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in _FULL else DiskError
        raise kind(f"{action}: {error.strerror or error}") from error
    except sqlite3.Error as error:
        kind = DiskFull if says_full(error) else DiskError
        raise kind(f"{action}: {error}") from error
    except UnicodeDecodeError as error:
        # Python cannot read SQLite's message about a damaged table.
        raise DiskError(f"{action}: the index is damaged: {error}") from error
