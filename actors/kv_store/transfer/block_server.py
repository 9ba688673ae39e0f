"""Serves a node's KV blocks from its disk to authenticated nodes.

One thread accepts, and each connection has its own thread. A connection holds a lease on the files that it offers,
renews it while it sends, and releases it at its end. Every fetch looks the entries up again, so entries that were
forgotten or evicted since are not sent, even if other readers still keep their files.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....cluster.config.timing import USUAL
from ....cluster.errors import CorruptSegment, DiskError, LinkError, LinkVersion, PortInUse, SatchelError
from ....cluster.trust.strangers import Strangers, host_of
from ...protocol.entries import TOKEN_BYTES, Location, unpack_tokens
from ..disk.segment_reader import CHANGED, EntryReader, opened
from ..disk.store import DiskStore
from . import wire
from .handshake import NONCE_BYTES, Acceptor, checked_key, refusal
from .link import Link, SharedRate
from .priority import give_way
from .wire import FetchRequest, FindRequest, Offered

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_TAILS_READ_MAX = 256
"""Tails of one parent that are compared with a request."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server. Times are limits, after which a connection is closed.

    Attributes:
        connections_max: connections of authenticated nodes; further ones are closed at once.
        strangers_max: connections that are not authenticated yet; a new one replaces an older one.
        handshake_s: for a whole handshake.
        request_s: until a whole request is here.
        answer_s: for a whole answer.
        stall_s: without the peer sending or accepting a byte.
        lease_s: of the files that a connection offers, at most the store's `lease_s_max`.
    """

    connections_max: int = 16
    strangers_max: int = 16
    handshake_s: float = 3.0
    request_s: float = 20.0
    answer_s: float = 600.0
    stall_s: float = 10.0
    lease_s: float = USUAL.block_lease_s


class BlockServer:
    """Serves the entries of `store` to holders of the cluster's key, until `close`.

    Args:
        store: must stay open until `close`.
        cluster_key: at least 16 bytes, equal on all nodes.
        node: this node's name, which a peer must ask for.
        listen: numeric addresses and ports; port 0 takes a free one.
        bytes_per_s: of all connections together; None is no limit.

    Attributes:
        addresses: the listening addresses with the real ports, in the order of `listen`.

    Raises:
        PortInUse: it cannot listen at an address.
        LinkError: the key is too short.
    """

    def __init__(
        self,
        store: DiskStore,
        cluster_key: bytes,
        node: str,
        listen: Sequence[Address],
        *,
        limits: ServerLimits | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self._store, self._key, self._node = store, checked_key(cluster_key), node
        self._rate = SharedRate(bytes_per_s)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: Strangers[socket.socket] = Strangers(self.limits.strangers_max)
        self._nodes: set[socket.socket] = set()
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._listeners: list[socket.socket] = []
        try:
            for address in listen:
                self._listeners.append(_listener(address))
        except BaseException:
            self._close_listeners()
            raise
        self.addresses: list[Address] = [listener.getsockname()[:2] for listener in self._listeners]
        self._acceptor = threading.Thread(target=self._accept_forever, name="blocks", daemon=True)
        self._acceptor.start()

    def connected(self) -> int:
        """Returns the number of connections."""
        with self._lock:
            return len(self._connections)

    def close(self, wait_s: float = 5.0) -> bool:
        """Closes all connections and ends all threads. Idempotent.

        Returns:
            Whether all threads ended within `wait_s`, so that the store may be closed.
        """
        ends = time.monotonic() + wait_s
        with self._lock:
            self._closing = True
            threads = [*self._connections.values(), self._acceptor]
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._rate.close()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # The accepting thread.

    def _accept_forever(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for listener in (*self._listeners, self._woken):
                    selector.register(listener, selectors.EVENT_READ)
                while not self._closing:
                    for key, _ in selector.select():
                        if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                            self._accept(key.fileobj)
        finally:
            self._close_listeners()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            # The peer has closed the connection already.
            return
        except OSError as error:
            # For example too many open files: only waiting helps.
            logger.warning("accepting a connection for blocks: %s", error.strerror or error)
            time.sleep(0.05)
            return
        with self._lock:
            # Replaced connections take a moment to end, so twice the limit.
            crowded = len(self._connections) - len(self._nodes) >= 2 * self.limits.strangers_max
            if crowded or self._closing:
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(sock,), name="blocks-out", daemon=True)
            self._connections[sock] = thread
            if (gone := self._strangers.add(sock, host_of(address))) is not None:
                with contextlib.suppress(OSError):
                    gone.shutdown(socket.SHUT_RDWR)
            # Under the lock, so that `close` never joins a thread that was not started.
            thread.start()

    def _close_listeners(self) -> None:
        for sock in (*self._listeners, self._wake, self._woken):
            sock.close()

    # A connection's thread.

    def _serve(self, sock: socket.socket) -> None:
        give_way()
        link = Link(sock, self.limits.stall_s, self._rate)
        conversation = _Conversation(self._store, link, self.limits)
        try:
            self._shake_hands(link)
            self._know(sock)
            while True:
                conversation.answer()
        except (SatchelError, OSError) as error:
            # The puller sees the connection's end and retries or recomputes.
            logger.info("a connection for blocks ends: %s", error)
        except Exception:
            logger.exception("a connection for blocks ends")
        finally:
            conversation.end()
            with self._lock:
                self._connections.pop(sock, None)
                self._strangers.remove(sock)
                self._nodes.discard(sock)
            sock.close()

    def _know(self, sock: socket.socket) -> None:
        """Counts the connection as an authenticated node's. Raises `LinkError` if there are too many."""
        with self._lock:
            self._strangers.remove(sock)
            if len(self._nodes) >= self.limits.connections_max:
                raise LinkError("nodes have too many connections")
            self._nodes.add(sock)

    def _shake_hands(self, link: Link) -> None:
        link.until = time.monotonic() + self.limits.handshake_s
        acceptor = Acceptor(self._key, self._node, secrets.token_bytes(NONCE_BYTES))
        try:
            hello = link.receive_handshake()
        except LinkVersion:
            link.send(refusal())
            raise
        link.send(acceptor.challenge(hello))
        link.sealed_by(acceptor.finish(link.receive_handshake()))


class _Conversation:
    """Answers what a node asks over one connection."""

    def __init__(self, store: DiskStore, link: Link, limits: ServerLimits) -> None:
        self._store, self._link, self._limits = store, link, limits
        # The lease on all offered files. The store ends it if it is not renewed.
        self._lease = ""

    def answer(self) -> None:
        """Answers one request. An error ends the connection."""
        link = self._link
        link.until = time.monotonic() + self._limits.request_s
        payload = link.receive_message()
        link.until = time.monotonic() + self._limits.answer_s
        try:
            request = wire.read_request(payload)
            if isinstance(request, FindRequest):
                self._find(request)
            else:
                self._fetch(request)
        except LinkError:
            raise
        except SatchelError as error:
            link.send_message(wire.pack("error", error.message))
            raise

    def end(self) -> None:
        # A closed or failed store has no leases.
        with contextlib.suppress(DiskError):
            self._store.unpin(self._lease)

    def _pin(self, locations: Iterable[Location]) -> None:
        self._lease = self._store.pin(locations, self._limits.lease_s, self._lease)

    def _find(self, request: FindRequest) -> None:
        locations = self._store.locate(request.model, request.chain)
        tails: list[Location] = []
        if request.tails_max and request.tail_tokens:
            tokens = unpack_tokens(request.tail_tokens)
            matches = self._store.tails(request.model, request.tail_parent, tokens, _TAILS_READ_MAX)
            # Only tails whose tokens the peer has all named: the end of a longer one may be another agent's.
            whole = [match.location for match in matches if 4 * match.tokens == len(match.location.tokens)]
            tails = whole[: request.tails_max]
        self._pin(location for location in (*locations, *tails) if location is not None)
        blocks = [None if location is None else Offered.of(location) for location in locations]
        ends = [(len(tail.tokens) // TOKEN_BYTES, Offered.of(tail)) for tail in tails]
        self._link.send_message(wire.pack_found(blocks, ends))

    def _fetch(self, request: FetchRequest) -> None:
        """Sends entry after entry. Locations may differ from those found, as files are rewritten."""
        located = self._store.locate(request.model, request.ids)
        present = [location for location in located if location is not None]
        reader = EntryReader(self._store.root, self._store.key, present)
        places = iter(range(len(present)))
        self._pin(present)
        for location in located:
            if location is None:
                self._link.send_message(wire.pack("gone", "the source no longer has it"))
            else:
                # While entries are sent, the lease must not end.
                self._pin([location])
                self._send(reader, next(places), location)

    def _send(self, reader: EntryReader, index: int, location: Location) -> None:
        """Sends an entry piece by piece. If its file fails, the store knows before the peer is told."""
        footer, begun = reader.footer(index), False
        if footer is not None:
            layout, offset = footer.layout, footer.offset(location.slot)
            digesting = layout.digest_of.begun()

            def fill(piece: memoryview, start: int) -> None:
                read(piece, offset + start)
                digesting.update(piece)
                if start + len(piece) == layout.nbytes and digesting.digest() != location.digest:
                    raise CorruptSegment(CHANGED)

            with reader.noting(index), opened(reader.paths[index]) as read:
                self._link.send_message(wire.pack_entry(location, layout))
                begun = True
                self._link.send_bytes(layout.nbytes, fill)
        if (failure := reader.failures.get(index)) is not None:
            self._store.report([failure])
            if begun:
                # What was announced cannot be sent any more.
                raise LinkError(failure.reason)
            self._link.send_message(wire.pack("gone", failure.reason))


def _listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=64)
    except OSError as error:
        raise PortInUse(f"cannot listen at {address[0]}:{address[1]}: {error.strerror or error}") from None
    # A peer that leaves before it is accepted must not block the thread.
    sock.setblocking(False)
    return sock
