"""A damaged index, key or file: never a wrong answer, and what can be found again is."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator

from satchel.actors.kv_store.disk.index import SCHEMA
from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.protocol.entries import Failure
from tests.worlds import kv_scenes
from tests.worlds.kv_files import MODEL, chain, payload
from tests.worlds.kv_scenes import BOB, CACHE, found, no_orphans

copies, prepared = kv_scenes.copies, kv_scenes.prepared
"""Fixtures."""


def damaged(good: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "deleted", None
    yield "empty", b""
    yield "garbage", random.Random(3).randbytes(len(good))
    yield "zeros", bytes(len(good))
    yield "text", b"SQLite format 3\0" + b"x" * 5000
    yield "every 64th byte", bytes(byte ^ 0xFF if at % 64 == 0 else byte for at, byte in enumerate(good))
    for cut in (1, 16, 99, 100, 4095, 4096, 8192, len(good) // 2, len(good) - 1):
        yield f"cut at {cut}", good[:cut]
    # SQLite's complaints about these are no text, and this file's name leads nowhere.
    for part in (b"BLOB NOT NULL", b"autoindex", b"s1."):
        bad = bytearray(good)
        bad[good.index(part) + 1] ^= 0xFF if part != b"s1." else 3
        yield f"{part}", bytes(bad)
    rng = random.Random(7)
    # The first page is SQLite's own header and the tables' names; the rest is sampled.
    for at in [*range(0, 100, 5), *(rng.randrange(100, len(good)) for _ in range(90))]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        yield f"byte {at}", bytes(bad)


def test_a_damaged_index_never_answers_wrongly_and_its_content_is_found_again(copy):
    bench = copy()
    bench.open()
    everything = found(bench)
    bench.store.close()
    assert len(everything) == 10
    good = (bench.root / "index").read_bytes()
    rebuilt = 0
    for name, data in damaged(good):
        path = bench.root / "index"
        path.unlink() if data is None else path.write_bytes(data)
        bench.open()
        assert found(bench) == everything, name
        bench.store.check()
        no_orphans(bench)
        rebuilt += bench.store.rebuilt
        assert len(list(bench.root.glob("index.damaged-*"))) <= 1, "one is kept"
        bench.store.close()
    assert rebuilt > 15


def test_garbage_in_the_place_of_the_indexs_log_changes_nothing(copy):
    bench = copy()
    bench.open()
    everything = found(bench)
    bench.store.close()
    for data in (b"", b"garbage" * 1000, bytes(5000)):
        (bench.root / "index-wal").write_bytes(data)
        bench.open()
        assert found(bench) == everything
        bench.store.close()


def test_a_rebuilt_store_accepts_no_writer_from_before(copy):
    bench = copy()
    bench.open()
    old = bench.write(chain(1, first=900))
    epochs = {bench.store.epoch}
    bench.store.close()
    (bench.root / "index").unlink()
    bench.open(session="s1")
    assert bench.store.rebuilt and bench.store.epoch not in epochs and bench.store.epoch > bench.store.stats()["files"]
    assert bench.store.commit(old).kept, "the rebuilding has found the finished file, and counts it"


def test_after_rebuilding_nothing_of_a_forgotten_owner_stays(copy):
    """Who came later to an entry is in the index only. What may be the forgotten one's goes with the rest."""
    bench = copy()
    bench.open()
    bench.store.touch([CACHE[1].id], owner="default/dave")
    bench.store.close()
    (bench.root / "index").write_bytes(b"garbage" * 1000)
    bench.open()
    assert bench.store.rebuilt
    bench.put(chain(1, first=900, owners=("default/erin",)))
    bench.store.forget("default/dave")
    assert payload(CACHE[1]) not in bench.bytes_on_disk()
    assert not list(bench.root.glob("index.damaged-*")), "it had everybody's tokens in it"
    assert bench.has(*chain(1, first=900))


def test_a_row_that_was_changed_is_a_miss_while_the_store_runs_and_mended_by_the_next_start(copy):
    bench = copy()
    bench.open()
    everything = found(bench)
    database = sqlite3.connect(bench.root / "index")
    database.execute("UPDATE entries SET facts = zeroblob(length(facts)) WHERE id = ?", (BOB[0].id,))
    database.execute("UPDATE entries SET certain = 0 WHERE id = ?", (BOB[1].id,))
    database.execute("UPDATE entries SET id = ? WHERE id = ?", (bytes(32), CACHE[2].id))
    database.commit()
    database.close()
    assert found(bench) == everything - {BOB[0].id, BOB[1].id, CACHE[2].id}
    assert bench.store.locate(MODEL, [bytes(32)]) == [None], "no row answers for another id"
    assert bench.store.stats()["corrupt_total"] >= 3
    bench.put([BOB[0]])
    assert bench.has(BOB[0]), "a new copy takes its place"
    bench.open()
    assert not bench.store.rebuilt and found(bench) == everything
    bench.store.check(payload=True)


def test_a_swapped_file_is_a_miss(copy):
    """A file in another one's place, of equal size and shapes."""
    bench = copy()
    bench.open()
    one, two = chain(1, first=300), chain(1, first=301)
    bench.put(one)
    bench.put(two)
    (first,), (second,) = (bench.located(entries) for entries in (one, two))
    assert first is not None and second is not None
    folder = bench.root / "segments" / MODEL.hex()
    (folder / first.name).write_bytes((folder / second.name).read_bytes())
    (failure,) = read_entries(bench.root, bench.store.key, [first])
    assert isinstance(failure, Failure)
    bench.store.report([failure])
    assert bench.lacks(*one) and bench.has(*two)


def test_files_that_changed_while_nobody_looked_are_misses(copy):
    bench = copy()
    bench.open()
    entries = [chain(1, first=300 + number) for number in range(4)]
    for group in entries:
        bench.put(group)
    paths = [
        bench.root / "segments" / MODEL.hex() / place.name
        for group in entries
        for place in bench.located(group)
        if place
    ]
    bench.store.close()
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].write_bytes(b"")
    bench.open()
    assert bench.lacks(*entries[0], *entries[1], *entries[2]) and bench.has(*entries[3])
    stats = bench.store.stats()
    assert (stats["corrupt_total"], stats["missing_total"]) == (2, 1)
    no_orphans(bench)


def test_a_lost_key_loses_the_memory_and_nothing_else(copy):
    bench = copy()
    (bench.root / "key").unlink()
    bench.open()
    assert found(bench) == set() and bench.files() == []
    bench.put(BOB)
    assert bench.has(*BOB)


def test_a_newer_index_is_rebuilt_from_the_files(copy):
    bench = copy()
    bench.open()
    everything = found(bench)
    with bench.store._shelf.index.transaction():
        bench.store._shelf.index.set_number("schema", SCHEMA + 1)
    bench.open()
    assert bench.store.rebuilt and found(bench) == everything


def test_a_changed_file_name_in_the_index_is_found_out_by_the_files(copy):
    """SQLite finds nothing wrong with it, and the file seems to be missing."""
    bench = copy()
    bench.open()
    everything = found(bench)
    bench.store.close()
    database = sqlite3.connect(bench.root / "index")
    database.execute("UPDATE segments SET name = 's1.' || printf('%032x', number) || '.kv' WHERE number = 1")
    database.commit()
    database.close()
    bench.open()
    assert bench.store.rebuilt and found(bench) == everything
    no_orphans(bench)
