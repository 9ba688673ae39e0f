"""A node's KV on disk: which segments are committed, where an entry is, what is evicted.

Replicas write and read the segment files. The store only keeps the index, and reads a file's data only to rewrite it
without forgotten entries. `Shelf` is the state behind the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....cluster.errors import DiskError, DiskFull, InvalidRecord
from ...protocol.entries import EntryRecord, Failure, Location, SegmentRecord, owner_tag, pack_tokens, tenant_tag
from .compaction import rewrite
from .folder import make_folders, take_lock, typed
from .io import DiskIO
from .leases import Pin
from .placement import Changes, SegmentPlacement
from .recovery import segment_files, segment_path
from .segment_reader import read_entries, read_header
from .segments import FINISHED, STORE_SESSION, checked_session, model_folder, session_of
from .shelf import DiskLimits, Shelf, free_files
from .tenant_files import TenantFiles

_ROUNDS_MAX = 3
"""How often in a row a segment is rewritten if entries of it are dropped during the rewriting."""


class TailMatch(NamedTuple):
    """A tail, and how many of its first tokens match the requested ones."""

    location: Location
    tokens: int


class DiskStore:
    """The KV folder of one home folder, for one process at a time. All methods are safe from any thread.

    Every method raises `DiskError` (or `DiskFull`) if the disk or the index fails; the next call may succeed.

    Args:
        root: the folder, created if it is absent.
        session: of the live writers, whose finished but uncommitted files are kept.
        limits: of bytes, files, entries and leases.
        clock: monotonic seconds, for leases.
        wall_clock: seconds since 1970, written into files that the store itself writes.
        lock_wait_s: how long to wait for another process to release the folder.
        io: the disk.

    Attributes:
        epoch: of this opening. Only segments written in it are committed, so writers must know it.
        rebuilt: whether the index was rebuilt from the files.

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
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        # Only one thread rewrites segments; taken before `_lock`, never inside it.
        self._maintenance = threading.Lock()
        self._in_flight: dict[str, float] = {}
        # Erased rows, perhaps of an earlier process, stay readable until the write-ahead log is checkpointed.
        self._erased = True
        self._changes = Changes()
        self._closed = False
        io = io or DiskIO()
        with typed(f"opening {root}"):
            make_folders(root, io)
            self._locked = take_lock(root / "lock", lock_wait_s)
            try:
                self._shelf = _open_shelf(root, session, limits, io)
            except BaseException:
                self._locked.release()
                raise
        self.key = self._shelf.key
        self.epoch = self._shelf.epoch
        self.rebuilt = self._shelf.rebuilt

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the index and releases the folder. Idempotent."""
        with self._maintenance, self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._shelf.close()
                finally:
                    self._locked.release()

    @contextmanager
    def _held(self, action: str) -> Iterator[Shelf]:
        """Holds the lock and translates errors."""
        with self._lock:
            if self._closed:
                raise DiskError(f"{action}: the store is closed")
            with typed(action):
                yield self._shelf

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
            known = shelf.index.segment(record.name)
            if known is not None:
                return shelf.placed_before(known.number, record)
            try:
                shelf.verify(record, path)
                if not shelf.fits(record):
                    shelf.refuse(record, path)
                    return SegmentPlacement(refused=[entry.id for entry in record.entries])
                placed = shelf.enter(record, without or {}, heirs or {})
            except Exception:
                shelf.refuse(record, path)
                raise
            # The segment is committed, even if removing others fails now.
            try:
                # First: a tenant over its limit must not evict other tenants.
                placed.retracted.extend(shelf.keep_limits(self._clock(), record.name))
                placed.retracted.extend(shelf.evict(shelf.budget(), self._clock()))
            except (DiskError, OSError):
                shelf.totals["failed_removals"] += 1
            kept = set(placed.kept)
            self._changes.note([each.id for each in record.entries if each.id in kept], placed.retracted)
            shelf.purge_if_possible(self._clock())
            return placed

    def locate(self, model: bytes, ids: Sequence[bytes]) -> list[Location | None]:
        """Returns each entry's location, None if it is absent or of another model. Compare tokens after a hit."""
        with self._held("locating entries") as shelf:
            rows = [shelf.index.live(entry) for entry in ids]
        return [row.location if row is not None and row.model == model else None for row in rows]

    def tails(self, model: bytes, parent: bytes, tokens: Sequence[int], count_max: int = 8) -> list[TailMatch]:
        """Returns tails after `parent` that share a prefix with `tokens`, the longest shared prefix first.

        A model whose layers need a snapshot can use only tails of which every token matches.
        """
        wanted = np.frombuffer(pack_tokens(tokens), dtype="<u4")
        with self._held("looking for tails") as shelf:
            rows = [row for row in shelf.index.live_tails(parent) if row.model == model]
        matches = [TailMatch(row.location, _common(row.record.tokens, wanted)) for row in rows]
        # Among equal prefixes the shortest tail first: it is read faster.
        matches.sort(key=lambda match: (-match.tokens, len(match.location.tokens), match.location.id))
        return [match for match in matches if match.tokens][:count_max]

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        """Marks a chain as used, its first block as the latest, so that eviction takes the chain's end first.

        Args:
            ids: of the chain; absent ones are skipped.
            owner: the agent whose memory has all of their tokens, "" for none. Do not name an owner for a tail of which
                only the first tokens were used.
        """
        with self._held("touching entries") as shelf:
            shelf.touch(ids, owner_tag(self.key, owner))

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
        with self._held("adding an owner") as shelf:
            return shelf.give(owner_tag(self.key, owner), ids, parents, has)

    def pin(self, locations: Iterable[Location], lease_s: float) -> Pin:
        """Keeps the files for a reader, for `lease_s` seconds (at most `lease_s_max`) or until `unpin`.

        Raises:
            DiskError: there are `leases_max` leases already.
        """
        wanted = list(locations)
        with self._held("pinning files") as shelf:
            names = {location.name for location in wanted}
            present = {name for name in names if shelf.index.segment(name) is not None}
            lease = shelf.leases.take(present, self._clock(), min(lease_s, shelf.limits.lease_s_max))
            if lease is None:
                raise DiskError(f"there are {shelf.limits.leases_max} leases on files already")
            return Pin(lease, [location.id for location in wanted if location.name not in present])

    def unpin(self, lease: str) -> bool:
        """Ends a lease. Returns whether it was still held."""
        with self._held("unpinning files") as shelf:
            held = shelf.leases.give_back(lease, self._clock())
            self._keep_limits(shelf)
            shelf.purge_if_possible(self._clock())
            return held

    def limit(self, tenant: str, bytes_max: int | None) -> list[bytes]:
        """Limits a tenant's KV, None for no limit. The limit is not stored.

        Evicts what is over the limit, the least recently used files first. Files with a lease go when it ends. Cheap if
        the tenant is within the limit.

        Returns:
            The ids that are gone.
        """
        with self._held("limiting a tenant's KV") as shelf:
            shelf.index.tenants.limit(tenant_tag(self.key, tenant), bytes_max)
            retracted = self._keep_limits(shelf)
            shelf.purge_if_possible(self._clock())
            return retracted

    def _keep_limits(self, shelf: Shelf) -> list[bytes]:
        """Evicts what tenants have over their limits. Failures are counted and retried later."""
        try:
            return self._changes.note([], shelf.keep_limits(self._clock()))
        except (DiskError, OSError):
            shelf.totals["failed_removals"] += 1
            return []

    def nbytes_of(self, tenant: str) -> int:
        """Returns the bytes of a tenant's files; those of the owner tenant are not counted."""
        with self._held("counting a tenant's KV") as shelf:
            return shelf.index.tenants.nbytes(tenant_tag(self.key, tenant))

    def report(self, failures: Iterable[Failure]) -> list[bytes]:
        """Drops entries that a reader could not read, so that a new copy can replace them. Returns their ids."""
        with self._held("dropping unreadable entries") as shelf:
            retracted = self._changes.note([], shelf.drop(failures))
            shelf.purge_if_possible(self._clock())
            return retracted

    def evict(self, bytes_max: int | None = None) -> list[bytes]:
        """Removes the least recently used files without a lease until the rest fits.

        Args:
            bytes_max: instead of what the device and the limits allow now; 0 removes everything.

        Returns:
            The ids that are gone.
        """
        with self._held("evicting files") as shelf:
            retracted = shelf.evict(shelf.budget() if bytes_max is None else bytes_max, self._clock())
            self._changes.note([], retracted)
            shelf.purge(self._clock())
            return retracted

    def keep_reserve(self) -> None:
        """Evicts KV if other programs have filled the device into the reserve. Cheap otherwise."""
        with self._held("keeping the reserve") as shelf:
            # Expired leases may have freed files of tenants over their limit.
            self._keep_limits(shelf)
            if shelf.io.space(self.root).free < shelf.reserve_bytes:
                self._changes.note([], shelf.evict(shelf.budget(), self._clock()))
                shelf.purge(self._clock())

    def make_room(self) -> bool:
        """Evicts KV down to the reserve, for writes that cannot be recomputed. Returns whether that freed any bytes."""
        with self._held("making room") as shelf:
            before = shelf.io.space(self.root).free
            self._changes.note([], shelf.make_room(self._clock()))
            return shelf.io.space(self.root).free > before

    def changes(self, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Returns the ids added and removed since the last call; if `whole`, all present ids and no removed ones."""
        with self._held("telling what changed") as shelf:
            changed = self._changes.take()
            return (shelf.index.live_ids(), []) if whole else changed

    def records(self, ids: Sequence[bytes]) -> list[EntryRecord]:
        """Returns the records of those entries that are present."""
        with self._held("looking entries up") as shelf:
            rows = [shelf.index.live(entry) for entry in ids]
        return [row.record for row in rows if row is not None]

    def owners(self) -> set[bytes]:
        """Returns the tags of all owners."""
        with self._held("listing owners") as shelf:
            return shelf.index.owners()

    def uncertain(self) -> Iterator[EntryRecord]:
        """Yields entries with possibly incomplete owners: the index was rebuilt, and the files name only the first."""
        with self._held("looking for uncertain owners") as shelf:
            numbers = shelf.index.uncertain()
        for number in numbers:
            with self._held("looking for uncertain owners") as shelf:
                records = [row.record for row in shelf.live_rows(number) if not row.certain]
            yield from records

    def settle(self, owners: Mapping[bytes, Sequence[bytes]]) -> int:
        """Sets the complete owner tags of `uncertain` entries, by id. Returns how many entries that settled."""
        with self._held("settling owners") as shelf:
            return shelf.settle(owners)

    def forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        """Removes an owner from all entries, and erases entries without other owners from the disk.

        Files with a lease are unlinked when it ends, by `compact` at the latest. All `uncertain` entries are erased,
        whoever is forgotten. A segment committed after this call counts, so the caller must stop the owner's writers
        first.

        Args:
            keep: selects entries that the owner keeps; called with the lock held.

        Returns:
            The ids that are gone.

        Raises:
            InvalidRecord: `owner` is "".
            DiskFull, DiskError: not all bytes are gone; `compact` and the next start try again.
        """
        if not owner:
            raise InvalidRecord("an owner to forget has a name")
        with self._maintenance:
            retracted = self._though_full(lambda: self._forget(owner, keep))
            self._though_full(lambda: self._compact(erase_only=True))
            return retracted

    def _forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None) -> list[bytes]:
        with self._held("forgetting an owner") as shelf:
            retracted = self._changes.note([], shelf.forget(owner_tag(self.key, owner), keep))
            # A damaged index that was set aside still holds every owner's tokens.
            for damaged in sorted(self.root.glob("index.damaged-*")):
                shelf.io.unlink(damaged)
        return retracted

    def _though_full(self, erase: Callable[[], list[bytes]]) -> list[bytes]:
        """Retries an erasure after making room: recording it in the index needs space on a full disk."""
        try:
            return erase()
        except DiskFull:
            self.make_room()
            return erase()

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
            segments = [segment for segment in shelf.index.sparse() if segment.erase or not erase_only]
            self._erased |= bool(segments) or erase_only
        lost: list[bytes] = []
        for segment in segments:
            lost.extend(self._rewrite(segment.name))
        with self._held("unlinking files") as shelf:
            shelf.purge(self._clock())
            if self._erased:
                shelf.index.checkpoint()
                self._erased = False
        return lost

    def _rewrite(self, name: str) -> list[bytes]:
        """Replaces a segment by one with its live entries only. Copies the data without holding the lock."""
        lost: list[bytes] = []
        for _ in range(_ROUNDS_MAX):
            with self._held("compacting") as shelf:
                segment = shelf.index.segment(name)
                if segment is None:
                    break
                rows = shelf.live_rows(segment.number)
            try:
                rewritten = rewrite(self.root, self.key, rows, epoch=self.epoch, now_s=self._wall_clock(), io=shelf.io)
            except DiskFull:
                if not segment.erase:
                    raise
                # Erasing has precedence, and the file's other entries can be recomputed.
                with self._held("compacting") as shelf:
                    lost.extend(self._changes.note([], shelf.discard(name)))
                break
            with self._held("compacting") as shelf:
                try:
                    gone = shelf.index.segment(name) is None
                    lost.extend([] if gone else self._changes.note([], shelf.replace(segment, rewritten)))
                except Exception:
                    gone = True
                    raise
                finally:
                    if gone and rewritten.record is not None:
                        shelf.refuse(rewritten.record, model_folder(self.root, segment.model) / rewritten.record.name)
                again = rewritten.record and shelf.index.segment(rewritten.record.name)
                if not again or not again.erase:
                    break
                name = again.name
        return lost

    def _sweep(self) -> None:
        """Removes files that stayed uncommitted for too long, and leftovers of failed rewritings."""
        with typed("looking for uncommitted files"):
            files = list(segment_files(self.root))
        now = self._clock()
        with self._held("sweeping") as shelf:
            doomed = {name for name, _, _ in shelf.index.doomed()}
            seen: dict[str, float] = {}
            for file in files:
                name = file.path.name
                if name in doomed or shelf.index.segment(name) is not None:
                    continue
                seen[name] = self._in_flight.get(name, now)
                if session_of(name) == STORE_SESSION or now - seen[name] >= shelf.limits.in_flight_s:
                    shelf.io.unlink(file.path)
                    del seen[name]
            self._in_flight = seen

    def stats(self) -> dict[str, int]:
        """Returns counters (`…_total`, since the opening) and sizes: bytes, files, entries, blocks, tails, and so on.
        `bytes_max` is what segments may take now, `device_free_bytes` what is free on the device."""
        with self._held("counting") as shelf:
            nbytes, files, rows = shelf.index.size()
            _, live, tails = shelf.index.counts()
            doomed = shelf.index.doomed()
            shelf.leases.expire(self._clock())
            totals = {f"{name}_total": count for name, count in shelf.totals.items()}
            return totals | {
                "corrupt_total": shelf.totals["corrupt"] + shelf.index.bad_rows_total,
                "bytes": nbytes,
                "bytes_max": max(0, shelf.budget()),
                "device_free_bytes": shelf.io.space(self.root).free,
                "files": files,
                "entries": live,
                "blocks": live - tails,
                "tails": tails,
                "dead_entries": rows - live,
                "doomed_files": len(doomed),
                "leases": len(shelf.leases),
                "epoch": shelf.epoch,
            }

    def check(self, *, payload: bool = False) -> None:
        """Raises AssertionError if index and files disagree.

        Args:
            payload: also read and verify every live entry.
        """
        with self._maintenance, self._held("checking") as shelf:
            check_shelf(shelf, payload=payload)


def _open_shelf(root: Path, session: str, limits: DiskLimits, io: DiskIO) -> Shelf:
    """Opens the shelf. If the device is too full for the index, removes segment files first."""
    try:
        with typed(f"opening {root}"):
            return Shelf(root, session, limits, io)
    except DiskError:
        # Any DiskError: SQLite has several errors for a full disk.
        if not free_files(root, limits, io):
            raise
        return Shelf(root, session, limits, io)


def _common(packed: bytes, wanted: np.ndarray) -> int:
    """Returns how many first tokens are equal; `wanted` is `(tokens,) uint32`."""
    tokens = np.frombuffer(packed, dtype="<u4")[: len(wanted)]
    different = np.flatnonzero(tokens != wanted[: len(tokens)])
    return int(different[0]) if len(different) else len(tokens)


def check_shelf(shelf: Shelf, *, payload: bool) -> None:
    """Raises AssertionError if index and files disagree; with `payload` every live entry is read."""
    index = shelf.index
    assert index.integrity() == []
    assert index.bad_segments() == set()
    segments = index.segments()
    files = {file.path: file for file in segment_files(shelf.root)}
    doomed = {name for name, _, _ in index.doomed()}
    nbytes = sum(size for _, _, size in index.doomed())
    served: set[bytes] = set()
    for segment in segments:
        path = segment_path(shelf.root, segment)
        file = files.pop(path, None)
        assert file is not None and file.nbytes == segment.nbytes, f"{path} is not as the index says"
        assert session_of(segment.name) is not None and segment.name.endswith(FINISHED)
        header = read_header(path, shelf.key)
        rows = index.of_segment(segment.number)
        assert any(row.live for row in rows), f"{path} has no live entry"
        for row in rows:
            assert row.record == header.record.entries[row.slot], f"{path} holds another entry in slot {row.slot}"
        live = [row for row in rows if row.live]
        ids = {row.record.id for row in live}
        assert not ids & served, "two copies of one id are live"
        served |= ids
        nbytes += segment.nbytes
        if payload:
            read = read_entries(shelf.root, shelf.key, [row.location for row in live])
            assert not any(isinstance(stored, Failure) for stored in read), f"{path} does not verify"
    assert index.size()[0] == nbytes
    recounted = TenantFiles()
    recounted.load(index.files_of_tenants())
    assert index.tenants.counted() == recounted.counted(), "the bytes of tenants' files are counted wrong"
    assert index.counts()[1] == len(served)
    strays = {path.name for path in files if session_of(path.name) == "store"} - doomed
    assert not strays, f"the index lacks {strays}"
