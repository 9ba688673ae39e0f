"""A store with a bit of everything, and the operations that make it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.protocol.entries import Entry, Failure

from .kv_files import MODEL, Bench, arrays, chain, evict, tail

ALICE = chain(3, owners=("default/alice",))

BOB = chain(3, first=50, owners=("default/bob",))

CACHE = chain(4, first=80)

BETTER = Entry(CACHE[0].id, CACHE[0].parent, CACHE[0].tokens, arrays(500), snapshot=True)

SHORT, LONG = tail([1, 2], 600), tail([1, 2, 3], 601)

REPLACED = [
    Entry(entry.id, entry.parent, entry.tokens, arrays(800 + at), snapshot=True) for at, entry in enumerate(CACHE[1:3])
]

VERSIONS: dict[bytes, list[Entry]] = {}

for known in (*ALICE, *BOB, *CACHE, BETTER, *REPLACED, SHORT, LONG):
    VERSIONS.setdefault(known.id, []).append(known)

Step = tuple[str, Callable[[Bench], object]]

OPERATIONS: list[Step] = [
    ("first commit", lambda bench: bench.put([ALICE[0], BOB[0], ALICE[1]])),
    ("second copy", lambda bench: bench.put([BOB[0]])),
    ("partly second", lambda bench: bench.put([BOB[0], BOB[1], ALICE[2]])),
    ("cache", lambda bench: bench.put(CACHE)),
    ("a copy that adds", lambda bench: bench.put([BETTER])),
    ("a tail", lambda bench: bench.put([SHORT])),
    ("a longer tail", lambda bench: bench.put([LONG])),
    ("touch", lambda bench: bench.store.touch([entry.id for entry in BOB], owner="default/carol")),
    ("forget", lambda bench: bench.store.forget("default/alice")),
    ("evict", lambda bench: evict(bench.store, bench.store.stats()["bytes"] - 1)),
    ("compact", lambda bench: bench.store.compact()),
    ("reopen", lambda bench: bench.open()),
    ("new session", lambda bench: bench.open(session="s2")),
]


def found(bench: Bench) -> set[bytes]:
    """The ids that answer; each is read, verified and compared with what was written."""
    locations = [location for location in bench.store.locate(MODEL, list(VERSIONS)) if location is not None]
    for location, stored in zip(locations, read_entries(bench.root, bench.store.key, locations), strict=True):
        assert not isinstance(stored, Failure), f"{stored.reason}"
        fits = [entry for entry in VERSIONS[location.id] if entry.parts.keys() == stored.parts.keys()]
        assert any(
            all(stored.parts[name].tobytes() == entry.parts[name].tobytes() for name in entry.parts) for entry in fits
        ), "a wrong array was returned"
    return {location.id for location in locations}


def no_orphans(bench: Bench) -> None:
    assert len(bench.files()) == bench.store.stats()["files"], [path.name for path in bench.files()]
    assert not list(bench.root.glob(".*")), "temporary files"


def prepare(root: Path) -> Path:
    """A closed folder with shared segments, second copies, a tail, and an owner who came later."""
    bench = Bench(root)
    bench.open()
    for name, operation in OPERATIONS[:8]:
        if name != "a longer tail":
            operation(bench)
    bench.store.close()
    return root


class Copies:
    """Makes fresh copies of a prepared folder, one after the other."""

    def __init__(self, prepared: Path, folder: Path) -> None:
        self._prepared = prepared
        self._folder = folder
        self._last: Bench | None = None
        self._made = 0

    def __call__(self) -> Bench:
        self.close()
        self._made += 1
        self._last = Bench(self._folder / f"kv{self._made}")
        shutil.copytree(self._prepared, self._last.root)
        return self._last

    def close(self) -> None:
        """Close the store in the last copy and remove it."""
        if self._last is not None:
            if hasattr(self._last, "store"):
                self._last.store.close()
            shutil.rmtree(self._last.root)
            self._last = None


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare` made."""
    return prepare(tmp_path_factory.mktemp("prepared") / "kv")


@pytest.fixture(name="copy")
def copies(prepared: Path, tmp_path: Path) -> Iterator[Copies]:
    """Makes copies of the prepared folder."""
    made = Copies(prepared, tmp_path)
    yield made
    made.close()
