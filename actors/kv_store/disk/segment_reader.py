"""Reads entries back, in any process, layer by layer, and verifies them.

Every part of every entry has its own digest in the file's header, the header has a MAC, and the location names the
entry's digest. So each array is verified before it is returned, while later layers have not been read yet.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....cluster.errors import CorruptSegment, DiskError, InvalidRecord
from ...protocol.entries import DTYPES, Failure, Location, Part, flat_bytes, part_digest
from .folder import BAD_FILE
from .segment_header import LENGTH_BYTES, Header, length_of, parse
from .segments import FINISHED, model_folder, session_of

FILES_OPEN_MAX = 96
"""Files that one reader keeps open, far below macOS's 256 for a process. Others are opened for each read."""

READ_BYTES_MAX = 2**30
"""Bytes of one system call; macOS refuses 2 GiB."""


class PartRead(NamedTuple):
    """One verified part of several entries. `array` is `(len(indexes), *part.shape)` in the part's stored dtype, and
    `array[i]` belongs to `locations[indexes[i]]`."""

    name: str
    indexes: list[int]
    array: np.ndarray


@dataclass(frozen=True)
class StoredEntry:
    """An entry read back: its arrays by part name, in the order of layers, each of its part's shape and stored dtype,
    and its writer's metadata."""

    location: Location
    parts: dict[str, np.ndarray]
    meta: dict[str, str]


def read_header(path: Path, key: bytes) -> Header:
    """Reads and verifies the header of a segment file, without its data.

    Raises:
        CorruptSegment: it was changed, or is no segment file.
        OSError: it is missing or cannot be read.
    """
    descriptor = _open(path)
    try:
        return _header(descriptor, path.name, key)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe of this name would block for ever.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _header(descriptor: int, name: str, key: bytes) -> Header:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptSegment("it is not a regular file")
    length = length_of(os.pread(descriptor, LENGTH_BYTES, 0), status.st_size)
    raw = os.pread(descriptor, length, LENGTH_BYTES)
    return parse(raw, name, status.st_size, key)


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    """Reads exactly `len(target)` bytes. Raises `CorruptSegment` at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done : done + READ_BYTES_MAX]], offset + done)
        if count == 0:
            raise CorruptSegment("the file ends before its data")
        done += count


@dataclass
class _File:
    """A segment file, and its wanted slots as (slot, index of the location)."""

    path: Path
    wanted: list[tuple[int, int]] = field(default_factory=list)
    header: Header | None = None
    descriptor: int | None = None
    number: dict[str, int] = field(default_factory=dict)


class _WantedSlot(NamedTuple):
    index: int
    file: _File
    slot: int


class EntryReader:
    """Reads the entries at `locations`, part by part.

    ::

        with EntryReader(root, key, locations) as reader:
            for read in reader.parts():
                upload(read.name, read.indexes, read.array)
        # Discard entries in reader.failures, also if some of their parts were read.

    Args:
        root: the KV folder.
        key: `read_key`.
        locations: from the store's `locate`, pinned.

    Attributes:
        failures: by index into `locations`.

    Raises:
        InvalidRecord: a location names no segment file.
        DiskError: nothing can be read now, for example because too many files are open. No entry is at fault.
    """

    def __init__(self, root: Path, key: bytes, locations: Sequence[Location]) -> None:
        self._root = root
        self._key = key
        self._locations = list(locations)
        self._files: dict[tuple[bytes, str], _File] = {}
        self._opened = 0
        self.failures: dict[int, Failure] = {}

    def __enter__(self) -> EntryReader:
        try:
            for index, location in enumerate(self._locations):
                self._want(index, location)
            for file in self._files.values():
                self._begin(file)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Reading afterwards is an error."""
        for file in self._files.values():
            if file.descriptor is not None:
                os.close(file.descriptor)
                file.descriptor = None
        self._files.clear()

    def signature(self, index: int) -> tuple[Part, ...]:
        """Returns the parts of the entry at `locations[index]`, in order; empty if it failed."""
        header = self._header_of(index)
        return header.parts if header else ()

    def meta(self, index: int) -> dict[str, str]:
        """Returns the writer's metadata of the entry at `locations[index]`; empty if it failed."""
        header = self._header_of(index)
        return dict(header.record.meta) if header else {}

    def parts(self) -> Iterator[PartRead]:
        """Yields every part of every entry that has not failed, layer by layer; entries with equal shapes of a part
        together."""
        files = [file for file in self._files.values() if file.header is not None]
        for name in _merged([file.header.parts for file in files if file.header]):
            shapes: dict[Part, list[_WantedSlot]] = {}
            for file in files:
                number = file.number.get(name)
                if number is not None and file.header is not None:
                    wanted = [
                        _WantedSlot(index, file, slot) for slot, index in file.wanted if index not in self.failures
                    ]
                    shapes.setdefault(file.header.parts[number], []).extend(wanted)
            for part, wanted in shapes.items():
                read = self._read(part, sorted(wanted, key=lambda item: item.index))
                if read.indexes:
                    yield read

    def _want(self, index: int, location: Location) -> None:
        ours = session_of(location.name) is not None and location.name.endswith(FINISHED)
        if not ours:
            raise InvalidRecord(f"{location.name!r:.80} is not the name of a segment")
        path = model_folder(self._root, location.model) / location.name
        file = self._files.setdefault((location.model, location.name), _File(path))
        file.wanted.append((location.slot, index))

    def _begin(self, file: _File) -> None:
        try:
            file.header = self._open_file(file)
        except FileNotFoundError:
            self._fail(file, "the file is gone", missing=True)
        except OSError as error:
            self._fail_with(file, error)
        except CorruptSegment as error:
            self._fail(file, error.message)
        if file.header is None:
            return
        file.number = {part.name: number for number, part in enumerate(file.header.parts)}
        record = file.header.record
        for slot, index in file.wanted:
            location = self._locations[index]
            stored = record.entries[slot] if 0 <= slot < len(record.entries) else None
            same = stored is not None and (stored.id, stored.digest, stored.tokens, stored.parent, stored.tail) == (
                location.id,
                location.digest,
                location.tokens,
                location.parent,
                location.tail,
            )
            if not same or record.model != location.model:
                self.failures[index] = Failure(location, "the file holds another entry there", False)

    def _open_file(self, file: _File) -> Header:
        descriptor = _open(file.path)
        keep = False
        try:
            header = _header(descriptor, file.path.name, self._key)
            keep = self._opened < FILES_OPEN_MAX
        finally:
            if keep:
                file.descriptor = descriptor
                self._opened += 1
            else:
                os.close(descriptor)
        return header

    def _read(self, part: Part, wanted: list[_WantedSlot]) -> PartRead:
        array = np.empty((len(wanted), *part.shape), dtype=DTYPES[part.dtype])
        target, nbytes = flat_bytes(array), part.nbytes
        for start, stop in _runs(wanted):
            file = wanted[start].file
            header, number = file.header, file.number[part.name]
            assert header is not None
            piece = target[start * nbytes : stop * nbytes]
            try:
                self._fill(file, piece, header.offsets[number] + wanted[start].slot * nbytes)
            except FileNotFoundError:
                self._fail(file, "the file is gone", missing=True)
            except OSError as error:
                self._fail_with(file, error)
            except CorruptSegment as error:
                self._fail(file, error.message)
            digests = header.digests[number]
            for offset, item in enumerate(wanted[start:stop]):
                data = piece[offset * nbytes : (offset + 1) * nbytes]
                if item.index not in self.failures and part_digest(data) != digests[item.slot]:
                    reason = f"part {part.name} is not as it was written"
                    self.failures[item.index] = Failure(self._locations[item.index], reason, False)
        good = [row for row, item in enumerate(wanted) if item.index not in self.failures]
        indexes = [wanted[row].index for row in good]
        return PartRead(part.name, indexes, array if len(good) == len(wanted) else array[good])

    def _fill(self, file: _File, target: memoryview, offset: int) -> None:
        if file.descriptor is not None:
            _fill(file.descriptor, target, offset)
            return
        descriptor = _open(file.path)
        try:
            _fill(descriptor, target, offset)
        finally:
            os.close(descriptor)

    def _fail(self, file: _File, reason: str, *, missing: bool = False) -> None:
        for _, index in file.wanted:
            self.failures.setdefault(index, Failure(self._locations[index], reason, missing))

    def _fail_with(self, file: _File, error: OSError) -> None:
        if error.errno not in BAD_FILE:
            raise DiskError(f"reading {file.path}: {error.strerror or error}") from error
        self._fail(file, f"the file cannot be read: {error.strerror or error}")

    def _header_of(self, index: int) -> Header | None:
        location = self._locations[index]
        file = self._files.get((location.model, location.name))
        return file.header if file and index not in self.failures else None


def _runs(wanted: Sequence[_WantedSlot]) -> Iterator[tuple[int, int]]:
    """Yields ranges of `wanted` that are contiguous in one file."""
    start = 0
    for row in range(1, len(wanted) + 1):
        last = wanted[row - 1]
        if row == len(wanted) or wanted[row].file is not last.file or wanted[row].slot != last.slot + 1:
            yield start, row
            start = row


def _merged(signatures: Iterable[Sequence[Part]]) -> list[str]:
    """Returns all part names in an order that keeps each file's own order, if the files agree on one."""
    order: list[str] = []
    known: set[str] = set()
    for names in {tuple(part.name for part in parts): None for parts in signatures}:
        at = 0
        for name in names:
            if name in known:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                known.add(name)
                at += 1
    return order


def read_entries(root: Path, key: bytes, locations: Sequence[Location]) -> list[StoredEntry | Failure]:
    """Reads and verifies whole entries; use `EntryReader` to begin with the first layer.

    Args:
        root: the KV folder.
        key: `read_key`.
        locations: from the store's `locate`, pinned.

    Returns:
        For every location its entry or a failure. Arrays of one part share memory.

    Raises:
        InvalidRecord: a location names no segment file.
        DiskError: nothing can be read now.
    """
    parts: list[dict[str, np.ndarray]] = [{} for _ in locations]
    with EntryReader(root, key, locations) as reader:
        for read in reader.parts():
            for row, index in enumerate(read.indexes):
                parts[index][read.name] = read.array[row]
        results: list[StoredEntry | Failure] = []
        for index, location in enumerate(locations):
            failure = reader.failures.get(index)
            if failure is None:
                ordered = {part.name: parts[index][part.name] for part in reader.signature(index)}
                results.append(StoredEntry(location, ordered, reader.meta(index)))
            else:
                results.append(failure)
    return results
