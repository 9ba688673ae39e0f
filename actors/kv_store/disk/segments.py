"""Segment files: written once, entry after entry, by replicas or the store, and never changed.

The KV folder::

    kv/key                                the secret of all MACs, for agents' memory too
    kv/segments/<model>/<session>.<random>.kv     finished
    kv/segments/<model>/<session>.<random>.tmp    being written

A file gets its final name only after all of it is durable.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ....cluster.errors import DiskError, InvalidRecord
from ...protocol.entries import (
    ENTRIES_MAX,
    ID_BYTES,
    KEY_BYTES,
    Entry,
    EntryLayout,
    EntryRecord,
    Part,
    SegmentRecord,
    flat_bytes,
    owner_tag,
    pack_tokens,
    signature,
)
from .folder import typed
from .io import DiskIO
from .segment_footer import build

FINISHED = ".kv"
UNFINISHED = ".tmp"
STORE_SESSION = "store"
"""The session of files that the store itself writes. Replicas use other names."""

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.[0-9a-f]{32}(\.kv|\.tmp|\.safetensors)")


def checked_session(session: str) -> str:
    """Returns `session`. Raises `InvalidRecord` if it cannot begin a file's name."""
    if not _SESSION.fullmatch(session):
        raise InvalidRecord(f"a session is up to 64 letters, digits, - and _, not {session!r:.80}")
    return session


def session_of(name: str) -> str | None:
    """Returns the session in a segment's file name, None if `name` is none of a segment."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def model_folder(root: Path, model: bytes) -> Path:
    """Returns the folder of a model's segments. Raises `InvalidRecord` if `model` is no model id."""
    if not isinstance(model, bytes) or len(model) != ID_BYTES:
        raise InvalidRecord("a model id has 32 bytes")
    return root / "segments" / model.hex()


class SegmentFile(NamedTuple):
    """A file with the name of a segment. `used` orders files by their last use."""

    path: Path
    model: bytes
    nbytes: int
    used: int


def segment_files(root: Path) -> Iterator[SegmentFile]:
    """Yields every finished or unfinished segment file; other files are left alone."""
    with os.scandir(root / "segments") as folders:
        names = sorted(folder.name for folder in folders if folder.is_dir(follow_symlinks=False))
    for name in names:
        try:
            model = bytes.fromhex(name)
        except ValueError:
            continue
        if len(model) != ID_BYTES or model.hex() != name:
            continue
        with os.scandir(root / "segments" / name) as files:
            for file in sorted(files, key=lambda file: file.name):
                if session_of(file.name) is not None and not file.is_dir(follow_symlinks=False):
                    # Writers may rename the file, and other threads unlink it.
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield SegmentFile(Path(file.path), model, status.st_size, status.st_mtime_ns)


def read_key(root: Path, io: DiskIO | None = None) -> bytes:
    """Returns the home folder's secret (32 bytes) in `root/key`, which the first caller creates. KV and agents' memory
    share it.

    Raises:
        DiskError: it cannot be read or created, or has not 32 bytes. Nothing verifies then, and an operator must remove
            the file.
    """
    io = io or DiskIO()
    path = root / "key"
    with typed(f"the key {path}"):
        if not path.exists():
            _make_key(path, io)
        secret = path.read_bytes()
        path.chmod(0o600)
    if len(secret) != KEY_BYTES:
        raise DiskError(f"{path} has {len(secret)} bytes instead of {KEY_BYTES}; without it no memory can be verified")
    return secret


def _make_key(path: Path, io: DiskIO) -> None:
    unfinished = path.with_name(f".key.{secrets.token_hex(8)}{UNFINISHED}")
    descriptor = io.create(unfinished)
    try:
        try:
            io.write(descriptor, unfinished, [secrets.token_bytes(KEY_BYTES)])
            io.sync(descriptor, unfinished)
        finally:
            os.close(descriptor)
        # The link fails if another process was first, so all agree on one key. It may also have removed our file.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            io.link(unfinished, path)
        io.sync_folder(path.parent)
    finally:
        io.unlink(unfinished)


def grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yields runs of entries that fit one segment each: at most 16 neighbours with equal signatures. Takes only one
    entry of the next run before it yields a run."""
    group: list[Entry] = []
    last: tuple[Part, ...] | None = None
    for entry in entries:
        parts = signature(entry.parts)
        if group and (parts != last or len(group) == ENTRIES_MAX):
            yield group
            group = []
        group.append(entry)
        last = parts
    if group:
        yield group


class SegmentWriter:
    """A segment that is being written, so that none of its entries has to be in memory. For one thread at a time.

    Args:
        root: the KV folder, which exists.
        key: `read_key`.
        model: the model id, 32 bytes.
        layout: of every entry.
        session: of the writer; the store keeps uncommitted files of its current session.
        epoch: `DiskStore.epoch`.
        now_s: seconds since 1970.
        io: the disk.

    Attributes:
        records: of the kept entries.

    Raises:
        DiskFull, DiskError: so does every method. Nothing is left behind after `abandon`, which the end of a `with`
            calls unless the file is finished.
    """

    def __init__(
        self,
        root: Path,
        key: bytes,
        model: bytes,
        layout: EntryLayout,
        *,
        session: str,
        epoch: int,
        now_s: float,
        io: DiskIO | None = None,
    ) -> None:
        self.records: list[EntryRecord] = []
        self.model, self.layout, self._key, self._io = model, layout, key, io or DiskIO()
        self._facts = model, epoch, now_s, layout.meta
        self._folder = model_folder(root, model)
        self._name = f"{checked_session(session)}.{secrets.token_hex(16)}"
        self._path = self._folder / (self._name + UNFINISHED)
        self._begun_bytes = 0  # of an entry that is not kept yet
        with self._typed():
            self._io.folder(self._folder.parent)
            self._io.folder(self._folder)
            self._descriptor = self._io.create(self._path)

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._descriptor >= 0:
            self.abandon()

    def _typed(self) -> contextlib.AbstractContextManager[None]:
        return typed(f"writing a segment under {self._folder}")

    def write(self, *pieces: memoryview | bytes) -> None:
        """Appends bytes of the next entry."""
        self._begun_bytes += sum(map(len, pieces))
        with self._typed():
            self._io.write(self._descriptor, self._path, pieces)

    def keep(self, record: EntryRecord) -> None:
        """The bytes since the last entry are this one's. Raises `InvalidRecord` if it has another size."""
        if not self._begun_bytes == record.nbytes == self.layout.nbytes:
            raise InvalidRecord("an entry has another size than its parts")
        self.records.append(record.checked())
        self._begun_bytes = 0

    def drop(self) -> None:
        """Forgets the bytes since the last entry."""
        if self._begun_bytes:
            end = self.layout.nbytes * len(self.records)
            with self._typed():
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
            self._begun_bytes = 0

    def finish(self) -> SegmentRecord:
        """Makes the file durable and gives it its name. It does not count until the store commits the record.

        Raises:
            InvalidRecord: its entries cannot be stored together.
        """
        if not 1 <= len(self.records) <= ENTRIES_MAX or len({record.id for record in self.records}) < len(self.records):
            raise InvalidRecord(f"a segment has 1 to {ENTRIES_MAX} different entries")
        self.drop()
        record = SegmentRecord(self._name + FINISHED, 0, *self._facts, tuple(self.records))
        footer = build(record, self.layout, self._key)
        with self._typed():
            self._io.write(self._descriptor, self._path, [footer])
            self._io.sync(self._descriptor, self._path)
            self._io.rename(self._path, self._folder / record.name)
            self._io.sync_folder(self._folder)
        self._close()
        return replace(record, nbytes=self.layout.nbytes * len(self.records) + len(footer))

    def abandon(self) -> None:
        """Removes the file. The store sweeps what cannot be removed."""
        self._close()
        for name in (self._path, self._folder / (self._name + FINISHED)):
            with contextlib.suppress(OSError):
                self._io.unlink(name)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def write_segment(
    root: Path,
    key: bytes,
    model: bytes,
    entries: Sequence[Entry],
    *,
    session: str,
    epoch: int,
    now_s: float,
    meta: Mapping[str, str] | None = None,
    io: DiskIO | None = None,
) -> SegmentRecord:
    """Writes `entries` as one durable file. It does not count until the store commits the record.

    Args:
        root, key, model, session, epoch, now_s, io: as `SegmentWriter`.
        entries: 1 to 16 with equal signatures.
        meta: what readers need to interpret the parts.

    Returns:
        The record for the store's `commit`.

    Raises:
        InvalidRecord: the entries cannot be stored together.
        DiskFull, DiskError: nothing is left behind.
    """
    layout = EntryLayout(signature(entries[0].parts) if entries else (), meta or {})
    if any(signature(entry.parts) != layout.parts for entry in entries[1:]):
        raise InvalidRecord("the entries of a segment have equal names, dtypes and shapes")
    with SegmentWriter(root, key, model, layout, session=session, epoch=epoch, now_s=now_s, io=io) as writer:
        for entry in entries:
            whole = entry.data
            flat = [flat_bytes(entry.parts[part.name]) for part in layout.parts] if whole is None else [whole]
            digest = layout.digest_of(*flat)
            writer.write(*flat)
            writer.keep(
                EntryRecord(
                    id=entry.id,
                    parent=entry.parent,
                    tail=entry.tail,
                    tokens=pack_tokens(entry.tokens),
                    digest=digest,
                    window_from=entry.window_from,
                    snapshot=entry.snapshot,
                    nbytes=layout.nbytes,
                    owners=tuple(dict.fromkeys(owner_tag(key, owner) for owner in entry.owners)),
                )
            )
        return writer.finish()
