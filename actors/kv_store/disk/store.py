"""The store of a node's KV on disk: which files count, where an entry is, and what goes.

Replicas write segment files and read them; this decides, and never sees their bytes but when it rewrites a file without
what was forgotten. `Shelf` is what is behind the lock.
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
from ...protocol.entries import EntryRecord, Location, SegmentRecord, owner_tag, pack_tokens, tenant_tag
from .compaction import rewrite
from .folder import make_folders, take_lock, typed
from .io import DiskIO
from .leases import Pin
from .placement import Changes, Placed
from .recovery import segment_files, segment_path
from .segment_reader import Failure, read_entries, read_header
from .segments import FINISHED, STORE_SESSION, checked_session, model_folder, session_of
from .shelf import DiskLimits, Shelf, free_files
from .tenant_files import TenantFiles

_ROUNDS_MAX = 3
"""How often in a row a segment is rewritten whose entries go on dying meanwhile."""


class TailMatch(NamedTuple):
    """A tail and how many of its first tokens are those that were asked for."""

    location: Location
    tokens: int


class DiskStore:
    """The folder of KV of one home, for one process at a time. All methods are safe to call from any thread.

    Every method raises `DiskError` (or `DiskFull`) where the disk or the index fails; the next call may succeed.

    Args:
        root: the folder, made if it is not there.
        session: of the writers that are alive: their finished but uncommitted files are kept.
        limits: what it may take.
        clock: seconds that only go forward, for leases.
        wall_clock: seconds since 1970, written into files that the store itself writes.
        lock_wait_s: how long to wait for another process to leave the folder.
        io: the disk.

    Attributes:
        epoch: of this opening; writers must be told it, and only their segments are committed.
        rebuilt: whether the index was built anew from the files.

    Raises:
        StoreInUse: another process has the folder.
        DiskFull, DiskError: it cannot be opened.
        InvalidRecord: `session` cannot begin a file's name.
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
        # What was erased, perhaps by a process before this one, is in the index's file until its log is moved there.
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
        """Give the folder back. Calling it twice is harmless."""
        with self._maintenance, self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._shelf.close()
                finally:
                    self._locked.release()

    @contextmanager
    def _held(self, action: str) -> Iterator[Shelf]:
        """What is behind the lock, and typed errors."""
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
    ) -> Placed:
        """Make a finished segment count. Committing it again is harmless.

        After it, `touch` the chain: the beginnings of chains should be used later than their ends.

        Args:
            without: by ids, tags of owners that may not have the entry. What nobody else has is refused: it answers
                for nothing, and the next `compact` erases it.
            heirs: by ids, tags of owners that the record does not name.

        Returns:
            Which ids its copies answer for, which others serve, which are refused, and which no longer answer, also by
            eviction. A segment that alone is more than its tenant may have is refused as a whole.

        Raises:
            StaleEpoch: the writer does not know that the store was opened anew. The file is removed.
            InvalidRecord: the file is not there or not what the record says. It is removed.
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
                    return Placed(refused=[entry.id for entry in record.entries])
                placed = shelf.enter(record, without or {}, heirs or {})
            except Exception:
                shelf.refuse(record, path)
                raise
            # It counts now, whether or not others can be removed for it.
            try:
                # First: nobody else's goes for what a tenant has too much.
                placed.retracted.extend(shelf.keep_limits(self._clock(), record.name))
                placed.retracted.extend(shelf.evict(shelf.budget(), self._clock()))
            except (DiskError, OSError):
                shelf.totals["failed_removals"] += 1
            kept = set(placed.kept)
            self._changes.note([each.id for each in record.entries if each.id in kept], placed.retracted)
            shelf.purge_if_possible(self._clock())
            return placed

    def locate(self, model: bytes, ids: Sequence[bytes]) -> list[Location | None]:
        """Where the entries are, None for each that is not there or is another model's. Compare tokens after a hit."""
        with self._held("locating entries") as shelf:
            rows = [shelf.index.live(entry) for entry in ids]
        return [row.location if row is not None and row.model == model else None for row in rows]

    def tails(self, model: bytes, parent: bytes, tokens: Sequence[int], count_max: int = 8) -> list[TailMatch]:
        """Tails after `parent` that begin as `tokens` do, the longest common beginning first.

        Where a model's layers need a snapshot, only those whose every token matches are of use.
        """
        wanted = np.frombuffer(pack_tokens(tokens), dtype="<u4")
        with self._held("looking for tails") as shelf:
            rows = [row for row in shelf.index.live_tails(parent) if row.model == model]
        matches = [TailMatch(row.location, _common(row.record.tokens, wanted)) for row in rows]
        # Of equal beginnings the shortest tail: less to read, and sooner whole.
        matches.sort(key=lambda match: (-match.tokens, len(match.location.tokens), match.location.id))
        return [match for match in matches if match.tokens][:count_max]

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        """Note that a chain was used, its beginning last, so that the beginning stays longer than the rest.

        Args:
            ids: those that are not there are skipped.
            owner: who has all of their tokens in memory now; "" is nobody in particular. Do not name an owner for a
                tail of which only the beginning was used.
        """
        with self._held("touching entries") as shelf:
            shelf.touch(ids, owner_tag(self.key, owner))

    def give(
        self, owner: str, ids: Iterable[bytes], parents: Iterable[bytes], has: Callable[[EntryRecord], bool]
    ) -> int:
        """Let an owner have entries that nobody has touched for him.

        Args:
            ids: of blocks.
            parents: of tails.
            has: which of them are his; it is called with the lock held.

        Returns:
            How many are new to him.
        """
        with self._held("adding an owner") as shelf:
            return shelf.give(owner_tag(self.key, owner), ids, parents, has)

    def pin(self, locations: Iterable[Location], lease_s: float) -> Pin:
        """Keep the files for a reader, for `lease_s` seconds (at most `lease_s_max`) or until `unpin`.

        Raises:
            DiskError: there are too many leases.
        """
        wanted = list(locations)
        with self._held("pinning files") as shelf:
            names = {location.name for location in wanted}
            there = {name for name in names if shelf.index.segment(name) is not None}
            lease = shelf.leases.take(there, self._clock(), min(lease_s, shelf.limits.lease_s_max))
            if lease is None:
                raise DiskError(f"there are {shelf.limits.leases_max} leases on files already")
            return Pin(lease, [location.id for location in wanted if location.name not in there])

    def unpin(self, lease: str) -> bool:
        """Whether the lease was still held."""
        with self._held("unpinning files") as shelf:
            held = shelf.leases.give_back(lease, self._clock())
            self._keep_limits(shelf)
            shelf.purge_if_possible(self._clock())
            return held

    def limit(self, tenant: str, bytes_max: int | None) -> list[bytes]:
        """Keep no more of a tenant's KV from now on, None for as much as there is room for. Not kept on the disk.

        What is over the limit goes at once, the least recently used first, but for what is being read, which goes when
        nobody reads it any more. Cheap where nothing is.

        Returns:
            The ids that no longer answer.
        """
        with self._held("limiting a tenant's KV") as shelf:
            shelf.index.tenants.limit(tenant_tag(self.key, tenant), bytes_max)
            retracted = self._keep_limits(shelf)
            shelf.purge_if_possible(self._clock())
            return retracted

    def _keep_limits(self, shelf: Shelf) -> list[bytes]:
        """What cannot be removed now goes later."""
        try:
            return self._changes.note([], shelf.keep_limits(self._clock()))
        except (DiskError, OSError):
            shelf.totals["failed_removals"] += 1
            return []

    def nbytes_of(self, tenant: str) -> int:
        """Of the files of a tenant other than the owner."""
        with self._held("counting a tenant's KV") as shelf:
            return shelf.index.tenants.nbytes(tenant_tag(self.key, tenant))

    def report(self, failures: Iterable[Failure]) -> list[bytes]:
        """Entries that a reader could not read answer no more, so that a new copy can. Returns their ids."""
        with self._held("dropping unreadable entries") as shelf:
            retracted = self._changes.note([], shelf.drop(failures))
            shelf.purge_if_possible(self._clock())
            return retracted

    def evict(self, bytes_max: int | None = None) -> list[bytes]:
        """Remove the least recently used files until the rest fits, but for those that are being read.

        Args:
            bytes_max: instead of what the device and the limits allow now; 0 removes everything.

        Returns:
            The ids that no longer answer.
        """
        with self._held("evicting files") as shelf:
            retracted = shelf.evict(shelf.budget() if bytes_max is None else bytes_max, self._clock())
            self._changes.note([], retracted)
            shelf.purge(self._clock())
            return retracted

    def keep_reserve(self) -> None:
        """Look anew at what is free: where others have filled the device, KV gives the reserve back. Cheap else."""
        with self._held("keeping the reserve") as shelf:
            # Whose lease has run out reads no more.
            self._keep_limits(shelf)
            if shelf.io.space(self.root).free < shelf.reserve_bytes:
                self._changes.note([], shelf.evict(shelf.budget(), self._clock()))
                shelf.purge(self._clock())

    def make_room(self) -> bool:
        """The device is full for what cannot be computed again: give it the reserve back. Whether that freed any."""
        with self._held("making room") as shelf:
            before = shelf.io.space(self.root).free
            self._changes.note([], shelf.make_room(self._clock()))
            return shelf.io.space(self.root).free > before

    def changes(self, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Ids that have come and that have gone since the last call, or all that are there."""
        with self._held("telling what changed") as shelf:
            changed = self._changes.take()
            return (shelf.index.live_ids(), []) if whole else changed

    def records(self, ids: Sequence[bytes]) -> list[EntryRecord]:
        """What is known of those of the entries that are there."""
        with self._held("looking entries up") as shelf:
            rows = [shelf.index.live(entry) for entry in ids]
        return [row.record for row in rows if row is not None]

    def owners(self) -> set[bytes]:
        """The tags of all who have anything here."""
        with self._held("listing owners") as shelf:
            return shelf.index.owners()

    def uncertain(self) -> Iterator[EntryRecord]:
        """Entries whose owners are not all known, since their index was built anew: only the first are in the files."""
        with self._held("looking for uncertain owners") as shelf:
            numbers = shelf.index.uncertain()
        for number in numbers:
            with self._held("looking for uncertain owners") as shelf:
                records = [row.record for row in shelf.live_rows(number) if not row.certain]
            yield from records

    def settle(self, owners: Mapping[bytes, Sequence[bytes]]) -> int:
        """Tell by ids who owns the `uncertain` entries: these tags and no others. Returns how many that settled."""
        with self._held("settling owners") as shelf:
            return shelf.settle(owners)

    def forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        """Take an owner from all entries, and erase from the disk what nobody else owns.

        Files that somebody reads are unlinked when their leases end, by `compact` at the latest. Entries that are
        still `uncertain` are all erased, whoever is forgotten. Segments committed after this call count again, so the
        caller keeps the owner's writers from committing.

        Args:
            keep: which entries the owner has rightly; it is called with the lock held.

        Returns:
            The ids that no longer answer.

        Raises:
            InvalidRecord: `owner` is "".
            DiskFull, DiskError: not all bytes are gone; `compact` tries again, and so does the next start.
        """
        if not owner:
            raise InvalidRecord("nobody in particular cannot be forgotten")
        with self._maintenance:
            retracted = self._though_full(lambda: self._forget(owner, keep))
            self._though_full(lambda: self._compact(erase_only=True))
            return retracted

    def _forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None) -> list[bytes]:
        with self._held("forgetting an owner") as shelf:
            retracted = self._changes.note([], shelf.forget(owner_tag(self.key, owner), keep))
            # A damaged index that was set aside still has everybody's tokens in it.
            for damaged in sorted(self.root.glob("index.damaged-*")):
                shelf.io.unlink(damaged)
        return retracted

    def _though_full(self, work: Callable[[], list[bytes]]) -> list[bytes]:
        """What erases must not fail because the disk is full: even saying that something is gone takes room."""
        try:
            return work()
        except DiskFull:
            self.make_room()
            return work()

    def compact(self) -> list[bytes]:
        """Erase what is to be erased, rewrite files that are mostly dead, remove files that nobody committed.

        Call it every now and then, at least once a minute. Returns ids that turned out to be unreadable.
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
        """Replace a segment by one with its live entries only. Reading and writing goes on without the lock."""
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
                # What must go goes, and the rest of the file with it, as it can be computed again.
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
        """Remove files that lie there uncommitted for too long, and those of a rewriting that failed."""
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
        """Counters (`…_total`, since the opening) and sizes: bytes, files, entries, blocks, tails, and so on.
        `bytes_max` is what they may take now; what is free of the whole device is `device_free_bytes`."""
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
        """Raise AssertionError where index and files disagree.

        Args:
            payload: also read and verify every live entry.
        """
        with self._maintenance, self._held("checking") as shelf:
            check_shelf(shelf, payload=payload)


def _open_shelf(root: Path, session: str, limits: DiskLimits, io: DiskIO) -> Shelf:
    """The shelf; where the device is too full for its index, KV makes room for it."""
    try:
        with typed(f"opening {root}"):
            return Shelf(root, session, limits, io)
    except DiskError:
        # Whatever it is called, as SQLite has several names for a full disk.
        if not free_files(root, limits, io):
            raise
        return Shelf(root, session, limits, io)


def _common(packed: bytes, wanted: np.ndarray) -> int:
    tokens = np.frombuffer(packed, dtype="<u4")[: len(wanted)]
    different = np.flatnonzero(tokens != wanted[: len(tokens)])
    return int(different[0]) if len(different) else len(tokens)


def check_shelf(shelf: Shelf, *, payload: bool) -> None:
    """Raise AssertionError where index and files disagree; with `payload` every live entry is read."""
    index = shelf.index
    assert index.integrity() == []
    assert index.bad_segments() == set()
    segments = index.segments()
    files = {file.path: file for file in segment_files(shelf.root)}
    doomed = {name for name, _, _ in index.doomed()}
    nbytes = sum(size for _, _, size in index.doomed())
    answered: set[bytes] = set()
    for segment in segments:
        path = segment_path(shelf.root, segment)
        file = files.pop(path, None)
        assert file is not None and file.nbytes == segment.nbytes, f"{path} is not as the index says"
        assert session_of(segment.name) is not None and segment.name.endswith(FINISHED)
        header = read_header(path, shelf.key)
        rows = index.of_segment(segment.number)
        assert any(row.live for row in rows), f"{path} answers for nothing"
        for row in rows:
            assert row.record == header.record.entries[row.slot], f"{path} holds another entry in slot {row.slot}"
        live = [row for row in rows if row.live]
        ids = {row.record.id for row in live}
        assert not ids & answered, "two copies answer for one id"
        answered |= ids
        nbytes += segment.nbytes
        if payload:
            read = read_entries(shelf.root, shelf.key, [row.location for row in live])
            assert not any(isinstance(stored, Failure) for stored in read), f"{path} does not verify"
    assert index.size()[0] == nbytes
    again = TenantFiles()
    again.load(index.files_of_tenants())
    assert index.tenants.counted() == again.counted(), "files of tenants are counted wrong"
    assert index.counts()[1] == len(answered)
    strays = {path.name for path in files if session_of(path.name) == "store"} - doomed
    assert not strays, f"nobody knows {strays}"
