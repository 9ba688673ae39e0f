"""What passes between two processes of a group arrives as it was sent, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.kv_store.transfer import handshake
from satchel.actors.kv_store.transfer.link import FRAME_BYTES
from satchel.actors.replica.group.link.connection import FAILED, Connection
from satchel.actors.replica.group.link.heartbeats import Heartbeats
from satchel.cluster.errors import LinkError, LinkGarbage
from tests.worlds.replica.group import KEY, listener, on_a_thread

Two = tuple[Connection, Connection]


def connect(key: bytes = KEY, name: str = "group/0") -> Two:
    listens = listener()
    with listens, on_a_thread(lambda: Connection.accept(listens.accept()[0], KEY, "group/0")) as accepted:
        near = Connection.connect(listens.getsockname()[:2], key, name, 0.0)
    return near, accepted.result()


@pytest.fixture
def two() -> Iterator[Two]:
    near, far = connect()
    yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_arrays_arrive_to_the_bit(two: Two, dtype: mx.Dtype):
    """Of one token and of several frames, with numbers that are none."""
    near, far = two
    for shape in ((1, 1, 64), (2, 3, FRAME_BYTES // 8)):
        sent = mx.random.normal(shape).astype(dtype)
        sent[0, 0, :2] = mx.array([float("nan"), float("-inf")])
        mx.eval(sent)
        with on_a_thread(lambda sent=sent: near.send_array(sent)):
            came = far.receive_array(shape)
        assert came.dtype == dtype and came.shape == shape
        assert np.array_equal(np.array(came.view(mx.uint8)), np.array(sent.view(mx.uint8)))


def test_messages_pass_both_ways_and_in_order(two: Two):
    near, far = two
    for number in range(3):
        near.send("say", number, b"bytes", ["a", None])
        far.send("answer", number)
    assert [far.receive() for _ in range(3)] == [("say", [number, b"bytes", ["a", None]]) for number in range(3)]
    assert [near.receive() for _ in range(3)] == [("answer", [number]) for number in range(3)]
    assert near.receive(0.01) is None


def test_keys_are_renewed_for_ever(two: Two, monkeypatch: pytest.MonkeyPatch):
    """A group decodes for days; a key is used for so many frames."""
    monkeypatch.setattr(handshake, "FRAMES_MAX", 3)
    near, far = two
    for number in range(20):
        near.send("say", number)
        assert far.receive() == ("say", [number])


def test_another_array_than_the_one_to_come_is_refused(two: Two):
    near, far = two
    near.send_array(mx.zeros((1, 2, 8)))
    with pytest.raises(LinkGarbage, match=r"shape \[1, 1, 8\] were to come"):
        far.receive_array((1, 1, 8))


@pytest.mark.parametrize("said", [("array", "int8", [1, 1, 8]), ("array", "float32"), ("say", 1)])
def test_what_is_no_array_is_refused(two: Two, said: tuple):
    near, far = two
    near.send(*said)
    with pytest.raises(LinkGarbage, match="were to come"):
        far.receive_array((1, 1, 8))


def test_a_peer_says_why_it_failed(two: Two):
    near, far = two
    near.send(FAILED, "no memory")
    with pytest.raises(LinkError, match="no memory"):
        far.receive_array((1, 1, 8))


def test_a_wait_ends_when_the_peer_goes_or_the_connection_is_shut(two: Two):
    near, far = two
    for end in (near.shut, far.shut):
        timer = threading.Timer(0.05, end)
        timer.start()
        with pytest.raises(LinkError):
            far.receive()
        timer.join()


@pytest.mark.parametrize("key, name", [(b"the key of another cluster", "group/0"), (KEY, "group/1"), (KEY, "other/0")])
def test_neither_another_key_nor_another_process_is_spoken_to(key: bytes, name: str):
    with pytest.raises(LinkError, match="does not have this cluster's key"):
        connect(key, name)


def test_bytes_of_a_stranger_are_refused():
    listens = listener()
    with listens, socket.create_connection(listens.getsockname()[:2]) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(LinkGarbage):
            Connection.accept(listens.accept()[0], KEY, "group/0")


def beating(connection: Connection, lost: list[str], silent_s: float = 0.5, stalled_s: float = 60.0) -> Heartbeats:
    return Heartbeats(connection, "the peer", 0.02, silent_s, stalled_s, lost.append)


def test_heartbeats_go_on_and_end_without_a_loss(two: Two):
    lost: list[str] = []
    both = [beating(connection, lost, silent_s=5.0) for connection in two]
    threading.Event().wait(0.1)
    both[0].end()
    for heartbeats in both:
        heartbeats.join()
    assert not lost


def test_a_silent_peer_and_one_that_goes_are_lost(two: Two):
    near, far = two
    lost: list[str] = []
    heartbeats = beating(near, lost, silent_s=0.05, stalled_s=0.1)
    heartbeats.join()
    # Its machine acknowledges what it does not read.
    assert lost == ["the peer says nothing for 0.1 s"]
    lost.clear()
    heartbeats = beating(near, lost, silent_s=60.0)
    far.shut()
    heartbeats.join()
    assert len(lost) == 1 and "the peer is lost" in lost[0]


def test_a_machine_that_acknowledges_nothing_is_lost_soon(two: Two, monkeypatch: pytest.MonkeyPatch):
    near, _ = two
    monkeypatch.setattr(near, "unacknowledged", lambda: 1000)
    lost: list[str] = []
    beating(near, lost, silent_s=0.1).join()
    assert lost == ["the peer cannot be reached for 0.1 s"]


def test_a_socket_says_what_was_not_acknowledged():
    """What a peer does not take stays in the sender's buffer once the peer's is full."""
    with listener() as listens, socket.create_connection(listens.getsockname()[:2]) as sock:
        far, _ = listens.accept()
        with far:
            near = Connection.__new__(Connection)
            near._sock = sock
            ends = time.monotonic() + 10
            sock.sendall(b"beat")
            while near.unacknowledged() and time.monotonic() < ends:
                time.sleep(0.001)
            assert near.unacknowledged() == 0
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(2**20))
            assert (near.unacknowledged() or 0) > 2**16
    assert near.unacknowledged() is None


def hold_the_interpreter(told: Pipe, seconds: float) -> None:
    """A process that sends heartbeats, and for some time runs nothing but one call that does not let go of the
    interpreter."""
    listens, lost = listener(), []
    told.send(listens.getsockname()[:2])
    connection = Connection.accept(listens.accept()[0], KEY, "group/0")
    heartbeats = beating(connection, lost)
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    told.send("held")
    told.recv()
    heartbeats.end()
    heartbeats.join()
    told.send(lost)
    connection.close()


def test_a_process_whose_interpreter_is_held_up_is_not_lost():
    """Nor are the others lost to it. Each machine may be silent for half a second; the call takes two."""
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe()
    process = context.Process(target=hold_the_interpreter, args=(telling, 2.0), daemon=True)
    process.start()
    # So that it cannot be waited for if it fails.
    telling.close()
    lost: list[str] = []
    near = Connection.connect(told.recv(), KEY, "group/0", time.monotonic() + 10)
    heartbeats = beating(near, lost)
    assert told.recv() == "held"
    threading.Event().wait(0.1)
    told.send("end")
    assert told.recv() == [] and lost == []
    heartbeats.join()
    near.close()
    process.join()


def test_a_peer_that_breaks_off_says_why(two: Two):
    lost: list[str] = []
    near, far = (beating(connection, lost, silent_s=60.0) for connection in two)
    near.end("no memory")
    far.join()
    assert lost == ["the peer is lost: no memory"]
