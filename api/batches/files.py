"""Uploaded files and batches' results on the head's disk, a folder a tenant.

A file is complete or absent: it is written under another name, synced, and renamed. Nothing here is shared between
tenants, and no name on the disk comes from a caller.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from ...cluster.errors import DiskFull, FileNotFound, RequestTooLarge
from ...cluster.home import replace_private

_NEW = "new-"
_ID = re.compile(r"file-[0-9a-f]{24}")
LEFT_S = 600.0
"""A file that should be gone by then, and that nobody has written to for this long, was left by a process that was
killed."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class StoredFile:
    """A file's description. `bytes` is its length, `created_at` Unix time, `filename` what the caller calls it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str


class TenantFiles:
    """One tenant's files. Every method does I/O.

    Args:
        root: where all tenants' folders are.
        bytes_max: of all the tenant's files together.
    """

    def __init__(self, root: Path, tenant: str, bytes_max: int) -> None:
        self.folder = root / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        self._bytes_max = bytes_max

    def list(self) -> list[StoredFile]:
        """Returns all files, the newest first."""
        found = [file for path in self.folder.glob("file-*.json") if (file := _described(path)) is not None]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def get(self, file_id: str) -> StoredFile:
        """Returns a file's description.

        Raises:
            FileNotFound: there is none.
        """
        file = _described(self._description(file_id)) if _ID.fullmatch(file_id) else None
        if file is None:
            raise _missing(file_id)
        return file

    def content(self, file_id: str) -> Path:
        """Returns where a file's content is. Raises as `get`."""
        return self._content(self.get(file_id).id)

    def open(self, file_id: str) -> BinaryIO:
        """Opens a file's content. It can be read to its end, also if the file is removed meanwhile. Raises as `get`."""
        try:
            return self.content(file_id).open("rb")
        except FileNotFoundError:
            raise _missing(file_id) from None

    def delete(self, file_id: str) -> None:
        """Removes a file. Raises as `get`."""
        self.get(file_id)
        self._description(file_id).unlink(missing_ok=True)
        self._content(file_id).unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        """The bytes of all content, also of what is being written."""
        return sum(path.stat().st_size for path in self.folder.glob("*.jsonl*") if path.is_file())

    @contextmanager
    def writing(self) -> Iterator[BoundedFile]:
        """Opens a new file, to be kept with `keep`. It is removed if it was not kept.

        Raises:
            DiskFull: the disk is full.
        """
        with _told():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.folder / f"{_NEW}{secrets.token_hex(12)}.jsonl.part"
            try:
                with open(path, "xb", opener=private) as file:
                    yield BoundedFile(file, path, self._bytes_max - self.nbytes)
            finally:
                path.unlink(missing_ok=True)

    def keep(self, path: Path, filename: str, purpose: str) -> StoredFile:
        """Makes what was written at `path` a file of the tenant.

        Raises:
            DiskFull: the disk is full.
        """
        with _told():
            file_id = f"file-{secrets.token_hex(12)}"
            with path.open("rb+") as written:
                os.fsync(written.fileno())
            file = StoredFile(file_id, path.stat().st_size, int(time.time()), filename[:255], purpose)
            path.rename(self._content(file_id))
            write_json(self._description(file_id), asdict(file))
        return file

    def _content(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.jsonl"

    def _description(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"


class BoundedFile:
    """A file that is being written, of at most `bytes_max`."""

    def __init__(self, file: BinaryIO, path: Path, bytes_max: int) -> None:
        self.path = path
        self._file, self._left = file, bytes_max

    def write(self, data: bytes) -> None:
        """
        Raises:
            RequestTooLarge: it would be too long.
            DiskFull: the disk is full.
        """
        self._left -= len(data)
        if self._left < 0:
            raise RequestTooLarge("the file is larger than what is left of endpoint.files_bytes_max: delete others")
        with _told():
            self._file.write(data)

    def flush(self) -> None:
        with _told():
            self._file.flush()


def write_json(path: Path, value: object) -> None:
    """Writes a file that is complete or absent, and outlasts a power cut.

    Raises:
        OSError: it cannot be written.
    """
    replace_private(path, json.dumps(value))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _missing(file_id: str) -> FileNotFound:
    return FileNotFound(f"there is no file {file_id[:100]!r}", param="file_id")


def remove_left(folder: Path, now: float) -> None:
    """Removes what processes that were killed left in a tenant's folder: uploads that are not complete, content without
    a description, files that were to replace others. Does I/O.

    Args:
        now: Unix time.
    """
    for path in folder.iterdir():
        content = path.suffix == ".jsonl" and _ID.fullmatch(path.stem) is not None
        if path.name.startswith((_NEW, ".")) or (content and not path.with_suffix(".json").exists()):
            remove_if_left(path, now)


def remove_if_left(path: Path, now: float) -> None:
    """Removes a file if nobody has written to it for `LEFT_S`."""
    with suppress(FileNotFoundError):
        if now - path.stat().st_mtime > LEFT_S:
            path.unlink()


def _described(path: Path) -> StoredFile | None:
    try:
        return StoredFile(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def private(path: str, flags: int) -> int:
    """Opens a file that only this user may read."""
    return os.open(path, flags, 0o600)


@contextmanager
def _told() -> Iterator[None]:
    """Turns a full disk into its error."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull("the disk of the endpoint's machine is full") from error
        raise
