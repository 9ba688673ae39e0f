"""Entries piece by piece, out of segments and into new ones, so that none of them has to be in memory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....cluster.errors import CorruptSegment, InvalidRecord
from ...protocol.entries import ENTRIES_MAX, EntryRecord, Location, Part, SegmentRecord
from .folder import typed
from .io import DiskIO
from .segment_header import Header, build
from .segment_reader import read_header
from .segments import FINISHED, UNFINISHED, checked_session, model_folder

_RECORD_BYTES = 512
"""What an entry takes of a header, but for its tokens, with room to spare."""

_MOVED_BYTES_MAX = 2**20
"""Data of up to so many bytes is moved to its header, whose place would be much of the file."""


class SegmentWriter:
    """A segment that is being written. For one thread at a time.

    Args:
        root, key, model, session, epoch, now_s, meta, io: as `segments.write_segment`.
        parts: names, dtypes and shapes of every entry's parts, in order.
        tokens_bytes: how many bytes of packed tokens its entries may have together.

    Attributes:
        records: of the kept entries.

    Raises:
        DiskFull, DiskError: so does every method. Nothing is left behind after `abandon`.
    """

    def __init__(
        self,
        root: Path,
        key: bytes,
        model: bytes,
        parts: Sequence[Part],
        *,
        tokens_bytes: int,
        session: str,
        epoch: int,
        now_s: float,
        meta: Mapping[str, str],
        io: DiskIO,
    ) -> None:
        self.records: list[EntryRecord] = []
        self._key, self._parts, self._io = key, parts, io
        self._size = sum(part.nbytes for part in parts)
        self._tokens_left = tokens_bytes
        self._folder = model_folder(root, model)
        self._name = f"{checked_session(session)}.{secrets.token_hex(16)}"
        self._record = SegmentRecord(self._name + FINISHED, 0, model, epoch, now_s, meta, ())
        # The header is written last; until then its place is empty.
        empty = len(build(self._record, parts, key))
        self._start = -(-(empty + tokens_bytes + _RECORD_BYTES * ENTRIES_MAX) // 4096) * 4096
        self._path = self._folder / (self._name + UNFINISHED)
        with typed(f"writing a segment under {self._folder}"):
            io.folder(self._folder.parent)
            io.folder(self._folder)
            self._descriptor = io.create(self._path)
            os.lseek(self._descriptor, self._start, os.SEEK_SET)

    def has_room(self, tokens_bytes: int) -> bool:
        """Returns whether an entry with so many bytes of packed tokens still fits."""
        return tokens_bytes <= self._tokens_left and len(self.records) < ENTRIES_MAX

    def write(self, data: memoryview) -> None:
        """Appends bytes of the next entry."""
        with typed(f"writing a segment under {self._folder}"):
            self._io.write(self._descriptor, self._path, [data])

    def keep(self, record: EntryRecord) -> None:
        """The bytes since the last entry are this one's. Raises `InvalidRecord` if it has another size."""
        end = self._start + self._size * (len(self.records) + 1)
        if os.lseek(self._descriptor, 0, os.SEEK_CUR) != end or record.nbytes != self._size:
            raise InvalidRecord("an entry has another size than its parts")
        self._tokens_left -= len(record.tokens)
        self.records.append(record.checked())

    def drop(self) -> None:
        """Forgets the bytes since the last entry."""
        os.lseek(self._descriptor, self._start + self._size * len(self.records), os.SEEK_SET)

    def finish(self) -> SegmentRecord:
        """Makes the file durable and gives it its name. It does not count until the store commits the record."""
        old, size = self._record, self._size * len(self.records)
        record = SegmentRecord(old.name, 0, old.model, old.epoch, old.written_s, old.meta, tuple(self.records))
        header, data = build(record, self._parts, self._key), b""
        with typed(f"writing a segment under {self._folder}"):
            try:
                if size <= _MOVED_BYTES_MAX:
                    data = self._path.read_bytes()[self._start : self._start + size]
                else:
                    header = build(record, self._parts, self._key, size=self._start)
                os.ftruncate(self._descriptor, len(header) + size)
                os.lseek(self._descriptor, 0, os.SEEK_SET)
                self._io.write(self._descriptor, self._path, [header, data])
                self._io.sync(self._descriptor, self._path)
                self._io.rename(self._path, self._folder / record.name)
                self._io.sync_folder(self._folder)
            except BaseException:
                self.abandon()
                raise
        os.close(self._descriptor)
        return replace(record, nbytes=len(header) + size)

    def abandon(self) -> None:
        """Removes the file. The store sweeps what cannot be removed."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        for name in (self._path, self._folder / self._record.name):
            with contextlib.suppress(OSError):
                self._io.unlink(name)


class SegmentFiles:
    """Reads entries of segments, of which the last one stays open: neighbours in a chain are neighbours in a file.

    Args:
        root, key: as `segments.write_segment`.
    """

    def __init__(self, root: Path, key: bytes) -> None:
        self._root, self._key = root, key
        self._path, self._header, self._descriptor = Path(), None, -1

    def __enter__(self) -> SegmentFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def find(self, location: Location) -> tuple[Header, Callable[[memoryview, int], None]]:
        """Returns the header of an entry's file, and what fills a buffer with the entry's bytes from an offset on.

        Raises:
            CorruptSegment: the file does not hold the entry; so does the reading.
            OSError: the file is missing or cannot be read; so does the reading.
        """
        path = model_folder(self._root, location.model) / location.name
        if path != self._path or self._header is None:
            self._close()
            self._header = read_header(path, self._key)
            self._path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        header, descriptor = self._header, self._descriptor
        if not header.holds(location):
            raise CorruptSegment("the file holds another entry there")
        start = header.offset(location.slot)

        def read(target: memoryview, offset: int) -> None:
            while len(target):
                if not (count := os.preadv(descriptor, [target], start + offset)):
                    raise CorruptSegment("the file ends before its data")
                target, offset = target[count:], offset + count

        return header, read

    def _close(self) -> None:
        if self._header is not None:
            os.close(self._descriptor)
        self._header = None
