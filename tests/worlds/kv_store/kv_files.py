"""Small entries for the tests of the disk tier, and a disk that counts, fails or is photographed at its steps."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from satchel.actors.kv_store.disk.io import DiskIO
from satchel.actors.kv_store.disk.segment_reader import StoredEntry, read_entries
from satchel.actors.kv_store.disk.segments import model_folder, write_segment
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, root_id
from satchel.actors.protocol.entries import DTYPES, Entry, Failure, Location, SegmentRecord, tenant_tag

MODEL = bytes(range(32))
KEY = bytes(32)
OTHER_MODEL = bytes(range(1, 33))
ROOT = root_id(MODEL, "tenant:default")


class NoSync(DiskIO):
    """For tests that do not stop the disk: syncing is most of their time."""

    def sync(self, descriptor: int, path: Path) -> None:
        self.step("sync", path)

    def sync_folder(self, folder: Path) -> None:
        self.step("sync folder", folder)


def arrays(seed: int, layers: int = 2, length: int = 8, state: bool = False) -> dict[str, np.ndarray]:
    """Codes and scales of some layers, told apart by the seed."""
    rng = np.random.default_rng(seed)
    parts: dict[str, np.ndarray] = {}
    for layer in range(layers):
        parts[f"{layer}.k.codes"] = rng.integers(0, 2**32, (2, length, 4), dtype=np.uint32)
        parts[f"{layer}.k.scales"] = rng.integers(0, 2**16, (2, length), dtype=np.uint16)
        if state:
            parts[f"{layer}.state"] = rng.standard_normal((3, 5)).astype(np.float32)
    return parts


def random_parts(rng: random.Random) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """A random signature, also with empty arrays and single numbers."""
    names = [f"{layer}.{name}" for layer in range(rng.randint(1, 5)) for name in ("k.codes", "v", "state")]
    chosen = rng.sample(names, rng.randint(1, len(names)))
    dtypes = list(DTYPES.values())
    return [
        (
            name,
            rng.choice(dtypes),
            tuple(rng.randint(0 if rng.random() < 0.1 else 1, 7) for _ in range(rng.randint(0, 4))),
        )
        for name in chosen
    ]


def chain(count: int, *, first: int = 0, parent: bytes = ROOT, owners: tuple[str, ...] = ("",), **more) -> list[Entry]:
    """Blocks that follow each other; block i has the tokens first + i and arrays of that seed."""
    found: list[Entry] = []
    for number in range(first, first + count):
        tokens = [number] * BLOCK_TOKENS
        entry_id = block_id(parent, tokens)
        found.append(Entry(entry_id, parent, tokens, arrays(number, **more), owners=owners))
        parent = entry_id
    return found


def tail(tokens: Sequence[int], seed: int, parent: bytes = ROOT, **more) -> Entry:
    return Entry.of_tail(parent, tokens, arrays(seed, length=len(tokens)), **more)


def same(left: dict[str, np.ndarray], right) -> bool:
    """Equal names in equal order, dtypes, shapes and bytes."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == np.ascontiguousarray(right[name]).tobytes()
        for name in left
    )


@dataclass
class Bench:
    """A folder of KV, its store, and what was given to it."""

    root: Path
    io: DiskIO = field(default_factory=NoSync)
    now: float = 1000.0
    session: str = "s1"
    store: DiskStore = field(init=False)

    def open(
        self, *, session: str | None = None, io: DiskIO | None = None, settles: bool = True, **limits
    ) -> DiskStore:
        """Opens the store, and as agents' branches do, `settles` who had what before."""
        known: dict[bytes, tuple[bytes, ...]] = {}
        if hasattr(self, "store"):
            if settles and not self.store._closed:
                known = {row.record.id: row.record.owners for row in self.store._shelf.index.all_rows() if row.live}
            self.store.close()
        self.session = session or self.session
        self.store = DiskStore(
            self.root,
            session=self.session,
            limits=DiskLimits(**{"bytes_max": 2**30, **limits}),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            io=io or self.io,
        )
        self.store.settle(known)
        return self.store

    def write(
        self, entries: Sequence[Entry], *, model: bytes = MODEL, io: DiskIO | None = None, **more
    ) -> SegmentRecord:
        values = {"session": self.session, "epoch": self.store.epoch, "now_s": self.now, **more}
        return write_segment(self.root, self.store.key, model, entries, io=io or self.io, **values)

    def put(self, entries: Sequence[Entry], *, model: bytes = MODEL, **more):
        """Write and commit, as a replica and the store do."""
        return self.store.commit(SegmentRecord.from_wire(self.write(entries, model=model, **more).to_wire()))

    def located(self, entries: Iterable[Entry], model: bytes = MODEL) -> list[Location | None]:
        return self.store.locate(model, [entry.id for entry in entries])

    def has(self, *entries: Entry) -> bool:
        """Whether all entries are found, and are what was written."""
        locations = self.located(entries)
        if not all(locations):
            return False
        read = read_entries(self.root, self.store.key, [location for location in locations if location])
        for entry, stored in zip(entries, read, strict=True):
            if isinstance(stored, Failure):
                return False
            assert same(stored.parts, entry.parts), "a wrong array was returned"
            assert stored.location.tokens == np.asarray(entry.tokens, dtype="<u4").tobytes()
        return True

    def lacks(self, *entries: Entry) -> bool:
        return not any(self.located(entries))

    def files(self) -> list[Path]:
        return sorted(path for path in (self.root / "segments").rglob("*") if path.is_file())

    def bytes_on_disk(self) -> bytes:
        """Everything under the folder, in one piece, to look for what must be gone."""
        return b"".join(path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file())


def evict(store: DiskStore, bytes_max: int) -> list[bytes]:
    """Have the least recently used files without a lease go until the rest fits, as a full disk does. Returns the ids
    that are gone."""
    with store._held("evicting files") as shelf:
        gone = store._changes.note([], shelf.evict(bytes_max))
        shelf.purge()
        return gone


def nbytes_of(store: DiskStore, tenant: str) -> int:
    """The bytes of a tenant's files; those of the owner tenant are not counted."""
    return store._shelf.index.tenant_bytes[tenant_tag(store.key, tenant)]


def payload(entry: Entry) -> bytes:
    """Bytes that only this entry has."""
    return np.ascontiguousarray(next(iter(entry.parts.values()))).tobytes()[:64]


def read_one(bench: Bench, entry: Entry) -> StoredEntry | Failure:
    location = bench.located([entry])[0]
    assert location is not None
    return read_entries(bench.root, bench.store.key, [location])[0]


class Failing(NoSync):
    """Raises `error()` at the step number `at`, counting from 0; with `forever` at every later one too."""

    def __init__(self, at: int, error: Callable[[], OSError], *, forever: bool = False) -> None:
        self.at = at
        self.error = error
        self.forever = forever
        self.steps: list[str] = []

    def step(self, what: str, path: Path) -> None:
        self.steps.append(what)
        number = len(self.steps) - 1
        if number == self.at or (self.forever and number > self.at >= 0):
            raise self.error()


class Filling(NoSync):
    """A device with room for `free_bytes` more. A write that does not fit stops in its middle, as the system's do."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def write(self, descriptor: int, path: Path, buffers: Sequence[memoryview | bytes]) -> None:
        data = b"".join(buffers)
        super().write(descriptor, path, [data[: self.free_bytes]])
        self.free_bytes -= len(data)
        if self.free_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Photographed(DiskIO):
    """Copies the folder before every step: what a process that is killed there leaves behind.

    With `power_loss` the copy lacks what was not made durable: files not synced are cut in half, and names in folders
    not synced are as they were.
    """

    def __init__(self, root: Path, pictures: Path, *, power_loss: bool = False) -> None:
        self.root = root
        self.pictures = pictures
        self.power_loss = power_loss
        self.taken: list[tuple[str, Path]] = []
        self.armed = False
        self._unsynced: set[Path] = set()
        self._renamed: dict[Path, Path] = {}

    def step(self, what: str, path: Path) -> None:
        if self.armed:
            self.take(what)

    def take(self, what: str) -> None:
        picture = self.pictures / str(len(self.taken))
        shutil.copytree(self.root, picture)
        self.taken.append((what, picture))
        if not self.power_loss:
            return
        for path in self._unsynced:
            copied = picture / path.relative_to(self.root)
            if copied.exists():
                data = copied.read_bytes()
                copied.write_bytes(data[: len(data) // 2])
        for target, source in self._renamed.items():
            copied = picture / target.relative_to(self.root)
            if copied.exists():
                copied.rename(picture / source.relative_to(self.root))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._unsynced.add(path)
        return descriptor

    def sync(self, descriptor: int, path: Path) -> None:
        self.step("sync", path)
        self._unsynced.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._renamed[target] = source

    def sync_folder(self, folder: Path) -> None:
        self.step("sync folder", folder)
        self._renamed = {target: source for target, source in self._renamed.items() if target.parent != folder}


def write_file(
    root: Path, entries: Sequence[Entry], *, key: bytes = KEY, model: bytes = MODEL, **more
) -> SegmentRecord:
    """Write a segment of no store."""
    values = {"session": "s", "epoch": 1, "now_s": 2.5, "io": NoSync(), **more}
    return write_segment(root, key, model, entries, **values)


def places(record: SegmentRecord) -> list[Location]:
    """Where a store would say that the entries of a segment are."""
    return [Location.of(entry, record.model, record.name, slot) for slot, entry in enumerate(record.entries)]


def file_of(root: Path, record: SegmentRecord) -> Path:
    return model_folder(root, record.model) / record.name


@contextmanager
def checked(root: Path) -> Iterator[Bench]:
    """An open store, whose index and files are compared at the end."""
    bench = Bench(root)
    bench.open()
    try:
        yield bench
        bench.store.check(payload=True)
    finally:
        bench.store.close()
