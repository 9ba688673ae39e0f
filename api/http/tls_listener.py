"""Takes connections for HTTPS, and hands over those that have agreed on their encryption.

An event loop's own server knows of a connection only when its handshake has ended, so that any number may stand there
and say nothing. Here those have places of their own, and time. None is given memory for TLS before it has said a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ...cluster.trust.shown_certificate import ShownCertificate
from ...cluster.trust.strangers import Strangers
from ..openai.answers import error_body
from .exchange import Refused

_log = logging.getLogger(__name__)

HANDSHAKES_MAX = 256
"""Connections at a time that have not finished theirs. Where there are more, of the address that has most the oldest is
closed. TLS takes up to 256 KiB for each."""

HANDSHAKE_S = 10.0
CLOSE_S = 10.0
"""How long a client may take to read the rest of its last answer, and to agree to the end."""

LOOK_S = 5.0
"""Between two looks whether the certificate has been replaced."""

BACKLOG = 2048
PAUSE_S = 0.1

_HANDSHAKE = b"\x16"
"""With what a client begins that speaks TLS: the type of the first record (RFC 8446, 5.1)."""


class TlsListener:
    """Make it on a running event loop, and `close` it.

    Args:
        listener: bound; it is closed with this.
        make: the protocol of a connection, which is told of it when the handshake has ended.
        refused: hears why a connection is refused for want of room.
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
        """Why it has ended without being closed; None while it listens."""
        return self._accepting.exception() if self._accepting.done() and not self._accepting.cancelled() else None

    def close(self) -> None:
        """Take no more connections. Those that were handed over go on."""
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
                sock, (address, *_) = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors, for one: all there is to do is wait.
                self._refused(f"a connection could not be taken ({error.strerror or error})")
                await asyncio.sleep(PAUSE_S)
                continue
            if (gone := self._strangers.add(sock, address)) is not None:
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
            # What the loop owns by now is the loop's to close, when it sees the end.
            _hang_up(sock)
        finally:
            if owned:
                sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Whoever waits for it sees its end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _speaks_tls(sock: socket.socket) -> bool:
    """Whether it begins with a handshake. HTTP is told what is spoken here.

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
        body = json.dumps(error_body(400, "this port speaks HTTPS: use https://", code="invalid_request")).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        sock.send(STATUS_LINE[400] + head.encode() + body)
        # What is not read when it is closed would take the answer from the client.
        sock.recv(2**16)
    return first == _HANDSHAKE
