"""Reads entries back, in any process, in large pieces, and verifies them.

The header has a MAC and the location names the entry's digest, so each entry is verified before it is returned.
Neighbours in a file are one *run*, read straight into one buffer; several runs are read and verified at a time, on
threads, while the caller uses the one before.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ....cluster.errors import CorruptSegment, DiskError, InvalidRecord
from ...protocol.entries import DTYPES, EntryDigest, Failure, Location, Part
from .folder import BAD_FILE
from .segment_header import LENGTH_BYTES, Header, length_of, parse
from .segments import FINISHED, model_folder, session_of

RUN_BYTES_MAX = 16 * 2**20
"""Bytes of a run, unless one entry has more: small enough that its memory is soon used again."""

THREADS = 2
"""One run more is being read or waits for the caller."""

READ_BYTES_MAX = 2**30
"""Bytes of one system call; macOS refuses 2 GiB."""


@dataclass(frozen=True)
class StoredEntry:
    """An entry read back.

    Attributes:
        data: its bytes, `(nbytes,) uint8`.
        signature: its parts, in order.
        meta: its writer's metadata.
    """

    location: Location
    data: np.ndarray
    signature: tuple[Part, ...]
    meta: dict[str, str]

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Its arrays by name, in the order of layers, as views of `data`."""
        return parts_of(self.data, self.signature)


@dataclass(frozen=True)
class Run:
    """Verified entries of one file. `data[i]`, `(nbytes,) uint8`, is the entry at `locations[indexes[i]]`."""

    indexes: list[int]
    data: np.ndarray
    signature: tuple[Part, ...]
    meta: dict[str, str]


@dataclass(frozen=True)
class _Piece:
    """A run that is to be read: entries from `slot` on."""

    path: Path
    header: Header
    slot: int
    indexes: list[int]


def parts_of(data: np.ndarray, signature: Sequence[Part]) -> dict[str, np.ndarray]:
    """Returns an entry's arrays by name, as views of its bytes `(nbytes,) uint8`."""
    parts, start = {}, 0
    for part in signature:
        stop = start + part.nbytes
        parts[part.name] = data[start:stop].view(DTYPES[part.dtype]).reshape(part.shape)
        start = stop
    return parts


def read_header(path: Path, key: bytes) -> Header:
    """Reads and verifies the header of a segment file, without its data.

    Raises:
        CorruptSegment: it was changed, or is no segment file.
        OSError: it is missing or cannot be read.
    """
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptSegment("it is not a regular file")
        length = length_of(os.pread(descriptor, LENGTH_BYTES, 0), status.st_size)
        return parse(os.pread(descriptor, length, LENGTH_BYTES), path.name, status.st_size, key)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe of this name would block for ever.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _host_buffer(count: int, size: int) -> np.ndarray:
    return np.empty((count, size), np.uint8)


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    """Reads exactly `len(target)` bytes. Raises `CorruptSegment` at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done : done + READ_BYTES_MAX]], offset + done)
        if count == 0:
            raise CorruptSegment("the file ends before its data")
        done += count


class EntryReader:
    """Reads the entries at `locations`, run by run.

    ::

        reader = EntryReader(root, key, locations)
        for run in reader.runs():
            use(run)
        # `reader.failures` has the others.

    Args:
        root: the KV folder.
        key: `read_key`.
        locations: from the store's `locate`, pinned.
        threads: how many runs are read at a time; 0 for `THREADS`.
        run_bytes_max: of a run; 0 for `RUN_BYTES_MAX`.
        make_buffer: makes the memory that a run is read into, `(entries, nbytes) uint8`. Called on the reading threads.

    Attributes:
        failures: by index into `locations`.

    Raises:
        InvalidRecord: a location names no segment file.
    """

    def __init__(
        self,
        root: Path,
        key: bytes,
        locations: Sequence[Location],
        *,
        threads: int = 0,
        run_bytes_max: int = 0,
        make_buffer: Callable[[int, int], np.ndarray] | None = None,
    ) -> None:
        self._key, self._locations = key, list(locations)
        self._threads = threads or THREADS
        self._run_bytes_max = run_bytes_max or RUN_BYTES_MAX
        self._make_buffer = make_buffer or _host_buffer
        self._paths: list[Path] = []
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}
        self.failures: dict[int, Failure] = {}
        for location in self._locations:
            if session_of(location.name) is None or not location.name.endswith(FINISHED):
                raise InvalidRecord(f"{location.name!r:.80} is not the name of a segment")
            self._paths.append(model_folder(root, location.model) / location.name)

    def give_back(self, run: Run) -> None:
        """Lets later runs overwrite the run's data: memory that was used before is filled twice as fast."""
        self._free.setdefault(run.data.shape, []).append(run.data)

    def runs(self) -> Iterator[Run]:
        """Yields runs of neighbours, in the order of `locations`.

        Raises:
            DiskError: nothing can be read now, for example because too many files are open. No entry is at fault.
        """
        coming: deque = deque()
        with ThreadPoolExecutor(self._threads, "read") as threads:
            try:
                for piece in self._pieces():
                    coming.append(threads.submit(self._read, piece))
                    if len(coming) > self._threads:
                        yield from self._some(coming.popleft().result())
                while coming:
                    yield from self._some(coming.popleft().result())
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _some(run: Run) -> Iterator[Run]:
        if run.indexes:
            yield run

    def _pieces(self) -> Iterator[_Piece]:
        """Yields what is to be read: neighbours of one file together, up to `run_bytes_max`."""
        headers: dict[Path, Header | None] = {}
        piece: _Piece | None = None
        for index, (path, location) in enumerate(zip(self._paths, self._locations, strict=True)):
            if path not in headers:
                headers[path] = self._header(path)
            header = headers[path]
            if header is None or not self._fits(index, header):
                continue
            if (
                piece is not None
                and piece.path == path
                and piece.slot + len(piece.indexes) == location.slot
                and (len(piece.indexes) + 1) * header.size <= self._run_bytes_max
            ):
                piece.indexes.append(index)
                continue
            if piece is not None:
                yield piece
            piece = _Piece(path, header, location.slot, [index])
        if piece is not None:
            yield piece

    def _header(self, path: Path) -> Header | None:
        try:
            return read_header(path, self._key)
        except (OSError, CorruptSegment) as error:
            self._fail(path, [index for index, other in enumerate(self._paths) if other == path], error)
            return None

    def _fits(self, index: int, header: Header) -> bool:
        """Whether the file has the entry there that the location names."""
        location, entries = self._locations[index], header.record.entries
        stored = entries[location.slot] if 0 <= location.slot < len(entries) else None
        same = stored is not None and (stored.id, stored.digest, stored.tokens, stored.parent, stored.tail) == (
            location.id,
            location.digest,
            location.tokens,
            location.parent,
            location.tail,
        )
        if not same or header.record.model != location.model:
            self.failures[index] = Failure(location, "the file holds another entry there", False)
        return index not in self.failures

    def _read(self, piece: _Piece) -> Run:
        """Reads and verifies entry after entry, while the last one's bytes are in the processor's caches."""
        header, count = piece.header, len(piece.indexes)
        data = self._buffer(count, header.size)
        digest_of = EntryDigest(header.parts)
        try:
            descriptor = _open(piece.path)
            try:
                for row, index in enumerate(piece.indexes):
                    target = data[row].data
                    _fill(descriptor, target, header.offset(piece.slot + row))
                    if digest_of(target) != self._locations[index].digest:
                        reason = "its bytes are not as they were written"
                        self.failures[index] = Failure(self._locations[index], reason, False)
            finally:
                os.close(descriptor)
        except (OSError, CorruptSegment) as error:
            self._fail(piece.path, piece.indexes, error)
        good = [row for row, index in enumerate(piece.indexes) if index not in self.failures]
        indexes = [piece.indexes[row] for row in good]
        return Run(indexes, data if len(good) == count else data[good], header.parts, dict(header.record.meta))

    def _buffer(self, count: int, size: int) -> np.ndarray:
        """Returns `(count, size) uint8`, of memory that the caller has given back if it fits."""
        try:
            return self._free[count, size].pop()
        except (KeyError, IndexError):
            return self._make_buffer(count, size)

    def _fail(self, path: Path, indexes: Sequence[int], error: OSError | CorruptSegment) -> None:
        if isinstance(error, CorruptSegment):
            reason = error.message
        elif isinstance(error, FileNotFoundError):
            reason = "the file is gone"
        elif error.errno in BAD_FILE:
            reason = f"the file cannot be read: {error.strerror or error}"
        else:
            raise DiskError(f"reading {path}: {error.strerror or error}") from error
        missing = isinstance(error, FileNotFoundError)
        for index in indexes:
            self.failures.setdefault(index, Failure(self._locations[index], reason, missing))


def read_entries(root: Path, key: bytes, locations: Sequence[Location]) -> list[StoredEntry | Failure]:
    """Reads and verifies entries.

    Args:
        root: the KV folder.
        key: `read_key`.
        locations: from the store's `locate`, pinned.

    Returns:
        For every location its entry or a failure. Neighbours share memory.

    Raises:
        InvalidRecord: a location names no segment file.
        DiskError: nothing can be read now.
    """
    reader = EntryReader(root, key, locations)
    found: dict[int, StoredEntry] = {}
    for run in reader.runs():
        for row, index in enumerate(run.indexes):
            found[index] = StoredEntry(locations[index], run.data[row], run.signature, run.meta)
    return [found.get(index) or reader.failures[index] for index in range(len(locations))]
