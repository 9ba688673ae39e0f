"""Every kind of change to the disk as one method, so that a test can stop at each of them.

`DiskIO` announces a step before it does it. Crash safety depends on the order of steps: write, sync, rename, sync the
folder, commit the index, and only then unlink old files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_PIECES_MAX, _PIECE_BYTES_MAX = 512, 2**21
"""The most pieces and bytes of one system call: every system allows 1024 pieces, and macOS refuses 2 GiB."""


class Space(NamedTuple):
    """A device's bytes: free for this user, and in total."""

    free: int
    total: int


class DiskIO:
    """The disk. Every method may raise OSError."""

    def space(self, folder: Path) -> Space:
        """Returns the current space of the device that `folder` is on."""
        usage = shutil.disk_usage(folder)
        return Space(usage.free, usage.total)

    def step(self, what: str, path: Path) -> None:
        """Called before `what` is done to `path`; tests override it."""

    def create(self, path: Path) -> int:
        """Creates the file `path` (mode 0600), which must not exist, and returns its descriptor."""
        self.step("create", path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, path: Path, buffers: Sequence[memoryview | bytes]) -> None:
        """Writes all of `buffers` (byte views) in order."""
        self.step("write", path)
        left = deque(
            view[start : start + _PIECE_BYTES_MAX]
            for view in map(memoryview, buffers)
            for start in range(0, len(view), _PIECE_BYTES_MAX)
        )
        while left:
            written = os.writev(descriptor, list(islice(left, _PIECES_MAX)))
            # A signal or a nearly full disk can cut a write short.
            while left and written >= len(left[0]):
                written -= len(left.popleft())
            if written:
                left[0] = left[0][written:]

    def sync(self, descriptor: int, path: Path) -> None:
        """Makes the file's bytes durable. On macOS fsync leaves them in the drive's cache, so F_FULLFSYNC. Disks of
        other machines and some external drives do not support that; there fsync is all there is."""
        self.step("sync", path)
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                    raise
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Renames `source` to `target`, replacing a file of that name."""
        self.step("rename", target)
        os.rename(source, target)  # noqa: PTH104

    def link(self, source: Path, target: Path) -> None:
        """Adds the name `target` to `source`. Raises FileExistsError if the name is taken."""
        self.step("link", target)
        os.link(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Makes the folder's names durable."""
        self.step("sync folder", folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        """Removes the file, if it exists."""
        self.step("unlink", path)
        path.unlink(missing_ok=True)

    def folder(self, path: Path) -> None:
        """Creates the folder (mode 0700), if it does not exist. Its parent must exist."""
        if path.is_dir():
            return
        self.step("folder", path)
        path.mkdir(mode=0o700, exist_ok=True)
        self.sync_folder(path.parent)
