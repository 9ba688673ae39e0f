"""Blocks on their way when something breaks: what is here then is right, is a beginning of the chain, and stays."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from satchel.actors.kv_store.disk.segments import model_folder
from satchel.actors.kv_store.transfer import wire
from satchel.actors.kv_store.transfer.block_client import PullResult
from satchel.actors.kv_store.transfer.block_server import BlockServer, ServerLimits
from satchel.actors.kv_store.transfer.handshake import NONCE_BYTES, SEAL_BYTES, Initiator, Seal
from satchel.actors.kv_store.transfer.link import Link
from satchel.actors.kv_store.transfer.pull_loop import LINES_MAX, PullLimits, Stop
from satchel.actors.protocol.entries import Entry
from satchel.cluster.errors import LinkError
from tests.worlds.kv_store.block_nodes import CLUSTER_KEY, Meddler, Nodes, nodes, wanted
from tests.worlds.kv_store.kv_files import MODEL, Filling, NoSync, chain, evict, payload

from .test_block_stream import large

SMALL = PullLimits(batch_entries=2, install_entries_max=2, backoff_s=0.02, stall_s=3.0)
"""Many small batches, so that there is a middle to break in."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path) as made:
        yield made


class Background:
    """A pull on a thread of its own."""

    def __init__(self, pair: Nodes, *arguments, **more) -> None:
        self.results: list[PullResult] = []
        self._thread = threading.Thread(target=lambda: self.results.append(pair.pull(*arguments, **more)), daemon=True)
        self._thread.start()

    def result(self) -> PullResult:
        self._thread.join(20)
        assert self.results, "it does not end"
        return self.results[0]


def until(condition) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it does not happen"
        time.sleep(0.005)


def damage(pair: Nodes, entry: Entry) -> None:
    """Flip a bit of what the source has of an entry."""
    location = pair.source.located([entry])[0]
    assert location is not None
    path = model_folder(pair.source.root, MODEL) / location.name
    raw = path.read_bytes()
    assert raw.count(payload(entry)) == 1
    at = raw.index(payload(entry))
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])


def test_damage_at_the_source_leaves_a_clean_beginning_and_is_reported_there(pair):
    entries = chain(9)
    pair.source.put(entries)
    damage(pair, entries[5])
    pair.serve()
    result = pair.pull(wanted(entries))
    assert (result.stop, result.blocks) == (Stop.MISSING, 5)
    assert pair.target.has(*entries[:5]) and pair.target.lacks(*entries[5:])
    assert pair.source.lacks(entries[5]), "it answers no more there, so that a new copy can"
    assert pair.source.store.stats()["corrupt_total"] == 1


def test_a_server_that_dies_and_comes_back_elsewhere_goes_on_where_it_ended(pair):
    entries = large(12, nbytes=1 << 18)
    pair.source.put(entries)
    first = pair.serve(bytes_per_s=1.5e6)
    other = pair.serve(bytes_per_s=1.5e6)
    pull = Background(pair, wanted(entries), [*first.addresses, *other.addresses], puller=pair.puller(limits=SMALL))
    until(lambda: pair.target.has(entries[1]))
    assert first.close()
    sent = len(pair.sent)
    result = pull.result()
    assert (result.stop, result.blocks, result.installed, result.connections) == (Stop.COMPLETE, 12, 12, 2)
    assert pair.target.has(*entries)
    assert len(pair.sent) - sent < 12, "what had come is not asked for again"


def test_a_server_that_comes_back_at_its_port_is_found_again(pair):
    """After a pause."""
    entries = large(8, nbytes=1 << 18)
    pair.source.put(entries)
    first = pair.serve(bytes_per_s=1.5e6)
    port = first.addresses[0][1]
    patient = replace(SMALL, backoff_s=0.4)
    pull = Background(pair, wanted(entries), first.addresses, puller=pair.puller(limits=patient))
    until(lambda: pair.target.has(entries[0]))
    first.close()
    time.sleep(0.05)
    pair.serve(port=port)
    assert pull.result().stop is Stop.COMPLETE and pair.target.has(*entries)


def test_a_server_that_is_gone_for_good_leaves_what_came(pair):
    entries = large(8, nbytes=1 << 18)
    pair.source.put(entries)
    server = pair.serve(bytes_per_s=1.5e6)
    pull = Background(pair, wanted(entries), puller=pair.puller(limits=SMALL))
    until(lambda: pair.target.has(entries[1]))
    server.close()
    result = pull.result()
    assert result.stop is Stop.UNREACHABLE and 2 <= result.blocks < 8 and result.connections == 2
    assert pair.target.has(*entries[: result.blocks]) and pair.target.lacks(*entries[result.blocks :])


def test_flipped_bits_on_the_way_are_never_written_down(pair):
    """Wherever the bit is: in the arrays, in a frame, in a handshake. It comes right in the end, or not at all."""
    seed = 3
    print("seed", seed)
    rng = random.Random(seed)
    entries = chain(6, layers=1)
    pair.source.put(entries)
    server = pair.serve(limits=ServerLimits(handshake_s=0.5, stall_s=0.5))
    limits = PullLimits(batch_entries=2, backoff_s=0.001, stall_s=0.1, connect_s=0.3)
    stops = set()
    for _ in range(20):
        left = [rng.randrange(6000)]

        def flip(number: int, data: bytes, left: list[int] = left) -> bytes:
            at, left[0] = left[0], left[0] - len(data)
            if 0 <= at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
            return data

        meddler = Meddler(server.addresses[0], flip)
        result = pair.pull(wanted(entries), [meddler.address], puller=pair.puller(limits=limits))
        meddler.close()
        stops.add(result.stop)
        assert pair.target.has(*entries[: result.blocks]) and pair.target.lacks(*entries[result.blocks :])
        evict(pair.target.store, 0)
    assert Stop.COMPLETE in stops


def test_an_entry_that_a_source_always_sends_damaged_is_computed(pair, monkeypatch):
    """Asked for over a second connection, and then not any more."""
    entries = large(4, nbytes=1 << 12)
    pair.source.put(entries)
    pair.serve()
    bad, send_bytes = payload(entries[2]), Link.send_bytes

    def damaged(self: Link, nbytes: int, read) -> None:
        def changed(piece: memoryview, start: int) -> None:
            read(piece, start)
            piece[:] = piece.tobytes().replace(bad, bytes(len(bad)))

        send_bytes(self, nbytes, changed)

    monkeypatch.setattr(Link, "send_bytes", damaged)
    result = pair.pull(wanted(entries), puller=pair.puller(limits=SMALL))
    assert (result.stop, result.blocks, result.connections) == (Stop.DAMAGED, 2, LINES_MAX)
    assert pair.target.has(*entries[:2]) and pair.target.lacks(*entries[2:])


def test_a_stream_that_breaks_anywhere_goes_on_or_ends_cleanly(pair):
    """Broken off after any number of bytes, again and again."""
    seed = 4
    print("seed", seed)
    rng = random.Random(seed)
    entries = chain(6, layers=1)
    pair.source.put(entries)
    server = pair.serve(limits=ServerLimits(handshake_s=0.5, stall_s=0.5))
    for _ in range(12):
        left = {number: rng.randrange(9000) for number in range(1, 9)}

        def cut(number: int, data: bytes, left: dict[int, int] = left) -> bytes | None:
            left[number] -= len(data)
            return data if left[number] > 0 else None

        meddler = Meddler(server.addresses[0], cut)
        limits = PullLimits(batch_entries=2, backoff_s=0.001)
        result = pair.pull(wanted(entries), [meddler.address], puller=pair.puller(limits=limits))
        meddler.close()
        assert result.stop in (Stop.COMPLETE, Stop.UNREACHABLE)
        assert pair.target.has(*entries[: result.blocks]) and pair.target.lacks(*entries[result.blocks :])
        evict(pair.target.store, 0)


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
def test_a_full_disk_ends_the_pull_and_leaves_what_was_written(pair, step):
    """Nothing of the file that did not fit is left."""
    entries = chain(8)
    pair.source.put(entries)
    pair.serve()

    class Full(NoSync):
        def __init__(self) -> None:
            self.files: list[str] = []
            self.full = True

        def step(self, what: str, path: Path) -> None:
            if what in ("create", "write") and path.stem not in self.files:
                self.files.append(path.stem)
            if what == step and self.full and path.stem in self.files[2:]:
                raise OSError(errno.ENOSPC, "full")

    disk = Full()
    pair.target.open(io=disk)
    result = pair.pull(wanted(entries), puller=pair.puller(limits=SMALL))
    assert result.stop is Stop.DISK and result.blocks == 4 and len(pair.target.files()) == 2
    assert pair.target.has(*entries[:4]) and pair.target.lacks(*entries[4:])
    disk.full = False
    assert pair.pull(wanted(entries)).stop is Stop.COMPLETE and pair.target.has(*entries), "and it serves on"


def test_a_disk_that_fills_in_the_middle_of_an_entry_costs_that_and_what_follows(pair):
    """Wherever it fills: what is said to be here is here, nothing else of the chain is on the disk, and once there is
    room the rest comes."""
    entries = large(6, nbytes=1 << 16)
    pair.source.put(entries)
    pair.serve()
    for blocks, more in ((0, 100), (1, 1 << 15), (2, 0), (2, 1 << 15), (3, (1 << 16) - 1), (4, 5000)):
        device = Filling(2**40)
        pair.target.open(io=device)
        device.free_bytes = (blocks << 16) + (blocks // 2) * 4000 + more
        result = pair.pull(wanted(entries), puller=pair.puller(limits=SMALL))
        # An entry may come before the segment before it is committed, and take its room.
        assert result.stop is Stop.DISK and result.blocks in range(0, blocks + 1, 2), f"{blocks} blocks, {more} bytes"
        assert pair.target.has(*entries[: result.blocks]) and pair.target.lacks(*entries[result.blocks :])
        left = pair.target.bytes_on_disk()
        assert len(pair.target.files()) == result.blocks // 2
        assert not [entry for entry in entries[result.blocks :] if payload(entry) in left], "nothing half-written"
        device.free_bytes = 2**40
        assert pair.pull(wanted(entries)).stop is Stop.COMPLETE and pair.target.has(*entries)
        evict(pair.target.store, 0)


@pytest.mark.parametrize("bytes_max", [250_000, 4 * 65_536 + 300])
def test_a_chain_larger_than_the_budget_ends_the_pull(pair, bytes_max):
    """In the second case all of the arrays fit, but not the headers of their files: the last file pushes out the first
    one. What is said to be here is here."""
    entries = large(6, nbytes=1 << 16)
    pair.source.put(entries)
    pair.serve()
    pair.target.open(bytes_max=bytes_max)
    result = pair.pull(wanted(entries), puller=pair.puller(limits=SMALL))
    assert result.stop is (Stop.TOO_LARGE if bytes_max == 250_000 else Stop.DISK)
    assert (result.blocks > 0) == (bytes_max == 250_000)
    assert pair.target.has(*entries[: result.blocks]) and len(result.here) == result.blocks


def test_a_cancelled_pull_ends_at_once_and_what_came_stays(pair):
    entries = large(12, nbytes=1 << 18)
    pair.source.put(entries)
    server = pair.serve(bytes_per_s=1.5e6)
    puller = pair.puller(limits=SMALL)
    pull = Background(pair, wanted(entries), puller=puller)
    until(lambda: pair.target.has(entries[1]))
    puller.close()
    result = pull.result()
    assert result.stop is Stop.CANCELLED and 2 <= result.blocks < 12
    assert pair.target.has(*entries[: result.blocks])
    until(lambda: server.connected() == 0)
    assert pair.source.store.stats()["leases"] == 0, "the source keeps nothing for it any more"


def test_a_pull_ends_by_its_deadline_though_the_disk_does_not_answer(pair):
    """The file that is being written then is not committed, and goes."""
    entries = chain(4)
    pair.source.put(entries)
    pair.serve()
    release = threading.Event()

    class Stuck(NoSync):
        def sync(self, descriptor: int, path: Path) -> None:
            release.wait(20)

    pair.target.open(io=Stuck())
    puller = pair.puller(pulls_max=1)
    begun = time.monotonic()
    result = pair.pull(wanted(entries), puller=puller, deadline_s=0.4)
    assert 0.3 < time.monotonic() - begun < 15
    assert (result.stop, result.blocks) == (Stop.DEADLINE, 0)
    assert puller.pulling() == 1, "its place is taken until the disk has answered"
    release.set()
    until(lambda: puller.pulling() == 0)
    assert pair.target.lacks(*entries) and not pair.target.files()


def test_an_owner_forgotten_in_the_middle_leaves_nothing(pair):
    """Not on the target, once its pulls have been ended; and the source sends no more of what it was told to forget."""
    entries = large(12, nbytes=1 << 18, owners=("default/alice",))
    for entry in entries:
        pair.source.put([entry])
    server = pair.serve(bytes_per_s=1.5e6)
    puller = pair.puller(limits=SMALL)
    pull = Background(pair, wanted(entries), puller=puller, owner="default/alice")
    until(lambda: pair.target.has(entries[1]))
    assert puller.cancel_owner("default/bob", 0.0) and puller.pulling() == 1
    assert puller.cancel_owner("default/alice", 5.0) and puller.pulling() == 0
    pair.target.store.forget("default/alice")
    assert pull.result().stop is Stop.CANCELLED
    left = pair.target.bytes_on_disk()
    assert pair.target.lacks(*entries) and not [entry for entry in entries if payload(entry) in left]
    sent = len(pair.sent)
    pull = Background(pair, wanted(entries), puller=puller, owner="default/alice")
    until(lambda: len(pair.sent) > sent)
    pair.source.store.forget("default/alice")
    result = pull.result()
    assert result.stop is Stop.MISSING and result.blocks < 12
    until(lambda: server.connected() == 0)
    pair.source.store.compact()
    left = pair.source.bytes_on_disk()
    assert not [entry for entry in entries if payload(entry) in left], "nor does a connection keep its files"


def test_a_file_that_moves_while_it_is_being_sent_is_found_again(pair):
    """Forgetting others rewrites the files that entries share with them."""
    entries = large(8, nbytes=1 << 18)
    strange = chain(8, first=300, owners=("default/bob",))
    strange = [Entry(e.id, e.parent, e.tokens, entries[0].parts, owners=e.owners) for e in strange]
    for number in range(8):
        pair.source.put([strange[number], entries[number]])
    pair.serve(bytes_per_s=2e6)
    pull = Background(pair, wanted(entries), puller=pair.puller(limits=SMALL))
    until(lambda: pair.target.has(entries[0]))
    pair.source.store.forget("default/bob")
    assert pull.result().stop is Stop.COMPLETE
    assert pair.target.has(*entries)


def test_pulls_and_everything_else_at_once(pair):
    """Pulls of several chains, cancels, evictions, a source that forgets: what is found is right."""
    seed = 11
    print("seed", seed)
    library = [chain(5, first=100 * number, owners=(f"default/{number}",)) for number in range(6)]
    for entries in library:
        pair.source.put(entries)
    server = pair.serve()
    puller = pair.puller(limits=SMALL, pulls_max=8)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(12):
                entries = rng.choice(library)
                mine = f"default/pull-{number}"
                if rng.random() < 0.2:
                    threading.Timer(rng.random() * 0.02, puller.cancel_owner, (mine, 0.0)).start()
                result = pair.pull(wanted(entries), server.addresses, puller=puller, owner=mine, deadline_s=10)
                assert result.stop in (Stop.COMPLETE, Stop.CANCELLED, Stop.MISSING, Stop.DISK), result
                action = rng.random()
                if action < 0.2:
                    evict(pair.target.store, rng.randrange(40_000))
                elif action < 0.3:
                    pair.source.store.forget(f"default/{rng.randrange(6)}")
                elif action < 0.5:
                    pair.source.put(rng.choice(library))
                pair.target.has(*entries)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads)


# What a peer with the key may say.


def speak(server: BlockServer, *payloads: bytes, damage: int = 0) -> bytes:
    """Shake hands, say this, and return what comes until the server hangs up."""
    initiator = Initiator(CLUSTER_KEY, "mac0", b"\7" * NONCE_BYTES)
    with socket.create_connection(server.addresses[0]) as sock:
        link = Link(sock, 5.0)
        link.send(initiator.hello())
        proof, seals = initiator.answer(link.receive_handshake())
        link.send(proof)
        link.sealed_by(seals)
        heard = b""
        try:
            for payload_ in payloads:
                sealed = sealed_message(seals.out, payload_)
                sock.sendall(sealed[:4] + bytes([sealed[4] ^ damage]) + sealed[5:])
            while True:
                heard += link.receive_message()
        except (LinkError, ConnectionError):
            return heard


def sealed_message(seal: Seal, payload_: bytes) -> bytes:
    sealed = bytearray(len(payload_) + SEAL_BYTES)
    seal.seal_into(payload_, memoryview(sealed))
    return len(sealed).to_bytes(4, "big") + sealed


@pytest.mark.parametrize(
    "payload_",
    [
        b"\xc1",
        wire.pack("find"),
        wire.pack("find", b"x", b"", bytes(32), b"", 1),
        wire.pack("find", MODEL, bytes(31), bytes(32), b"", 1),
        wire.pack("find", MODEL, bytes(32), bytes(32), b"abc", 1),
        wire.pack("find", MODEL, bytes(32), bytes(32), b"", 10**6),
        wire.pack("fetch", MODEL, bytes(32) * 65),
        wire.pack("fetch", MODEL, bytes(64)),
        wire.pack("renew"),
        wire.pack("shutdown"),
        b"\x91" * 3000,
    ],
)
def test_a_request_that_cannot_be_is_answered_with_an_error_and_the_end(pair, payload_):
    server = pair.serve()
    assert b"error" in speak(server, payload_)
    until(lambda: server.connected() == 0)


def test_a_request_that_was_changed_on_the_way_is_not_answered(pair):
    """Or put in by somebody else, who has not the connection's key."""
    limits = ServerLimits(request_s=0.2)
    find = wire.pack_request(wire.FindRequest(MODEL, (), MODEL, b"", 0))
    assert b"found" in speak(pair.serve(limits=limits), find)
    assert speak(pair.serve(limits=limits), find, damage=1) == b""


def test_a_request_that_is_too_long_is_not_even_read(pair):
    server = pair.serve()
    assert speak(server, bytes(wire.MESSAGE_BYTES_MAX + 1)) == b""
    entries = chain(2)
    pair.source.put(entries)
    assert pair.pull(wanted(entries)).stop is Stop.COMPLETE
