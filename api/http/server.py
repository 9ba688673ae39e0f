"""The HTTP server in the endpoint's event loop: uvicorn, with limits that it lacks."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from ...cluster.errors import Unavailable
from ...cluster.trust.shown_certificate import ShownCertificate
from ..patches import HttpProtocol, protocol_maker, without_signals
from .error_shapes import openai_error
from .exchange import STALL_S, Refused
from .tls_listener import TlsListener

POLL_S = 0.1
LISTEN_S = 10.0
KEEP_ALIVE_S = 60
SEND_BUFFER_BYTES = 128 * 2**10
"""The size of a connection's send buffer in the system. With a round trip of 10 ms, this much is sent every 10 ms."""


class HttpServer:
    """An application served on one address. Make it, `start` it, `close` it.

    Args:
        certificate: for HTTPS; None means HTTP.
        refused: called with the reason if a request is refused for lack of capacity.
        closing: called when it begins to close, to end answers that have no other end.
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
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._protocol = partial(HttpProtocol, connections_max=connections_max, refused=refused, error=_error)
        settings = uvicorn.Config(
            app,
            http=self._protocol,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            # The application has no websockets, and an upgraded connection would escape this protocol's limits.
            ws="none",
        )
        self._server = uvicorn.Server(settings)
        without_signals(self._server)
        self._address = host, port
        self._certificate = certificate
        self._refused = refused
        self._closing = closing
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
            make = protocol_maker(self._server, self._protocol)
            self._tls = TlsListener(listener, self._certificate, make, refused=self._refused)

    @property
    def failure(self) -> BaseException | None:
        """The error with which the server ended without being closed; None while it serves."""
        if self._server.should_exit or self._task is None:
            return None
        if not self._task.done():
            return None if self._tls is None else self._tls.failure
        return self._task.exception() or RuntimeError("the server has returned")

    async def close(self, timeout_s: float) -> None:
        """Stops accepting connections, and lets clients read the rest of their answers for at most `timeout_s`."""
        self._closing()
        self._server.should_exit = True
        if self._tls is not None:
            self._tls.close()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)


def _error(status: int, message: str) -> str:
    """Returns an error in OpenAI's shape, as JSON."""
    return json.dumps(openai_error(status, message, code=Unavailable.code if status == 503 else "invalid_request"))


async def _listener(host: str, port: int) -> socket.socket:
    """Returns a bound socket; waits while a predecessor that is ending still has the address."""
    ends = time.monotonic() + LISTEN_S
    while True:
        # The address is resolved as in `check_port_free`.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this option. Without it a token may wait 40 ms until the client acknowledges the one
        # before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Otherwise megabytes of an unread answer could wait in the system's buffer, outside of the endpoint's limits.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if sys.platform == "linux":
            # Otherwise a client that reads nothing would keep its connection and its send buffer for ever.
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
