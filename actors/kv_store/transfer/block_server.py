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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....cluster.errors import DiskError, LinkError, LinkVersion, PortInUse, SatchelError
from ....cluster.timing import USUAL
from ....cluster.trust.strangers import Strangers
from ...protocol.entries import Failure, Location, flat_bytes, unpack_tokens
from ..disk.segment_reader import StoredEntry, read_entries
from ..disk.store import DiskStore
from .machine import block_messages as messages
from .machine.block_messages import RUNS_MAX, Coming, Described, FetchRequest, FindRequest, Run, Signature
from .machine.link_auth import NONCE_BYTES, PREAMBLE_BYTES, Acceptor, FrameSeal, body_length, refusal
from .paced_socket import PacedSocket, SharedRate

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_FRAME_DATA_BYTES = 2**20
"""Data bytes after which a frame of parts is sent."""

_TAILS_READ_MAX = 256
"""Tails of one parent that are compared with a request."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server. Times are limits, after which a connection is closed.

    Attributes:
        connections_max: connections of authenticated nodes; further ones are closed at once.
        strangers_max: connections that are not authenticated yet; a new one replaces an older one.
        handshake_s: for a whole handshake.
        idle_s: between requests.
        request_s: for the rest of a request that has begun.
        stall_s: without the peer accepting a byte.
        lease_s: of the files that a connection offers, at most the store's `lease_s_max`.
    """

    connections_max: int = 16
    strangers_max: int = 16
    handshake_s: float = 3.0
    idle_s: float = 20.0
    request_s: float = 5.0
    stall_s: float = 10.0
    lease_s: float = USUAL.block_lease_s


@dataclass
class ServerCounters:
    """Totals since the server began."""

    connections: int = 0
    refused: int = 0
    sent_entries: int = 0
    sent_bytes: int = 0
    failed_entries: int = 0


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
        counters: for the metrics.

    Raises:
        PortInUse: it cannot listen at an address.
        LinkError: the key is too short, or the name is invalid.
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
        Acceptor(cluster_key, node, bytes(NONCE_BYTES))
        self.limits = limits or ServerLimits()
        self.counters = ServerCounters()
        self._store, self._key, self._node = store, cluster_key, node
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

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connected(self) -> int:
        """Returns the number of connections."""
        with self._lock:
            return len(self._connections)

    def count(self, sent: int, failed: int) -> None:
        """Counts the sent and failed entries of a fetch."""
        with self._lock:
            self.counters.sent_entries += sent
            self.counters.failed_entries += failed

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
            sock, (address, *_) = listener.accept()
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
                self.counters.refused += 1
                sock.close()
                return
            self.counters.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock,), name="blocks-out", daemon=True)
            self._connections[sock] = thread
            if (gone := self._strangers.add(sock, address)) is not None:
                with contextlib.suppress(OSError):
                    gone.shutdown(socket.SHUT_RDWR)
            # Under the lock, so that `close` never joins a thread that was not started.
            thread.start()

    def _close_listeners(self) -> None:
        for sock in (*self._listeners, self._wake, self._woken):
            sock.close()

    # A connection's thread.

    def _serve(self, sock: socket.socket) -> None:
        link = PacedSocket(sock, self._rate, self.limits.stall_s)
        lease = _Lease(self._store, self.limits.lease_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seals = self._shake_hands(link)
            self._know(sock)
            _ServedConnection(self, self._store, link, lease, *seals).run()
        except (LinkError, SatchelError, OSError) as error:
            # The puller sees the connection's end and retries or recomputes.
            logger.info("a connection for blocks ends: %s", error)
        except Exception:
            logger.exception("a connection for blocks ends")
        finally:
            lease.give_back()
            with self._lock:
                self._connections.pop(sock, None)
                self._strangers.remove(sock)
                self._nodes.discard(sock)
                self.counters.sent_bytes += link.sent_bytes
            sock.close()

    def _know(self, sock: socket.socket) -> None:
        """Counts the connection as an authenticated node's. Raises `LinkError` if there are too many."""
        with self._lock:
            self._strangers.remove(sock)
            if len(self._nodes) >= self.limits.connections_max:
                self.counters.refused += 1
                raise LinkError("nodes have too many connections")
            self._nodes.add(sock)

    def _shake_hands(self, link: PacedSocket) -> tuple[FrameSeal, FrameSeal]:
        ends = time.monotonic() + self.limits.handshake_s
        acceptor = Acceptor(self._key, self._node, secrets.token_bytes(NONCE_BYTES))

        def body() -> bytes:
            length = body_length(link.receive(PREAMBLE_BYTES, ends - time.monotonic()))
            return link.receive(length, ends - time.monotonic())

        try:
            try:
                hello = body()
            except LinkVersion:
                link.send(refusal())
                raise
            link.send(acceptor.challenge(hello))
            acceptor.finish(body())
        except LinkError:
            with self._lock:
                self.counters.refused += 1
            raise
        return acceptor.frames()


class _Lease:
    """A connection's lease on the files that it offers. The store ends it if it is not renewed."""

    def __init__(self, store: DiskStore, lease_s: float) -> None:
        self._store = store
        self._locations: dict[str, Location] = {}
        self._lease: str | None = None
        self._taken_at = 0.0
        self.lease_s = lease_s

    def take(self, locations: Sequence[Location]) -> None:
        """Adds files, and renews the lease of all of them. Raises `DiskError`."""
        for location in locations:
            self._locations[location.name] = location
        old = self._lease
        self._taken_at = time.monotonic()
        self._lease = self._store.pin(self._locations.values(), self.lease_s).lease
        if old is not None:
            self._store.unpin(old)

    def keep(self) -> None:
        """Renews the lease if half of it is over. Raises `DiskError`."""
        if time.monotonic() - self._taken_at > self.lease_s / 2:
            self.take([])

    def give_back(self) -> None:
        if self._lease is not None:
            # A closed or failed store has no leases.
            with contextlib.suppress(DiskError):
                self._store.unpin(self._lease)
            self._lease = None


class _ServedConnection:
    """The requests and answers of one connection, after the handshake."""

    def __init__(
        self, server: BlockServer, store: DiskStore, link: PacedSocket, lease: _Lease, out: FrameSeal, into: FrameSeal
    ) -> None:
        self._server, self._store, self._link, self._lease = server, store, link, lease
        self._out, self._into = out, into

    def run(self) -> None:
        """Answers requests until an error ends the connection, and raises that error."""
        limits = self._server.limits
        while True:
            raw = self._link.receive_frame(self._into, messages.REQUEST_BYTES_MAX, limits.idle_s, limits.request_s)
            try:
                request = messages.read_request(raw)
                if isinstance(request, FindRequest):
                    self._find(request)
                elif isinstance(request, FetchRequest):
                    self._fetch(request)
                else:
                    self._lease.take([])
                    self._say(messages.pack("renewed", self._lease.lease_s))
            except LinkError:
                raise
            except SatchelError as error:
                self._say(messages.pack("error", error.message[:200]))
                raise

    def _say(self, payload: bytes, *data: memoryview) -> None:
        self._link.send_frame(self._out, payload, *data)

    def _find(self, request: FindRequest) -> None:
        locations = self._store.locate(request.model, request.chain)
        tails: list[Location] = []
        if request.tails_max and request.tail_tokens:
            tokens = unpack_tokens(request.tail_tokens)
            matches = self._store.tails(request.model, request.tail_parent, tokens, _TAILS_READ_MAX)
            # Only tails whose tokens the peer has all named: the end of a longer one may be another agent's.
            whole = [match.location for match in matches if 4 * match.tokens == len(match.location.tokens)]
            tails = whole[: request.tails_max]
        self._lease.take([location for location in (*locations, *tails) if location is not None])
        blocks = [None if location is None else Described.of(location) for location in locations]
        self._say(
            messages.pack_found(self._lease.lease_s, blocks, [(tail.tokens, Described.of(tail)) for tail in tails])
        )

    def _fetch(self, request: FetchRequest) -> None:
        located = self._store.locate(request.model, request.ids)
        # `rows` maps locations to rows of the fetch. Locations may differ from those found, as files are rewritten.
        rows = [row for row, location in enumerate(located) if location is not None]
        locations = [location for location in located if location is not None]
        self._lease.take(locations)
        read = read_entries(self._store.root, self._store.key, locations)
        self._say(_describe(read, located, rows))
        for reads in _frames(read):
            self._lease.keep()
            runs = [Run(name, [rows[index]]) for index, name, _ in reads]
            self._say(messages.pack_parts(runs), *(flat_bytes(array) for _, _, array in reads))
        failures = {index: stored for index, stored in enumerate(read) if isinstance(stored, Failure)}
        if failures:
            self._store.report(failures.values())
        self._say(messages.pack_end([(rows[index], failure.reason) for index, failure in failures.items()]))
        self._server.count(len(locations) - len(failures), len(failures))


_Part = tuple[int, str, np.ndarray]
"""The number of an entry, and a part's name and array."""


def _frames(read: Sequence[StoredEntry | Failure]) -> Iterator[list[_Part]]:
    """Groups parts into frames: a frame for each small part would cost more than its bytes."""
    frame: list[_Part] = []
    nbytes = 0
    entries = [(index, stored) for index, stored in enumerate(read) if isinstance(stored, StoredEntry)]
    for part in [(index, name, array) for index, stored in entries for name, array in stored.parts.items()]:
        frame.append(part)
        nbytes += part[2].nbytes
        if nbytes >= _FRAME_DATA_BYTES or len(frame) == RUNS_MAX:
            yield frame
            frame, nbytes = [], 0
    if frame:
        yield frame


def _describe(read: Sequence[StoredEntry | Failure], located: Sequence[Location | None], rows: Sequence[int]) -> bytes:
    """Returns the frame that announces the entries of a fetch."""
    signatures: list[Signature] = []
    coming = [Coming(-1, b"", "the source no longer has it") for _ in located]
    for index, row in enumerate(rows):
        location = located[row]
        assert location is not None
        stored = read[index]
        if isinstance(stored, Failure):
            coming[row] = Coming(-1, b"", stored.reason)
            continue
        signature = Signature(stored.signature, stored.meta)
        if signature not in signatures:
            signatures.append(signature)
        coming[row] = Coming(signatures.index(signature), location.tokens, "")
    return messages.pack_batch(signatures, coming)


def _listener(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, where = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PortInUse(f"cannot listen at {address[0]}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
        # A peer that leaves before it is accepted must not block the thread.
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise PortInUse(f"cannot listen at {address[0]}:{address[1]}: {error.strerror or error}") from None
    return sock
