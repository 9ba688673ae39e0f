"""Opening the folder of an earlier process: compares the index with the files, or rebuilds it from their headers."""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ....cluster.errors import CorruptSegment, DamagedIndex, DiskError, InvalidRecord
from ...protocol.entries import ID_BYTES
from .folder import BAD_FILE, primary_code
from .index import Index, SegmentRow
from .io import DiskIO
from .placement import place
from .segment_header import Header
from .segment_reader import read_header
from .segments import FINISHED, STORE_SESSION, UNFINISHED, model_folder, session_of

_EPOCH_JUMP = 2**32
"""A rebuilt index does not know the last epoch. It jumps a random distance, so that no old writer's epoch matches."""

_NOT_DAMAGE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM)


class SegmentFile(NamedTuple):
    """A file with the name of a segment."""

    path: Path
    model: bytes
    nbytes: int


@dataclass
class Recovery:
    """An index that matches the files, and counts of what was lost."""

    index: Index
    rejected: set[Path] = field(default_factory=set)
    rebuilt: bool = False
    corrupt: int = 0
    missing: int = 0


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
                        nbytes = file.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
                    yield SegmentFile(Path(file.path), model, nbytes)


def recover(root: Path, key: bytes, session: str, tails_max: int, io: DiskIO) -> Recovery:
    """Opens the index of `root`, whose lock is held, in a new epoch, and removes files that the index lacks.

    Args:
        session: whose unknown files stay, because a writer may be about to commit them.

    Raises:
        sqlite3.Error, OSError: the disk fails.
        DamagedIndex, DiskError: the rebuilt index cannot be opened either.
    """
    for unfinished in [*root.glob(f".key.*{UNFINISHED}"), *root.glob(f".probe.*{UNFINISHED}")]:
        io.unlink(unfinished)
    path = root / "index"
    for attempt in range(2):
        recovery: Recovery | None = None
        try:
            recovery = Recovery(Index(path, key, io))
            files = list(segment_files(root))
            with recovery.index.transaction():
                if recovery.index.empty:
                    _rebuild(recovery, files, key, tails_max)
                else:
                    _audit(recovery, files, root, key, tails_max)
            _sweep(recovery, files, session, io)
            return recovery
        except (DamagedIndex, sqlite3.Error, UnicodeDecodeError, InvalidRecord) as error:
            if recovery is not None:
                recovery.index.close()
            if attempt or not _is_damage(error, root, io):
                raise
            _set_aside(path, io)
        except BaseException:
            if recovery is not None:
                recovery.index.close()
            raise
    raise DiskError(f"{path} cannot be opened")


def _set_aside(path: Path, io: DiskIO) -> None:
    """Renames a damaged index, and removes its write-ahead log and earlier damaged ones."""
    older = sorted(path.parent.glob("index.damaged-*"))
    numbers = [int(old.name.rpartition("-")[2]) for old in older if old.name.rpartition("-")[2].isdigit()]
    # The log first: SQLite would apply it to the next database of this name.
    for suffix in ("-wal", "-shm"):
        io.unlink(path.with_name(path.name + suffix))
    if path.exists():
        io.rename(path, path.with_name(f"index.damaged-{max(numbers, default=0) + 1}"))
    for old in older:
        io.unlink(old)
    io.sync_folder(path.parent)


def _is_damage(error: Exception, root: Path, io: DiskIO) -> bool:
    """Returns whether the index is at fault and not the disk: SQLite reports some damage as a write failure."""
    if isinstance(error, sqlite3.Error) and primary_code(error) in _NOT_DAMAGE:
        return False
    if not isinstance(error, sqlite3.Error):
        return True
    probe = root / f".probe.{secrets.token_hex(8)}{UNFINISHED}"
    try:
        descriptor = io.create(probe)
        try:
            io.write(descriptor, probe, [bytes(4096)])
            io.sync(descriptor, probe)
        finally:
            os.close(descriptor)
            io.unlink(probe)
    except OSError:
        return False
    return True


def _rebuild(recovery: Recovery, files: list[SegmentFile], key: bytes, tails_max: int) -> None:
    """Fills the empty index from the headers, oldest first. Headers lack owners added later, so no row is certain."""
    index = recovery.index
    order: list[tuple[int, float, str, SegmentFile]] = []
    for file in files:
        header = _header(file, key) if file.path.name.endswith(FINISHED) else None
        if header is not None:
            order.append((header.record.epoch, header.record.written_s, file.path.name, file))
        elif file.path.name.endswith(FINISHED):
            recovery.corrupt += 1
            recovery.rejected.add(file.path)
    order.sort()
    recovery.rebuilt = bool(order)
    index.create(max((epoch for epoch, *_ in order), default=0) + 1 + secrets.randbelow(_EPOCH_JUMP))
    for used, (_, _, _, file) in enumerate(order, 1):
        _enter(recovery, file, key, used, tails_max)
    _remove_lonely(index)


def _audit(recovery: Recovery, files: list[SegmentFile], root: Path, key: bytes, tails_max: int) -> None:
    """Makes the index match the files; segments with unreadable rows are added again from their headers."""
    index = recovery.index
    index.remove_strangers()
    sizes = {file.path: file for file in files}
    bad = index.bad_segments()
    again: list[tuple[SegmentFile, int]] = []
    for segment in index.segments():
        if session_of(segment.name) is None or not segment.name.endswith(FINISHED):
            raise DamagedIndex("the index has a file whose name is none of a segment")
        file = sizes.get(model_folder(root, segment.model) / segment.name)
        if file is None:
            if segment.number in bad:
                raise DamagedIndex("the index has a segment without a file and without readable entries")
            recovery.missing += 1
            index.remove_segment(segment, doom=False)
        elif segment.number in bad or file.nbytes != segment.nbytes:
            # Index and file differ. The file's header has a MAC, so it decides.
            recovery.corrupt += 1
            index.remove_segment(segment, doom=False)
            again.append((file, segment.used))
    for file, used in again:
        _enter(recovery, file, key, used, tails_max)
    _remove_lonely(index)
    index.set_number("epoch", index.number("epoch") + 1)


def _enter(recovery: Recovery, file: SegmentFile, key: bytes, used: int, tails_max: int) -> None:
    header = _header(file, key)
    if header is None:
        recovery.rejected.add(file.path)
        return
    number = recovery.index.add_segment(file.path.name, file.model, file.nbytes, used, header.record.tenant)
    place(recovery.index, number, header.record, certain=False, tails_max=tails_max)


def _header(file: SegmentFile, key: bytes) -> Header | None:
    try:
        header = read_header(file.path, key)
    except CorruptSegment:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, *BAD_FILE):
            raise
        return None
    return header if header.record.model == file.model else None


def _remove_lonely(index: Index) -> None:
    for segment in index.lonely():
        index.remove_segment(segment)


def _sweep(recovery: Recovery, files: list[SegmentFile], session: str, io: DiskIO) -> None:
    """Removes files that the index lacks, except those that this session's writers may be about to commit."""
    known = {segment.name for segment in recovery.index.segments()}
    for file in files:
        owner = session_of(file.path.name)
        in_flight = owner == session != STORE_SESSION and file.path not in recovery.rejected
        if file.path.name not in known and not in_flight:
            io.unlink(file.path)


def segment_path(root: Path, segment: SegmentRow) -> Path:
    return model_folder(root, segment.model) / segment.name
