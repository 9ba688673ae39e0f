"""An agent's satchel as a file of the user: written as a whole or not at all, and encrypted if there is a
passphrase."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...actors.kv_store.satchels.layout import read_manifest
from ...cluster.errors import InvalidRequest, SatchelError
from ...cluster.trust import locked

PIECE_BYTES = 2**20

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links: those of memory sticks (FAT, exFAT) and some network ones."""


def check_new(file: Path) -> None:
    """
    Raises:
        InvalidRequest: the file exists already.
    """
    if file.exists():
        raise InvalidRequest(f"{file} exists already")


def write_new(file: Path, pieces: Iterable[bytes], passphrase: bytes | None = None) -> None:
    """Writes a new file that only this user can read, encrypted if there is a passphrase. The file gets its name only
    when it is complete.

    Raises:
        SatchelError: it cannot be written.
    """
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                for piece in pieces if passphrase is None else locked.lock(pieces, passphrase):
                    opened.write(piece)
                opened.flush()
                os.fsync(opened.fileno())
            _name(unfinished, file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise SatchelError(f"{file} cannot be written: {error.strerror or error}") from None


def _name(unfinished: Path, file: Path) -> None:
    try:
        # Unlike renaming, a hard link never replaces a file.
        os.link(unfinished, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check_new(file)
        unfinished.rename(file)


@dataclass(frozen=True)
class SatchelFile:
    """A satchel that is being read. `agent` is the id that it was packed with; `nbytes` is the length of all `pieces`,
    decrypted."""

    agent: str
    nbytes: int
    pieces: Iterator[bytes]


@contextmanager
def opened_satchel(file: Path, passphrase: Callable[[], bytes]) -> Iterator[SatchelFile]:
    """
    Args:
        passphrase: called if the file is encrypted.

    Raises:
        InvalidRequest: the file cannot be read.
        InvalidSatchel: it is not a satchel, or the passphrase is wrong. Reading `pieces` raises it too.
    """
    with open_file(file) as source:
        nbytes = os.fstat(source.fileno()).st_size
        is_locked = locked.is_locked(source.read(len(locked.MAGIC)))
        source.seek(0)
        plain: Iterable[bytes] = iter(lambda: source.read(PIECE_BYTES), b"")
        if is_locked:
            plain, nbytes = locked.unlock(source, passphrase()), locked.unlocked_size(nbytes)
        begun = _Begun(plain)
        packed = read_manifest(begun, nbytes)
        yield SatchelFile(packed.agent, nbytes, begun.all())


def open_file(file: Path) -> BinaryIO:
    """
    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}") from None


class _Begun:
    """An iterator of pieces whose first bytes can be read in advance."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._held, self._place = iter(pieces), bytearray(), 0

    def read(self, count: int) -> bytes:
        while len(self._held) < self._place + count and (piece := next(self._pieces, b"")):
            self._held += piece
        self._place += count
        return bytes(self._held[self._place - count : self._place])

    def all(self) -> Iterator[bytes]:
        """Yields all pieces, including those that were already read."""
        yield bytes(self._held)
        yield from self._pieces
