"""A log file that one process writes, of bounded size."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from itertools import count
from pathlib import Path

BYTES_MAX = 8 * 2**20
FORMER = 2
"""A file that is full becomes `NAME.log.1`, and that one `NAME.log.2`: at most three of `BYTES_MAX` each."""


class LogFile(logging.Handler):
    """Writes lines to `NAME.log` in a folder. If another process of that name still writes there, to `NAME.2.log`.

    A process locks (flock) the file that it writes, and the kernel frees the lock when the process ends. If a line
    cannot be written, as on a full disk, it is dropped.
    """

    def __init__(self, folder: Path, name: str, bytes_max: int = BYTES_MAX) -> None:
        super().__init__()
        self._folder, self._name, self._bytes_max = folder, name, bytes_max
        self._descriptor = -1
        self._path = folder
        self._size = 0
        self._cut = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            self._write(line)
        except Exception:
            # A log must not fail who logs: the record's arguments may be wrong, or the disk full.
            return

    def _write(self, line: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        elif self._size + len(line) > self._bytes_max:
            self._rotate()
        if self._cut:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._cut = written < len(line)
        self._size += written

    def _open(self) -> None:
        """
        Raises:
            OSError: no file can be opened.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count(1):
            path = self._folder / f"{self._name}{f'.{number}' if number > 1 else ''}.log"
            if (descriptor := locked(path, os.O_CREAT)) is not None:
                self._descriptor, self._path = descriptor, path
                self._size = os.fstat(descriptor).st_size
                return

    def _rotate(self) -> None:
        """Begins a new file. The full one stays locked until it has its new name."""
        for number in range(FORMER, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            with suppress(FileNotFoundError):
                newer.replace(older)
        self._release()
        self._open()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        self.acquire()
        try:
            self._release()
        finally:
            self.release()
        super().close()


def locked(path: Path, flags: int = 0) -> int | None:
    """Returns a descriptor of the file, locked; None if another process has it.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Meanwhile its process may have given it another name, or somebody has removed it.
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def remove_old(folder: Path, before_s: float, most: int) -> None:
    """Removes the files that no process writes any more and that were last written before `before_s` (Unix time), and
    beyond `most` names the oldest ones."""
    with suppress(OSError):
        found = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
        for place, path in enumerate(found):
            if place >= most or path.stat().st_mtime < before_s:
                _remove(path)


def _remove(path: Path) -> None:
    descriptor = locked(path)
    if descriptor is None:
        return
    try:
        for each in (path, *(path.with_name(f"{path.name}.{number}") for number in range(1, FORMER + 1))):
            each.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
