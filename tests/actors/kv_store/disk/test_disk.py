"""The store of KV on disk: what is committed is found, what is forgotten is gone, and the budget holds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.protocol.entries import Entry, EntryRecord, Failure, SegmentRecord
from satchel.cluster.errors import DiskError, DiskFull, InvalidRecord, SatchelError, StaleEpoch, StoreInUse
from tests.worlds.kv_store.kv_files import (
    MODEL,
    OTHER_MODEL,
    ROOT,
    Bench,
    arrays,
    chain,
    checked,
    evict,
    payload,
    read_one,
    tail,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with checked(tmp_path / "kv") as made:
        yield made


def file_bytes(bench: Bench) -> int:
    return sum(path.stat().st_size for path in bench.files())


def test_what_is_committed_is_found_also_after_a_restart(bench):
    entries = chain(20)
    assert bench.lacks(*entries)
    assert bench.put(entries[:16]).kept == [entry.id for entry in entries[:16]]
    assert bench.lacks(*entries[16:])
    bench.put(entries[16:])
    assert bench.has(*entries)
    first = bench.store.epoch
    bench.open()
    assert bench.has(*entries) and bench.store.epoch > first
    stats = bench.store.stats()
    assert (stats["entries"], stats["files"], stats["bytes"]) == (20, 2, file_bytes(bench))


def test_a_file_counts_only_once_it_is_committed(bench):
    entries = chain(2)
    record = bench.write(entries)
    assert bench.lacks(*entries) and len(bench.files()) == 1
    bench.store.commit(record)
    assert bench.has(*entries)
    assert bench.store.commit(record).kept == [entry.id for entry in entries], "again is harmless"
    assert bench.store.stats()["entries"] == 2


def test_an_entry_of_another_model_is_never_returned(bench):
    entries = chain(2)
    bench.put(entries)
    tail_of_it = tail([1, 2], 9)
    bench.put([tail_of_it])
    assert bench.store.locate(OTHER_MODEL, [entry.id for entry in entries]) == [None, None]
    assert bench.store.tails(OTHER_MODEL, ROOT, [1, 2]) == []


def test_the_first_copy_of_an_id_stays(bench):
    entries = chain(3)
    bench.put(entries[:2])
    again = [Entry(entry.id, entry.parent, entry.tokens, arrays(90 + index)) for index, entry in enumerate(entries)]
    assert bench.put(again[:2]).dropped == [entry.id for entry in entries[:2]]
    assert len(bench.files()) == 1, "nothing of the second file is needed"
    placed = bench.put(again)
    assert (placed.kept, placed.dropped) == ([entries[2].id], [entries[0].id, entries[1].id])
    assert bench.has(entries[0], entries[1], again[2])
    assert bench.store.stats()["dead_entries"] == 2
    bench.store.compact()
    assert bench.store.stats()["dead_entries"] == 0, "mostly dead files are rewritten"
    assert payload(again[0]) not in bench.bytes_on_disk()
    assert bench.has(entries[0], entries[1], again[2])


def test_a_copy_that_adds_to_the_first_replaces_it(bench):
    (plain,) = chain(1)
    copies = [
        Entry(plain.id, plain.parent, plain.tokens, arrays(number), window_from=window_from, snapshot=snapshot)
        for number, (window_from, snapshot) in enumerate([(100, False), (0, False), (0, True), (50, False)])
    ]
    assert [bool(bench.put([copy]).kept) for copy in copies] == [True, True, True, False]
    assert bench.has(copies[2]) and len(bench.files()) == 1


def test_tails_are_found_by_their_longest_common_beginning(bench):
    tails = [tail([1, 2, 3, 4], 1), tail([1, 2, 9], 2), tail([7], 3), tail([1, 2, 3, 4], 4, parent=MODEL)]
    for entry in tails:
        bench.put([entry])
    found = bench.store.tails(MODEL, ROOT, [1, 2, 3, 5])
    assert [(match.location.id, match.tokens) for match in found] == [(tails[0].id, 3), (tails[1].id, 2)]
    assert [match.tokens for match in bench.store.tails(MODEL, ROOT, [1, 2, 3, 5], count_max=1)] == [3]
    assert bench.store.tails(MODEL, ROOT, []) == bench.store.tails(MODEL, ROOT, [2]) == []
    whole = bench.store.tails(MODEL, ROOT, [1, 2, 9, 9])[0]
    assert whole.tokens == 3 == len(whole.location.tokens) // 4
    assert bench.has(*tails)


def test_a_longer_tail_takes_the_place_of_those_it_serves_for(bench):
    short, longer, beside = tail([1, 2], 1), tail([1, 2, 3], 2), tail([1, 5], 3)
    bench.put([short])
    bench.put([beside])
    assert bench.put([longer]).retracted == [short.id]
    assert bench.has(longer, beside) and bench.lacks(short)
    assert bench.put([short]).dropped == [short.id], "and a shorter one that comes later is not needed"
    assert len(bench.files()) == 2


def test_one_parent_has_a_limited_number_of_tails(bench):
    bench.open(tails_per_parent_max=3)
    tails = [tail([number], number) for number in range(5)]
    for entry in tails:
        bench.put([entry])
    assert bench.has(*tails[2:]) and bench.lacks(*tails[:2])


def test_the_least_recently_used_file_goes_first_and_real_bytes_count(bench):
    groups = [chain(1, first=10 * number) for number in range(6)]
    size = bench.write(groups[0]).nbytes
    bench.open(bytes_max=4 * size + 3)
    for group in groups[:4]:
        bench.put(group)
    bench.store.touch([groups[0][0].id])
    bench.now -= 10_000
    placed = bench.put(groups[4])
    assert placed.retracted == [groups[1][0].id]
    assert bench.has(*groups[0], *groups[2], *groups[3], *groups[4])
    # The clock went back and the store was opened anew: the order stays.
    bench.open(bytes_max=4 * size + 3, session="s2")
    assert bench.put(groups[5]).retracted == [groups[2][0].id]
    assert file_bytes(bench) <= 4 * size + 3
    assert len(evict(bench.store, 2 * size)) == 2 and bench.has(*groups[4], *groups[5])
    assert len(evict(bench.store, 0)) == 2 and bench.files() == []


def test_a_commit_is_a_use_also_after_a_restart(bench):
    first, second = chain(1), chain(1, first=10)
    records = [bench.write(first), bench.write(second)]
    for record in reversed(records):
        bench.store.commit(record)
    bench.open(bytes_max=2 * records[0].nbytes + 3, session="s2")
    assert bench.put(chain(1, first=20)).retracted == [second[0].id]


def test_the_beginning_of_a_chain_stays_longest(bench):
    entries = chain(3)
    for entry in entries:
        bench.put([entry])
    bench.store.touch([entry.id for entry in entries])
    order = []
    while bench.store.stats()["bytes"]:
        order += evict(bench.store, bench.store.stats()["bytes"] - 1)
    assert order == [entries[2].id, entries[1].id, entries[0].id]


def test_files_and_rows_are_limited_too(bench):
    entries = chain(9)
    bench.open(files_max=2)
    for at in range(0, 9, 3):
        bench.put(entries[at : at + 3])
    assert bench.lacks(*entries[:3]) and bench.has(*entries[3:])
    bench.open(rows_max=5)
    bench.put(entries[:2])
    assert bench.store.stats()["entries"] == 5 and bench.has(*entries[:2], *entries[6:])


def test_a_pinned_file_stays_until_its_lease_ends(bench):
    entries = chain(2)
    for entry in entries:
        bench.put([entry])
    pin = bench.store.pin(bench.located(entries[:1]), lease_s=5.0)
    assert evict(bench.store, 0) == [entries[1].id]
    assert bench.has(entries[0])
    bench.now += 5.0
    assert not bench.store.unpin(pin), "it has expired"
    assert evict(bench.store, 0) == [entries[0].id]


def test_a_lease_that_replaces_another_keeps_the_files_of_both(bench):
    entries = chain(3)
    for entry in entries:
        bench.put([entry])
    first = bench.store.pin(bench.located(entries[:1]), 5.0)
    bench.now += 4.0
    both = bench.store.pin(bench.located(entries[1:2]), 5.0, first)
    assert not bench.store.unpin(first) and bench.store.stats()["leases"] == 1
    bench.now += 4.0
    assert evict(bench.store, 0) == [entries[2].id] and bench.has(*entries[:2])
    assert bench.store.unpin(both) and len(evict(bench.store, 0)) == 2


def test_pins_are_limited_and_keep_nothing_that_is_gone(bench):
    entries = chain(2)
    bench.put(entries)
    locations = bench.located(entries)
    evict(bench.store, 0)
    assert bench.store.unpin(bench.store.pin(locations, 10.0)) and bench.lacks(*entries)
    bench.open(leases_max=2, lease_s_max=4.0)
    bench.put(entries)
    for _ in range(2):
        bench.store.pin(bench.located(entries), 1e9)
    with pytest.raises(DiskError):
        bench.store.pin(bench.located(entries), 1.0)
    bench.now += 4.0
    bench.store.pin(bench.located(entries), 1.0)


def test_an_unreadable_entry_is_reported_and_can_be_written_again(bench):
    entries = chain(2)
    bench.put(entries)
    (path,) = bench.files()
    data = bytearray(path.read_bytes())
    data[data.index(payload(entries[0]))] ^= 1
    path.write_bytes(data)
    failure = read_one(bench, entries[0])
    assert isinstance(failure, Failure) and bench.has(entries[1])
    assert bench.store.report([failure]) == [entries[0].id]
    assert bench.store.report([failure]) == [], "once"
    assert bench.lacks(entries[0]) and bench.store.stats()["corrupt_total"] == 1
    bench.put(entries[:1])
    assert bench.has(*entries)
    bench.store.compact()
    assert bench.has(*entries) and bench.store.stats()["dead_entries"] == 0


def test_a_missing_file_is_a_miss_and_can_be_written_again(bench):
    entries = chain(2)
    bench.put(entries)
    bench.files()[0].unlink()
    failures = read_entries(bench.root, bench.store.key, bench.located(entries))
    assert all(isinstance(failure, Failure) and failure.missing for failure in failures)
    bench.store.report(failures)
    bench.put(entries)
    assert bench.has(*entries)


def test_an_old_writer_cannot_commit(bench):
    epoch = bench.store.epoch
    bench.open()
    old = bench.write(chain(1), epoch=epoch)
    with pytest.raises(StaleEpoch):
        bench.store.commit(old)
    assert bench.files() == []


def test_files_that_were_never_committed_count_from_the_next_start_if_they_are_whole(bench):
    """Their writers may commit them again, and others' unfinished files go."""
    record = bench.write(chain(1))
    half = bench.files()[0].with_name("s1." + "0" * 32 + ".tmp")
    half.write_bytes(b"half")
    theirs = half.with_name("notes.txt")
    theirs.write_bytes(b"not ours")
    bench.open()
    assert len(bench.files()) == 3, "the session goes on, its writers may still finish"
    assert bench.has(*chain(1)) and bench.store.commit(record).kept
    evict(bench.store, 0)
    late = bench.write(chain(1, first=9))
    bench.store.compact()
    bench.now += 599.0
    bench.store.compact()
    assert len(bench.files()) == 3
    bench.now += 1.0
    bench.store.compact()
    assert bench.files() == [theirs]
    with pytest.raises(InvalidRecord):
        bench.store.commit(late)
    half.write_bytes(b"half")
    bench.open(session="s2")
    assert bench.files() == [theirs], "a new session has none of the old one's writers"


def test_a_commit_must_fit_its_file(bench):
    record = bench.write(chain(2))
    values = vars(record)
    path = bench.files()[0]
    kept = path.read_bytes()
    others = [
        {"nbytes": record.nbytes + 1},
        {"entries": record.entries[:1]},
        {"meta": {"a": "b"}},
        {"name": "s1." + "0" * 32 + ".kv"},
        {"name": "../../key"},
        {"name": path.name.replace(".kv", ".tmp")},
        {"model": OTHER_MODEL},
        {"entries": (record.entries[0], EntryRecord(**{**vars(record.entries[1]), "digest": bytes(16)}))},
    ]
    for change in others:
        with pytest.raises(InvalidRecord):
            bench.store.commit(SegmentRecord(**{**values, **change}))
        path.write_bytes(kept)
    for damaged in (kept[:-1], kept + b"\0", b"", kept[:-20] + bytes([kept[-20] ^ 1]) + kept[-19:]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRecord):
            bench.store.commit(record)
        assert not path.exists(), "a refused file is removed"
    path.write_bytes(kept)
    bench.store.commit(record)
    assert bench.store.stats()["entries"] == 2


def test_a_segment_over_the_whole_budget_is_refused(bench):
    bench.open(bytes_max=100)
    with pytest.raises(DiskFull):
        bench.put(chain(1))
    assert bench.files() == []


def test_a_second_store_is_refused_and_a_killed_one_leaves_the_folder_at_once(bench, tmp_path):
    with pytest.raises(StoreInUse):
        DiskStore(bench.root, session="s2", limits=DiskLimits(1))
    code = (
        "import sys, time; from pathlib import Path; from satchel.actors.kv_store.disk.store import DiskStore\n"
        "from satchel.actors.kv_store.disk.store import DiskLimits\n"
        "store = DiskStore(Path(sys.argv[1]), session='x', limits=DiskLimits(10**9))\n"
        "print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "two")], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"open\n"
            with pytest.raises(StoreInUse):
                DiskStore(tmp_path / "two", session="s2", limits=DiskLimits(1))
        finally:
            os.kill(other.pid, signal.SIGKILL)
        DiskStore(tmp_path / "two", session="s2", limits=DiskLimits(1), lock_wait_s=5.0).close()


def test_folders_and_files_are_for_their_owner_alone(bench):
    bench.put(chain(1))
    for path in [bench.root, *bench.root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_closed_store_says_so(tmp_path):
    with DiskStore(tmp_path / "kv", session="s", limits=DiskLimits(10**6)) as store:
        pass
    store.close()
    for call in (lambda: store.locate(MODEL, []), store.stats, store.compact, lambda: store.forget("a")):
        with pytest.raises(DiskError):
            call()
    for session in ("", "a/b", "store"):
        with pytest.raises(InvalidRecord):
            DiskStore(tmp_path / "kv", session=session, limits=DiskLimits(1))


def test_errors_are_of_the_tree_and_say_what_was_being_done(bench, monkeypatch):
    monkeypatch.setattr(bench.store._shelf.io, "space", Mock(side_effect=OSError(errno.EIO, "not now")))
    with pytest.raises(SatchelError, match="keeping the reserve: not now"):
        bench.store.keep_reserve()
