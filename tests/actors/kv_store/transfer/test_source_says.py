"""What a source with the key may say to a pull: only what answers a question is taken, and only as it was announced."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from satchel.actors.kv_store.transfer import wire
from satchel.actors.kv_store.transfer.handshake import NONCE_BYTES, SEAL_BYTES, Acceptor, Seal
from satchel.actors.kv_store.transfer.link import Link
from satchel.actors.kv_store.transfer.pull_loop import LINES_MAX, PullLimits, Stop
from satchel.actors.kv_store.transfer.wire import MESSAGE_BYTES_MAX, Offered
from satchel.actors.protocol.entries import EntryLayout, EntryRecord, flat_bytes, pack_tokens, signature, tail_id
from satchel.cluster.errors import LinkError
from tests.worlds.kv_store.block_nodes import CLUSTER_KEY, Nodes, nodes, wanted
from tests.worlds.kv_store.kv_files import ROOT, chain, evict

BLOCKS = chain(2)
IDS = [block.id for block in BLOCKS]
PARTS = signature(BLOCKS[0].parts)
LAYOUT = EntryLayout(PARTS, {})
REST = [7, 8, 9]
OFFERED = Offered(LAYOUT.nbytes, 0, False)
FOUND = wire.pack_found([OFFERED, OFFERED], [])


def bytes_of(number: int) -> bytes:
    return b"".join(flat_bytes(array) for array in BLOCKS[number].parts.values())


def record(number: int, **more) -> EntryRecord:
    block, digest = BLOCKS[number], LAYOUT.digest_of(bytes_of(number))
    facts = EntryRecord(block.id, block.parent, False, pack_tokens(block.tokens), digest, 0, False, LAYOUT.nbytes)
    return replace(facts, **more)


HEADS = [wire.pack_entry(record(number), LAYOUT) for number in range(2)]


class Source:
    """The other side of one connection, after the handshake."""

    def __init__(self, sock: socket.socket) -> None:
        acceptor = Acceptor(CLUSTER_KEY, "mac0", bytes(NONCE_BYTES))
        self.link = Link(sock, 5.0)
        self.link.send(acceptor.challenge(self.link.receive_handshake()))
        self.link.sealed_by(acceptor.finish(self.link.receive_handshake()))

    def find(self, payload: bytes = FOUND) -> None:
        self.link.receive_message()
        self.link.send_message(payload)

    def fetch(self, *payloads: bytes) -> None:
        self.link.receive_message()
        for payload in payloads:
            self.link.send_message(payload)

    def data(self, number: int) -> None:
        data = memoryview(bytes_of(number))

        def read(piece: memoryview, start: int) -> None:
            piece[:] = data[start : start + len(piece)]

        self.link.send_bytes(len(data), read)


@contextmanager
def source(script: Callable[[Source], object]) -> Iterator[tuple[str, int]]:
    """Where something listens that says this to whoever has the key."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(LinkError, ConnectionError):
                    script(Source(sock))
                    sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listener.getsockname()[:2]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path) as made:
        yield made


def pulled(pair: Nodes, script: Callable[[Source], object], **more):
    puller = pair.puller(limits=PullLimits(backoff_s=0.001, stall_s=0.5))
    with source(script) as address:
        result = pair.pull(wanted(BLOCKS, **more), [address], puller=puller)
    assert pair.target.has(*BLOCKS[: result.blocks]) and pair.target.lacks(*BLOCKS[result.blocks :])
    return result


def test_what_was_asked_for_comes_whole(pair):
    def script(said: Source) -> None:
        said.find()
        said.fetch(HEADS[0])
        said.data(0)
        said.link.send_message(HEADS[1])
        said.data(1)

    assert pulled(pair, script).stop is Stop.COMPLETE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HEADS[0], "answers no request"),
        (wire.pack("zebra"), "answers no request"),
        (wire.pack("gone", "a"), "answers no request"),
        (wire.pack("error", "no more"), "the source reports: no more"),
        (b"\xc1", "cannot be read"),
        (wire.pack_found([OFFERED], []), "a list of 2 values"),
    ],
)
def test_nothing_is_taken_that_answers_no_question(pair, answer: bytes, reason: str):
    result = pulled(pair, lambda said: said.find(answer))
    assert result.stop is Stop.UNREACHABLE and reason in result.reason and result.connections == LINES_MAX

    def instead(said: Source) -> None:
        said.find()
        said.fetch(FOUND if b"gone" in answer else answer if b"entry" not in answer else wire.pack("a"))

    result = pulled(pair, instead)
    assert result.stop is Stop.UNREACHABLE and result.blocks == 0


def test_an_entry_of_another_id_size_digest_place_or_of_other_tokens_is_not_written(pair):
    smaller = EntryLayout(PARTS[:1], {})
    other = list(range(256))
    for wrong, layout, said in (
        (record(0, nbytes=smaller.nbytes), smaller, "another id or size"),
        (record(0, nbytes=smaller.nbytes), LAYOUT, "another size than its parts"),
        (record(1), LAYOUT, "another id or size"),
        (record(0, digest=record(1).digest), LAYOUT, "does not match its digest"),
        (record(0, parent=IDS[1]), LAYOUT, "other tokens"),
        (record(0, tokens=pack_tokens(other)), LAYOUT, "other tokens"),
    ):

        def script(said: Source, head: bytes = wire.pack_entry(wrong, layout)) -> None:
            said.find()
            said.fetch(head)
            said.data(0)

        result = pulled(pair, script, tokens=[token for block in BLOCKS for token in block.tokens])
        assert said in result.reason
        assert result.stop is (Stop.UNREACHABLE if "size" in said else Stop.DAMAGED)


@pytest.mark.parametrize("forgery", ["changed", "plain", "repeated", "skipped", "of another key"])
def test_no_byte_of_an_entry_is_taken_that_was_forged_on_the_way(pair, forgery: str):
    """Whatever its digest is: that is of no key, and bytes with the same one can be made."""

    def script(said: Source) -> None:
        said.find()
        said.fetch(HEADS[0])
        data = bytes_of(0)
        sealed = bytearray(len(data) + SEAL_BYTES)
        seal = Seal(bytes(32)) if forgery == "of another key" else said.link._out
        for _ in range({"skipped": 2, "plain": 0}.get(forgery, 1)):
            seal.seal_into(data, memoryview(sealed))
        sealed[5] ^= forgery == "changed"
        said.link.send(data + bytes(SEAL_BYTES) if forgery == "plain" else sealed)
        if forgery == "repeated":
            said.link.send_message(HEADS[1])
            said.link.send(sealed)

    result = pulled(pair, script)
    # What came before the repeated frame was right.
    assert result.blocks == (forgery == "repeated")
    assert result.stop is Stop.UNREACHABLE
    assert result.blocks or "verify" in result.reason


@pytest.mark.parametrize("length", [0, SEAL_BYTES, MESSAGE_BYTES_MAX + SEAL_BYTES + 1])
def test_a_message_has_a_possible_length(pair, length: int):
    def script(said: Source) -> None:
        said.link.receive_message()
        said.link.send(length.to_bytes(4, "big") + bytes(64))

    assert "a message of" in pulled(pair, script).reason


def test_a_tail_is_of_the_tokens_that_are_wanted_and_named_by_them(pair):
    assert pulled(pair, lambda said: said.find(wire.pack_found([None, None], [(2, OFFERED)])), rest=REST).stop is (
        Stop.MISSING
    )
    for count in (0, 4):
        payload = wire.pack_found([None, None], [(count, OFFERED)])
        assert pulled(pair, lambda said, payload=payload: said.find(payload), rest=REST).stop is Stop.UNREACHABLE
    end = record(0, id=tail_id(IDS[1], REST[:2]), parent=IDS[1], tail=True, tokens=pack_tokens(REST[:2]))
    other = record(0, id=tail_id(ROOT, REST[:2]), parent=ROOT, tail=True, tokens=pack_tokens(REST[:2]))
    for sent, stop in ((end, Stop.COMPLETE), (other, Stop.UNREACHABLE), (replace(end, parent=ROOT), Stop.UNREACHABLE)):

        def script(said: Source, sent: EntryRecord = sent) -> None:
            said.find(wire.pack_found([OFFERED, OFFERED], [(2, OFFERED)]))
            said.fetch(HEADS[0])
            said.data(0)
            said.link.send_message(HEADS[1])
            said.data(1)
            said.link.send_message(wire.pack_entry(sent, LAYOUT))
            said.data(0)

        evict(pair.target.store, 0)
        puller = pair.puller(limits=PullLimits(backoff_s=0.001, stall_s=0.5))
        with source(script) as address:
            result = pair.pull(wanted(BLOCKS, rest=REST), [address], puller=puller)
        assert result.stop is stop and pair.target.has(*BLOCKS)
