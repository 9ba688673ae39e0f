"""A socket between two nodes: sealed frames, a time limit for every wait, and a rate that many sockets share."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from ....cluster.errors import LinkError, LinkGarbage
from .handshake import PREAMBLE_BYTES, SEAL_BYTES, Seal, Seals, body_length
from .rate import Rate
from .wire import MESSAGE_BYTES_MAX

FRAME_BYTES = 2**19
"""An entry's bytes pass in frames of this size: few calls, and they stay in the core's cache from disk to wire."""

_HEAD_BYTES = 4


class SharedRate:
    """A limit in bytes per second for all sockets together, None for no limit. Safe from any thread."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = None if bytes_per_s is None else Rate(bytes_per_s, time.monotonic())
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def take(self, wanted: int) -> int:
        """Waits until bytes may be sent. Returns how many of `wanted`.

        Raises:
            LinkError: the limiter was closed.
        """
        wait_s = 0.0
        if self._rate is not None:
            wanted = min(wanted, self._rate.piece_bytes)
            with self._lock:
                wait_s = self._rate.wait_s(wanted, time.monotonic())
        if self._closed.wait(wait_s) if wait_s else self._closed.is_set():
            raise LinkError("the server is closing")
        return wanted

    def close(self) -> None:
        """Ends all waits and refuses further bytes."""
        self._closed.set()


class Link:
    """One connection, for one thread. Another thread may shut its socket down. Every method raises `LinkError` if the
    peer is silent for `stall_s`, if it is `until`, or if the connection breaks.

    Args:
        sock: connected; the caller closes it.
        stall_s: how long the peer may send or accept no byte.
        rate: limits what it sends.

    Attributes:
        stall_s: as given; may be changed.
        until: monotonic seconds after which nothing is waited for.
    """

    def __init__(self, sock: socket.socket, stall_s: float, rate: SharedRate | None = None) -> None:
        self.sock, self.until = sock, float("inf")
        self.stall_s, self._rate = stall_s, rate or SharedRate(None)
        self._out = self._into = Seal(bytes(32))
        self._plain, self._sealed = memoryview(b""), memoryview(b"")
        # The system ends each wait (`_try`). On macOS an accepted socket blocks only if its listener does, whatever
        # Python believes.
        sock.setblocking(True)
        with contextlib.suppress(OSError):
            # Buffers are left to the system, which makes them larger as the link needs.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # The handshake.

    def receive_handshake(self) -> bytes:
        """Returns the body of a handshake's message. Raises `LinkGarbage`, `LinkVersion`."""
        return self._receive(body_length(self._receive(PREAMBLE_BYTES)))

    def sealed_by(self, seals: Seals) -> None:
        """The handshake is over: seal everything from now on."""
        self._out, self._into = seals
        self._plain, self._sealed = memoryview(bytearray(FRAME_BYTES)), memoryview(bytearray(FRAME_BYTES + SEAL_BYTES))

    # Messages and entries.

    def send_message(self, payload: bytes) -> None:
        sealed = bytearray(_HEAD_BYTES + len(payload) + SEAL_BYTES)
        sealed[:_HEAD_BYTES] = (len(payload) + SEAL_BYTES).to_bytes(_HEAD_BYTES, "big")
        self._out.seal_into(payload, memoryview(sealed)[_HEAD_BYTES:])
        self.send(sealed)

    def receive_message(self) -> bytes:
        """Returns the next message. Raises `LinkGarbage` if it has over `MESSAGE_BYTES_MAX`, or does not verify."""
        length = int.from_bytes(self._receive(_HEAD_BYTES), "big")
        if not SEAL_BYTES < length <= MESSAGE_BYTES_MAX + SEAL_BYTES:
            raise LinkGarbage(f"a message of {length} bytes is over {MESSAGE_BYTES_MAX}")
        payload = bytearray(length - SEAL_BYTES)
        self._into.open_into(self._receive(length), memoryview(payload))
        return bytes(payload)

    def send_bytes(self, nbytes: int, read: Callable[[memoryview, int], None]) -> None:
        """Sends an entry's bytes in frames. `read` fills each piece, given where it begins."""
        for start in range(0, nbytes, FRAME_BYTES):
            piece = self._plain[: min(FRAME_BYTES, nbytes - start)]
            read(piece, start)
            sealed = self._sealed[: len(piece) + SEAL_BYTES]
            self._out.seal_into(piece, sealed)
            self.send(sealed)

    def receive_bytes(self, nbytes: int, take: Callable[[memoryview], None]) -> None:
        """Receives an entry's bytes; `take` gets piece after piece, whose memory is used again. Raises `LinkGarbage` if
        they do not verify."""
        for start in range(0, nbytes, FRAME_BYTES):
            piece = self._plain[: min(FRAME_BYTES, nbytes - start)]
            sealed = self._sealed[: len(piece) + SEAL_BYTES]
            self._fill(sealed)
            self._into.open_into(sealed, piece)
            take(piece)

    # Bytes.

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of `data`, at the shared rate."""
        left = memoryview(data)
        while len(left):
            granted = self._rate.take(len(left))
            while granted:
                sent = self._try(socket.SO_SNDTIMEO, lambda piece=left[:granted]: self.sock.send(piece))
                granted -= sent
                left = left[sent:]

    def _receive(self, count: int) -> bytes:
        raw = bytearray(count)
        self._fill(memoryview(raw))
        return bytes(raw)

    def _fill(self, target: memoryview) -> None:
        while len(target):
            # One call for all of a frame, in which the interpreter is free.
            came = self._try(socket.SO_RCVTIMEO, lambda piece=target: self.sock.recv_into(piece, 0, socket.MSG_WAITALL))
            if not came:
                raise LinkError("the peer has left")
            target = target[came:]

    def _try(self, limit: int, call: Callable[[], int]) -> int:
        """Returns what one system call returns, which ends after `stall_s`."""
        wait_s = min(self.stall_s, self.until - time.monotonic())
        try:
            if wait_s <= 0:
                raise BlockingIOError
            micros = max(1, int(wait_s * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", *divmod(micros, 10**6)))
            return call()
        except BlockingIOError:
            raise LinkError(
                "the peer says nothing" if limit == socket.SO_RCVTIMEO else "the peer takes nothing"
            ) from None
        except OSError as error:
            raise LinkError(f"the connection broke: {error.strerror or error}") from None
