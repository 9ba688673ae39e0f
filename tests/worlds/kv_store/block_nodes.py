"""Two nodes in one process: a store that gives, a store that fetches, and what lies between them on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from satchel.actors.kv_store.transfer.block_client import BlockPuller, PullResult
from satchel.actors.kv_store.transfer.block_server import BlockServer, ServerLimits
from satchel.actors.kv_store.transfer.link import Link
from satchel.actors.kv_store.transfer.pull_loop import PullLimits, Wanted
from satchel.actors.protocol.entries import Entry

from .kv_files import MODEL, ROOT, Bench, checked

CLUSTER_KEY = bytes(range(32))
Address = tuple[str, int]


@dataclass
class Nodes:
    """`source` and `target`, whose stores are compared with their files at the end. `sent` has the bytes of each entry
    that was sent."""

    source: Bench
    target: Bench
    limits: PullLimits = field(default_factory=lambda: PullLimits(backoff_s=0.05, stall_s=1.0))
    servers: list[BlockServer] = field(default_factory=list)
    pullers: list[BlockPuller] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def serve(self, *, key: bytes = CLUSTER_KEY, node: str = "mac0", port: int = 0, **more) -> BlockServer:
        server = BlockServer(self.source.store, key, node, [("127.0.0.1", port)], **more)
        self.servers.append(server)
        return server

    def puller(self, *, key: bytes = CLUSTER_KEY, **more) -> BlockPuller:
        puller = BlockPuller(
            self.target.store,
            key,
            self.target.store,
            limits=more.pop("limits", self.limits),
            **more,
        )
        self.pullers.append(puller)
        return puller

    def pull(
        self,
        wanted: Wanted,
        addresses: Sequence[Address] | None = None,
        *,
        puller: BlockPuller | None = None,
        deadline_s: float = 20.0,
        owner: str = "",
    ) -> PullResult:
        addresses = self.servers[-1].addresses if addresses is None else addresses
        puller = puller or self.puller()
        return puller.pull(wanted, "mac0", addresses, deadline_s=deadline_s, owner=owner)


@contextmanager
def nodes(path: Path) -> Iterator[Nodes]:
    """At the end no thread, connection, pull or lease is left, and both stores agree with their files."""
    with checked(path / "source") as source, checked(path / "target") as target:
        made, send_bytes = Nodes(source, target), Link.send_bytes

        def counted(self: Link, nbytes: int, read: Callable[[memoryview, int], None]) -> None:
            send_bytes(self, nbytes, read)
            made.sent.append(nbytes)

        try:
            with patch.object(Link, "send_bytes", counted):
                yield made
        finally:
            closed = [puller.close() for puller in made.pullers] + [server.close() for server in made.servers]
            left = [source.store.stats()["leases"], target.store.stats()["leases"]]
        assert all(closed), "something does not end"
        assert left == [0, 0], "leases drain"
        ends = time.monotonic() + 5
        while [thread for thread in threading.enumerate() if thread.name.startswith("blocks")]:
            assert time.monotonic() < ends, "a connection's thread does not end"
            time.sleep(0.01)


def wanted(entries: Sequence[Entry], **more) -> Wanted:
    return Wanted(MODEL, ROOT, tuple(entry.id for entry in entries), **more)


class Meddler:
    """A relay between the nodes that may do anything to what the source says.

    Args:
        target: where to go on to.
        meddle: gets the connection's number and what goes back; returns what shall arrive, None to break off.
    """

    def __init__(self, target: Address, meddle: Callable[[int, bytes], bytes | None]) -> None:
        self._target, self._meddle = target, meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()[:2]
        self.connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                number = self.connections
                threading.Thread(target=self._relay, args=(near, far, None), daemon=True).start()
                meddle = lambda data, number=number: self._meddle(number, data)  # noqa: E731
                threading.Thread(target=self._relay, args=(far, near, meddle), daemon=True).start()

    def _relay(self, into: socket.socket, out: socket.socket, meddle: Callable[[bytes], bytes | None] | None) -> None:
        with contextlib.suppress(OSError):
            while data := into.recv(65_536):
                changed = data if meddle is None else meddle(data)
                if changed is None:
                    break
                out.sendall(changed)
        for sock in (into, out):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


LIMITS = ServerLimits(handshake_s=0.3, stall_s=1.0)
