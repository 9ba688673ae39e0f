"""Calls between processes of one machine over a socket, without Ray; `local_threads.py` has those of threads.

A call through Ray takes several threads of both processes. Here it is a message in each direction on a connection to
127.0.0.1. Arguments and answers have the same bytes. A connection begins with the server's secret, which an actor tells
only those who may call it through Ray.

`NearActor` finds out whether an actor can be reached in this way. As long as it cannot, and for all methods that are
not served so, calls go through Ray.

A method that one caller calls again and again may be *asked ahead*: one message asks for the answers to the next
`AHEAD` calls, and each is sent as soon as there is one, by whichever thread has it. So neither the caller's process nor
the actor's event loop has to do anything before the next answer can be sent.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...cluster.detached import DetachedTasks, detached
from ...cluster.trust.strangers import Strangers
from .client import UNANSWERED, ActorRef, this_machine
from .codec import decode, encode_call
from .messages import DirectWriter, Messages, framed

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

SECRET_BYTES = 32

SECRET_S = 3.0
"""How long a connection may take to show the secret."""

ADDRESS_S = 5.0
"""How long an actor may take to say where it listens."""

STRANGERS_MAX = 64
"""The most connections that have not shown it. Threads of all processes of a machine may connect at once."""

MESSAGE_BYTES_MAX = 2**30

AHEAD = 64
"""How many answers one message asks for, if the method is asked ahead. When half of them have come, or after
`RENEWED_S`, the next call asks for as many again."""

RENEWED_S = 0.25
"""Whoever answers learns at least so often that somebody still asks, as long as answers come."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """Where an actor answers calls of processes on its machine, a node of Ray, and which methods; `ahead` are those of
    them that are asked ahead."""

    machine: str
    port: int
    secret: bytes = field(repr=False)
    methods: list[str]
    ahead: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answers:
    """Where answers go that were asked for ahead. Those of one caller's messages are equal."""

    connection: _Served
    number: int

    def send(self, answer: bytes) -> bool:
        """Sends the next answer, from any thread. Returns False if the connection has ended."""
        return self.connection.write(self.number, answer)


class LocalServer:
    """Answers calls of some methods of this process's actor.

    Args:
        actor: its methods take and return bytes.
        ahead: of the methods that are asked ahead, what takes a message's call, and where its answer goes and the next
            ones, until there are `AHEAD` of them. It runs on the event loop and returns at once.
        ends_calls: whether calls are cancelled when their connection ends. If not, they go on, as calls through Ray do.
    """

    def __init__(
        self,
        actor: Any,
        *methods: str,
        ahead: Mapping[str, Callable[[bytes, Answers], None]] | None = None,
        ends_calls: bool = True,
    ) -> None:
        self.methods: dict[str, Callable[[bytes], Awaitable[bytes]]] = {name: getattr(actor, name) for name in methods}
        self.ahead = dict(ahead or {})
        self.ends_calls = ends_calls
        self.answering = DetachedTasks()
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
        return LocalAddress(this_machine(), port, self.secret, list(self.methods), list(self.ahead))


class _Served(Messages):
    """A connection at the server. Its first message is the secret; the others are a method's name, a zero byte and the
    call's arguments. An answer without bytes says that the method failed."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(SECRET_BYTES)
        self._server = server
        self._known = False
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._writer = DirectWriter(self.transport)
        self._ends = asyncio.get_running_loop().call_later(SECRET_S, self.abort)
        gone = self._server.strangers.add(self, LOOPBACK)
        if gone is not None:
            gone.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.cancel()
        self._writer.close()
        self._server.strangers.remove(self)
        if self._server.ends_calls:
            for task in self._answering:
                task.cancel()

    def resume_writing(self) -> None:
        self._writer.note_written()

    def write(self, number: int, *parts: bytes) -> bool:
        """Sends a message, from any thread. Returns False if the connection has ended."""
        return self._writer.write(framed(number, *parts))

    def take(self, number: int, body: bytes) -> None:
        if not self._known:
            self._introduce(body)
            return
        head, _, call = body.partition(b"\0")
        name = head.decode("ascii", "replace")
        if (ahead := self._server.ahead.get(name)) is not None:
            try:
                ahead(call, Answers(self, number))
            except Exception:
                logger.exception("a call failed")
                self.write(number)
            return
        method = self._server.methods.get(name)
        if method is None:
            self.abort()
            return
        # Ray would take it for a part of the call in which the server was started.
        task = self._server.answering.begin(self._answer(number, method(call)))
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
            self.write(number, await answer)
        except Exception:
            logger.exception("a call failed")
            self.write(number)


class LocalConnection(Messages):
    """A connection at the caller. `open` makes one; it is `lost` once it has ended."""

    def __init__(self) -> None:
        super().__init__(MESSAGE_BYTES_MAX)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._ahead: dict[int, AskedAhead] = {}
        self._number = 0
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
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

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of its event loop."""
        return threading.get_ident() == self._thread

    def ask(self, method: str, call: bytes) -> asyncio.Future[bytes]:
        """Sends a call. Its answer is dropped if nobody waits for it any more.

        Raises:
            ConnectionError: the connection has ended. So does the answer if it ends later.
        """
        number = self._next_number()
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda _: self._waiting.pop(number, None))
        self.call(number, method, call)
        return waiting

    def ask_aside(self, method: str, call: bytes) -> asyncio.Future[bytes]:
        """As `ask`, for a call that is made in another thread. The answer, or what `ask` raises, is the event loop's to
        await."""

        async def asked() -> bytes:
            return await self.ask(method, call)

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked(), self._loop), loop=self._loop)

    def call(self, number: int, method: str, call: bytes) -> None:
        """Sends a call with that number. Raises as `ask`."""
        if self.lost:
            raise ConnectionResetError("the connection has ended")
        self.send(number, method.encode(), b"\0", call)

    def listen(self, ahead: AskedAhead) -> int:
        """Returns the number of the calls whose answers it takes."""
        number = self._next_number()
        self._ahead[number] = ahead
        return number

    def _next_number(self) -> int:
        self._number = (self._number + 1) % 2**32
        return self._number

    def take(self, number: int, body: bytes) -> None:
        if (ahead := self._ahead.get(number)) is not None:
            ahead.take(body)
            return
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            _answer(waiting, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for ahead in self._ahead.values():
            ahead.lose()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the connection broke"))


def _answer(waiting: asyncio.Future[bytes], body: bytes) -> None:
    if body:
        waiting.set_result(body)
    else:
        waiting.set_exception(ValueError("the method failed"))


class AskedAhead:
    """A method that is asked ahead, at its only caller. Its answers are in the order of the calls."""

    def __init__(self, connection: LocalConnection, name: str) -> None:
        self._connection, self._name = connection, name
        self._number = connection.listen(self)
        self._came: deque[bytes] = deque()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._left, self._asked = 0, 0.0

    def remote(self, call: bytes) -> asyncio.Future[bytes]:
        """Returns the next answer. Raises as `LocalConnection.ask`."""
        now = time.monotonic()
        if self._left <= AHEAD // 2 or now - self._asked >= RENEWED_S:
            self._connection.call(self._number, self._name, call)
            self._left, self._asked = AHEAD, now
        self._left -= 1
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._came:
            _answer(waiting, self._came.popleft())
        elif self._connection.lost:
            raise ConnectionResetError("the connection has ended")
        else:
            self._waiting.append(waiting)
        return waiting

    def take(self, body: bytes) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                _answer(waiting, body)
                return
        self._came.append(body)

    def lose(self) -> None:
        """Its connection has ended."""
        while self._waiting:
            waiting = self._waiting.popleft()
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
                    self._near = _Handle(handle, self._connection, at)
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

    def __init__(self, by_ray: Any, connection: LocalConnection, at: LocalAddress) -> None:
        self._by_ray = by_ray
        self._methods: dict[str, _Method | AskedAhead] = {name: _Method(connection, name) for name in at.methods}
        self._methods |= {name: AskedAhead(connection, name) for name in at.ahead}

    def __getattr__(self, name: str) -> Any:
        method = self._methods.get(name)
        return getattr(self._by_ray, name) if method is None else method


class _Method:
    def __init__(self, connection: LocalConnection, name: str) -> None:
        self._connection, self._name = connection, name

    def remote(self, call: bytes) -> asyncio.Future[bytes]:
        # Large calls are made in another thread, which encodes them.
        connection = self._connection
        return connection.ask(self._name, call) if connection.is_here else connection.ask_aside(self._name, call)
