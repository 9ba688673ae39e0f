"""Whose KV it is: what an owner leaves is gone from the disk, and nobody else loses anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.actors.kv_store.disk import index
from satchel.actors.kv_store.disk import store as disk
from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.kv_store.disk.segments import STORE_SESSION, SegmentWriter
from satchel.actors.protocol.entries import Entry, Failure, SegmentRecord, owner_tag
from satchel.cluster.errors import InvalidRecord
from tests.worlds.kv_store.kv_files import OTHER_MODEL, ROOT, Bench, arrays, chain, checked, payload, tail


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with checked(tmp_path / "kv") as made:
        yield made


def test_a_tail_with_a_snapshot_or_of_another_owner_stays_beside_a_longer_one(bench):
    snapshot = tail([1, 2], 1, snapshot=True)
    alice = tail([1, 2, 3], 2, owners=("default/alice",))
    bob = tail([1, 2, 3, 4], 3, owners=("default/bob",))
    for entry in (snapshot, alice, bob):
        bench.put([entry])
    assert bench.has(snapshot, alice, bob)
    assert bench.store.forget("default/bob") == [bob.id]
    assert bench.has(snapshot, alice)


def test_forgetting_erases_the_bytes_of_what_nobody_else_owns(bench):
    alice = chain(3, owners=("default/alice",))
    bob = chain(3, first=50, owners=("default/bob",))
    cache = chain(2, first=80)
    bench.put([alice[0], bob[0], alice[1], cache[0]])
    bench.put([bob[1], alice[2]])
    bench.put([bob[2], cache[1]])
    tokens = bytes(4) + b"".join(number.to_bytes(4, "little") * 20 for number in (1, 2))
    assert tokens[4:84] in bench.bytes_on_disk() and payload(alice[2]) in bench.bytes_on_disk()
    assert set(bench.store.forget("default/alice")) == {entry.id for entry in alice}
    assert bench.lacks(*alice) and bench.has(*bob, *cache)
    left = bench.bytes_on_disk()
    assert not [number for number, entry in enumerate(alice) if payload(entry) in left], "arrays"
    assert not [number for number, entry in enumerate(alice) if entry.id in left], "ids, in the index too"
    assert tokens[4:84] not in left and tokens[84:] not in left, "tokens"
    assert all(payload(entry) in left for entry in (*bob, *cache))
    bench.open()
    assert bench.has(*bob, *cache) and bench.lacks(*alice)


def test_what_others_committed_or_used_survives_until_they_are_forgotten_too(bench):
    shared = chain(2, owners=("default/alice",))
    bench.put(shared)
    second = [Entry(shared[0].id, ROOT, shared[0].tokens, arrays(77), owners=("default/bob",))]
    extra = chain(1, first=60, owners=("default/bob",))
    bench.put([*second, *extra])
    bench.store.touch([shared[1].id], owner="default/carol")
    assert bench.store.forget("default/alice") == [] and bench.has(*shared)
    assert set(bench.store.forget("default/bob")) == {shared[0].id, extra[0].id}
    left = bench.bytes_on_disk()
    assert payload(shared[0]) not in left and payload(second[0]) not in left, "also of the second copy"
    assert bench.has(shared[1])
    assert bench.store.forget("default/carol") == [shared[1].id] and bench.files() == []


def test_after_a_start_no_file_names_who_was_forgotten(bench):
    """Others own the entry too, so it stays, and its file is written anew."""
    alice, bob = "default/alice", "default/bob"
    (entry,) = chain(1, owners=(alice, bob))
    bench.put([entry])
    assert bench.store.forget(alice) == []
    bench.open(settles=False)
    (record,) = bench.store.uncertain()
    assert record.owners == (owner_tag(bench.store.key, bob),)
    assert owner_tag(bench.store.key, alice) not in bench.bytes_on_disk()


def test_only_what_an_earlier_opening_wrote_is_settled(bench):
    key, (old, new) = bench.store.key, (chain(1, owners=("default/alice",)), chain(1, first=5, owners=("default/bob",)))
    bench.put(old)
    bench.open(settles=False)
    bench.put(new)
    more = [Entry(old[0].id, ROOT, old[0].tokens, arrays(0, state=True), snapshot=True, owners=("default/bob",))]
    bench.put(more)
    assert [record.id for record in bench.store.uncertain()] == [old[0].id], "a copy knows its own owners alone"
    carol = owner_tag(key, "default/carol")
    assert bench.store.settle({old[0].id: [carol], new[0].id: [carol]}) == 1
    assert list(bench.store.uncertain()) == []
    assert bench.store.forget("default/alice") == [] and bench.store.forget("default/carol") == []
    assert bench.store.forget("default/bob") == [new[0].id, old[0].id]


def test_what_nobody_in_particular_owns_is_just_cache(bench):
    entries = chain(1)
    bench.put(entries)
    bench.store.touch([entries[0].id], owner="default/alice")
    assert bench.store.forget("default/alice") == bench.store.forget("default/nobody") == []
    assert bench.has(*entries)
    with pytest.raises(InvalidRecord):
        bench.store.forget("")


def test_an_entry_that_everybody_uses_is_nobodys(bench, monkeypatch):
    monkeypatch.setattr(index, "OWNERS_MAX", 8)
    entries = chain(1, owners=("default/first",))
    bench.put(entries)
    for number in range(12):
        bench.store.touch([entries[0].id], owner=f"default/{number}")
    assert bench.store.forget("default/first") == [] and bench.has(*entries)


def test_forgetting_waits_for_readers_and_then_the_bytes_go(bench):
    alice, bob = chain(1, owners=("default/alice",)), chain(1, first=9, owners=("default/bob",))
    bench.put([*alice, *bob])
    locations = bench.located(alice)
    pin = bench.store.pin(locations, lease_s=20.0)
    bench.store.forget("default/alice")
    assert bench.lacks(*alice) and bench.has(*bob)
    assert not isinstance(read_entries(bench.root, bench.store.key, locations)[0], Failure), "the reader goes on"
    bench.store.unpin(pin)
    assert payload(alice[0]) not in bench.bytes_on_disk()
    bench.put(alice)
    bench.store.pin(bench.located(alice), lease_s=20.0)
    bench.store.forget("default/alice")
    assert payload(alice[0]) in bench.bytes_on_disk()
    bench.now += 20.0
    bench.store.compact()
    assert payload(alice[0]) not in bench.bytes_on_disk() and bench.has(*bob)


def test_compaction_carries_nothing_over_that_does_not_verify(bench):
    entries = chain(4, owners=("default/alice",))
    bob = chain(1, first=70, owners=("default/bob",))
    bench.put([*entries[:2], *bob])
    (path,) = bench.files()
    data = bytearray(path.read_bytes())
    data[data.index(payload(bob[0]))] ^= 1
    path.write_bytes(data)
    bench.store.forget("default/alice")
    assert bench.lacks(*bob) and bench.files() == [] and bench.store.stats()["corrupt_total"] == 1


def test_what_a_rewriting_that_failed_left_goes_in_the_next_round(bench):
    """It may be of somebody who was forgotten since, and nobody will commit it; what others write is under way."""
    left, coming = chain(1, owners=("default/alice",)), chain(1, first=9)
    bench.write(left, session=STORE_SESSION)
    record = bench.write(coming)
    bench.store.compact()
    assert payload(left[0]) not in bench.bytes_on_disk() and payload(coming[0]) in bench.bytes_on_disk()
    bench.store.commit(record)
    assert bench.has(*coming)


def test_a_snapshot_is_not_given_up_for_a_longer_tail(bench):
    snapshot, longer = tail([1, 2], 1, snapshot=True), tail([1, 2, 3], 2, snapshot=True)
    assert bench.put([snapshot]).kept and bench.put([longer]).retracted == []
    assert bench.has(snapshot, longer)


def test_a_copy_that_replaces_another_has_the_owners_of_both(bench):
    (plain,) = chain(1, owners=("default/alice",))
    better = Entry(plain.id, ROOT, plain.tokens, arrays(77), owners=("default/bob",), snapshot=True)
    bench.put([plain])
    bench.put([better])
    assert bench.store.forget("default/bob") == [] and bench.has(better)
    assert bench.store.forget("default/alice") == [plain.id] and bench.files() == []


def test_what_dies_while_its_file_is_rewritten_does_not_come_back(bench, monkeypatch):
    alice, bob = chain(1, owners=("default/alice",)), chain(2, first=9, owners=("default/bob",))
    bench.put([*alice, *bob])
    place = bench.located(bob)[1]
    assert place is not None

    class Slow(SegmentWriter):
        def finish(self) -> SegmentRecord:
            bench.store.report([Failure(place, "found to be corrupt meanwhile", False)])
            return super().finish()

    with monkeypatch.context() as slowly:
        slowly.setattr(disk, "SegmentWriter", Slow)
        bench.store.forget("default/alice")
    assert bench.lacks(bob[1]) and bench.has(bob[0])
    bench.store.compact()
    assert bench.has(bob[0]) and payload(bob[1]) not in bench.bytes_on_disk(), "and is erased in the next round"


def test_owners_are_settled_of_what_is_uncertain_only(bench):
    lost, known = chain(2, owners=("default/alice",)), chain(1, first=9, owners=("default/alice",))
    bench.put(lost)
    bench.open(settles=False)
    bench.put(known)
    assert {record.id for record in bench.store.uncertain()} == {entry.id for entry in lost}
    bob, carol = (owner_tag(bench.store.key, f"default/{name}") for name in ("bob", "carol"))
    assert bench.store.settle({lost[0].id: [bob, carol], known[0].id: [bob], bytes(32): [bob], lost[1].id: []}) == 1
    assert bench.store.owners() == {bob, carol, owner_tag(bench.store.key, "default/alice")}
    assert [record.id for record in bench.store.uncertain()] == [lost[1].id]
    assert set(bench.store.forget("default/alice")) == {lost[1].id, known[0].id} and bench.has(lost[0])
    assert bench.store.forget("default/bob") == [] and bench.has(lost[0])
    assert bench.store.forget("default/carol") == [lost[0].id] and bench.files() == []


def test_what_an_owner_has_rightly_is_not_taken_with_the_rest(bench):
    entries = chain(3, owners=("default/alice",))
    bench.put(entries)
    assert bench.store.forget("default/alice", lambda record: record.id == entries[1].id) == [
        entry.id for entry in entries if entry is not entries[1]
    ]
    assert bench.has(entries[1]) and payload(entries[0]) not in bench.bytes_on_disk()
    assert bench.store.forget("default/alice") == [entries[1].id]


def test_of_as_many_owners_as_are_kept_each_counts(bench, monkeypatch):
    """The last of them takes the entry along; with one more it is nobody's in particular."""
    monkeypatch.setattr(index, "OWNERS_MAX", 3)
    for count, stays in ((3, False), (4, True)):
        (entry,) = chain(1, first=20 * count, owners=("default/0",))
        bench.put([entry])
        for number in range(1, count):
            bench.store.touch([entry.id], owner=f"default/{number}")
        for number in range(count):
            bench.store.forget(f"default/{number}")
        assert bench.has(entry) if stays else bench.lacks(entry)


def test_a_longer_tail_serves_for_a_shorter_one_only_where_all_of_its_owners_have_it(bench):
    alice, bob = "default/alice", "default/bob"
    both, hers = tail([1, 2], 1, owners=(alice, bob)), tail([1, 2, 3], 2, owners=(alice,))
    bench.put([both])
    assert bench.put([hers]).retracted == [] and bench.has(both, hers)
    assert bench.put([tail([1, 2, 3, 4], 3, owners=(alice, bob))]).retracted == [both.id, hers.id]


def test_a_copy_of_another_model_replaces_nothing(bench):
    (plain,) = chain(1)
    better = Entry(plain.id, ROOT, plain.tokens, arrays(77), snapshot=True)
    bench.put([plain])
    assert bench.put([better], model=OTHER_MODEL).dropped == [plain.id]
    assert bench.has(plain)
