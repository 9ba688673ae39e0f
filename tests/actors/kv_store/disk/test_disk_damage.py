"""A damaged key or file: never a wrong answer, and what can be found again is."""

from __future__ import annotations

import random

from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.protocol.entries import Failure, owner_tag
from tests.worlds.kv_store import kv_scenes
from tests.worlds.kv_store.kv_files import MODEL, chain, payload
from tests.worlds.kv_store.kv_scenes import BOB, found, no_orphans

copies, prepared = kv_scenes.copies, kv_scenes.prepared
"""Fixtures."""


def test_damaged_files_cost_what_they_hold_and_nothing_else(copy):
    """Every file in turn, cut, flipped in its footer or empty: after a start the rest answers as before."""
    bench = copy()
    bench.open()
    everything, names = found(bench), [path.name for path in bench.files()]
    held = {name: {row.record.id for row in bench.store._shelf.index.segments[name].live} for name in names}
    bench.store.close()
    rng = random.Random(7)
    for number, name in enumerate(names):
        bench = copy()
        (path,) = bench.root.rglob(name)
        good = bytearray(path.read_bytes())
        good[-1 - rng.randrange(40 + int.from_bytes(good[-8:], "little"))] ^= 1 << rng.randrange(8)
        path.write_bytes([good, b"", good[: len(good) // 2], rng.randbytes(len(good))][number % 4])
        bench.open()
        assert everything - held[name] <= found(bench) <= everything and all(
            other.name != name for other in bench.files()
        )
        bench.store.check(payload=True)
        no_orphans(bench)


def test_an_opened_store_accepts_no_writer_from_before(copy):
    bench = copy()
    bench.open()
    old = bench.write(chain(1, first=900))
    epochs = {bench.store.epoch}
    bench.open(session="s1")
    assert bench.store.epoch not in epochs and bench.store.epoch > bench.store.stats()["files"]
    assert bench.store.commit(old).kept, "the start has found the finished file, and counts it"


def test_no_file_names_who_was_forgotten(copy):
    """So a start, which knows of those alone whom files name, brings nobody back; nor does one in the midst of it."""
    bench = copy()
    bench.open()
    bench.store.touch([BOB[1].id], owner="default/dave")
    bench.store.forget("default/bob")
    assert bench.has(BOB[1]) and owner_tag(bench.store.key, "default/bob") not in bench.bytes_on_disk()
    bench.open(settles=False)
    assert bench.has(BOB[1]) and bench.store.forget("default/bob") == []
    assert BOB[1].id in bench.store.forget("default/dave") and payload(BOB[1]) not in bench.bytes_on_disk()


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
    assert stats["corrupt_total"] == 2
    no_orphans(bench)


def test_a_lost_key_loses_the_memory_and_nothing_else(copy):
    bench = copy()
    (bench.root / "key").unlink()
    bench.open()
    assert found(bench) == set() and bench.files() == []
    bench.put(BOB)
    assert bench.has(*BOB)
