"""Calls of threads to an actor of their machine, without Ray: as `local.py`, but they wait.

A call has a connection for itself, so a slow answer delays no other call.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from ray.exceptions import RayError, RayTaskError

from .client import UNANSWERED, ActorRef, this_machine
from .codec import decode, encode_call
from .local import LOOPBACK, MESSAGE_BYTES_MAX, LocalAddress
from .messages import HEAD, framed

logger = logging.getLogger(__name__)


class NearActorOfThreads(ActorRef):
    """An actor whose calls take the short way if it is on this machine and a thread waits for them. Those of event
    loops go through Ray.

    No call waits until it is known where the actor listens: until then they go through Ray too. A connection that ends
    is a `NoAnswer`, and the next call asks Ray for the actor.
    """

    unanswered_by = (*UNANSWERED, OSError)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # Guards the rest; only held briefly.
        self._finding = threading.Lock()
        self._asked: Future[Any] | None = None
        self._connections: Connections | None = None
        self._is_far = False

    def find(self) -> Any:
        with self._finding:
            if self._handle is None or (self._connections is not None and self._connections.lost):
                # The actor's process may be another one now.
                self._handle, self._asked, self._is_far = None, None, False
                self._hang_up()
        handle = self.find_handle()
        with self._finding:
            if self._connections is None and not self._is_far:
                self._open(handle)
            return handle if self._connections is None else _Near(handle, self._connections)

    def _open(self, handle: Any) -> None:
        try:
            asked = self._asked or handle.local_address.remote(encode_call([])).future()
            self._asked = asked
            if not asked.done():
                return
            at = decode(LocalAddress, asked.result())
            self._connections = Connections(at) if at.machine == this_machine() else None
            self._is_far = self._connections is None
        except Exception as error:
            # If it is starting, or has ended, the next call asks again.
            self._asked = None
            self._is_far = isinstance(error, RayTaskError) or not isinstance(error, RayError)
            logger.debug("%s is not reached without Ray: %s", self.name, error)

    def answer(self, sent: Any, timeout_s: float) -> Any:
        return sent(timeout_s) if isinstance(sent, partial) else super().answer(sent, timeout_s)

    def close(self) -> None:
        """Ends the connections. Later calls open others."""
        with self._finding:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._connections is not None:
            self._connections.close()
            self._connections = None


class _Near:
    """What threads make calls on: like Ray's handle of the actor, but some methods take the short way."""

    def __init__(self, by_ray: Any, connections: Connections) -> None:
        self._by_ray, self._connections = by_ray, connections

    def __getattr__(self, name: str) -> Any:
        return _Method(self._connections, name) if name in self._connections.at.methods else getattr(self._by_ray, name)


class _Method:
    def __init__(self, connections: Connections, name: str) -> None:
        self._connections, self._name = connections, name

    def remote(self, call: bytes) -> Callable[[float], bytes]:
        return partial(self._connections.ask, self._name, call)


class Connections:
    """Connections to one server. Those that no call uses are kept for the next ones."""

    def __init__(self, at: LocalAddress) -> None:
        self.at = at
        self._free: list[socket.socket] = []
        # Guards the free ones; only held briefly.
        self._lock = threading.Lock()
        self._closed = False
        weakref.finalize(self, _close, self._free)

    @property
    def lost(self) -> bool:
        """Whether the server has ended a connection that no call uses: it sends nothing unasked."""
        with self._lock:
            if not self._free:
                return self._closed
            waiting = select.poll()
            waiting.register(self._free[-1], select.POLLIN)
            return bool(waiting.poll(0))

    def ask(self, method: str, call: bytes, timeout_s: float) -> bytes:
        """Calls a method and waits for its answer.

        Raises:
            TimeoutError: none came in time.
            OSError: the connection ended, or there was none.
            ValueError: the method failed.
        """
        ends = time.monotonic() + timeout_s
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = socket.create_connection((LOOPBACK, self.at.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call_of = framed(0, self.at.secret) + framed(0, method.encode(), b"\0", call)
        else:
            call_of = framed(0, method.encode(), b"\0", call)
        try:
            connection.settimeout(max(1e-3, ends - time.monotonic()))
            connection.sendall(call_of)
            length, _ = HEAD.unpack(_read(connection, HEAD.size, ends))
            if length > MESSAGE_BYTES_MAX:
                raise ConnectionAbortedError("the answer is too long")
            answer = bytes(_read(connection, length, ends))
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._free.append(connection)
        if not answer:
            raise ValueError("the method failed")
        return answer

    def close(self) -> None:
        """Ends the connections; one that a call uses ends after it."""
        with self._lock:
            self._closed = True
            _close(self._free)


def _read(connection: socket.socket, count: int, ends: float) -> bytearray:
    """Returns the next `count` bytes. Raises as `Connections.ask`."""
    came = bytearray(count)
    left = memoryview(came)
    while left:
        connection.settimeout(max(1e-3, ends - time.monotonic()))
        read = connection.recv_into(left)
        if not read:
            raise ConnectionResetError("the connection has ended")
        left = left[read:]
    return came


def _close(connections: list[socket.socket]) -> None:
    while connections:
        with suppress(OSError):
            connections.pop().close()
