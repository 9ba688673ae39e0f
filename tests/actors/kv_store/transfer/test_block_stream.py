"""Blocks from one store into another: what arrives is what was there, and what is not there is not asked for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from satchel.actors.kv_store.disk.segment_reader import StoredEntry
from satchel.actors.kv_store.transfer import link
from satchel.actors.kv_store.transfer.block_server import ServerLimits
from satchel.actors.kv_store.transfer.pull_loop import PullLimits, Stop
from satchel.actors.kv_store.transfer.pull_writer import SEGMENTS_AHEAD, PullWriter
from satchel.actors.protocol.entries import Entry
from satchel.cluster.errors import InvalidRecord, PortInUse, QueueFull
from tests.worlds.kv_store.block_nodes import Meddler, Nodes, nodes, wanted
from tests.worlds.kv_store.kv_files import ROOT, arrays, chain, payload, read_one, tail
from tests.worlds.macos_sockets import accepts_as_macos, reset


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path) as made:
        yield made


def large(count: int, *, nbytes: int = 1 << 20, **more) -> list[Entry]:
    """Blocks of about `nbytes` each, in four layers."""
    made = []
    for number, entry in enumerate(chain(count, **more)):
        rng = np.random.default_rng(number)
        parts = {f"{layer}.k": rng.integers(0, 2**32, nbytes // 16, dtype=np.uint32) for layer in range(4)}
        made.append(Entry(entry.id, entry.parent, entry.tokens, parts, owners=entry.owners))
    return made


def test_a_chain_moves_and_reads_back_byte_for_byte(pair):
    """Of files of several entries each, asked for in pieces that fit none of them."""
    entries = chain(37)
    for start in range(0, 37, 7):
        pair.source.put(entries[start : start + 7])
    pair.serve()
    result = pair.pull(wanted(entries, tokens=[n for entry in entries for n in entry.tokens]), owner="default/alice")
    assert (result.stop, result.blocks, result.installed, result.connections) == (Stop.COMPLETE, 37, 37, 1)
    assert result.here == [entry.id for entry in entries]
    assert result.nbytes == sum(array.nbytes for entry in entries for array in entry.parts.values())
    assert pair.target.has(*entries)
    assert pair.source.located(entries)[0].digest == pair.target.located(entries)[0].digest
    assert len(pair.target.files()) == 5, "8 entries a file"
    assert set(pair.target.store.forget("default/alice")) == {entry.id for entry in entries}


def test_a_pull_follows_what_the_source_makes(pair):
    """Blocks come and count here as they are sealed there, and the tail of all the rest ends it; a shorter one, of
    another turn, does not."""
    entries = chain(6)
    rest = [*range(100)]
    shorter, last = (tail(rest[:count], count, parent=entries[-1].id) for count in (40, 100))
    pair.source.put(entries[:1])
    pair.serve()
    seen: list[int] = []

    def make() -> None:
        for entry in entries[1:]:
            time.sleep(0.06)
            seen.append(sum(location is not None for location in pair.target.located(entries)))
            pair.source.put([entry])
        pair.source.put([shorter])
        time.sleep(0.1)
        pair.source.put([last])

    maker = threading.Thread(target=make)
    maker.start()
    result = pair.pull(replace(wanted(entries), rest=rest, wait_s=5.0), owner="default/alice")
    maker.join()
    assert (result.stop, result.blocks, result.installed, result.connections) == (Stop.COMPLETE, 6, 7, 1)
    assert result.here == [*(entry.id for entry in entries), last.id]
    assert pair.target.has(*entries, last) and not pair.target.has(shorter)
    assert seen[-1] >= 2 and seen == sorted(seen), "the first ones count before the last ones are made"


def test_a_pull_that_waits_ends_by_itself_with_a_dead_source_and_by_its_deadline(pair):
    entries = chain(4)
    pair.source.put(entries[:2])
    server = pair.serve()
    waiting = replace(wanted(entries), wait_s=0.3)
    began = time.monotonic()
    result = pair.pull(waiting)
    assert (result.stop, result.blocks) == (Stop.MISSING, 2) and 0.3 <= time.monotonic() - began < 20.0
    result = pair.pull(replace(waiting, wait_s=60.0), deadline_s=0.3)
    assert (result.stop, result.blocks) == (Stop.DEADLINE, 2)
    closing = threading.Timer(0.3, server.close)
    closing.start()
    began = time.monotonic()
    result = pair.pull(replace(waiting, wait_s=60.0), deadline_s=60.0)
    closing.join()
    assert (result.stop, result.blocks) == (Stop.UNREACHABLE, 2) and time.monotonic() - began < 30.0


def test_arrays_of_every_kind_move(pair):
    """Empty ones, single numbers, states in full precision, other signatures from entry to entry, and what is said
    about them."""
    entries = chain(6)
    kinds = [
        {"a": np.empty((0, 3), np.uint8), "b": np.array(7, np.uint32), "c": np.arange(9, dtype=np.float32)},
        arrays(1, layers=3, state=True),
        arrays(2, layers=3, state=True),
        {"c": np.arange(5, dtype=np.float16), "a": np.arange(4, dtype=np.uint16)},
        {"a": np.arange(4, dtype=np.uint16), "c": np.arange(5, dtype=np.float16)},
        arrays(3),
    ]
    entries = [Entry(e.id, e.parent, e.tokens, parts) for e, parts in zip(entries, kinds, strict=True)]
    pair.source.put(entries[:1], meta={"bfloat16": "c"})
    pair.source.put(entries[1:3])
    for entry in entries[3:]:
        pair.source.put([entry])
    pair.serve()
    assert pair.pull(wanted(entries)).stop is Stop.COMPLETE
    assert pair.target.has(*entries)
    first, second = read_one(pair.target, entries[0]), read_one(pair.target, entries[1])
    assert isinstance(first, StoredEntry) and isinstance(second, StoredEntry)
    assert (first.layout.meta, second.layout.meta) == ({"bfloat16": "c"}, {})


def test_what_is_here_is_not_fetched_and_what_neither_has_ends_the_chain(pair):
    entries = chain(12)
    pair.source.put(entries[:4])
    pair.source.put(entries[6:9])
    pair.source.put(entries[10:])
    pair.target.put([entries[0], entries[4], entries[5], entries[7]])
    pair.serve()
    result = pair.pull(wanted(entries))
    assert (result.stop, result.blocks, result.installed) == (Stop.MISSING, 9, 5)
    assert pair.target.has(*entries[:9]) and pair.target.lacks(*entries[9:])
    # The sender notes an entry once it has sent it, which may be after it has come.
    ends = time.monotonic() + 5.0
    while len(pair.sent) < 5 and time.monotonic() < ends:
        time.sleep(0.01)
    assert len(pair.sent) == 5
    again = pair.pull(wanted(entries[:9]))
    assert (again.stop, again.blocks, again.installed, again.nbytes) == (Stop.COMPLETE, 9, 0, 0)


def test_what_was_here_already_is_its_owners_too(pair):
    """So it stays when the other one, who brought it, is forgotten; and goes with the last of them."""
    entries = chain(3)
    pair.target.put([Entry(e.id, e.parent, e.tokens, e.parts, owners=("default/bob",)) for e in entries[:2]])
    pair.source.put(entries)
    pair.serve()
    assert pair.pull(wanted(entries), owner="default/alice").installed == 1
    assert pair.target.store.forget("default/bob") == []
    assert pair.target.has(*entries)
    assert len(pair.target.store.forget("default/alice")) == 3


def test_a_copy_that_serves_where_ours_does_not_is_fetched(pair):
    """Recurrent layers need the snapshot at the end of the prefix; a copy without one is not enough."""
    plain = chain(2)
    better = [Entry(e.id, e.parent, e.tokens, arrays(50 + n, state=True), snapshot=True) for n, e in enumerate(plain)]
    pair.target.put(plain)
    pair.source.put(better)
    pair.serve()
    assert pair.pull(wanted(plain)).installed == 2
    assert pair.target.has(*better)
    assert all(location is not None and location.snapshot for location in pair.target.located(plain))


def test_tails_come_with_their_snapshots_if_they_are_all_of_what_is_wanted(pair):
    """Another agent's longer tail stays where it is, though it begins alike: its end is not for this one."""
    entries = chain(2)
    ours = tail([1, 2, 3], 70, parent=entries[-1].id, snapshot=True)
    short = tail([1], 71, parent=entries[-1].id, snapshot=True)
    foreign = tail([1, 2, 3, 9, 9], 72, parent=entries[-1].id, owners=("default/bob",))
    for group in (entries, [ours], [short], [foreign]):
        pair.source.put(group)
    pair.serve()
    result = pair.pull(wanted(entries, rest=[1, 2, 3, 4, 5], tails_max=2), owner="default/alice")
    assert (result.stop, result.blocks, result.installed) == (Stop.COMPLETE, 2, 4)
    assert pair.target.has(*entries, ours, short) and pair.target.lacks(foreign)
    assert payload(foreign) not in pair.target.bytes_on_disk()
    located = pair.target.located([ours])[0]
    assert located is not None and located.snapshot and located.tail


def test_a_tail_without_its_chain_is_not_fetched(pair):
    entries = chain(3)
    end = tail([1, 2], 70, parent=entries[-1].id)
    pair.source.put([entries[0], entries[2]])
    pair.source.put([end])
    pair.serve()
    result = pair.pull(wanted(entries, rest=[1, 2]))
    assert (result.stop, result.blocks, result.installed) == (Stop.MISSING, 1, 1)
    assert pair.target.lacks(end)


def test_a_conversation_shorter_than_a_block_is_a_tail_of_the_root(pair):
    end = tail([4, 5, 6], 70, parent=ROOT)
    pair.source.put([end])
    pair.serve()
    result = pair.pull(wanted([], rest=[4, 5, 6]))
    assert (result.stop, result.here) == (Stop.COMPLETE, [end.id])
    assert pair.target.has(end)
    assert pair.pull(wanted([])).stop is Stop.COMPLETE, "nothing is wanted, and nothing came"


def test_blocks_of_other_tokens_than_ours_are_refused(pair):
    entries = chain(3)
    pair.source.put(entries)
    pair.serve()
    tokens = [n for entry in entries for n in entry.tokens]
    tokens[2 * 256 + 5] += 1
    result = pair.pull(wanted(entries, tokens=tokens))
    assert (result.stop, result.blocks, result.reason) == (Stop.DAMAGED, 2, "it has other tokens")
    assert pair.target.has(*entries[:2]) and pair.target.lacks(entries[2])


def test_few_segments_are_complete_and_not_committed_and_none_is_in_memory(pair, monkeypatch):
    """Eight megabytes through segments of one, on a disk that is slower than the wire."""
    entries = large(8)
    pair.source.put(entries)
    pair.serve()
    commit, held = PullWriter._commit, []

    def watched(self: PullWriter, segment) -> None:
        time.sleep(0.02)
        held.append(sum(not commit.done() for commit in self._commits))
        commit(self, segment)

    monkeypatch.setattr(PullWriter, "_commit", watched)
    result = pair.pull(wanted(entries), puller=pair.puller(limits=PullLimits(install_entries_max=1)))
    assert (result.stop, result.blocks) == (Stop.COMPLETE, 8)
    assert len(held) == 8 and max(held) == SEGMENTS_AHEAD + 1
    assert pair.target.has(*entries)


def test_an_entry_larger_than_the_store_ends_the_chain(pair):
    entries = [*chain(2), *large(3)[2:]]
    pair.source.put(entries[:2])
    pair.source.put(entries[2:])
    pair.serve()
    pair.target.open(bytes_max=1 << 19)
    result = pair.pull(wanted(entries))
    assert (result.stop, result.blocks) == (Stop.TOO_LARGE, 2)


def test_all_connections_take_from_one_rate(pair, monkeypatch):
    """Every byte that leaves was allowed by one rate, which is tested in virtual time."""
    entries = large(4)
    pair.source.put(entries)
    rates: list[Counted] = []

    class Counted(link.Rate):
        def __init__(self, bytes_per_s: float, now: float) -> None:
            super().__init__(bytes_per_s, now)
            self.rate, self.allowed = bytes_per_s, 0
            rates.append(self)

        def wait_s(self, nbytes: int, now: float) -> float:
            self.allowed += nbytes
            return super().wait_s(nbytes, now)

    monkeypatch.setattr(link, "Rate", Counted)
    came: list[int] = []

    def count(number: int, data: bytes) -> bytes:
        came.append(len(data))
        return data

    server = pair.serve(bytes_per_s=1e9)
    meddler = Meddler(server.addresses[0], count)
    for part in (entries[:2], entries):
        assert pair.pull(wanted(part), [meddler.address]).stop is Stop.COMPLETE
    server.close()
    meddler.close()
    assert [rate.rate for rate in rates] == [1e9]
    assert rates[0].allowed == sum(came) > 4 << 20


def test_two_pulls_of_one_chain_install_each_block_once(pair):
    """Both have all of it in the end; the index and the files agree."""
    entries = large(8, nbytes=1 << 18)
    pair.source.put(entries)
    pair.serve()
    puller = pair.puller()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(pair.pull(wanted(entries), puller=puller)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [(result.stop, result.blocks) for result in results] == [(Stop.COMPLETE, 8)] * 3
    assert pair.target.has(*entries)
    assert pair.target.store.stats()["blocks"] == 8 and pair.target.store.stats()["dead_entries"] == 0


def test_more_pulls_than_agreed_are_refused_at_once(pair):
    entries = large(2)
    pair.source.put(entries)
    pair.serve(bytes_per_s=1e5)
    puller = pair.puller(pulls_max=1)
    thread = threading.Thread(target=lambda: pair.pull(wanted(entries), puller=puller), daemon=True)
    thread.start()
    while not puller.pulling():
        time.sleep(0.005)
    with pytest.raises(QueueFull):
        pair.pull(wanted(entries), puller=puller)
    assert puller.close()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(QueueFull):
        pair.pull(wanted(entries), puller=puller)


def test_what_cannot_be_wanted_is_refused(pair):
    entries = chain(2)
    pair.serve()
    puller = pair.puller()
    for bad in (
        wanted([entries[0], entries[0]]),
        wanted(entries, tokens=[1] * 300),
        wanted(entries, rest=[-1]),
        wanted(entries, tails_max=99),
        wanted([Entry(b"short", ROOT, [1], {})]),
    ):
        with pytest.raises(InvalidRecord):
            pair.pull(bad, puller=puller)
    assert puller.pulling() == 0
    with pytest.raises(PortInUse):
        pair.serve(port=pair.servers[0].addresses[0][1])


def test_strangers_do_not_keep_nodes_out(pair):
    """As many as like may connect and say nothing: a further one takes the place of the first."""
    server = pair.serve(limits=ServerLimits(strangers_max=2, handshake_s=60.0))
    entries = chain(1)
    pair.source.put(entries)
    made = [socket.create_connection(server.addresses[0]) for _ in range(4)]
    for sock in made[:2]:
        sock.settimeout(20)
        assert sock.recv(1) == b""
    assert pair.pull(wanted(entries)).stop is Stop.COMPLETE
    for sock in made:
        sock.close()


def test_a_mac_serves_too(pair, monkeypatch):
    """Its connections do not block, as the listener does not, and one that is reset at once has no address."""
    accepts_as_macos(monkeypatch)
    server, entries = pair.serve(), chain(3)
    pair.source.put(entries)
    for _ in range(3):
        reset(server.addresses[0])
    assert pair.pull(wanted(entries)).stop is Stop.COMPLETE


def test_connections_of_nodes_are_bounded_and_strangers_have_little_time(pair):
    server = pair.serve(limits=ServerLimits(connections_max=0, handshake_s=0.3))
    with socket.create_connection(server.addresses[0], 5) as sock:
        assert sock.recv(1) == b""
    entries = chain(1)
    pair.source.put(entries)
    result = pair.pull(wanted(entries))
    assert (result.stop, result.blocks) == (Stop.UNREACHABLE, 0)
