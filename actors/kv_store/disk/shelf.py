"""The state of a node's KV store: index, files, counters. One thread at a time; `DiskStore` holds the lock.

Files are removed from the index first, and unlinked when nobody reads them any more; until then they are *doomed*. The
order of use is a counter, because clocks can be set back.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ....cluster.config.timing import USUAL
from ....cluster.errors import CorruptSegment, DiskFull, InvalidRecord, StaleEpoch
from ...protocol.entries import EntryRecord, Failure, SegmentRecord
from .changes import SegmentPlacement
from .folder import BAD_FILE
from .index import Index, IndexRow, Segment
from .io import DiskIO
from .leases import Leases
from .segment_reader import read_entries, read_footer
from .segments import (
    FINISHED,
    STORE_SESSION,
    UNFINISHED,
    SegmentFile,
    model_folder,
    read_key,
    segment_files,
    session_of,
)

logger = logging.getLogger(__name__)

_EPOCH_JUMP = 2**32
"""Files do not tell the last epoch. It jumps a random distance, so that no old writer's epoch matches."""

_RESERVE_SHARE = 8
"""The reserve is at most the device's bytes divided by this."""

_COUNTERS = ("corrupt", "missing", "evicted", "dropped", "refused", "forgotten", "failed_removals")


@dataclass(frozen=True)
class DiskLimits:
    """Limits of the disk tier.

    Attributes:
        bytes_max: of all segment files; less if the device has less.
        reserve_bytes: left free on the device for agents' memory, an eighth of the device at most.
        files_max: segment files.
        rows_max: entries in the index, about 2 kB of memory each, including copies that are not served.
        tails_per_parent_max: tails after one block.
        leases_max: readers' leases at the same time.
        lease_s_max: of one lease; unlinking waits for it.
        in_flight_s: how long a file may stay uncommitted.
    """

    bytes_max: int
    reserve_bytes: int = 0
    files_max: int = 65_536
    rows_max: int = 262_144
    tails_per_parent_max: int = 256
    leases_max: int = 1024
    lease_s_max: float = USUAL.block_lease_s
    in_flight_s: float = 600.0


class Shelf:
    """An open KV folder, whose lock is held.

    Args:
        root, session, limits, io, clock: as for `DiskStore`.

    Raises:
        OSError, DiskError: the disk fails, here and in every method.
    """

    def __init__(self, root: Path, session: str, limits: DiskLimits, io: DiskIO, clock: Callable[[], float]) -> None:
        self.root, self.limits, self.io, self._clock = root, limits, io, clock
        self.index = Index(limits.tails_per_parent_max)
        self.leases = Leases(limits.leases_max)
        self.totals = dict.fromkeys(_COUNTERS, 0)
        self.bytes_max: dict[bytes, int] = {}
        # Files that are no longer in the index and still to be unlinked, with their bytes.
        self.doomed: dict[Path, int] = {}
        self.used = 0
        self.touched: set[Segment] = set()
        self.key = read_key(root, io)
        self.epoch = self.recover(session)

    def recover(self, session: str) -> int:
        """Fills the index from the footers of finished files, in the order in which they were written, and removes all
        other files, but those that this session's writers have under way. Returns the new epoch."""
        # An index on disk is from an earlier version, and contains tokens.
        for old in [*self.root.glob("index*"), *self.root.glob(f".*{UNFINISHED}")]:
            self.io.unlink(old)
        found: list[tuple[int, float, str, SegmentFile, SegmentRecord]] = []
        removed = 0
        for file in segment_files(self.root):
            name = file.path.name
            if name.endswith(FINISHED):
                record = self.record_of(file)
                if record is not None:
                    found.append((record.epoch, record.written_s, name, file, record))
                    continue
                self.totals["corrupt"] += 1
            elif name.endswith(UNFINISHED) and session_of(name) == session:
                continue
            removed += not name.endswith(UNFINISHED)
            self.io.unlink(file.path)
        if removed:
            what = "%d files of KV, damaged or in an earlier layout, were removed; what they had is computed again"
            logger.warning(what, removed)
        for *_, file, record in sorted(found, key=lambda item: item[:3]):
            self.used = max(self.used, file.used)
            self.index.place(record, file.used, certain=False)
        self.remove_lonely()
        self.purge_if_possible()
        # Above a minimum, so that every epoch takes the same number of bytes in a file.
        return max((epoch for epoch, *_ in found), default=_EPOCH_JUMP) + 1 + secrets.randbelow(_EPOCH_JUMP)

    def record_of(self, file: SegmentFile) -> SegmentRecord | None:
        try:
            record = read_footer(file.path, self.key).record
        except CorruptSegment:
            return None
        except OSError as error:
            if error.errno not in BAD_FILE:
                raise
            return None
        return record if record.model == file.model else None

    def verify(self, record: SegmentRecord, path: Path) -> None:
        """Checks that a new segment's file matches its record; raises as `commit`."""
        if record.epoch != self.epoch:
            raise StaleEpoch(f"the segment was written in epoch {record.epoch}, this is {self.epoch}")
        # The file exists already, so the free space excludes it.
        budget = min(self.limits.bytes_max, self.budget() + record.nbytes)
        if record.nbytes > budget:
            raise DiskFull(f"a segment of {record.nbytes} bytes is over the budget of {max(0, budget)}")
        try:
            written = read_footer(path, self.key).record
        except FileNotFoundError:
            raise InvalidRecord(f"{record.name} is not there") from None
        except CorruptSegment as error:
            self.totals["corrupt"] += 1
            raise InvalidRecord(f"{record.name}: {error.message}") from None
        if written.to_wire() != record.to_wire():
            raise InvalidRecord(f"{record.name} is another segment than announced")

    def placed_before(self, record: SegmentRecord) -> SegmentPlacement:
        """Returns what is served now of a segment that is in the index already."""
        ids = [entry.id for entry in record.entries]
        served = [entry for entry in ids if self.index.live(entry)]
        return SegmentPlacement(kept=served, refused=[entry for entry in ids if entry not in served])

    def forget(self, tag: bytes, keep: Callable[[EntryRecord], bool] | None) -> list[bytes]:
        """Removes an owner from all entries except those to `keep`. Marks what has no other owner for erasing. Returns
        the ids that are gone."""
        index = self.index
        gone: dict[bytes, None] = {}
        for row in index.owned(tag):
            if keep is not None and keep(row.record):
                continue
            live = row.live
            if not index.remove_owner(row, tag) and live:
                gone[row.record.id] = None
        for row in index.all_rows():
            # Second copies of what is gone.
            if not row.live and row.record.id in gone:
                row.segment.erase = True
        self.remove_lonely()
        self.totals["forgotten"] += len(gone)
        return list(gone)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that KV leaves free for writes that cannot be recomputed."""
        return min(self.limits.reserve_bytes, self.io.space(self.root).total // _RESERVE_SHARE)

    def budget(self) -> int:
        """Returns the bytes that all segment files may take now, given the device's free space and the reserve.
        Negative if the reserve is not free even without KV."""
        held = self.index.nbytes + sum(self.doomed.values())
        return min(self.limits.bytes_max, held + self.io.space(self.root).free - self.reserve_bytes)

    def evict(self, bytes_max: int) -> list[bytes]:
        """Removes the least recently used unpinned files until the rest fits. Returns the ids that are gone."""
        index, limits = self.index, self.limits

        def fits() -> bool:
            return (
                index.nbytes <= bytes_max and len(index.segments) <= limits.files_max and index.rows <= limits.rows_max
            )

        gone: list[bytes] = []
        if not fits():
            for segment in self.unpinned():
                gone += self.remove(segment)
                if fits():
                    break
            self.totals["evicted"] += len(gone)
        return gone

    def keep_limits(self, new: Segment | None = None) -> list[bytes]:
        """Removes unpinned files of tenants over their limits, the least recently used first. Cheap if none is over.
        Returns the ids that are gone.

        Args:
            new: a segment that has just come. The segments that it follows are marked as used later than it, because it
                can only be found through them.
        """
        index = self.index
        over = {tag: most for tag, most in self.bytes_max.items() if index.tenant_bytes[tag] > most}
        if not over:
            return []
        seen: set[Segment] = set()
        while new is not None and new not in seen:
            seen.add(new)
            if (new := index.before(new)) is not None and new not in seen:
                self.use(new)
        gone: list[bytes] = []
        for segment in self.unpinned():
            if segment.tenant in over and index.tenant_bytes[segment.tenant] > over[segment.tenant]:
                gone += self.remove(segment)
        self.totals["evicted"] += len(gone)
        return gone

    def unpinned(self) -> list[Segment]:
        """Returns the files without a lease, the least recently used first."""
        pinned = self.leases.held(self._clock())
        files = [segment for segment in self.index.segments.values() if segment.name not in pinned]
        return sorted(files, key=lambda segment: (segment.used, segment.number))

    def next_use(self) -> int:
        # Clocks can be set back.
        self.used = max(self.used + 1, time.time_ns())
        return self.used

    def use(self, segment: Segment) -> None:
        segment.used = self.next_use()
        self.touched.add(segment)

    def note_use(self) -> None:
        """Writes the order of use down, as the files' times. A failure loses only that."""
        touched, self.touched = self.touched, set()
        for segment in touched:
            if segment.name in self.index.segments:
                with suppress(OSError):
                    os.utime(self.path(segment), ns=(segment.used, segment.used))

    def path(self, segment: Segment) -> Path:
        return model_folder(self.root, segment.model) / segment.name

    def remove(self, segment: Segment) -> list[bytes]:
        """Removes a segment; its file is unlinked by `purge`. Returns the ids that are gone."""
        self.doomed[self.path(segment)] = segment.nbytes
        return self.index.remove_segment(segment)

    def remove_lonely(self) -> None:
        """Removes segments without live entries."""
        for segment in self.index.lonely():
            self.remove(segment)

    def purge(self) -> None:
        """Unlinks the doomed files without a lease. Raises the first error after trying all."""
        pinned = self.leases.held(self._clock())
        folders: set[Path] = set()
        failed: OSError | None = None
        for path in [path for path in self.doomed if path.name not in pinned]:
            try:
                self.io.unlink(path)
                folders.add(path.parent)
                del self.doomed[path]
            except OSError as error:
                failed = failed or error
        for folder in folders:
            if folder.is_dir():
                self.io.sync_folder(folder)
        if failed is not None:
            raise failed

    def purge_if_possible(self) -> None:
        """Runs `purge`; a failure is counted and retried later."""
        try:
            self.purge()
        except OSError:
            self.totals["failed_removals"] += 1

    def unlink_if_possible(self, path: Path) -> None:
        """Removes a file that is not in the index; `compact` removes leftovers."""
        with suppress(OSError):
            self.io.unlink(path)

    def replace(
        self, old: Segment, rows: Sequence[IndexRow], record: SegmentRecord | None, failures: Sequence[Failure]
    ) -> list[bytes]:
        """Replaces a segment by its rewritten file. What died meanwhile is dead in the new one. Returns the ids that
        are gone."""
        index = self.index
        if old.name not in index.segments:
            if record is not None:
                self.unlink_if_possible(model_folder(self.root, record.model) / record.name)
            return []
        for failure in failures:
            if old.rows[failure.location.slot].live:
                self.totals["missing" if failure.missing else "corrupt"] += 1
        before = [(row.live, row.certain, row.record) for row in rows]
        gone = set(self.remove(old))
        if record is not None:
            segment = index.add_segment(record, old.used)
            self.touched.add(segment)
            for slot, ((live, certain, entry), written) in enumerate(zip(before, record.entries, strict=True)):
                index.add(IndexRow(segment, slot, live, certain, entry, written.owners))
                gone.discard(entry.id)
                # Dropped while the file was written: the next round erases it.
                segment.erase |= not live
        self.remove_lonely()
        return sorted(gone)

    def stats(self) -> dict[str, int]:
        """As `DiskStore.stats`."""
        index = self.index
        live = [row for row in index.all_rows() if row.live]
        tails = sum(row.record.tail for row in live)
        self.leases.expire(self._clock())
        return {f"{name}_total": count for name, count in self.totals.items()} | {
            "bytes": index.nbytes + sum(self.doomed.values()),
            "bytes_max": max(0, self.budget()),
            "device_free_bytes": self.io.space(self.root).free,
            "files": len(index.segments) + len(self.doomed),
            "entries": len(live),
            "blocks": len(live) - tails,
            "tails": tails,
            "dead_entries": index.rows - len(live),
            "doomed_files": len(self.doomed),
            "leases": len(self.leases),
            "epoch": self.epoch,
        }

    def check(self, *, payload: bool) -> None:
        """As `DiskStore.check`."""
        index = self.index
        index.check()
        files = {file.path: file.nbytes for file in segment_files(self.root)}
        for segment in index.segments.values():
            path = self.path(segment)
            assert files.pop(path, None) == segment.nbytes, f"{path} is not as the index says"
            entries = read_footer(path, self.key).record.entries
            assert all(row.record == entries[row.slot] for row in segment.rows), f"{path} has other entries"
            if payload:
                read = read_entries(self.root, self.key, [row.location for row in segment.live])
                assert not any(isinstance(stored, Failure) for stored in read), f"{path} does not verify"
        strays = {path for path in files if session_of(path.name) == STORE_SESSION} - self.doomed.keys()
        assert not strays, f"the index lacks {strays}"
