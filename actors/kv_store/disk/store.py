"""A node's KV on disk: which segments are committed, where an entry is, what is evicted.

Replicas write and read the segment files. The store keeps the index, in memory, and reads a file's data only to rewrite
it without forgotten entries. The files are all that is kept: their headers are read at every start, so that nothing
else can be damaged or disagree with them. What headers lack is told anew: owners that came later by the agents'
branches (`uncertain`, `settle`), who was forgotten by their tombstones, and the order of use by the files' times.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....cluster.errors import CorruptSegment, DiskError, DiskFull, InvalidRecord, StaleEpoch
from ....cluster.timing import USUAL
from ...protocol.entries import (
    NOBODY,
    Entry,
    EntryRecord,
    Failure,
    Location,
    SegmentRecord,
    owner_tag,
    pack_tokens,
    tenant_tag,
    unpack_tokens,
)
from .folder import BAD_FILE, make_folders, take_lock, typed
from .index import Index, IndexRow, Segment, add_owners, set_owners
from .io import DiskIO
from .leases import Leases, Pin
from .placement import Changes, SegmentPlacement
from .segment_reader import StoredEntry, read_entries, read_header
from .segments import (
    EARLIER,
    FINISHED,
    STORE_SESSION,
    UNFINISHED,
    SegmentFile,
    checked_session,
    model_folder,
    read_key,
    segment_files,
    session_of,
    write_tagged,
)

logger = logging.getLogger(__name__)

_ROUNDS_MAX = 3
"""How often in a row a segment is rewritten if entries of it are dropped during the rewriting."""

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


class TailMatch(NamedTuple):
    """A tail, and how many of its first tokens match the requested ones."""

    location: Location
    tokens: int


class DiskStore:
    """The KV folder of one home folder, for one process at a time. All methods are safe from any thread.

    Every method raises `DiskError` (or `DiskFull`) if the disk fails; the next call may succeed.

    Args:
        root: the folder, created if it is absent.
        session: of the live writers, whose unfinished files are kept.
        limits: of bytes, files, entries and leases.
        clock: monotonic seconds, for leases.
        wall_clock: seconds since 1970, written into files that the store itself writes.
        lock_wait_s: how long to wait for another process to release the folder.
        io: the disk.

    Attributes:
        epoch: of this opening. Only segments written in it are committed, so writers must know it.
        key: the secret of all MACs.

    Raises:
        StoreInUse: another process has the folder.
        DiskFull, DiskError: it cannot be opened.
        InvalidRecord: `session` is no valid session name.
    """

    def __init__(
        self,
        root: Path,
        *,
        session: str,
        limits: DiskLimits,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        lock_wait_s: float = 0.0,
        io: DiskIO | None = None,
    ) -> None:
        if checked_session(session) == STORE_SESSION:
            raise InvalidRecord(f"{STORE_SESSION} is the store's own session")
        self.root = root
        self._limits, self._clock, self._wall_clock = limits, clock, wall_clock
        self._io = io or DiskIO()
        self._lock = threading.Lock()
        # Only one thread rewrites segments; taken before `_lock`, never inside it.
        self._maintenance = threading.Lock()
        self._index = Index(limits.tails_per_parent_max)
        self._leases = Leases(limits.leases_max)
        self._changes = Changes()
        self._totals = dict.fromkeys(_COUNTERS, 0)
        self._bytes_max: dict[bytes, int] = {}
        # Files that are no longer in the index and still to be unlinked, with their bytes.
        self._doomed: dict[Path, int] = {}
        # Uncommitted files, and when they were first seen.
        self._in_flight: dict[Path, float] = {}
        self._used = 0
        self._touched: set[Segment] = set()
        self._closed = False
        with typed(f"opening {root}"):
            make_folders(root, self._io)
            self._locked = take_lock(root / "lock", lock_wait_s)
            try:
                self.key = read_key(root, self._io)
                self.epoch = self._recover(session)
            except BaseException:
                self._locked.release()
                raise

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the folder. Idempotent."""
        with self._maintenance, self._lock:
            if not self._closed:
                self._closed = True
                self._note_use()
                self._locked.release()

    @contextmanager
    def _held(self, action: str) -> Iterator[Index]:
        """Holds the lock and translates errors."""
        with self._lock:
            if self._closed:
                raise DiskError(f"{action}: the store is closed")
            with typed(action):
                yield self._index

    # Opening.

    def _recover(self, session: str) -> int:
        """Fills the index from the headers of finished files, in the order in which they were written, and removes all
        other files, but those that this session's writers have under way. Returns the new epoch."""
        # An index on disk is of an earlier version, and has tokens.
        for old in [*self.root.glob("index*"), *self.root.glob(f".*{UNFINISHED}")]:
            self._io.unlink(old)
        found: list[tuple[int, float, str, SegmentFile, SegmentRecord]] = []
        earlier = 0
        for file in segment_files(self.root):
            name = file.path.name
            if name.endswith(FINISHED):
                record = self._record_of(file)
                if record is not None:
                    found.append((record.epoch, record.written_s, name, file, record))
                    continue
                self._totals["corrupt"] += 1
            elif name.endswith(UNFINISHED) and session_of(name) == session:
                continue
            earlier += name.endswith(EARLIER)
            self._io.unlink(file.path)
        if earlier:
            logger.warning("%d files of KV in an earlier layout were removed; what they had is computed again", earlier)
        for *_, file, record in sorted(found, key=lambda item: item[:3]):
            self._used = max(self._used, file.used)
            self._index.place(record, file.used, certain=False)
        self._remove_lonely()
        self._purge_if_possible()
        return max((epoch for epoch, *_ in found), default=0) + 1 + secrets.randbelow(_EPOCH_JUMP)

    def _record_of(self, file: SegmentFile) -> SegmentRecord | None:
        try:
            record = read_header(file.path, self.key).record
        except CorruptSegment:
            return None
        except OSError as error:
            if error.errno not in BAD_FILE:
                raise
            return None
        return record if record.model == file.model else None

    # What writers say.

    def commit(
        self,
        record: SegmentRecord,
        without: Mapping[bytes, Collection[bytes]] | None = None,
        heirs: Mapping[bytes, Collection[bytes]] | None = None,
    ) -> SegmentPlacement:
        """Commits a finished segment. Idempotent.

        `touch` the chain afterwards, so that its first blocks count as used later than its last ones.

        Args:
            without: by entry id, tags of owners that may not have the entry. An entry without other owners is refused:
                it is never served, and the next `compact` erases it.
            heirs: by entry id, tags of further owners, which the record does not name.

        Returns:
            Which ids this segment serves, which other segments serve, which are refused, and which are gone, by
            replacement or eviction. A segment larger than its tenant's limit is refused as a whole.

        Raises:
            StaleEpoch: the store was reopened since the writer asked for its epoch. The file is removed.
            InvalidRecord: the file is absent or differs from the record. It is removed.
            DiskFull, DiskError: nothing is committed.
        """
        record = SegmentRecord.from_wire(record.to_wire())
        if session_of(record.name) is None or not record.name.endswith(FINISHED):
            raise InvalidRecord(f"{record.name!r:.80} is not the name of a segment")
        path = model_folder(self.root, record.model) / record.name
        with self._held("committing a segment") as index:
            known = index.segments.get(record.name)
            if known is not None:
                return self._placed_before(known, record)
            try:
                self._verify(record, path)
                most = self._bytes_max.get(record.tenant)
                if most is not None and record.nbytes > most:
                    self._unlink_if_possible(path)
                    return SegmentPlacement(refused=[entry.id for entry in record.entries])
            except Exception:
                self._unlink_if_possible(path)
                raise
            placed = index.place(record, self._next_use(), certain=True, without=without, heirs=heirs)
            segment = index.segments[record.name]
            self._touched.add(segment)
            self._totals["dropped"] += len(placed.dropped)
            self._totals["refused"] += len(placed.refused)
            self._remove_lonely()
            # First: a tenant over its limit must not evict other tenants.
            placed.retracted.extend(self._keep_limits(segment))
            with suppress(OSError):
                placed.retracted.extend(self._evict(self._budget()))
            self._purge_if_possible()
            kept = set(placed.kept)
            self._changes.note([each.id for each in record.entries if each.id in kept], placed.retracted)
            return placed

    def _verify(self, record: SegmentRecord, path: Path) -> None:
        """Checks that a new segment's file matches its record; raises as `commit`."""
        if record.epoch != self.epoch:
            raise StaleEpoch(f"the segment was written in epoch {record.epoch}, this is {self.epoch}")
        # The file exists already, so the free space excludes it.
        budget = min(self._limits.bytes_max, self._budget() + record.nbytes)
        if record.nbytes > budget:
            raise DiskFull(f"a segment of {record.nbytes} bytes is over the budget of {max(0, budget)}")
        try:
            written = read_header(path, self.key).record
        except FileNotFoundError:
            raise InvalidRecord(f"{record.name} is not there") from None
        except CorruptSegment as error:
            self._totals["corrupt"] += 1
            raise InvalidRecord(f"{record.name}: {error.message}") from None
        if written.to_wire() != record.to_wire():
            raise InvalidRecord(f"{record.name} is another segment than announced")

    def _placed_before(self, segment: Segment, record: SegmentRecord) -> SegmentPlacement:
        """Returns the current placement of a segment that is in the index already."""
        live, placed = {row.record.id for row in segment.live}, SegmentPlacement()
        for entry in record.entries:
            if entry.id in live:
                placed.kept.append(entry.id)
            else:
                (placed.dropped if self._index.live(entry.id) else placed.refused).append(entry.id)
        return placed

    # What readers ask.

    def locate(self, model: bytes, ids: Sequence[bytes]) -> list[Location | None]:
        """Returns each entry's location, None if it is absent or of another model. Compare tokens after a hit."""
        with self._held("locating entries") as index:
            rows = [index.live(entry) for entry in ids]
            return [row.location if row is not None and row.segment.model == model else None for row in rows]

    def tails(self, model: bytes, parent: bytes, tokens: Sequence[int], count_max: int = 8) -> list[TailMatch]:
        """Returns tails after `parent` that share a prefix with `tokens`, the longest shared prefix first.

        A model whose layers need a snapshot can use only tails of which every token matches.
        """
        wanted = np.frombuffer(pack_tokens(tokens), dtype="<u4")
        with self._held("looking for tails") as index:
            rows = [row.location for row in index.live_tails(parent) if row.segment.model == model]
        matches = [TailMatch(location, _common(location.tokens, wanted)) for location in rows]
        # Among equal prefixes the shortest tail first: it is read faster.
        matches.sort(key=lambda match: (-match.tokens, len(match.location.tokens), match.location.id))
        return [match for match in matches if match.tokens][:count_max]

    def records(self, ids: Sequence[bytes]) -> list[EntryRecord]:
        """Returns the records of those entries that are present."""
        with self._held("looking entries up") as index:
            return [row.record for entry in ids if (row := index.live(entry)) is not None]

    def pin(self, locations: Iterable[Location], lease_s: float) -> Pin:
        """Keeps the files for a reader, for `lease_s` seconds (at most `lease_s_max`) or until `unpin`.

        Raises:
            DiskError: there are `leases_max` leases already.
        """
        wanted = list(locations)
        with self._held("pinning files") as index:
            present = {location.name for location in wanted} & index.segments.keys()
            lease = self._leases.take(present, self._clock(), min(lease_s, self._limits.lease_s_max))
            if lease is None:
                raise DiskError(f"there are {self._limits.leases_max} leases on files already")
            return Pin(lease, [location.id for location in wanted if location.name not in present])

    def unpin(self, lease: str) -> bool:
        """Ends a lease. Returns whether it was still held."""
        with self._held("unpinning files"):
            held = self._leases.give_back(lease, self._clock())
            self._changes.note([], self._keep_limits())
            self._purge_if_possible()
            return held

    def report(self, failures: Iterable[Failure]) -> list[bytes]:
        """Drops entries that a reader could not read, so that a new copy can replace them. Returns their ids."""
        with self._held("dropping unreadable entries") as index:
            gone = []
            for failure in failures:
                row = index.live(failure.location.id)
                if row is not None and row.location == failure.location:
                    self._totals["missing" if failure.missing else "corrupt"] += 1
                    index.kill(row)
                    row.segment.erase = True
                    gone.append(row.record.id)
            self._remove_lonely()
            self._purge_if_possible()
            return self._changes.note([], gone)

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        """Marks a chain as used, its first block as the latest, so that eviction takes the chain's end first.

        Args:
            ids: of the chain; absent ones are skipped.
            owner: the agent whose memory has all of their tokens, "" for none. Do not name an owner for a tail of which
                only the first tokens were used.
        """
        tag = owner_tag(self.key, owner)
        with self._held("touching entries") as index:
            for entry in reversed(ids):
                if (row := index.live(entry)) is not None:
                    self._use(row.segment)
                    if tag != NOBODY:
                        add_owners(row, [tag])

    def changes(self, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Returns the ids added and removed since the last call; if `whole`, all present ids and no removed ones."""
        with self._held("telling what changed") as index:
            changed = self._changes.take()
            return (index.live_ids(), []) if whole else changed

    # Owners.

    def give(
        self, owner: str, ids: Iterable[bytes], parents: Iterable[bytes], has: Callable[[EntryRecord], bool]
    ) -> int:
        """Adds an owner to entries.

        Args:
            ids: of blocks.
            parents: of tails.
            has: selects the owner's entries among them; called with the lock held.

        Returns:
            To how many the owner was added.
        """
        tag = owner_tag(self.key, owner)
        with self._held("adding an owner") as index:
            rows = [row for entry in ids if (row := index.live(entry)) is not None]
            rows += [row for parent in parents for row in index.live_tails(parent)]
            unowned = [row for row in rows if tag not in row.record.owners and has(row.record)]
            for row in unowned:
                add_owners(row, [tag])
            return len(unowned)

    def owners(self) -> set[bytes]:
        """Returns the tags of all owners."""
        with self._held("listing owners") as index:
            return {tag for row in index.all_rows() for tag in row.record.owners}

    def uncertain(self) -> Iterator[EntryRecord]:
        """Yields entries with possibly incomplete owners: those of an earlier opening, whose files name only the
        first."""
        with self._held("looking for uncertain owners") as index:
            records = [row.record for row in index.all_rows() if row.live and not row.certain]
        yield from records

    def settle(self, owners: Mapping[bytes, Sequence[bytes]]) -> int:
        """Sets the complete owner tags of `uncertain` entries, by id. Returns how many entries that settled."""
        with self._held("settling owners") as index:
            rows = [(row, tags) for entry, tags in owners.items() if (row := index.live(entry)) is not None]
            unsettled = [(row, tags) for row, tags in rows if tags and not row.certain]
            for row, tags in unsettled:
                set_owners(row, tags)
            return len(unsettled)

    def forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        """Removes an owner from all entries, and erases entries without other owners from the disk.

        Files with a lease are unlinked when it ends, by `compact` at the latest. All `uncertain` entries are erased,
        whoever is forgotten. A segment committed after this call counts, so the caller must stop the owner's writers
        first, and must forget the owner again if the process ends before this call does.

        Args:
            keep: selects entries that the owner keeps; called with the lock held.

        Returns:
            The ids that are gone.

        Raises:
            InvalidRecord: `owner` is "".
            DiskFull, DiskError: not all bytes are gone; `compact` tries again.
        """
        if not owner:
            raise InvalidRecord("an owner to forget has a name")
        with self._maintenance:
            with self._held("forgetting an owner") as index:
                gone = self._forget(index, owner_tag(self.key, owner), keep)
            self._compact(erase_only=True)
            return gone

    def _forget(self, index: Index, tag: bytes, keep: Callable[[EntryRecord], bool] | None) -> list[bytes]:
        gone: dict[bytes, None] = {}
        for row in index.owned(tag):
            if keep is not None and keep(row.record):
                continue
            live = row.live
            if not index.remove_owner(row, tag):
                row.segment.erase = True
                gone.update({row.record.id: None} if live else {})
        for row in index.all_rows():
            # Second copies of what is gone.
            if not row.live and row.record.id in gone:
                row.segment.erase = True
        self._remove_lonely()
        self._totals["forgotten"] += len(gone)
        return self._changes.note([], list(gone))

    # Limits.

    def limit(self, tenant: str, bytes_max: int | None) -> list[bytes]:
        """Limits a tenant's KV, None for no limit. The limit is not stored.

        Evicts what is over the limit, the least recently used files first. Files with a lease go when it ends. Cheap if
        the tenant is within the limit.

        Returns:
            The ids that are gone.
        """
        tag = tenant_tag(self.key, tenant)
        with self._held("limiting a tenant's KV"):
            self._bytes_max.pop(tag, None)
            if bytes_max is not None:
                self._bytes_max[tag] = bytes_max
            gone = self._changes.note([], self._keep_limits())
            self._purge_if_possible()
            return gone

    def nbytes_of(self, tenant: str) -> int:
        """Returns the bytes of a tenant's files; those of the owner tenant are not counted."""
        with self._held("counting a tenant's KV") as index:
            return index.tenant_bytes[tenant_tag(self.key, tenant)]

    def evict(self, bytes_max: int | None = None) -> list[bytes]:
        """Removes the least recently used files without a lease until the rest fits.

        Args:
            bytes_max: instead of what the device and the limits allow now; 0 removes everything.

        Returns:
            The ids that are gone.
        """
        with self._held("evicting files"):
            gone = self._changes.note([], self._evict(self._budget() if bytes_max is None else bytes_max))
            self._purge()
            return gone

    def keep_reserve(self) -> None:
        """Evicts KV if other programs have filled the device into the reserve. Cheap otherwise."""
        with self._held("keeping the reserve"):
            # Expired leases may have freed files of tenants over their limit.
            self._changes.note([], self._keep_limits())
            if self._io.space(self.root).free < self._reserve_bytes:
                self._changes.note([], self._evict(self._budget()))
            self._purge()

    def make_room(self) -> bool:
        """Evicts KV down to the reserve, for writes that cannot be recomputed: as many bytes as the reserve lacks, or a
        whole reserve if it lacks none. Returns whether that freed any bytes."""
        with self._held("making room") as index:
            before, reserve = self._io.space(self.root).free, self._reserve_bytes
            wanted = reserve - before if before < reserve else max(1, reserve)
            self._changes.note([], self._evict(max(0, index.nbytes - wanted)))
            self._purge_if_possible()
            return self._io.space(self.root).free > before

    @property
    def _reserve_bytes(self) -> int:
        """Bytes that KV leaves free for writes that cannot be recomputed."""
        return min(self._limits.reserve_bytes, self._io.space(self.root).total // _RESERVE_SHARE)

    def _budget(self) -> int:
        """Returns the bytes that all segment files may take now, given the device's free space and the reserve.
        Negative if the reserve is not free even without KV."""
        held = self._index.nbytes + sum(self._doomed.values())
        return min(self._limits.bytes_max, held + self._io.space(self.root).free - self._reserve_bytes)

    def _evict(self, bytes_max: int) -> list[bytes]:
        """Removes the least recently used unpinned files until the rest fits. Returns the ids that are gone."""
        index, limits = self._index, self._limits

        def fits() -> bool:
            return (
                index.nbytes <= bytes_max and len(index.segments) <= limits.files_max and index.rows <= limits.rows_max
            )

        gone: list[bytes] = []
        if not fits():
            for segment in self._unpinned():
                gone += self._remove(segment)
                if fits():
                    break
            self._totals["evicted"] += len(gone)
        return gone

    def _keep_limits(self, new: Segment | None = None) -> list[bytes]:
        """Removes unpinned files of tenants over their limits, the least recently used first. Cheap if none is over.
        Returns the ids that are gone.

        Args:
            new: a segment that has just come. The segments that it follows are marked as used later than it, because it
                can only be found through them.
        """
        index = self._index
        over = {tag: most for tag, most in self._bytes_max.items() if index.tenant_bytes[tag] > most}
        if not over:
            return []
        seen: set[Segment] = set()
        while new is not None and new not in seen:
            seen.add(new)
            if (new := index.before(new)) is not None and new not in seen:
                self._use(new)
        gone: list[bytes] = []
        for segment in self._unpinned():
            if segment.tenant in over and index.tenant_bytes[segment.tenant] > over[segment.tenant]:
                gone += self._remove(segment)
        self._totals["evicted"] += len(gone)
        return gone

    def _unpinned(self) -> list[Segment]:
        """Returns the files without a lease, the least recently used first."""
        pinned = self._leases.held(self._clock())
        files = [segment for segment in self._index.segments.values() if segment.name not in pinned]
        return sorted(files, key=lambda segment: (segment.used, segment.number))

    def _next_use(self) -> int:
        # Clocks can be set back.
        self._used = max(self._used + 1, time.time_ns())
        return self._used

    def _use(self, segment: Segment) -> None:
        segment.used = self._next_use()
        self._touched.add(segment)

    def _note_use(self) -> None:
        """Writes the order of use down, as the files' times. A failure loses only that."""
        touched, self._touched = self._touched, set()
        for segment in touched:
            if segment.name in self._index.segments:
                with suppress(OSError):
                    os.utime(self._path(segment), ns=(segment.used, segment.used))

    # Removing files.

    def _path(self, segment: Segment) -> Path:
        return model_folder(self.root, segment.model) / segment.name

    def _remove(self, segment: Segment) -> list[bytes]:
        """Removes a segment; its file is unlinked by `_purge`. Returns the ids that are gone."""
        self._doomed[self._path(segment)] = segment.nbytes
        return self._index.remove_segment(segment)

    def _remove_lonely(self) -> None:
        """Removes segments without live entries."""
        for segment in self._index.lonely():
            self._remove(segment)

    def _purge(self) -> None:
        """Unlinks the doomed files without a lease. Raises the first error after trying all."""
        pinned = self._leases.held(self._clock())
        folders: set[Path] = set()
        failed: OSError | None = None
        for path in [path for path in self._doomed if path.name not in pinned]:
            try:
                self._io.unlink(path)
                folders.add(path.parent)
                del self._doomed[path]
            except OSError as error:
                failed = failed or error
        for folder in folders:
            if folder.is_dir():
                self._io.sync_folder(folder)
        if failed is not None:
            raise failed

    def _purge_if_possible(self) -> None:
        """Runs `_purge`; a failure is counted and retried later."""
        try:
            self._purge()
        except OSError:
            self._totals["failed_removals"] += 1

    def _unlink_if_possible(self, path: Path) -> None:
        """Removes a file that is not in the index; `compact` removes leftovers."""
        with suppress(OSError):
            self._io.unlink(path)

    # Rewriting.

    def compact(self) -> list[bytes]:
        """Erases forgotten entries, rewrites files of mostly dead entries, and removes uncommitted files.

        Call it at least once a minute. Returns ids that turned out to be unreadable.
        """
        with self._maintenance:
            lost = self._compact(erase_only=False)
            self._sweep()
            return lost

    def _compact(self, *, erase_only: bool) -> list[bytes]:
        with self._held("compacting") as index:
            self._note_use()
            names = [segment.name for segment in index.sparse() if segment.erase or not erase_only]
        lost: list[bytes] = []
        for name in names:
            lost.extend(self._rewrite(name))
        with self._held("unlinking files"):
            self._purge()
        return lost

    def _rewrite(self, name: str) -> list[bytes]:
        """Replaces a segment by one with its live entries only. Copies the data without holding the lock."""
        lost: list[bytes] = []
        for _ in range(_ROUNDS_MAX):
            with self._held("compacting") as index:
                segment = index.segments.get(name)
                if segment is None:
                    break
                rows = segment.live
                copies = [(row, row.location, row.record) for row in rows]
            read = read_entries(self.root, self.key, [location for _, location, _ in copies])
            good = [
                (row, record, stored)
                for (row, _, record), stored in zip(copies, read, strict=True)
                if isinstance(stored, StoredEntry)
            ]
            try:
                written = self._write_again(good)
            except DiskFull:
                if not segment.erase:
                    raise
                # Erasing has precedence, and the file's other entries can be recomputed.
                good, written = [], None
            failures = [stored for stored in read if isinstance(stored, Failure)]
            with self._held("compacting"):
                lost += self._replace(segment, [row for row, _, _ in good], written, failures)
                again = self._index.segments.get(written.name) if written is not None else None
                if again is None or not again.erase:
                    break
                name = again.name
        return lost

    def _write_again(self, good: Sequence[tuple[IndexRow, EntryRecord, StoredEntry]]) -> SegmentRecord | None:
        if not good:
            return None
        entries = [
            Entry(
                id=record.id,
                parent=record.parent,
                tokens=unpack_tokens(record.tokens),
                parts=stored.parts,
                tail=record.tail,
                window_from=record.window_from,
                snapshot=record.snapshot,
            )
            for _, record, stored in good
        ]
        return write_tagged(
            self.root,
            self.key,
            good[0][2].location.model,
            entries,
            [record.owners for _, record, _ in good],
            session=STORE_SESSION,
            epoch=self.epoch,
            now_s=self._wall_clock(),
            meta=good[0][2].meta,
            io=self._io,
        )

    def _replace(
        self, old: Segment, rows: Sequence[IndexRow], record: SegmentRecord | None, failures: Sequence[Failure]
    ) -> list[bytes]:
        """Replaces a segment by its rewritten file. What died meanwhile is dead in the new one. Returns the ids that
        are gone."""
        index = self._index
        if old.name not in index.segments:
            if record is not None:
                self._unlink_if_possible(model_folder(self.root, record.model) / record.name)
            return []
        for failure in failures:
            if old.rows[failure.location.slot].live:
                self._totals["missing" if failure.missing else "corrupt"] += 1
        before = [(row.live, row.certain, row.record) for row in rows]
        gone = set(self._remove(old))
        if record is not None:
            segment = index.add_segment(record, old.used)
            self._touched.add(segment)
            for slot, (live, certain, entry) in enumerate(before):
                index.add(IndexRow(segment, slot, live, certain, entry))
                gone.discard(entry.id)
                # Dropped while the file was written: the next round erases it.
                segment.erase |= not live
        self._remove_lonely()
        return self._changes.note([], sorted(gone))

    def _sweep(self) -> None:
        """Removes files that stayed uncommitted for too long, and leftovers of failed rewritings."""
        with typed("looking for uncommitted files"):
            files = list(segment_files(self.root))
        now = self._clock()
        with self._held("sweeping") as index:
            seen: dict[Path, float] = {}
            for file in files:
                name = file.path.name
                if file.path in self._doomed or name in index.segments:
                    continue
                since = self._in_flight.get(file.path, now)
                if session_of(name) == STORE_SESSION or now - since >= self._limits.in_flight_s:
                    self._io.unlink(file.path)
                else:
                    seen[file.path] = since
            self._in_flight = seen

    # For metrics and tests.

    def stats(self) -> dict[str, int]:
        """Returns counters (`…_total`, since the opening) and sizes: bytes, files, entries, blocks, tails, and so on.
        `bytes_max` is what segments may take now, `device_free_bytes` what is free on the device."""
        with self._held("counting") as index:
            live = [row for row in index.all_rows() if row.live]
            tails = sum(row.record.tail for row in live)
            self._leases.expire(self._clock())
            return {f"{name}_total": count for name, count in self._totals.items()} | {
                "bytes": index.nbytes + sum(self._doomed.values()),
                "bytes_max": max(0, self._budget()),
                "device_free_bytes": self._io.space(self.root).free,
                "files": len(index.segments) + len(self._doomed),
                "entries": len(live),
                "blocks": len(live) - tails,
                "tails": tails,
                "dead_entries": index.rows - len(live),
                "doomed_files": len(self._doomed),
                "leases": len(self._leases),
                "epoch": self.epoch,
            }

    def check(self, *, payload: bool = False) -> None:
        """Raises AssertionError if index and files disagree.

        Args:
            payload: also read and verify every live entry.
        """
        with self._maintenance, self._held("checking") as index:
            index.check()
            files = {file.path: file.nbytes for file in segment_files(self.root)}
            for segment in index.segments.values():
                path = self._path(segment)
                assert files.pop(path, None) == segment.nbytes, f"{path} is not as the index says"
                entries = read_header(path, self.key).record.entries
                assert all(row.record == entries[row.slot] for row in segment.rows), f"{path} has other entries"
                if payload:
                    read = read_entries(self.root, self.key, [row.location for row in segment.live])
                    assert not any(isinstance(stored, Failure) for stored in read), f"{path} does not verify"
            strays = {path for path in files if session_of(path.name) == STORE_SESSION} - self._doomed.keys()
            assert not strays, f"the index lacks {strays}"


def _common(packed: bytes, wanted: np.ndarray) -> int:
    """Returns how many first tokens are equal; `wanted` is `(tokens,) uint32`."""
    tokens = np.frombuffer(packed, dtype="<u4")[: len(wanted)]
    different = np.flatnonzero(tokens != wanted[: len(tokens)])
    return int(different[0]) if len(different) else len(tokens)
