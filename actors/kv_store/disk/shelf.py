"""The state of a node's KV store: index, files, counters. One thread at a time; `DiskStore` holds the lock.

Every change is one transaction of the index. Files are unlinked only afterwards. The index lists files that are still
to be unlinked (*doomed*), so a crash in between leaves nothing behind.

The order of use is a counter, because clocks can be set back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ....cluster.errors import CorruptSegment, DiskError, DiskFull, InvalidRecord, StaleEpoch
from ....cluster.timing import USUAL
from ...protocol.entries import NOBODY, EntryRecord, Failure, SegmentRecord
from .compaction import Rewritten
from .folder import typed
from .index import IndexRow, SegmentRow
from .io import DiskIO, Space
from .leases import Leases
from .placement import SegmentPlacement, add_owners, place, remove_owner, set_owners
from .recovery import recover, segment_files, segment_path
from .segment_reader import read_header
from .segments import FINISHED, model_folder, read_key, session_of

_COUNTER_MAX = 2**62
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
        rows_max: entries in the index, including copies that are not served.
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
    """An open KV folder, whose lock is held. Methods raise `DiskError` or `DiskFull` if a change fails.

    Raises:
        sqlite3.Error, OSError, DiskError: it cannot be opened.
    """

    def __init__(self, root: Path, session: str, limits: DiskLimits, io: DiskIO) -> None:
        self.root = root
        self.limits = limits
        self.io = io
        self.key = read_key(root, io)
        self.leases = Leases(limits.leases_max)
        self.totals = dict.fromkeys(_COUNTERS, 0)
        recovery = recover(root, self.key, session, limits.tails_per_parent_max, io)
        self.rebuilt = recovery.rebuilt
        self.index = recovery.index
        self._touched: dict[int, int] = {}
        try:
            self.totals["corrupt"] += recovery.corrupt
            self.totals["missing"] += recovery.missing
            self.epoch = self.index.number("epoch")
            self._counter = max((segment.used for segment in self.index.segments()), default=0)
            if self._counter >= _COUNTER_MAX:
                self._renumber()
            self.index.count_tenants()
            self.purge_if_possible(0.0)
        except BaseException:
            self.index.close()
            raise

    def _renumber(self) -> None:
        order = {segment.number: used for used, segment in enumerate(self.index.segments(), 1)}
        with self.index.transaction():
            self.index.set_used(order)
        self._counter = len(order)

    def close(self) -> None:
        """Stores the order of use if possible, and closes the index."""
        try:
            # A failure loses only the eviction order.
            with suppress(DiskError), self.change("closing"):
                pass
        finally:
            self.index.close()

    @contextmanager
    def change(self, action: str) -> Iterator[None]:
        """Runs a transaction with typed errors, which also stores the order of use."""
        with typed(action):
            with self.index.transaction():
                # First, before segment numbers change.
                self.index.set_used(self._touched)
                yield
            self._touched.clear()

    def verify(self, record: SegmentRecord, path: Path) -> None:
        """Checks that a new segment's file matches its record.

        Raises:
            StaleEpoch: it was written in another epoch.
            DiskFull: it is larger than the budget.
            InvalidRecord: the file is absent, damaged or another one.
        """
        if record.epoch != self.epoch:
            raise StaleEpoch(f"the segment was written in epoch {record.epoch}, this is {self.epoch}")
        # The file exists already, so the free space excludes it.
        budget = min(self.limits.bytes_max, self.budget() + record.nbytes)
        if record.nbytes > budget:
            raise DiskFull(f"a segment of {record.nbytes} bytes is over the budget of {max(0, budget)}")
        try:
            with typed("reading a new segment's header"):
                written = self._header_of(path)
        except CorruptSegment as error:
            self.totals["corrupt"] += 1
            raise InvalidRecord(f"{record.name}: {error.message}") from None
        if written.to_wire() != record.to_wire():
            raise InvalidRecord(f"{record.name} is another segment than announced")

    def _header_of(self, path: Path) -> SegmentRecord:
        try:
            return read_header(path, self.key).record
        except FileNotFoundError:
            raise InvalidRecord(f"{path.name} is not there") from None

    def enter(
        self,
        record: SegmentRecord,
        without: Mapping[bytes, Collection[bytes]],
        heirs: Mapping[bytes, Collection[bytes]],
    ) -> SegmentPlacement:
        """Adds the entries of a verified segment to the index; see `DiskStore.commit`."""
        with self.change("entering a segment"):
            self._counter += 1
            number = self.index.add_segment(record.name, record.model, record.nbytes, self._counter, record.tenant)
            tails_max = self.limits.tails_per_parent_max
            placed = place(self.index, number, record, certain=True, tails_max=tails_max, without=without, heirs=heirs)
            if placed.refused:
                self.index.set_erase([number])
            self._remove_lonely()
        self.totals["dropped"] += len(placed.dropped)
        self.totals["refused"] += len(placed.refused)
        return placed

    def placed_before(self, number: int, record: SegmentRecord) -> SegmentPlacement:
        """Returns the current placement of a segment that was committed before."""
        live = {row.record.id for row in self.live_rows(number)}
        placed = SegmentPlacement()
        for entry in record.entries:
            if entry.id in live:
                placed.kept.append(entry.id)
            else:
                (placed.dropped if self.index.live(entry.id) else placed.refused).append(entry.id)
        return placed

    def refuse(self, record: SegmentRecord, path: Path) -> None:
        """Removes the file of a failed commit, unless the segment is in the index. `DiskStore` sweeps leftovers."""
        with suppress(DiskError), typed("removing a refused segment"):
            if self.index.segment(record.name) is None:
                self.io.unlink(path)

    def touch(self, ids: Sequence[bytes], tag: bytes) -> None:
        """Marks a chain as used, its first block as the latest, and adds an owner."""
        for entry in reversed(ids):
            number = self.index.segment_of(entry)
            if number is not None:
                self._use(number)
        if tag == NOBODY:
            return
        rows = (self.index.live(entry) for entry in ids)
        unowned = [row for row in rows if row is not None and tag not in row.record.owners]
        if unowned:
            with self.change("adding an owner"):
                for row in unowned:
                    add_owners(self.index, row, [tag])

    def _use(self, number: int) -> None:
        self._counter += 1
        self._touched[number] = self._counter
        self.index.tenants.use(number, self._counter)

    def give(
        self, tag: bytes, ids: Iterable[bytes], parents: Iterable[bytes], has: Callable[[EntryRecord], bool]
    ) -> int:
        """Adds an owner to those of the entries `ids` and the tails after `parents` for which `has` is true. Returns to
        how many it was added."""
        rows = [row for entry in ids if (row := self.index.live(entry)) is not None]
        rows += [row for parent in parents for row in self.index.live_tails(parent)]
        unowned = [row for row in rows if tag not in row.record.owners and has(row.record)]
        if unowned:
            with self.change("adding an owner"):
                for row in unowned:
                    add_owners(self.index, row, [tag])
        return len(unowned)

    def drop(self, failures: Iterable[Failure]) -> list[bytes]:
        """Drops entries that could not be read. Returns their ids."""
        retracted = []
        with self.change("dropping unreadable entries"):
            for failure in failures:
                row = self.index.live(failure.location.id)
                if row is not None and row.location == failure.location:
                    self.totals["missing" if failure.missing else "corrupt"] += 1
                    self.index.kill(row)
                    self.index.set_erase([row.segment])
                    retracted.append(row.record.id)
            self._remove_lonely()
        return retracted

    def settle(self, owners: Mapping[bytes, Sequence[bytes]]) -> int:
        """Sets the complete owner tags of uncertain entries, by id. Returns how many were uncertain."""
        rows = [(row, tags) for entry, tags in owners.items() if (row := self.index.live(entry)) is not None]
        unsettled = [(row, tags) for row, tags in rows if tags and not row.certain]
        with self.change("settling owners"):
            for row, tags in unsettled:
                set_owners(self.index, row, tags)
        return len(unsettled)

    def forget(self, tag: bytes, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        """Removes the owner from all entries except those to `keep`. Drops entries without other owners and marks them
        for erasing. Returns their ids."""
        retracted: list[bytes] = []
        with self.change("forgetting an owner"):
            marked: set[int] = set()
            for row in self.index.owned(tag):
                if keep is not None and keep(row.record):
                    continue
                if not remove_owner(self.index, row, tag):
                    marked.add(row.segment)
                    retracted.extend([row.record.id] if row.live else [])
            for entry in retracted:
                marked.update(row.segment for row in self.index.dead(entry))
            self.index.set_erase(marked)
            self._remove_lonely()
        self.totals["forgotten"] += len(retracted)
        return retracted

    def replace(self, segment: SegmentRow, rewritten: Rewritten) -> list[bytes]:
        """Replaces `segment`, which still exists, by its rewritten file. Returns ids that could not be read."""
        lost: list[bytes] = []
        record = rewritten.record
        with self.change("replacing a segment"):
            now = {row.slot: row for row in self.index.of_segment(segment.number)}
            used = self._touched.get(segment.number, segment.used)
            self.index.remove_segment(segment)
            if record is not None:
                number = self.index.add_segment(record.name, record.model, record.nbytes, used, record.tenant)
                for slot, old in enumerate(rewritten.rows):
                    row = now.get(old.slot, replace(old, live=False))
                    self.index.add(replace(row, segment=number, name=record.name, slot=slot))
                    if not row.live:
                        # Dropped while the file was written: the next round erases it.
                        self.index.set_erase([number])
            for failure in rewritten.failures:
                row = now.get(failure.location.slot)
                if row is not None and row.live:
                    self.totals["missing" if failure.missing else "corrupt"] += 1
                    lost.append(row.record.id)
            self._remove_lonely()
        return lost

    @property
    def reserve_bytes(self) -> int:
        """Bytes that KV leaves free for writes that cannot be recomputed."""
        return _reserve(self.limits, self.io.space(self.root))

    def budget(self) -> int:
        """Returns the bytes that all segment files may take now, given the device's free space and the reserve.
        Negative if the reserve is not free even without KV.

        Raises:
            OSError: the free space cannot be read.
        """
        return min(self.limits.bytes_max, self.index.size()[0] + self.io.space(self.root).free - self.reserve_bytes)

    def evict(self, bytes_max: int, now: float) -> list[bytes]:
        """Removes the least recently used unpinned files until the rest fits. Returns the ids that are gone."""
        nbytes, files, rows = self.index.size()
        doomed = self.index.doomed()
        # Doomed files are unlinked as soon as their leases end.
        nbytes, files = nbytes - sum(size for _, _, size in doomed), files - len(doomed)
        limits = self.limits

        def fits() -> bool:
            return nbytes <= bytes_max and files <= limits.files_max and rows <= limits.rows_max

        if fits():
            return []
        pinned = self.leases.held(now)
        retracted: list[bytes] = []
        victims = []
        for segment in sorted(self.index.segments(), key=lambda row: self._touched.get(row.number, row.used)):
            if fits():
                break
            if segment.name in pinned:
                continue
            entries = self.index.of_segment(segment.number)
            retracted.extend(row.record.id for row in entries if row.live)
            nbytes, files, rows = nbytes - segment.nbytes, files - 1, rows - len(entries)
            victims.append(segment)
        self.give_up(victims)
        self.totals["evicted"] += len(retracted)
        return retracted

    def fits(self, record: SegmentRecord) -> bool:
        """Returns whether the segment alone is within its tenant's limit."""
        most = self.index.tenants.bytes_max(record.tenant)
        return most is None or record.nbytes <= most

    def keep_limits(self, now: float, name: str = "") -> list[bytes]:
        """Removes unpinned files of tenants over their limits, the least recently used first. Cheap if none is over.
        Returns the ids that are gone.

        Args:
            name: of a new segment. The segments that it follows are marked as used later than it, because it can only
                be found through them.
        """
        tenants = self.index.tenants
        over = tenants.over()
        if not over:
            return []
        if (segment := self.index.segment(name)) is not None:
            number, seen = segment.number, {segment.number}
            while (before := self.index.before(number)) is not None and before not in seen:
                self._use(before)
                seen.add(number := before)
        pinned = self.leases.held(now)
        retracted: list[bytes] = []
        victims: list[SegmentRow] = []
        for tenant in over:
            excess = tenants.nbytes(tenant) - (tenants.bytes_max(tenant) or 0)
            for number in tenants.oldest(tenant):
                if excess <= 0:
                    break
                segment = self.index.numbered(number)
                if segment is not None and segment.name not in pinned:
                    retracted.extend(row.record.id for row in self.live_rows(number))
                    victims.append(segment)
                    excess -= segment.nbytes
        self.give_up(victims)
        self.totals["evicted"] += len(retracted)
        return retracted

    def make_room(self, now: float) -> list[bytes]:
        """Evicts unpinned files at once: as many bytes as the reserve lacks, or a whole reserve if it lacks none.
        Counts failures. Returns the ids that are gone."""
        self.purge_if_possible(now)
        free, reserve = self.io.space(self.root).free, self.reserve_bytes
        wanted = reserve - free if free < reserve else max(1, reserve)
        nbytes = self.index.size()[0] - sum(size for _, _, size in self.index.doomed())
        retracted: list[bytes] = []
        try:
            retracted = self.evict(max(0, nbytes - wanted), now)
        except DiskError:
            self.totals["failed_removals"] += 1
        self.purge_if_possible(now)
        # The write-ahead log may be the largest file on a small device.
        with suppress(DiskError), typed("shortening the index"):
            self.index.checkpoint()
        return retracted

    def give_up(self, segments: Sequence[SegmentRow]) -> None:
        """Removes segments, even if the disk is too full for the index's own transaction."""
        try:
            self.remove(segments)
        except DiskFull:
            # Unlink first. If the index still fails, the next start removes rows without a file.
            with typed("unlinking files"):
                for segment in segments:
                    self.io.unlink(segment_path(self.root, segment))
            self.remove(segments)

    def discard(self, name: str) -> list[bytes]:
        """Removes a segment with all its entries, if it exists. Returns the ids that are gone."""
        segment = self.index.segment(name)
        if segment is None:
            return []
        retracted = [row.record.id for row in self.live_rows(segment.number)]
        self.give_up([segment])
        self.totals["evicted"] += len(retracted)
        return retracted

    def remove(self, segments: Iterable[SegmentRow]) -> None:
        with self.change("removing segments"):
            for segment in segments:
                self.index.remove_segment(segment)

    def _remove_lonely(self) -> None:
        """Removes segments without live entries. Call it inside `change`."""
        for segment in self.index.lonely():
            self.index.remove_segment(segment)

    def purge(self, now: float) -> None:
        """Unlinks the doomed files without a lease. Raises the first error after trying all."""
        pinned = self.leases.held(now)
        gone: list[str] = []
        folders: set[Path] = set()
        failed: OSError | None = None
        with typed("unlinking files"):
            for name, model, _ in self.index.doomed():
                if name in pinned:
                    continue
                try:
                    # A damaged name never leads out of the folder.
                    if session_of(name) is not None:
                        path = model_folder(self.root, model) / name
                        self.io.unlink(path)
                        folders.add(path.parent)
                    gone.append(name)
                except OSError as error:
                    failed = failed or error
            for folder in folders:
                if folder.is_dir():
                    self.io.sync_folder(folder)
            if gone:
                with self.index.transaction():
                    self.index.undoom(gone)
            if failed is not None:
                raise failed

    def purge_if_possible(self, now: float) -> None:
        """Runs `purge`; a failure is counted and retried later."""
        try:
            self.purge(now)
        except DiskError:
            self.totals["failed_removals"] += 1

    def live_rows(self, number: int) -> list[IndexRow]:
        return [row for row in self.index.of_segment(number) if row.live]


def free_files(root: Path, limits: DiskLimits, io: DiskIO) -> bool:
    """Removes segment files of a folder whose index cannot be opened, the oldest first, until the reserve is free.
    Returns whether any was removed.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    missing = _reserve(limits, io.space(root)) - io.space(root).free
    freed = 0
    # Unfinished files belong to their writers.
    files = [file for file in segment_files(root) if file.path.name.endswith(FINISHED)]
    for file in sorted(files, key=lambda file: file.path.stat().st_mtime):
        if freed >= missing:
            break
        io.unlink(file.path)
        freed += file.nbytes
    return freed > 0


def _reserve(limits: DiskLimits, space: Space) -> int:
    return min(limits.reserve_bytes, space.total // _RESERVE_SHARE)
