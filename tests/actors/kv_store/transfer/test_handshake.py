"""Nobody without the cluster's key gets or gives a byte, and nothing that was said once can be said again."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from satchel.actors.kv_store.transfer import handshake
from satchel.actors.kv_store.transfer.handshake import (
    BODY_BYTES_MAX,
    PREAMBLE_BYTES,
    SEAL_BYTES,
    Acceptor,
    Initiator,
    Seal,
    Seals,
    body_length,
    checked_key,
)
from satchel.actors.kv_store.transfer.pull_loop import PullLimits, Stop
from satchel.cluster.errors import LinkError, LinkGarbage, LinkRefused, LinkVersion
from tests.worlds.kv_store.block_nodes import CLUSTER_KEY, LIMITS, Nodes, nodes, wanted
from tests.worlds.kv_store.kv_files import chain

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def body(message: bytes) -> bytes:
    assert body_length(message[:PREAMBLE_BYTES]) == len(message) - PREAMBLE_BYTES
    return message[PREAMBLE_BYTES:]


def sides(*, key: bytes = CLUSTER_KEY, other: bytes = CLUSTER_KEY, peer: str = "mac0", nonces=(ONE, TWO)):
    return Initiator(key, peer, nonces[0]), Acceptor(other, "mac0", nonces[1])


class Talk(NamedTuple):
    """What was said, and the seals of both sides."""

    hello: bytes
    challenge: bytes
    proof: bytes
    near: Seals
    far: Seals


def talk(initiator: Initiator, acceptor: Acceptor) -> Talk:
    """The whole handshake."""
    hello = initiator.hello()
    challenge = acceptor.challenge(body(hello))
    proof, near = initiator.answer(body(challenge))
    return Talk(hello, challenge, proof, near, acceptor.finish(body(proof)))


def sealed(seal: Seal, data: bytes) -> bytes:
    target = bytearray(len(data) + SEAL_BYTES)
    seal.seal_into(data, memoryview(target))
    return bytes(target)


def opened(seal: Seal, raw: bytes) -> bytes:
    target = bytearray(max(0, len(raw) - SEAL_BYTES))
    seal.open_into(raw, memoryview(target))
    return bytes(target)


def test_both_sides_know_each_other_and_seal_their_frames_with_different_keys():
    said, again = talk(*sides()), talk(*sides())
    (out, into), (back, other) = said.near, said.far
    first = sealed(out, b"find")
    assert b"find" not in first and opened(other, first) == b"find"
    assert opened(into, sealed(back, b"found")) == b"found"
    with pytest.raises(LinkGarbage):
        opened(other, first)
    assert sealed(again.near.out, b"find") == first != sealed(again.far.out, b"find")


def test_a_changed_a_dropped_or_a_repeated_frame_is_found():
    find = sealed(talk(*sides()).near.out, b"find")
    changed = [find[:at] + bytes([find[at] ^ 1]) + find[at + 1 :] for at in range(len(find))]
    for raw in (*changed, find[:-1], find + b"\0"):
        with pytest.raises(LinkGarbage):
            opened(talk(*sides()).far.into, raw)
    said = talk(*sides())
    out, into = said.near.out, said.far.into
    first, second = sealed(out, b"one"), sealed(out, b"two")
    with pytest.raises(LinkGarbage):
        opened(into, second)
    into = talk(*sides()).far.into
    assert opened(into, first) == b"one"
    with pytest.raises(LinkGarbage):
        opened(into, first)


def test_a_key_seals_only_so_many_frames_and_then_the_connection_ends(monkeypatch):
    """Long before a nonce could come again."""
    monkeypatch.setattr(handshake, "FRAMES_MAX", 3)
    out, into = Seal(bytes(32)), Seal(bytes(32))
    frames = [sealed(out, b"same") for _ in range(3)]
    assert len(set(frames)) == 3 and [opened(into, frame) for frame in frames] == [b"same"] * 3
    with pytest.raises(LinkError, match="used up"):
        sealed(out, b"same")
    with pytest.raises(LinkError, match="used up"):
        opened(into, frames[0])


def test_another_key_is_refused_by_either_side():
    initiator, acceptor = sides(other=b"x" * 32)
    challenge = acceptor.challenge(body(initiator.hello()))
    with pytest.raises(LinkRefused):
        initiator.answer(body(challenge))
    with pytest.raises(LinkRefused):
        acceptor.finish(bytes(32))
    with pytest.raises(LinkError):
        checked_key(b"short")


def test_what_was_said_in_one_connection_is_worth_nothing_in_another():
    """Fresh nonces of both sides: neither an old proof nor an old challenge is accepted."""
    hello, challenge, proof, _, _ = talk(*sides())
    later = Acceptor(CLUSTER_KEY, "mac0", THREE)
    later.challenge(body(hello))
    with pytest.raises(LinkRefused):
        later.finish(body(proof))
    with pytest.raises(LinkRefused):
        Initiator(CLUSTER_KEY, "mac0", THREE).answer(body(challenge))


@pytest.mark.parametrize("nonces", [(ONE, THREE), (THREE, TWO)])
def test_a_frame_of_one_connection_is_none_of_another(nonces):
    """The keys of frames are each connection's own: the nonce of either side changes them."""
    frames = []
    for pair in ((ONE, TWO), nonces):
        said = talk(*sides(nonces=pair))
        frames.append((*said.near, *said.far))
    for earlier, later in zip(*frames, strict=True):
        with pytest.raises(LinkGarbage):
            opened(later, sealed(earlier, b"find"))


def test_what_a_side_said_cannot_be_sent_back_to_it():
    """Neither an acceptor's proof as an initiator's, nor an initiator's own nonce as a challenge."""
    initiator, acceptor = sides()
    challenge = body(acceptor.challenge(body(initiator.hello())))
    with pytest.raises(LinkRefused):
        acceptor.finish(challenge[-32:])
    mirror = Acceptor(CLUSTER_KEY, "mac0", ONE)
    with pytest.raises(LinkRefused):
        initiator.answer(body(mirror.challenge(body(initiator.hello()))))


def test_another_node_than_the_wanted_one_is_refused_though_it_has_the_key():
    initiator, acceptor = sides(peer="mac7")
    challenge = acceptor.challenge(body(initiator.hello()))
    with pytest.raises(LinkRefused, match="the peer is not mac7"):
        initiator.answer(body(challenge))


def test_every_cut_and_every_flipped_bit_is_a_typed_error():
    """And never a peer."""
    seed = 5
    print("seed", seed)
    rng = random.Random(seed)
    hello, challenge, proof, _, _ = talk(*sides())
    for message, reader in ((hello, "hello"), (challenge, "challenge"), (proof, "proof")):
        whole = body(message)
        damaged = [whole[:length] for length in range(len(whole))]
        damaged += [whole + b"\0", rng.randbytes(len(whole)), b"", rng.randbytes(BODY_BYTES_MAX)]
        for _ in range(300):
            flipped = bytearray(whole)
            flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        for raw in damaged:
            initiator, acceptor = sides()
            said = acceptor.challenge(body(initiator.hello()))
            with pytest.raises(LinkError):
                if reader == "hello":
                    said = acceptor.challenge(raw)
                    acceptor.finish(body(initiator.answer(body(said))[0]))
                elif reader == "challenge":
                    initiator.answer(raw)
                else:
                    initiator.answer(body(said))
                    acceptor.finish(raw)


def test_other_versions_and_other_protocols_are_told_apart(monkeypatch):
    hello = sides()[0].hello()
    for raw in (b"GET / HTTP/1.1\r\n"[:PREAMBLE_BYTES], hello[:5], b"", bytes(12)):
        with pytest.raises(LinkGarbage):
            body_length(raw)
    with pytest.raises(LinkGarbage):
        body_length(hello[:10] + (BODY_BYTES_MAX + 1).to_bytes(2, "big"))
    with pytest.raises(LinkVersion):
        body_length(hello[:8] + (handshake.VERSION + 1).to_bytes(2, "big") + hello[10:12])
    initiator, acceptor = sides()
    hello = initiator.hello()
    with monkeypatch.context() as later:
        later.setattr(handshake, "VERSION", handshake.VERSION + 1)
        challenge = acceptor.challenge(hello[PREAMBLE_BYTES:])
    with pytest.raises(LinkRefused):
        initiator.answer(body(handshake.preamble(challenge[PREAMBLE_BYTES:])))


# The same on the stream.


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path) as made:
        made.source.put(chain(3))
        yield made


def test_a_pull_with_another_key_or_for_another_node_gets_nothing(pair):
    pair.serve()
    entries = chain(3)
    result = pair.pull(wanted(entries), puller=pair.puller(key=b"y" * 32))
    assert (result.stop, result.installed, result.connections) == (Stop.REFUSED, 0, 1)
    other = pair.serve(node="mac9")
    result = pair.pull(wanted(entries), other.addresses)
    assert (result.stop, result.installed) == (Stop.REFUSED, 0)
    assert "the peer is not mac0" in result.reason
    assert pair.target.lacks(*entries)
    assert not pair.sent


def test_a_server_of_another_version_is_refused_and_says_which(pair):
    """It answers with its own version, and no more."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(b"satchel\x00" + (9).to_bytes(2, "big") + bytes(2))

    threading.Thread(target=answer, daemon=True).start()
    with listener:
        result = pair.pull(wanted(chain(3)), [listener.getsockname()])
    assert (result.stop, result.connections) == (Stop.REFUSED, 1) and "version 9" in result.reason
    server = pair.serve()
    with socket.create_connection(server.addresses[0]) as sock:
        sock.sendall(b"satchel\x00" + (9).to_bytes(2, "big") + (4).to_bytes(2, "big") + b"abcd")
        sock.settimeout(20)
        assert sock.recv(100) == handshake.refusal()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"", bytes(4096), b"satchel\x00\x00\x05\xff\xff"])
def test_strangers_are_sent_away_in_time(pair, said):
    server = pair.serve(limits=LIMITS)
    with socket.create_connection(server.addresses[0]) as sock:
        sock.settimeout(20)
        begun = time.monotonic()
        sock.sendall(said)
        # What it had not read when it closed makes a reset of the end.
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        assert time.monotonic() - begun < 15
    assert pair.pull(wanted(chain(3))).stop is Stop.COMPLETE


def test_a_stranger_who_speaks_slowly_has_no_more_time_than_others(pair):
    """A byte now and then does not keep a place."""
    server = pair.serve(limits=LIMITS)
    hello = sides()[0].hello()
    with socket.create_connection(server.addresses[0]) as sock:
        begun = time.monotonic()
        for byte in hello:
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("it waited for all of it")
        assert time.monotonic() - begun < 15


def test_a_peer_that_never_answers_costs_what_was_agreed(pair):
    """It is connected to and says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        puller = pair.puller(limits=PullLimits(stall_s=0.15, backoff_s=0.01))
        begun = time.monotonic()
        result = pair.pull(wanted(chain(3)), [silent.getsockname()], puller=puller)
    assert (result.stop, result.connections) == (Stop.UNREACHABLE, 2)
    assert 0.3 <= time.monotonic() - begun < 15
