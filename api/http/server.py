"""The HTTP server in the endpoint's event loop: uvicorn, with limits on what it leaves unlimited."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import sys
import time
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ...cluster.errors import Unavailable
from ...cluster.trust.shown_certificate import ShownCertificate
from ..openai.answers import error_body
from .exchange import STALL_S, Refused
from .tls_listener import TlsListener

POLL_S = 0.1
LISTEN_S = 10.0
KEEP_ALIVE_S = 60
HEAD_S = 60.0
READ_S = 1.0
"""So long after an answer its last bytes are with the client, whether that has read them or not."""

SEND_BUFFER_BYTES = 128 * 2**10
"""What the system may hold of an answer until the client takes it. On a link where an acknowledgement takes 10 ms, so
much is sent every 10 ms."""

HEAD_BYTES_MAX = 64 * 2**10
HEADERS_MAX = 100
"""Of a request, with those that come after its body (trailers), which nobody here reads."""
PIPELINED_MAX = 8
"""Requests of one connection that wait for the answer to another."""


_NOT_HTTP = 400, "this is not a valid HTTP request"


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request's line and headers may take `HEAD_BYTES_MAX` and `HEAD_S`, and what is neither head nor
    body as many bytes; what is not HTTP is answered in OpenAI's shape.

    Args:
        connections_max: of the server. Where there are more, the one that has waited longest for its client to ask
            something is closed; where all are at work, the new one is refused.
        refused: hears why a connection is refused for want of room.
    """

    def __init__(self, *args: Any, connections_max: int, refused: Refused, **named: Any) -> None:
        super().__init__(*args, **named)
        self._refused = refused
        self._connections_max = connections_max
        self._refusal = _NOT_HTTP

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # With TLS it would be eight times as much.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._head_bytes = self._headers = self._between_bytes = 0
        self._head_ends = self.loop.call_later(HEAD_S, transport.abort)
        self._waits_since = self.loop.time()
        if len(self.connections) > self._connections_max:
            self._make_room()

    def _make_room(self) -> None:
        others = [it for it in self.connections - {self} if isinstance(it, HttpProtocol)]
        spare = [it for it in others if it.is_idle] or [it for it in others if it._is_answered]
        if spare:
            min(spare, key=lambda it: it._waits_since).transport.abort()
        else:
            why = f"all {self._connections_max} connections are in use (endpoint.connections_max)"
            self._refused(why)
            self._refuse(503, why)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was asked here that is not answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    @property
    def _is_answered(self) -> bool:
        """Whether all is said, and only the client has not agreed to the end, as it does with TLS."""
        return self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def data_received(self, data: bytes) -> None:
        in_head = self._head_bytes >= 0
        self._in_body = False
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if in_head and self._head_bytes >= 0:
            self._head_bytes += len(data)
        elif self._head_bytes < 0:
            self._between_bytes = 0 if self._in_body else self._between_bytes + len(data)
        if max(self._head_bytes, self._between_bytes) > HEAD_BYTES_MAX:
            self._refuse(431, f"the request's line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Also after an answer on the same connection; then the wait for the next request is uvicorn's to limit.
        self._head_ends.cancel()
        self._head_bytes, self._head_ends = 0, self.loop.call_later(HEAD_S, self.transport.abort)
        self._headers, self._between_bytes = 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADERS_MAX:
            raise self._stop(431, f"the request has more than {HEADERS_MAX} headers")
        if self._head_bytes >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            # Others are being answered, so there is no place for an answer to this one.
            self.transport.abort()
            raise self._stop(*_NOT_HTTP)
        self._head_bytes = -1
        self._head_ends.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_answered and self.loop.time() - self._waits_since > READ_S:
            # It has been read long since; nobody waits until the client agrees to the end.
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends.cancel()
        super().connection_lost(exc)

    def _stop(self, status: int, message: str) -> Exception:
        """What ends the parsing when it is raised by one of the parser's callbacks."""
        self._refusal = status, message
        return ValueError(message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            # It would be read as a part of another answer.
            self.transport.abort()
            return
        body = json.dumps(error_body(status, message, code=Unavailable.code if status == 503 else "invalid_request"))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        again = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(STATUS_LINE[status] + f"{head}{again}\r\n{body}".encode())
        self.transport.close()


class HttpServer:
    """An application served on one address. Make it, `start` it, `close` it.

    Args:
        certificate: for HTTPS; None is HTTP.
        refused: hears why a request is refused for want of room.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        connections_max: int = 1000,
        certificate: ShownCertificate | None = None,
        refused: Refused = lambda why: None,
    ) -> None:
        self._protocol = partial(HttpProtocol, connections_max=connections_max, refused=refused)
        settings = uvicorn.Config(
            app,
            http=self._protocol,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            # There are none, and they would leave this protocol.
            ws="none",
        )
        self._server = uvicorn.Server(settings)
        # This process's signals are Ray's.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._address = host, port
        self._certificate = certificate
        self._refused = refused
        self._tls: TlsListener | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is not to be had.
        """
        listener = await _listener(*self._address)
        own = [listener] if self._certificate is None else []
        self._task = asyncio.create_task(self._server.serve(sockets=own))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._certificate is not None:
            self._tls = TlsListener(listener, self._certificate, self._make_protocol, refused=self._refused)

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn makes them for its own listeners."""
        server = self._server
        return self._protocol(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)

    @property
    def failure(self) -> BaseException | None:
        """Why it has ended without being closed; None while it serves."""
        if self._server.should_exit or self._task is None:
            return None
        if not self._task.done():
            return None if self._tls is None else self._tls.failure
        return self._task.exception() or RuntimeError("the server has returned")

    async def close(self, timeout_s: float) -> None:
        """Take no more connections, and let clients read the rest of their answers for at most `timeout_s`."""
        self._server.should_exit = True
        if self._tls is not None:
            self._tls.close()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)


async def _listener(host: str, port: int) -> socket.socket:
    """A socket on the address; waits for one that a dying predecessor still holds."""
    ends = time.monotonic() + LISTEN_S
    while True:
        # As `check_port_free` reads the address.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without, a token may wait 40 ms for the client to acknowledge the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Nor may megabytes of an answer that nobody reads wait in the system, which is no limit of ours.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if sys.platform == "linux":
            # Else a client that takes nothing would keep its connection, and what is written to it, for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_S))
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > ends:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return listener
