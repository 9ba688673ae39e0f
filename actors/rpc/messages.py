"""Messages on a connection of an event loop, and how other threads write to it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from typing import cast

HEAD = struct.Struct(">II")
"""The length of a message's body, and the number of its call."""


def framed(number: int, *parts: bytes) -> bytes:
    """Returns a message as it is on the connection."""
    return b"".join((HEAD.pack(sum(map(len, parts)), number), *parts))


class Messages(asyncio.Protocol):
    """A connection on which messages come. One of over `bytes_max` ends it."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._came = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        while len(self._came) >= HEAD.size:
            length, number = HEAD.unpack_from(self._came)
            if length > self.bytes_max:
                self.abort()
                return
            ends = HEAD.size + length
            if len(self._came) < ends:
                return
            body = bytes(memoryview(self._came)[HEAD.size : ends])
            del self._came[:ends]
            self.take(number, body)

    def take(self, number: int, body: bytes) -> None:
        raise NotImplementedError

    def send(self, number: int, *parts: bytes) -> None:
        if self._transport is not None:
            self._transport.write(framed(number, *parts))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class DirectWriter:
    """Writes to a connection from any thread, without waking the event loop: its thread would compete with the caller
    for the interpreter. What the socket does not take at once is written by the event loop, and until that is done all
    that comes later too. Made on the event loop.

    The connection's protocol calls `note_written` when it may resume writing, and `close` when it has ended.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._loop, self._transport = asyncio.get_running_loop(), transport
        transport.set_write_buffer_limits(0)
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        self._socket: socket.socket | None = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._left: list[bytes] = []
        self._behind = False

    def write(self, data: bytes) -> bool:
        """Writes it, behind all that came before. Returns False if the connection has ended."""
        with self._lock:
            if self._socket is None:
                return False
            if not self._behind:
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    # If there was only no memory for it, the connection would stay, and the caller wait for an answer.
                    self._loop.call_soon_threadsafe(self._transport.abort)
                    return False
                if sent == len(data):
                    return True
                self._behind, data = True, data[sent:]
            self._left.append(data)
        self._loop.call_soon_threadsafe(self._write_left)
        return True

    def _write_left(self) -> None:
        with self._lock:
            left, self._left = b"".join(self._left), []
        if left and not self._transport.is_closing():
            self._transport.write(left)
        self.note_written()

    def note_written(self) -> None:
        """Called on the event loop when all that it had to write may be written."""
        with self._lock:
            if not self._left and self._transport.get_write_buffer_size() == 0:
                self._behind = False

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
