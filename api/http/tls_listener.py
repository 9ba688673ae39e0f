"""Accepts connections for HTTPS, and hands them to the server after their TLS handshake.

asyncio's own server sees a connection only after its handshake, so any number of silent ones could stay open. Here
unfinished handshakes are limited in number and time, and a connection gets memory for TLS only after its first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable

from ...cluster.trust.shown_certificate import ShownCertificate
from ...cluster.trust.strangers import Strangers, host_of
from ..patches import status_line
from .error_shapes import openai_error
from .exchange import Refused

_log = logging.getLogger(__name__)

HANDSHAKES_MAX = 256
"""The most unfinished handshakes at a time, each up to 256 KiB. If there are more, the address with the most of them
loses its oldest one."""

HANDSHAKE_S = 10.0
CLOSE_S = 10.0
"""How long a client may take to read the rest of its last answer and to close TLS."""

LOOK_S = 5.0
"""Seconds between checks whether the certificate was replaced."""

BACKLOG = 2048
PAUSE_S = 0.1

_HANDSHAKE = b"\x16"
"""The first byte of a TLS client: the type of its first record (RFC 8446, 5.1)."""


class TlsListener:
    """A listening socket for HTTPS. Make it on a running event loop, and `close` it.

    Args:
        listener: a bound socket; `close` closes it.
        make: makes a connection's protocol, which starts after the handshake.
        refused: called with the reason if a connection is refused for lack of capacity.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificate: ShownCertificate,
        make: Callable[[], asyncio.Protocol],
        *,
        refused: Refused,
    ) -> None:
        self._listener = listener
        self._certificate = certificate
        self._make = make
        self._refused = refused
        self._strangers: Strangers[socket.socket] = Strangers(HANDSHAKES_MAX)
        self._receiving: dict[asyncio.Task[None], socket.socket] = {}
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept_forever())
        self._looking = asyncio.create_task(self._look_forever())

    @property
    def failure(self) -> BaseException | None:
        """The error with which the listener ended without being closed; None while it listens."""
        return self._accepting.exception() if self._accepting.done() and not self._accepting.cancelled() else None

    def close(self) -> None:
        """Stops accepting connections. Those already handed over continue."""
        self._accepting.cancel()
        self._looking.cancel()
        for sock in self._receiving.values():
            _hang_up(sock)
        self._listener.close()

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._certificate.look)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:
                # For example out of file descriptors: wait and try again.
                self._refused(f"a connection could not be taken ({error.strerror or error})")
                await asyncio.sleep(PAUSE_S)
                continue
            if (gone := self._strangers.add(sock, host_of(address))) is not None:
                _hang_up(gone)
            task = loop.create_task(self._receive(sock))
            self._receiving[task] = sock
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.remove(self._receiving.pop(task))

    async def _receive(self, sock: socket.socket) -> None:
        owned = True
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if await _speaks_tls(sock):
                    owned = False
                    await asyncio.get_running_loop().connect_accepted_socket(
                        self._make,
                        sock,
                        ssl=self._certificate.context,
                        ssl_handshake_timeout=HANDSHAKE_S,
                        ssl_shutdown_timeout=CLOSE_S,
                    )
        except (OSError, TimeoutError) as error:
            _log.debug("no handshake: %s", error)
            # If the event loop already owns the socket, the loop closes it once it sees the end.
            _hang_up(sock)
        finally:
            if owned:
                sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Shuts the socket down, so that a task waiting for it sees its end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _speaks_tls(sock: socket.socket) -> bool:
    """Returns whether the client begins a TLS handshake. A client that speaks plain HTTP gets a 400.

    Raises:
        OSError: the connection is broken.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)
    first = sock.recv(1, socket.MSG_PEEK)
    if first.isalpha():
        body = json.dumps(openai_error(400, "this port speaks HTTPS: use https://", code="invalid_request")).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        sock.send(status_line(400) + head.encode() + body)
        # Closing with unread input would reset the connection before the client reads the answer.
        sock.recv(2**16)
    return first == _HANDSHAKE
