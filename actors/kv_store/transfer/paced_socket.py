"""A blocking socket with a time limit for every wait, and a rate limit that many sockets share."""

from __future__ import annotations

import socket
import threading
import time

from ....cluster.errors import LinkError, LinkGarbage
from .machine.link_auth import SEAL_BYTES, FrameSeal, records
from .machine.rate import TokenBucket

_BUFFERS_MAX = 512
"""How many buffers go into one system call; every system allows 1024."""

_HEAD_BYTES = 4


class SharedRate:
    """A limit in bytes per second for all sockets together, None for no limit. Safe from any thread."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s, time.monotonic())
        self._changed = threading.Condition()
        self._closed = False

    def take(self, wanted: int) -> int:
        """Waits until bytes may be sent. Returns how many of `wanted`.

        Raises:
            LinkError: the limiter was closed.
        """
        with self._changed:
            while not self._closed:
                if self._bucket is None:
                    return wanted
                grant = self._bucket.take(wanted, time.monotonic())
                if grant.count or not wanted:
                    return grant.count
                self._changed.wait(grant.wait_s)
        raise LinkError("the server is closing")

    def close(self) -> None:
        """Ends all waits and refuses further bytes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PacedSocket:
    """One connection, for one thread.

    Args:
        sock: connected; the caller closes it.
        rate: limits what it sends.
        stall_s: how long the peer may accept no byte.
    """

    def __init__(self, sock: socket.socket, rate: SharedRate, stall_s: float) -> None:
        self._sock = sock
        self._rate = rate
        self._stall_s = stall_s
        self.sent_bytes = 0

    def receive(self, count: int, wait_s: float) -> bytes:
        """Receives exactly `count` bytes within `wait_s` seconds.

        Raises:
            LinkError: they did not arrive, or the peer closed the connection.
        """
        raw = bytearray(count)
        view = memoryview(raw)
        ends = time.monotonic() + wait_s
        done = 0
        while done < count:
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise LinkError("the peer says nothing")
            self._sock.settimeout(left_s)
            try:
                got = self._sock.recv_into(view[done:])
            except TimeoutError:
                raise LinkError("the peer says nothing") from None
            except OSError as error:
                raise LinkError(f"the connection broke: {error.strerror or error}") from None
            if not got:
                raise LinkError("the peer has left")
            done += got
        return bytes(raw)

    def receive_frame(self, seal: FrameSeal, bytes_max: int, first_s: float, rest_s: float) -> bytes:
        """Receives the payload of the next frame. Its first byte must arrive within `first_s` seconds, the rest of its
        length and its body within `rest_s` each.

        Raises:
            LinkGarbage: it is longer than `bytes_max`, or does not verify.
            LinkError: it did not arrive.
        """
        head = self.receive(1, first_s) + self.receive(_HEAD_BYTES - 1, rest_s)
        length = int.from_bytes(head, "big")
        if not 1 <= length <= bytes_max + SEAL_BYTES:
            raise LinkGarbage(f"a frame of {length} bytes is over {bytes_max}")
        return seal.open(self.receive(length, rest_s))

    def send(self, *buffers: bytes | memoryview) -> None:
        """Sends all buffers, without copying, at the shared rate.

        Raises:
            LinkError: the peer accepts nothing, or closed the connection.
        """
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            granted = self._rate.take(sum(len(view) for view in left))
            while granted:
                sent = self._send_some(_first(left, granted))
                granted -= sent
                self.sent_bytes += sent
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left and sent:
                    left[0] = left[0][sent:]

    def send_frame(self, seal: FrameSeal, payload: bytes, *data: memoryview) -> None:
        """Sends a frame, then the sealed records of `data`. Raises `LinkError` as `send`."""
        sealed = seal.seal(payload)
        self.send(len(sealed).to_bytes(4, "big") + sealed)
        for record in records(data):
            self.send(seal.seal(record))

    def _send_some(self, views: list[memoryview]) -> int:
        self._sock.settimeout(self._stall_s)
        try:
            return self._sock.sendmsg(views[:_BUFFERS_MAX])
        except TimeoutError:
            raise LinkError("the peer takes nothing") from None
        except OSError as error:
            raise LinkError(f"the connection broke: {error.strerror or error}") from None


def _first(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns the first `count` bytes of `views`."""
    first: list[memoryview] = []
    for view in views:
        if count <= 0:
            break
        first.append(view[:count])
        count -= len(first[-1])
    return first
