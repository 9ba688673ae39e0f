"""Arrays are sent and received while their stages compute, in order and with bounded memory; nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from satchel.actors.replica.group.link.arrays import AT_ONCE_BYTES, QUEUE_BYTES_MAX, Incoming, Outgoing, Plain
from satchel.cluster.errors import LinkError
from tests.worlds.replica.group import on_a_thread

LARGE = AT_ONCE_BYTES + 1


def array(number: int, nbytes: int = LARGE) -> Plain:
    return Plain("float32", [number], np.zeros(nbytes, np.uint8))


class Network:
    """Takes arrays one by one, each once it may."""

    def __init__(self) -> None:
        self.may, self.sent = threading.Semaphore(0), list[int]()
        self.error: Exception | None = None

    def send(self, plain: Plain) -> None:
        assert self.may.acquire(timeout=20.0)
        if self.error is not None:
            raise self.error
        self.sent.append(plain.shape[0])


def test_a_stage_goes_on_while_its_arrays_are_sent_until_too_many_bytes_wait():
    network = Network()
    outgoing = Outgoing(network.send)
    half = QUEUE_BYTES_MAX // 2
    for number in range(2):
        # Nothing is sent yet, and this one does not wait.
        outgoing.put(array(number, half))
    with on_a_thread(lambda: outgoing.put(array(2, half))) as third:
        assert not network.sent and not third.done()
        network.may.release()
        third.result(20.0)
    assert network.sent == [0] and not outgoing.flush(0.0)
    network.may.release(2)
    assert outgoing.flush(20.0) and network.sent == [0, 1, 2]
    outgoing.end()


def test_a_small_array_is_sent_at_once_but_never_before_a_larger_one():
    network = Network()
    outgoing = Outgoing(network.send)
    network.may.release()
    outgoing.put(array(0, 8))
    assert network.sent == [0]
    outgoing.put(array(1))
    outgoing.put(array(2, 8))
    assert network.sent == [0]
    network.may.release(2)
    assert outgoing.flush(20.0) and network.sent == [0, 1, 2]
    outgoing.end()


@pytest.mark.parametrize("error", [LinkError("the peer has left"), MemoryError("none")])
def test_who_waits_for_a_broken_connection_is_told(error: Exception):
    network = Network()
    outgoing = Outgoing(network.send)
    outgoing.put(array(0, QUEUE_BYTES_MAX))
    with on_a_thread(lambda: outgoing.put(array(1))) as waiting:
        network.error = error
        network.may.release()
    assert isinstance(waiting.exception(), LinkError) and str(error) in str(waiting.exception())
    with pytest.raises(LinkError):
        outgoing.put(array(2))
    assert not outgoing.flush(20.0)
    outgoing.end()


def coming(*said: Any) -> Callable[[], Plain]:
    left = iter(said)

    def receive() -> Plain:
        each = next(left)
        if isinstance(each, Exception):
            raise each
        return each

    return receive


def test_arrays_are_received_before_they_are_asked_for_and_the_error_comes_after_them():
    incoming = Incoming(coming(array(0), array(1), LinkError("the peer has left")))
    incoming.end()
    assert [incoming.take().shape for _ in range(2)] == [[0], [1]]
    for _ in range(2):
        with pytest.raises(LinkError, match="the peer has left"):
            incoming.take()


def test_what_nobody_takes_is_not_received_without_end():
    received = list[int]()

    def receive() -> Plain:
        received.append(len(received))
        if len(received) > 9:
            raise LinkError("the end")
        return array(received[-1], QUEUE_BYTES_MAX // 2)

    incoming = Incoming(receive)
    assert [incoming.take().shape[0] for _ in range(4)] == [0, 1, 2, 3]
    # Three more fill the queue, and so does the one with which that was noticed.
    assert len(received) <= 4 + 3
    assert [incoming.take().shape[0] for _ in range(5)] == [4, 5, 6, 7, 8]
    with pytest.raises(LinkError, match="the end"):
        incoming.take()
    incoming.end()
