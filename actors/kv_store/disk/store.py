"""A node's KV on disk: which segments are committed, where an entry is, what is evicted.

Replicas write and read the segment files. The store keeps the index, in memory, and reads a file's data only to rewrite
it without forgotten entries. The files are all that is kept: their footers are read at every start, so that nothing
else can be damaged or disagree with them. What footers lack comes from elsewhere after a start: owners that were added
later from the agents' branches (`uncertain`, `settle`), forgotten agents from their tombstones, and the order of use
from the files' times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....cluster.errors import DiskError, DiskFull, InvalidRecord
from ...protocol.entries import (
    NOBODY,
    EntryLayout,
    EntryRecord,
    Failure,
    Location,
    SegmentRecord,
    owner_tag,
    pack_tokens,
    tenant_tag,
)
from .changes import Changes, SegmentPlacement
from .folder import make_folders, take_lock, typed
from .index import add_owners
from .io import DiskIO
from .segment_reader import StoredEntry, read_entries
from .segments import (
    FINISHED,
    STORE_SESSION,
    SegmentWriter,
    checked_session,
    model_folder,
    segment_files,
    session_of,
)
from .shelf import DiskLimits, Shelf


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
        self.root, self.session = root, session
        self._clock, self._wall_clock, self._io = clock, wall_clock, io or DiskIO()
        self._lock = threading.Lock()
        # Only one thread rewrites segments; taken before `_lock`, never inside it.
        self._maintenance = threading.Lock()
        self._changes = Changes()
        # Uncommitted files, and when they were first seen.
        self._in_flight: dict[Path, float] = {}
        self._closed = False
        with typed(f"opening {root}"):
            make_folders(root, self._io)
            self._locked = take_lock(root / "lock", lock_wait_s)
            try:
                self._shelf = Shelf(root, session, limits, self._io, clock)
            except BaseException:
                self._locked.release()
                raise
        self.key, self.epoch = self._shelf.key, self._shelf.epoch

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the folder. Idempotent."""
        with self._maintenance, self._lock:
            if not self._closed:
                self._closed = True
                self._shelf.note_use()
                self._locked.release()

    @contextmanager
    def _held(self, action: str) -> Iterator[Shelf]:
        """Holds the lock and translates errors."""
        with self._lock:
            if self._closed:
                raise DiskError(f"{action}: the store is closed")
            with typed(action):
                yield self._shelf

    def writer(self, model: bytes, layout: EntryLayout, session: str = "") -> SegmentWriter:
        """Begins a segment of the current session, or of another one. Raises as `SegmentWriter`."""
        facts = {"epoch": self.epoch, "now_s": self._wall_clock(), "io": self._io}
        return SegmentWriter(self.root, self.key, model, layout, session=session or self.session, **facts)

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
        with self._held("committing a segment") as shelf:
            if record.name in shelf.index.segments:
                return shelf.placed_before(record)
            try:
                shelf.verify(record, path)
                most = shelf.bytes_max.get(record.tenant)
                if most is not None and record.nbytes > most:
                    shelf.unlink_if_possible(path)
                    return SegmentPlacement(refused=[entry.id for entry in record.entries])
            except Exception:
                shelf.unlink_if_possible(path)
                raise
            placed = shelf.index.place(record, shelf.next_use(), certain=True, without=without, heirs=heirs)
            segment = shelf.index.segments[record.name]
            shelf.touched.add(segment)
            shelf.totals["dropped"] += len(placed.dropped)
            shelf.totals["refused"] += len(placed.refused)
            shelf.remove_lonely()
            # First: a tenant over its limit must not evict other tenants.
            placed.retracted.extend(shelf.keep_limits(segment))
            with suppress(OSError):
                placed.retracted.extend(shelf.evict(shelf.budget()))
            shelf.purge_if_possible()
            kept = set(placed.kept)
            self._changes.note([each.id for each in record.entries if each.id in kept], placed.retracted)
            return placed

    def locate(self, model: bytes, ids: Sequence[bytes]) -> list[Location | None]:
        """Returns each entry's location, None if it is absent or of another model. Compare tokens after a hit."""
        with self._held("locating entries") as shelf:
            rows = [shelf.index.live(entry) for entry in ids]
            return [row.location if row is not None and row.segment.model == model else None for row in rows]

    def tails(self, model: bytes, parent: bytes, tokens: Sequence[int], count_max: int = 8) -> list[TailMatch]:
        """Returns tails after `parent` that share a prefix with `tokens`, the longest shared prefix first.

        A model whose layers need a snapshot can use only tails of which every token matches.
        """
        wanted = np.frombuffer(pack_tokens(tokens), dtype="<u4")
        with self._held("looking for tails") as shelf:
            rows = [row.location for row in shelf.index.live_tails(parent) if row.segment.model == model]
        matches = [TailMatch(location, _common(location.tokens, wanted)) for location in rows]
        # Among equal prefixes the shortest tail first: it is read faster.
        matches.sort(key=lambda match: (-match.tokens, len(match.location.tokens), match.location.id))
        return [match for match in matches if match.tokens][:count_max]

    def records(self, ids: Sequence[bytes]) -> list[EntryRecord]:
        """Returns the records of those entries that are present."""
        with self._held("looking entries up") as shelf:
            return [row.record for entry in ids if (row := shelf.index.live(entry)) is not None]

    def pin(self, locations: Iterable[Location], lease_s: float, old: str = "") -> str:
        """Keeps the files for a reader, for `lease_s` seconds (at most `lease_s_max`) or until `unpin`. Files that no
        longer exist are not kept.

        Args:
            old: a lease that ends now; its files are kept too.

        Returns:
            The lease.

        Raises:
            DiskError: there are `leases_max` leases already.
        """
        names = {location.name for location in locations}
        with self._held("pinning files") as shelf:
            present = names & shelf.index.segments.keys()
            lease = shelf.leases.take(present, self._clock(), min(lease_s, shelf.limits.lease_s_max), old)
            if lease is None:
                raise DiskError(f"there are {shelf.limits.leases_max} leases on files already")
            return lease

    def unpin(self, lease: str) -> bool:
        """Ends a lease. Returns whether it was still held."""
        with self._held("unpinning files") as shelf:
            held = shelf.leases.give_back(lease, self._clock())
            self._changes.note([], shelf.keep_limits())
            shelf.purge_if_possible()
            return held

    def report(self, failures: Iterable[Failure]) -> list[bytes]:
        """Drops entries that a reader could not read, so that a new copy can replace them. Returns their ids."""
        with self._held("dropping unreadable entries") as shelf:
            gone = []
            for failure in failures:
                row = shelf.index.live(failure.location.id)
                if row is not None and row.location == failure.location:
                    shelf.totals["missing" if failure.missing else "corrupt"] += 1
                    shelf.index.kill(row)
                    row.segment.erase = True
                    gone.append(row.record.id)
            shelf.remove_lonely()
            shelf.purge_if_possible()
            return self._changes.note([], gone)

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        """Marks a chain as used, its first block as the latest, so that eviction takes the chain's end first.

        Args:
            ids: of the chain; absent ones are skipped.
            owner: the agent whose memory has all of their tokens, "" for none. Do not name an owner for a tail of which
                only the first tokens were used.
        """
        tag = owner_tag(self.key, owner)
        with self._held("touching entries") as shelf:
            for entry in reversed(ids):
                if (row := shelf.index.live(entry)) is not None:
                    shelf.use(row.segment)
                    if tag != NOBODY:
                        add_owners(row, [tag])

    def changes(self, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Returns the ids added and removed since the last call; if `whole`, all present ids and no removed ones."""
        with self._held("telling what changed") as shelf:
            changed = self._changes.take()
            return (shelf.index.live_ids(), []) if whole else changed

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
        with self._held("adding an owner") as shelf:
            rows = [row for entry in ids if (row := shelf.index.live(entry)) is not None]
            rows += [row for parent in parents for row in shelf.index.live_tails(parent)]
            unowned = [row for row in rows if tag not in row.record.owners and has(row.record)]
            for row in unowned:
                add_owners(row, [tag])
            return len(unowned)

    def owners(self) -> set[bytes]:
        """Returns the tags of all owners."""
        with self._held("listing owners") as shelf:
            return {tag for row in shelf.index.all_rows() for tag in row.record.owners}

    def models(self, owner: str = "") -> list[bytes]:
        """Returns the ids of the models that have entries, sorted; with an owner only of those that it has."""
        with self._held("listing models") as shelf:
            if not owner:
                return sorted({segment.model for segment in shelf.index.segments.values()})
            return sorted({row.segment.model for row in shelf.index.owned(owner_tag(self.key, owner))})

    def owned(self, owner: str) -> frozenset[bytes]:
        """Returns the ids of the entries that an owner has."""
        tag = owner_tag(self.key, owner)
        with self._held("listing an owner's entries") as shelf:
            return frozenset(row.record.id for row in shelf.index.owned(tag))

    def uncertain(self) -> Iterator[EntryRecord]:
        """Yields entries with possibly incomplete owners: those of an earlier opening, whose files do not name who
        came later."""
        with self._held("looking for uncertain owners") as shelf:
            records = [row.record for row in shelf.index.all_rows() if row.live and not row.certain]
        yield from records

    def settle(self, owners: Mapping[bytes, Sequence[bytes]]) -> int:
        """Adds further owners to `uncertain` entries, as tags by id. Returns how many entries that settled."""
        with self._held("settling owners") as shelf:
            rows = [(row, tags) for entry, tags in owners.items() if (row := shelf.index.live(entry)) is not None]
            unsettled = [(row, tags) for row, tags in rows if tags and not row.certain]
            for row, tags in unsettled:
                add_owners(row, tags)
                row.certain = True
            return len(unsettled)

    def forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        """Removes an owner from all entries, and erases entries without other owners from the disk. No file names the
        owner afterwards.

        Files with a lease are unlinked when it ends, by `compact` at the latest. A segment committed after this call
        counts, so the caller must stop the owner's writers first, and must forget the owner again if the process ends
        before this call does.

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
            with self._held("forgetting an owner") as shelf:
                gone = self._changes.note([], shelf.forget(owner_tag(self.key, owner), keep))
            self._compact(erase_only=True)
            return gone

    def limit(self, tenant: str, bytes_max: int | None) -> list[bytes]:
        """Limits a tenant's KV, None for no limit. The limit is not stored.

        Evicts what is over the limit, the least recently used files first. Files with a lease go when it ends. Cheap if
        the tenant is within the limit.

        Returns:
            The ids that are gone.
        """
        tag = tenant_tag(self.key, tenant)
        with self._held("limiting a tenant's KV") as shelf:
            shelf.bytes_max.pop(tag, None)
            if bytes_max is not None:
                shelf.bytes_max[tag] = bytes_max
            gone = self._changes.note([], shelf.keep_limits())
            shelf.purge_if_possible()
            return gone

    def keep_reserve(self) -> None:
        """Evicts KV if other programs have filled the device into the reserve. Cheap otherwise."""
        with self._held("keeping the reserve") as shelf:
            # Expired leases may have freed files of tenants over their limit.
            self._changes.note([], shelf.keep_limits())
            if shelf.io.space(self.root).free < shelf.reserve_bytes:
                self._changes.note([], shelf.evict(shelf.budget()))
            shelf.purge()

    def make_room(self) -> bool:
        """Evicts KV down to the reserve, for writes that cannot be recomputed: as many bytes as the reserve lacks, or a
        whole reserve if it lacks none. Returns whether that freed any bytes."""
        with self._held("making room") as shelf:
            before, reserve = shelf.io.space(self.root).free, shelf.reserve_bytes
            wanted = reserve - before if before < reserve else max(1, reserve)
            self._changes.note([], shelf.evict(max(0, shelf.index.nbytes - wanted)))
            shelf.purge_if_possible()
            return shelf.io.space(self.root).free > before

    def compact(self) -> list[bytes]:
        """Erases forgotten entries, rewrites files of mostly dead entries, and removes uncommitted files.

        Call it at least once a minute. Returns ids that turned out to be unreadable.
        """
        with self._maintenance:
            lost = self._compact(erase_only=False)
            self._sweep()
            return lost

    def _compact(self, *, erase_only: bool) -> list[bytes]:
        with self._held("compacting") as shelf:
            shelf.note_use()
            names = [segment.name for segment in shelf.index.sparse() if segment.erase or not erase_only]
        lost: list[bytes] = []
        for name in names:
            lost.extend(self._rewrite(name))
        with self._held("unlinking files") as shelf:
            shelf.purge()
        return lost

    def _rewrite(self, name: str) -> list[bytes]:
        """Replaces a segment by one with its live entries only. Copies the data without holding the lock; what is
        dropped meanwhile is erased by the next call of `compact`."""
        with self._held("compacting") as shelf:
            segment = shelf.index.segments.get(name)
            if segment is None:
                return []
            copies = [(row, row.location, row.record) for row in segment.live]
        read = read_entries(self.root, self.key, [location for _, location, _ in copies])
        good = [
            (row, record, stored)
            for (row, _, record), stored in zip(copies, read, strict=True)
            if isinstance(stored, StoredEntry)
        ]
        try:
            written = self._write([(record, stored) for _, record, stored in good])
        except DiskFull:
            if not segment.erase:
                raise
            # Erasing has precedence, and the file's other entries can be recomputed.
            good, written = [], None
        failures = [stored for stored in read if isinstance(stored, Failure)]
        with self._held("compacting") as shelf:
            return self._changes.note([], shelf.replace(segment, [row for row, _, _ in good], written, failures))

    def _write(self, entries: Sequence[tuple[EntryRecord, StoredEntry]]) -> SegmentRecord | None:
        """Writes entries of one segment into a new file; None if there are none."""
        if not entries:
            return None
        first = entries[0][1]
        with self.writer(first.location.model, first.layout, STORE_SESSION) as writer:
            for record, stored in entries:
                writer.write(stored.data.data)
                writer.keep(record)
            return writer.finish()

    def _sweep(self) -> None:
        """Removes files that stayed uncommitted for too long, and leftovers of failed rewritings."""
        with typed("looking for uncommitted files"):
            files = list(segment_files(self.root))
        now = self._clock()
        with self._held("sweeping") as shelf:
            seen: dict[Path, float] = {}
            for file in files:
                name = file.path.name
                if file.path in shelf.doomed or name in shelf.index.segments:
                    continue
                since = self._in_flight.get(file.path, now)
                if session_of(name) == STORE_SESSION or now - since >= shelf.limits.in_flight_s:
                    shelf.io.unlink(file.path)
                else:
                    seen[file.path] = since
            self._in_flight = seen

    def stats(self) -> dict[str, int]:
        """Returns counters (`…_total`, since the opening) and sizes: bytes, files, entries, blocks, tails, and so on.
        `bytes_max` is what segments may take now, `device_free_bytes` what is free on the device."""
        with self._held("counting") as shelf:
            return shelf.stats()

    def check(self, *, payload: bool = False) -> None:
        """Raises AssertionError if index and files disagree.

        Args:
            payload: also read and verify every live entry.
        """
        with self._maintenance, self._held("checking") as shelf:
            shelf.check(payload=payload)


def _common(packed: bytes, wanted: np.ndarray) -> int:
    """Returns how many first tokens are equal; `wanted` is `(tokens,) uint32`."""
    tokens = np.frombuffer(packed, dtype="<u4")[: len(wanted)]
    different = np.flatnonzero(tokens != wanted[: len(tokens)])
    return int(different[0]) if len(different) else len(tokens)
