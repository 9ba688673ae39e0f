"""Calls between the event loops of one machine over a socket, without Ray.

A call through Ray takes several threads of both processes. Here it is a message in each direction on a connection to
127.0.0.1. Arguments and answers have the same bytes. A connection begins with the server's secret, which an actor tells
only those who may call it through Ray.

`NearActor` finds out whether an actor can be reached in this way. As long as it cannot, and for all methods that are
not served so, calls go through Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from ...cluster.detached import detached
from ...cluster.trust.strangers import Strangers
from .client import UNANSWERED, ActorRef, this_machine
from .codec import decode, encode_call

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

SECRET_BYTES = 32

SECRET_S = 3.0
"""How long a connection may take to show the secret."""

ADDRESS_S = 5.0
"""How long an actor may take to say where it listens."""

STRANGERS_MAX = 16
"""The most connections that have not shown it."""

MESSAGE_BYTES_MAX = 2**30

_HEAD = struct.Struct(">II")
"""The length of a message's body, and the number of its call."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """Where an actor answers calls of processes on its machine, a node of Ray, and which methods."""

    machine: str
    port: int
    secret: bytes = field(repr=False)
    methods: list[str]


class _Messages(asyncio.Protocol):
    """A connection on which messages come. One of over `bytes_max` ends it."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._came = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        while len(self._came) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._came)
            if length > self.bytes_max:
                self.abort()
                return
            ends = _HEAD.size + length
            if len(self._came) < ends:
                return
            body = bytes(memoryview(self._came)[_HEAD.size : ends])
            del self._came[:ends]
            self.take(number, body)

    def take(self, number: int, body: bytes) -> None:
        raise NotImplementedError

    def send(self, number: int, *parts: bytes) -> None:
        if self._transport is not None:
            body = b"".join(parts)
            self._transport.write(_HEAD.pack(len(body), number) + body)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class LocalServer:
    """Answers calls of some methods of this process's actor.

    Args:
        actor: its methods take and return bytes.
    """

    def __init__(self, actor: Any, *methods: str) -> None:
        self.methods: dict[str, Callable[[bytes], Awaitable[bytes]]] = {name: getattr(actor, name) for name in methods}
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.strangers: Strangers[_Served] = Strangers(STRANGERS_MAX)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> LocalAddress:
        """Listens on a free port of 127.0.0.1 from the first call on.

        Raises:
            OSError: it cannot listen.
        """
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.get_running_loop().create_server(lambda: _Served(self), LOOPBACK, 0)
        port = int(self._server.sockets[0].getsockname()[1])
        return LocalAddress(this_machine(), port, self.secret, list(self.methods))


class _Served(_Messages):
    """A connection at the server. Its first message is the secret; the others are a method's name, a zero byte and the
    call's arguments. An answer without bytes says that the method failed."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(SECRET_BYTES)
        self._server = server
        self._known = False
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ends = asyncio.get_running_loop().call_later(SECRET_S, self.abort)
        gone = self._server.strangers.add(self, LOOPBACK)
        if gone is not None:
            gone.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.cancel()
        self._server.strangers.remove(self)
        for task in self._answering:
            task.cancel()

    def take(self, number: int, body: bytes) -> None:
        if not self._known:
            self._introduce(body)
            return
        name, _, call = body.partition(b"\0")
        method = self._server.methods.get(name.decode("ascii", "replace"))
        if method is None:
            self.abort()
            return
        # Ray would take it for a part of the call in which the server was started.
        task = detached(self._answer(number, method(call)))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _introduce(self, secret: bytes) -> None:
        self._known = hmac.compare_digest(secret, self._server.secret)
        self._ends.cancel()
        self._server.strangers.remove(self)
        self.bytes_max = MESSAGE_BYTES_MAX
        if not self._known:
            self.abort()

    async def _answer(self, number: int, answer: Awaitable[bytes]) -> None:
        try:
            self.send(number, await answer)
        except Exception:
            logger.exception("a call failed")
            self.send(number)


class LocalConnection(_Messages):
    """A connection at the caller. `open` makes one; it is `lost` once it has ended."""

    def __init__(self) -> None:
        super().__init__(MESSAGE_BYTES_MAX)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self.lost = False

    @classmethod
    async def open(cls, at: LocalAddress) -> LocalConnection:
        """
        Raises:
            OSError: nobody listens there.
        """
        _, connection = await asyncio.get_running_loop().create_connection(cls, LOOPBACK, at.port)
        connection.send(0, at.secret)
        return connection

    def ask(self, method: str, call: bytes) -> asyncio.Future[bytes]:
        """Sends a call. Its answer is dropped if nobody waits for it any more.

        Raises:
            ConnectionError: the connection has ended. So does the answer if it ends later.
        """
        if self.lost:
            raise ConnectionResetError("the connection has ended")
        number = self._number = (self._number + 1) % 2**32
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda _: self._waiting.pop(number, None))
        self.send(number, method.encode(), b"\0", call)
        return waiting

    def take(self, number: int, body: bytes) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if body:
            waiting.set_result(body)
        else:
            waiting.set_exception(ValueError("the method failed"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the connection broke"))


class NearActor(ActorRef):
    """An actor whose calls take the short way if it is on this machine. For event loops only.

    A connection that ends is a `NoAnswer`, and the next call goes through Ray. Whether the process has ended is known
    only to Ray. A method that fails does not end the connection, on which other calls wait.
    """

    unanswered_by = (*UNANSWERED, ConnectionError)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._opening: asyncio.Task[None] | None = None
        self._connection: LocalConnection | None = None
        self._near: _Handle | None = None
        self._closed = False

    async def find_aside(self) -> Any:
        if self._connection is not None and self._connection.lost:
            # The actor's process may be another one now.
            self._handle = None
        elif self._near is not None:
            return self._near
        if self._handle is None:
            self._hang_up()
        handle = await super().find_aside()
        # Another call may have begun to open it meanwhile.
        if self._opening is None and not self._closed:
            # Ray would take the call for a part of the request that is served now.
            self._opening = detached(self._open(handle))
        return handle

    async def _open(self, handle: Any) -> None:
        try:
            async with asyncio.timeout(ADDRESS_S):
                at = decode(LocalAddress, await handle.local_address.remote(encode_call([])))
                if at.machine == this_machine():
                    self._connection = await LocalConnection.open(at)
                    self._near = _Handle(handle, self._connection, frozenset(at.methods))
        except TimeoutError:
            # The actor is starting, or busy: the next call asks again.
            self._opening = None
        except Exception as error:
            # All calls go through Ray then.
            logger.debug("%s is not reached without Ray: %s", self.name, error)

    def close(self) -> None:
        """Ends the connection. Later calls go through Ray."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.abort()
        self._opening = self._connection = self._near = None


class _Handle:
    """What calls are made on: like Ray's handle of the actor, but some methods take the short way."""

    def __init__(self, by_ray: Any, connection: LocalConnection, methods: frozenset[str]) -> None:
        self._by_ray, self._connection, self._methods = by_ray, connection, methods

    def __getattr__(self, name: str) -> Any:
        return _Method(self._connection, name) if name in self._methods else getattr(self._by_ray, name)


class _Method:
    def __init__(self, connection: LocalConnection, name: str) -> None:
        self._connection, self._name = connection, name

    def remote(self, call: bytes) -> asyncio.Future[bytes]:
        return self._connection.ask(self._name, call)
