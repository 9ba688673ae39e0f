"""The join server of a cluster, on its head: admits machines that have an invitation or were admitted before.

TLS 1.3 with the head's certificate, one line of JSON each way. A machine checks the fingerprint of the head's key
before it sends anything. It sends its invitation's secret, unless it shows a certificate of this cluster, and requests
a certificate. The answer has Ray's address and secret, the machine's certificate, and the authority's.

A machine in the cluster asks for news every few seconds: whether it is still a member, where the cluster's Ray is, and
the takeover state (`takeover_state.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.nodes import Node, host_port
from ..errors import ClusterError, PortInUse
from ..home import Home, read_json, write_private_json
from .certificates import Authority, fingerprint, keep, request, requested_fingerprint
from .invitations import find_invitation, use_up
from .members import Member, admit, members
from .strangers import Strangers, host_of
from .takeover_state import TakeoverState, digest

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 16_384
CALLERS_MAX = 16
TALK_S = 10.0
"""Time limit of one exchange, from the first byte to the last."""

_PAUSE_S = 0.05
_CLOSE_S = 5.0


class JoinServer:
    """The join server. Listens at one address, for the cluster whose head has the home `home`. Call `open` once;
    `close` may be called repeatedly.

    Args:
        home: has the cluster's secret.
        node: this machine; the server listens at its address.
        port: 0 takes a free one.
        versions: the versions that all machines must have.

    Attributes:
        address: `HOST:PORT`.
        takeover_state: reads the takeover state; None sends none.

    Raises:
        PortInUse: the port cannot be listened on.
        ClusterError: the home's keys and certificates cannot be read or written.
    """

    def __init__(self, home: Home, node: Node, port: int, versions: str, *, talk_s: float = TALK_S) -> None:
        self._home, self._versions, self._talk_s = home, versions, talk_s
        self._authority = Authority(home)
        keep(home, self._authority.sign(request(home), node), self._authority.certificate)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.verify_mode = ssl.CERT_OPTIONAL
        self._context.load_verify_locations(home.authority_file)
        if home.former_authorities_file.exists():
            # Accepts machines of the former head's cluster, too.
            self._context.load_verify_locations(home.former_authorities_file)
        self._context.load_cert_chain(home.certificate_file, home.key_file)
        self._listener = _listener(node.address, port)
        host, found = self._listener.getsockname()[:2]
        self.address = host_port(host, found)
        self.takeover_state: Callable[[], TakeoverState] | None = None
        self._ray = ""
        self._strangers: Strangers[socket.socket] = Strangers(CALLERS_MAX)
        self._callers: dict[socket.socket, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="join-server", daemon=True)
        self._closed = False

    def open(self, ray_address: str) -> None:
        """Begins to admit machines to the cluster whose Ray is at that address."""
        self._ray = ray_address
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._accept_forever(), self._loop)

    def callers(self) -> int:
        """Returns the number of open connections."""
        return len(self._callers)

    def close(self) -> None:
        """Ends all connections and stops listening."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._listener.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept_forever(self) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                # For example too many open files: only waiting helps.
                logger.warning("nobody can be let in: %s", error.strerror or error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if (gone := self._strangers.add(sock, host_of(address))) is not None:
                self._callers[gone].cancel()
            task = self._callers[sock] = asyncio.create_task(self._receive(sock))
            # A callback, as a task that is cancelled before it starts runs no `finally`.
            task.add_done_callback(lambda _, sock=sock: self._forget(sock))
            await asyncio.sleep(0)

    async def _receive(self, sock: socket.socket) -> None:
        transport = None
        try:
            async with asyncio.timeout(self._talk_s):
                reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._context)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                received = await reader.readuntil(b"\n")
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                answer = await asyncio.to_thread(self._answer_in_words, received, shown or b"")
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.info("somebody at the join server has not come in: %s", error)
        finally:
            if transport is not None:
                transport.abort()

    def _forget(self, sock: socket.socket) -> None:
        self._strangers.remove(sock)
        del self._callers[sock]
        sock.close()

    def _answer_in_words(self, received: bytes, shown: bytes) -> dict[str, Any]:
        try:
            return self._answer(received, shown)
        except ClusterError as error:
            logger.warning("nobody can be let in: %s", error.message)
            return {"error": "its head cannot tell who belongs to the cluster; its log says why"}

    def _answer(self, received: bytes, shown: bytes) -> dict[str, Any]:
        """Returns the answer to a request. `shown` is the certificate (DER) that the other machine shows, of this
        cluster or of the former head's; empty if it shows none."""
        try:
            asked = json.loads(received)
            if shown and asked.get("news"):
                return self._refusal(shown, str(asked["versions"])) or self._news(str(asked["have"]))
            node = Node(name=asked["name"], address=asked["address"])
            secret, versions = str(asked["secret"]), str(asked["versions"])
            wanted = str(asked["request"])
            certificate, key = self._authority.sign(wanted, node), requested_fingerprint(wanted)
            invitation = find_invitation(self._home, secret)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {"error": "the cluster does not understand this machine; install the same version of Satchel"}
        if invitation is None and not shown:
            return {"error": "the invitation is not good, or not any more; `satchel invite` on the head makes another"}
        refusal = self._refusal(shown if invitation is None else b"", versions)
        if refusal is None and invitation is None and key != fingerprint(shown):
            refusal = _UNKNOWN
        if refusal is not None:
            return refusal
        return self._admit(Member(node.name, node.address, key), certificate, invitation)

    def _refusal(self, shown: bytes, versions: str) -> dict[str, Any] | None:
        """Returns why a machine is refused, None if it is not. `shown` is empty for a machine with an invitation."""
        # Also for a machine with an invitation, which is not used up if the members cannot be read.
        known = members(self._home)
        if shown:
            key = fingerprint(shown)
            if key in known.removed:
                return _REMOVED
            # Somebody with the lost head's disk could sign other machines with its authority.
            if key not in known.admitted and not self._authority.has_signed(shown):
                return _UNKNOWN
        if versions != self._versions:
            return {"error": f"the cluster runs {self._versions}, this machine {versions}; install the same"}
        return None

    def _admit(self, member: Member, certificate: str, invitation: Path | None) -> dict[str, Any]:
        if invitation is not None and not use_up(invitation):
            return {"error": "the invitation has been used; `satchel invite` on the head makes another"}
        try:
            admit(self._home, member)
        except ClusterError as error:
            return {"error": f"its head cannot store that: {error.message}"}
        return {
            "ray": self._ray,
            "token": self._home.token_file.read_text(encoding="ascii"),
            "certificate": certificate,
            "authority": self._authority.certificate,
        }

    def _news(self, have: str) -> dict[str, Any]:
        text = "" if self.takeover_state is None else self.takeover_state().to_text()
        return {"ray": self._ray, "estate": text if text and digest(text) != have else ""}


def known_join_server(home: Home, node: Node, port: int, versions: str) -> JoinServer:
    """Returns a join server at `port`. If `port` is 0, takes the port of the last start if it is free, because machines
    know it. The port is stored for the next start.

    Raises:
        PortInUse: `port` is not 0 and is taken.
        ClusterError: as `JoinServer`.
    """
    known = (read_json(home.join_server_file) or {}).get("port", 0)
    try:
        join_server = JoinServer(home, node, port or (known if isinstance(known, int) else 0), versions)
    except (PortInUse, OverflowError):
        if port:
            raise
        logger.warning("port %s, where machines joined, is taken: they have to be told another one", known)
        join_server = JoinServer(home, node, 0, versions)
    write_private_json(home.join_server_file, {"port": int(join_server.address.rpartition(":")[2])})
    return join_server


_UNKNOWN = {"error": "it does not know this machine; `satchel invite` on the head lets it in"}

_REMOVED = {
    "error": "it was removed from the cluster; `satchel invite` on the head lets it in again",
    "removed": True,
}


def _listener(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise PortInUse(f"machines cannot join at {address}:{port}: {error.strerror or error}") from None
    return sock
