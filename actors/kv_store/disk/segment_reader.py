"""Reads entries back, in any process, in large pieces, and verifies them.

The footer has a MAC and the location names the entry's digest, so each entry is verified before it is returned.
Neighbours in a file are one *run*, read straight into one buffer; several runs are read and verified at a time, on
threads, while the caller uses the one before.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ....cluster.errors import CorruptSegment, DiskError, InvalidRecord
from ...protocol.entries import DTYPES, EntryLayout, Failure, Location, Part
from .folder import BAD_FILE
from .segment_footer import END_BYTES, Footer, length_of, parse
from .segments import FINISHED, model_folder, session_of

RUN_BYTES_MAX = 16 * 2**20
"""Bytes of a run, unless one entry has more: small enough that its memory is soon used again."""

THREADS = 2
"""How many runs are read at the same time. One more is being read or waits for the caller."""

READ_BYTES_MAX = 2**30
"""Bytes of one system call; macOS refuses 2 GiB."""

CHANGED = "its bytes are not as they were written"


@dataclass(frozen=True)
class StoredEntry:
    """An entry read back.

    Attributes:
        data: its bytes, `(nbytes,) uint8`.
    """

    location: Location
    data: np.ndarray
    layout: EntryLayout

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Its arrays by name, in the order of layers, as views of `data`."""
        return parts_of(self.data, self.layout.parts)


@dataclass(frozen=True)
class Run:
    """Verified entries of one file. `data[i]`, `(nbytes,) uint8`, is the entry at `locations[indexes[i]]`."""

    indexes: list[int]
    data: np.ndarray
    layout: EntryLayout


@dataclass(frozen=True)
class _Piece:
    """A run that is to be read: entries from `slot` on."""

    path: Path
    footer: Footer
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


def read_footer(path: Path, key: bytes) -> Footer:
    """Reads and verifies the footer of a segment file, without its data.

    Raises:
        CorruptSegment: it was changed, or is no segment file.
        OSError: it is missing or cannot be read.
    """
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptSegment("it is not a regular file")
        place = max(0, status.st_size - END_BYTES)
        end = os.pread(descriptor, END_BYTES, place)
        length = length_of(end, status.st_size)
        return parse(os.pread(descriptor, length, place - length), end, path.name, status.st_size, key)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe of this name would block for ever.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextmanager
def opened(path: Path) -> Iterator[Callable[[memoryview, int], None]]:
    """Opens a file. Gives what fills a buffer with its bytes from an offset on.

    Raises:
        CorruptSegment: the file ends before that.
        OSError: it is missing or cannot be read.
    """
    descriptor = _open(path)

    def read(target: memoryview, offset: int) -> None:
        while len(target):
            count = os.preadv(descriptor, [target[:READ_BYTES_MAX]], offset)
            if count == 0:
                raise CorruptSegment("the file ends before its data")
            target, offset = target[count:], offset + count

    try:
        yield read
    finally:
        os.close(descriptor)


def _host_buffer(count: int, size: int) -> np.ndarray:
    return np.empty((count, size), np.uint8)


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
        threads: how many runs are read at a time.
        run_bytes_max: of a run, unless one entry has more.
        make_buffer: makes the memory that a run is read into, `(entries, nbytes) uint8`. Called on the reading threads.

    Attributes:
        paths: of the files, as `locations`.
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
        threads: int = THREADS,
        run_bytes_max: int = RUN_BYTES_MAX,
        make_buffer: Callable[[int, int], np.ndarray] = _host_buffer,
    ) -> None:
        self._key, self._locations = key, list(locations)
        self._threads, self._run_bytes_max, self._make_buffer = threads, run_bytes_max, make_buffer
        self.paths: list[Path] = []
        self._footers: dict[Path, Footer] = {}
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}
        self.failures: dict[int, Failure] = {}
        for location in self._locations:
            if session_of(location.name) is None or not location.name.endswith(FINISHED):
                raise InvalidRecord(f"{location.name!r:.80} is not the name of a segment")
            self.paths.append(model_folder(root, location.model) / location.name)

    def give_back(self, run: Run) -> None:
        """Lets later runs overwrite the run's data: memory that was used before is filled twice as fast."""
        self._free.setdefault(run.data.shape, []).append(run.data)

    def runs(self) -> Iterator[Run]:
        """Yields runs of neighbours, in the order of `locations`. One is empty if all of its entries failed.

        Raises:
            DiskError: nothing can be read now, for example because too many files are open. No entry is at fault.
        """
        coming: deque[Future[Run]] = deque()
        with ThreadPoolExecutor(self._threads, "read") as threads:
            try:
                for piece in self._pieces():
                    coming.append(threads.submit(self._read, piece))
                    if len(coming) > self._threads:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _pieces(self) -> Iterator[_Piece]:
        """Yields what is to be read: neighbours of one file together, up to `run_bytes_max`."""
        piece: _Piece | None = None
        for index, (path, location) in enumerate(zip(self.paths, self._locations, strict=True)):
            footer = self.footer(index)
            if footer is None:
                continue
            if (
                piece is not None
                and piece.path == path
                and piece.slot + len(piece.indexes) == location.slot
                and (len(piece.indexes) + 1) * footer.layout.nbytes <= self._run_bytes_max
            ):
                piece.indexes.append(index)
                continue
            if piece is not None:
                yield piece
            piece = _Piece(path, footer, location.slot, [index])
        if piece is not None:
            yield piece

    def footer(self, index: int) -> Footer | None:
        """Returns the footer of an entry's file; None if it cannot be read or holds another entry there, and then
        `failures` says so. Raises `DiskError` as `runs`."""
        path = self.paths[index]
        with self.noting(index):
            if path not in self._footers:
                self._footers[path] = read_footer(path, self._key)
            if not self._footers[path].holds(self._locations[index]):
                raise CorruptSegment("the file holds another entry there")
            return self._footers[path]
        return None

    def _read(self, piece: _Piece) -> Run:
        """Reads and verifies entry after entry, while the last one's bytes are in the processor's caches."""
        layout, count = piece.footer.layout, len(piece.indexes)
        data = self._buffer(count, layout.nbytes)
        with self.noting(*piece.indexes), opened(piece.path) as read:
            for row, index in enumerate(piece.indexes):
                target = data[row].data
                read(target, piece.footer.offset(piece.slot + row))
                if layout.digest_of(target) != self._locations[index].digest:
                    self.failures[index] = Failure(self._locations[index], CHANGED, False)
        good = [row for row, index in enumerate(piece.indexes) if index not in self.failures]
        return Run([piece.indexes[row] for row in good], data if len(good) == count else data[good], layout)

    def _buffer(self, count: int, size: int) -> np.ndarray:
        """Returns `(count, size) uint8`, of memory that the caller has given back if it fits."""
        try:
            return self._free[count, size].pop()
        except (KeyError, IndexError):
            return self._make_buffer(count, size)

    @contextmanager
    def noting(self, *indexes: int) -> Iterator[None]:
        """Makes an error of the block a failure of these entries, unless they failed before. Raises `DiskError` for one
        that says nothing about them."""
        try:
            yield
        except (OSError, CorruptSegment) as error:
            missing = isinstance(error, FileNotFoundError)
            if isinstance(error, CorruptSegment):
                reason = error.message
            elif missing:
                reason = "the file is gone"
            elif error.errno in BAD_FILE:
                reason = f"the file cannot be read: {error.strerror or error}"
            else:
                raise DiskError(f"reading {self.paths[indexes[0]]}: {error.strerror or error}") from error
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
            found[index] = StoredEntry(locations[index], run.data[row], run.layout)
    return [found.get(index) or reader.failures[index] for index in range(len(locations))]
