"""The HTTP server in the endpoint's event loop: uvicorn, with limits on what it leaves unlimited."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .http import STALL_S
from .openai_answers import error_body

POLL_S = 0.1
LISTEN_S = 10.0
KEEP_ALIVE_S = 60
HEAD_S = 60.0
SEND_BUFFER_BYTES = 128 * 2**10
"""What the system may hold of an answer until the client takes it. On a link where an acknowledgement takes 10 ms, so
much is sent every 10 ms."""

HEAD_BYTES_MAX = 64 * 2**10


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request's line and headers may take `HEAD_BYTES_MAX` and `HEAD_S`, and what is not HTTP is
    answered in OpenAI's shape."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes = 0
        self._head_ends = self.loop.call_later(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        in_head = self._head_bytes >= 0
        super().data_received(data)
        if in_head and self._head_bytes >= 0 and self.parser is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(431, f"the request's line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Also after an answer on the same connection; then the wait for the next request is uvicorn's to limit.
        self._head_ends.cancel()
        self._head_bytes, self._head_ends = 0, self.loop.call_later(HEAD_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        self._head_ends.cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(error_body(status, message, code="invalid_request")).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


class HttpServer:
    """An application served on one address. Make it, `start` it, `close` it."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        settings = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(settings)
        # This process's signals are Ray's.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._address = host, port
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is not to be had.
        """
        self._task = asyncio.create_task(self._server.serve(sockets=[await _listener(*self._address)]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    @property
    def failure(self) -> BaseException | None:
        """Why it has ended without being closed; None while it serves."""
        if self._server.should_exit or self._task is None or not self._task.done():
            return None
        return self._task.exception() or RuntimeError("the server has returned")

    async def close(self, timeout_s: float) -> None:
        """Take no more connections, and let clients read the rest of their answers for at most `timeout_s`."""
        self._server.should_exit = True
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
