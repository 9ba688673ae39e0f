"""The HTTP server in the endpoint's event loop: uvicorn, with limits that it lacks."""

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
"""By this time after an answer its last bytes have reached the client, read or not."""

SEND_BUFFER_BYTES = 128 * 2**10
"""The system's send buffer of a connection. With a round trip of 10 ms, so much is sent every 10 ms."""

HEAD_BYTES_MAX = 64 * 2**10
HEADERS_MAX = 100
"""Of a request, with its trailers, which are ignored."""
PIPELINED_MAX = 8
"""Requests of one connection that wait for an earlier answer."""


_NOT_HTTP = 400, "this is not a valid HTTP request"


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request's line and headers are limited to `HEAD_BYTES_MAX` and `HEAD_S`, and bytes outside head
    and body to `HEAD_BYTES_MAX` too. Input that is not HTTP gets an error in OpenAI's shape.

    Args:
        connections_max: of the server. If there are more, the longest idle one is closed; if none is idle, the new one
            is refused.
        refused: called with the reason if a connection is refused for lack of capacity.
    """

    def __init__(self, *args: Any, connections_max: int, refused: Refused, **named: Any) -> None:
        super().__init__(*args, **named)
        self._refused = refused
        self._connections_max = connections_max
        self._refusal = _NOT_HTTP

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # The default for TLS is eight times as much.
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
        """Whether every request of this connection has been answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    @property
    def _is_answered(self) -> bool:
        """Whether everything is sent and only the client's TLS close is missing."""
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
        # Also after an answer on the same connection; uvicorn limits the wait for the next request.
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
            # Earlier requests are being answered, so no response can be sent for this one.
            self.transport.abort()
            raise self._stop(*_NOT_HTTP)
        self._head_bytes = -1
        self._head_ends.cancel()
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            # That version has no chunks: the connection's end is the answer's.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilTheEnd()

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_answered and self.loop.time() - self._waits_since > READ_S:
            # The client has long read the answer: do not wait for its TLS close.
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends.cancel()
        super().connection_lost(exc)

    def _stop(self, status: int, message: str) -> Exception:
        """Sets the refusal, and returns the exception that ends parsing if a parser callback raises it."""
        self._refusal = status, message
        return ValueError(message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            # The client would read it as part of another answer.
            self.transport.abort()
            return
        body = json.dumps(error_body(status, message, code=Unavailable.code if status == 503 else "invalid_request"))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        again = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(STATUS_LINE[status] + f"{head}{again}\r\n{body}".encode())
        self.transport.close()


class _UntilTheEnd(int):
    """How many bytes of an answer are still expected, if the connection's end tells: none is too many or missing."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilTheEnd:
        return self

    __hash__ = int.__hash__


class HttpServer:
    """An application served on one address. Make it, `start` it, `close` it.

    Args:
        certificate: for HTTPS; None is HTTP.
        refused: called with the reason if a request is refused for lack of capacity.
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
            # The application has no websockets, and an upgrade would leave this protocol and its limits.
            ws="none",
        )
        self._server = uvicorn.Server(settings)
        # Ray handles this process's signals.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._address = host, port
        self._certificate = certificate
        self._refused = refused
        self._tls: TlsListener | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts listening.

        Raises:
            OSError: the address cannot be bound.
        """
        listener = await _listener(*self._address)
        own = [listener] if self._certificate is None else []
        self._task = asyncio.create_task(self._server.serve(sockets=own))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._certificate is not None:
            self._tls = TlsListener(listener, self._certificate, self._make_protocol, refused=self._refused)

    def _make_protocol(self) -> asyncio.Protocol:
        """Makes a protocol as uvicorn does for its own listeners."""
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
        """Stops accepting connections, and lets clients read the rest of their answers for at most `timeout_s`."""
        self._server.should_exit = True
        if self._tls is not None:
            self._tls.close()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)


async def _listener(host: str, port: int) -> socket.socket:
    """Returns a bound socket; waits while a dying predecessor still holds the address."""
    ends = time.monotonic() + LISTEN_S
    while True:
        # As `check_port_free` reads the address.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without it a token may wait 40 ms for the client to acknowledge the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Else megabytes of an unread answer could wait in the system's buffer, beyond our own limits.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if sys.platform == "linux":
            # Else a client that reads nothing would keep its connection and its send buffer for ever.
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
