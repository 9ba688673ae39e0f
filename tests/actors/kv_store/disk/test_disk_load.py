"""The store under many threads and with many entries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.protocol.entries import Entry, EntryRecord, Failure, SegmentRecord, owner_tag
from tests.worlds.kv_store.kv_files import MODEL, ROOT, Bench, chain, checked, evict, payload, tail


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with checked(tmp_path / "kv") as made:
        yield made


def file_bytes(bench: Bench) -> int:
    return sum(path.stat().st_size for path in bench.files())


def test_threads_may_do_anything_at_any_time(bench):
    """At the end index and files agree, and whatever is found is what was written."""
    seed = 20
    print("seed", seed)
    bench.open(bytes_max=60_000)
    bench.now = 0.0
    agents = [f"default/{name}" for name in "abc"]
    library = [chain(4, first=100 * number, owners=(agents[number % 3],)) for number in range(8)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(40):
                entries = rng.choice(library)
                start = rng.randrange(4)
                chosen = entries[start : start + rng.randint(1, 4)]
                action = rng.choice(["put", "put", "read", "read", "touch", "evict", "forget", "compact", "tail"])
                if action == "put":
                    bench.put(chosen)
                elif action == "read":
                    read_back(chosen)
                elif action == "touch":
                    bench.store.touch([entry.id for entry in entries], owner=rng.choice([*agents, ""]))
                elif action == "evict":
                    evict(bench.store, rng.randrange(60_000))
                elif action == "forget":
                    bench.store.forget(rng.choice(agents))
                elif action == "compact":
                    bench.store.compact()
                else:
                    bench.put([tail([number] * rng.randint(1, 9), rng.randrange(2**20), parent=entries[0].id)])
        except BaseException as error:
            failures.append(error)

    def read_back(chosen: list[Entry]) -> None:
        pairs = [(entry, place) for entry, place in zip(chosen, bench.located(chosen), strict=True) if place]
        pin = bench.store.pin([place for _, place in pairs], 30.0)
        now = bench.located(entry for entry, _ in pairs)
        there = [(entry, place) for (entry, place), again in zip(pairs, now, strict=True) if place == again]
        read = read_entries(bench.root, bench.store.key, [place for _, place in there])
        for (entry, _), stored in zip(there, read, strict=True):
            assert not isinstance(stored, Failure), f"a pinned file failed: {stored}"
            assert next(iter(stored.parts.values())).tobytes()[:64] == payload(entry)
        bench.store.unpin(pin)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads)
    bench.store.compact()
    assert bench.store.stats()["bytes"] == file_bytes(bench) <= 60_000


def test_400_ids_among_20_000_are_found_in_milliseconds(bench):
    """The law is 10 ms on an idle machine; here with room for a busy one."""
    tag = owner_tag(bench.store.key, "default/alice")
    for segment in range(1250):
        rows = []
        for slot in range(16):
            value = segment * 16 + slot
            parent = (value - 1).to_bytes(32, "big") if value else ROOT
            entry_id = value.to_bytes(32, "big")
            rows.append(EntryRecord(entry_id, parent, False, bytes(1024), bytes(16), 0, False, 1, (tag,)))
        record = SegmentRecord(f"s1.{segment:032x}.kv", 1, MODEL, 1, 0.0, {}, tuple(rows))
        bench.store._shelf.index.place(record, segment, certain=True)
    took = []
    for attempt in range(5):
        ids = [(attempt * 3000 + value).to_bytes(32, "big") for value in range(400)]
        begun = time.perf_counter()
        assert all(bench.store.locate(MODEL, ids))
        took.append(time.perf_counter() - begun)
    print(f"400 of 20,000 in {1000 * min(took):.1f} ms")
    assert min(took) < 0.06
    assert len(evict(bench.store, 0)) == 20_000
