"""A KV disk in memory, in place of `DiskStore`. What a node has committed survives its death."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from satchel.actors.kv_store.disk.changes import Changes, SegmentPlacement
from satchel.actors.kv_store.disk.leases import Leases
from satchel.actors.protocol.entries import DIGEST_BYTES, EntryRecord, Location, SegmentRecord, owner_tag
from satchel.cluster.errors import DiskFull, StaleEpoch

from ..worlds.kv_store.store_world import MODEL

ENTRY_BYTES = 1000


def kv_of(block: bytes) -> bytes:
    """Returns the content that a block must have, which depends only on its id."""
    return b"kv of " + block


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class KVDisk:
    """A disk with one entry in each file, so that pinning a file pins the entry.

    Attributes:
        contents: the bytes as they are on the disk, whatever their record says.
        files: written and not committed, by name: an entry's id and its bytes.
        rotten: ids whose bytes went bad here.
        full: nothing more can be written.
    """

    def __init__(self, clock: Callable[[], float], entries_max: int) -> None:
        self.key, self.root, self.epoch = b"k" * 32, Path("disk"), 0
        self._clock, self._entries_max = clock, entries_max
        self._records: OrderedDict[bytes, EntryRecord] = OrderedDict()
        self.contents: dict[bytes, bytes] = {}
        self.rotten: set[bytes] = set()
        self.full = False
        self._written = 0
        self.reopen(0)

    def reopen(self, lost: int) -> None:
        """Opens the disk in another process; the last `lost` committed entries are gone."""
        self.epoch += 1
        self.files: dict[str, tuple[bytes, bytes]] = {}
        self.leases, self._changes = Leases(1000), Changes()
        for entry in list(self._records)[len(self._records) - lost :] if lost else ():
            self._remove(entry)

    def __contains__(self, entry: object) -> bool:
        return entry in self._records

    @property
    def blocks(self) -> set[bytes]:
        return set(self._records)

    def read(self, entry: bytes) -> bytes | None:
        return self.contents.get(entry)

    def rot(self, entry: bytes) -> None:
        self.contents[entry] = b"rotten"
        self.rotten.add(entry)

    def write(self, model: bytes, record: EntryRecord, content: bytes) -> SegmentRecord:
        """Writes a file that is not committed yet.

        Raises:
            DiskFull: there is no room.
        """
        if self.full:
            raise DiskFull("the disk is full")
        self._written += 1
        name = f"s-{self._written}.kv"
        self.files[name] = record.id, content
        return SegmentRecord(name, ENTRY_BYTES, model, self.epoch, 0.0, {}, (record,))

    # What the store's actor calls.

    def commit(
        self,
        record: SegmentRecord,
        without: Mapping[bytes, Collection[bytes]] | None = None,
        heirs: Mapping[bytes, Collection[bytes]] | None = None,
    ) -> SegmentPlacement:
        if record.epoch != self.epoch:
            raise StaleEpoch("the store was opened anew")
        (entry,) = record.entries
        barred = (without or {}).get(entry.id, ())
        known = dict.fromkeys((*entry.owners, *(heirs or {}).get(entry.id, ())))
        owners = tuple(tag for tag in known if tag not in barred)
        _, content = self.files.pop(record.name)
        if not owners:
            return SegmentPlacement(refused=[entry.id])
        if entry.id in self._records:
            # The first copy of an id stays.
            self._own(entry.id, owners)
            return SegmentPlacement(dropped=[entry.id])
        self._records[entry.id], self.contents[entry.id] = replace(entry, owners=owners), content
        self.rotten.discard(entry.id)
        gone = self._make_room()
        self._changes.note([entry.id], gone)
        return SegmentPlacement(kept=[entry.id], retracted=gone)

    def locate(self, model: bytes, ids: Sequence[bytes]) -> list[Location | None]:
        return [_location(model, record) if (record := self._records.get(entry)) else None for entry in ids]

    def tails(self, model: bytes, parent: bytes, tokens: Sequence[int], count_max: int = 8) -> list[Any]:
        return []

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        for entry in reversed([entry for entry in ids if entry in self._records]):
            self._records.move_to_end(entry)
            if owner:
                self._own(entry, (owner_tag(self.key, owner),))

    def give(
        self, owner: str, ids: Iterable[bytes], parents: Iterable[bytes], has: Callable[[EntryRecord], bool]
    ) -> int:
        found = [entry for entry in ids if entry in self._records and has(self._records[entry])]
        for entry in found:
            self._own(entry, (owner_tag(self.key, owner),))
        return len(found)

    def keep_reserve(self) -> None:
        pass

    def compact(self) -> list[bytes]:
        return []

    def pin(self, locations: Iterable[Location], lease_s: float) -> str:
        names = [location.name for location in locations]
        lease = self.leases.take(names, self._clock(), lease_s)
        assert lease is not None, "leases drain"
        return lease

    def unpin(self, lease: str) -> bool:
        return self.leases.give_back(lease, self._clock())

    def report(self, failures: Iterable[Any]) -> list[bytes]:
        gone = [failure.location.id for failure in failures if failure.location.id in self._records]
        for entry in gone:
            self._remove(entry)
        return self._changes.note([], gone)

    def changes(self, whole: bool) -> tuple[list[bytes], list[bytes]]:
        changed = self._changes.take()
        return (sorted(self._records), []) if whole else changed

    def records(self, ids: Sequence[bytes]) -> list[EntryRecord]:
        return [self._records[entry] for entry in ids if entry in self._records]

    def models(self, owner: str = "") -> list[bytes]:
        """All entries are of one model."""
        tags = self.owners()
        return [MODEL] if (owner_tag(self.key, owner) in tags if owner else tags) else []

    def owners(self) -> set[bytes]:
        return {tag for record in self._records.values() for tag in record.owners}

    def uncertain(self) -> list[EntryRecord]:
        return []

    def forget(self, owner: str, keep: Callable[[EntryRecord], bool] | None = None) -> list[bytes]:
        tag, gone = owner_tag(self.key, owner), []
        for record in [
            record for record in self._records.values() if tag in record.owners and not (keep and keep(record))
        ]:
            rest = tuple(other for other in record.owners if other != tag)
            if rest:
                self._records[record.id] = replace(record, owners=rest)
            else:
                self._remove(record.id)
                gone.append(record.id)
        return self._changes.note([], gone)

    def stats(self) -> dict[str, int]:
        sizes = {"bytes": len(self._records) * ENTRY_BYTES, "bytes_max": self._entries_max * ENTRY_BYTES}
        return {**sizes, "device_free_bytes": 2**40}

    def _own(self, entry: bytes, tags: Sequence[bytes]) -> None:
        record = self._records[entry]
        self._records[entry] = replace(record, owners=tuple(dict.fromkeys((*record.owners, *tags))))

    def _remove(self, entry: bytes) -> None:
        del self._records[entry], self.contents[entry]

    def _make_room(self) -> list[bytes]:
        """Evicts the least recently used entries, except those that somebody reads."""
        over = len(self._records) - self._entries_max
        if over <= 0:
            return []
        held = self.leases.held(self._clock())
        gone = [entry for entry in self._records if entry.hex() not in held][:over]
        for entry in gone:
            self._remove(entry)
        return gone


def _location(model: bytes, record: EntryRecord) -> Location:
    return Location.of(record, model, record.id.hex(), 0)
