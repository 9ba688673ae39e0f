"""Runs one pull: the state machine `Pull` over a socket, on the caller's thread.

That thread receives and verifies while the writer's thread writes. It blocks only in one place, where it waits for the
socket, the writer, a cancellation and the clock at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ....cluster.errors import InvalidRecord, LinkError, LinkRefused, LinkVersion, SatchelError
from ...protocol.entries import Location, adds_to
from ..disk.store import DiskStore
from .machine import pull_terms as terms
from .machine.block_messages import Described
from .machine.link_auth import Initiator
from .machine.pull import Pull
from .machine.pull_items import ItemState
from .machine.pull_terms import Command, Event, Offer, PullLimits, Stop
from .machine.pull_wire import PullWire, Received, Wanted
from .pull_writer import Keeper, PullWriter

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_TURN_BYTES_MAX = 8 * 2**20
"""Bytes received before other events are handled."""

_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EINTR)


@dataclass(frozen=True)
class PullResult:
    """How a pull ended.

    Attributes:
        stop, reason: why it ended. Whatever it is, compute the blocks that are missing.
        blocks: how many of the chain's first blocks are on this node now.
        here: their ids, and those of the tails if all blocks are here.
        installed, nbytes: entries that this pull brought, and their bytes.
        seconds: how long it took.
        connections: how many were tried.
        retracted: ids that were evicted here to make room.
    """

    stop: Stop
    reason: str
    blocks: int
    here: list[bytes]
    installed: int
    nbytes: int
    seconds: float
    connections: int
    retracted: list[bytes]


class PullCancel:
    """Cancels a pull from any thread, even before it begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._wake: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Ends the pull now. Idempotent. The pull still returns a `PullResult`."""
        with self._lock:
            self._cancelled = True
            if self._wake is not None:
                self._wake()

    def attach(self, wake: Callable[[], None] | None) -> None:
        """Sets the callback for a cancellation, and calls it at once if cancelled already. None removes it."""
        with self._lock:
            self._wake = wake
            if wake is not None and self._cancelled:
                wake()


class _PullConnection:
    """A connection, perhaps not established yet."""

    def __init__(self, sock: socket.socket, wire: PullWire, number: int) -> None:
        self.sock, self.wire, self.number = sock, wire, number
        self.standing = False
        self.interest = selectors.EVENT_WRITE


class PullSession:
    """One pull: the state machine, its connection, its writer. For one call of `run`.

    Args:
        store: this node's.
        wanted: what to fetch.
        owner: of the pulled entries.
        addresses: of the source, the best first.
        limits: of the pull; `total_bytes_max` is replaced by the store's budget.
        cancel: cancels the pull.
        initiator: creates the state of a handshake.
        writer: creates the writer, given the callback for its events.
        keeper: adds the owner to entries that are here; None for the store itself.
    """

    def __init__(
        self,
        store: DiskStore,
        wanted: Wanted,
        owner: str,
        addresses: Sequence[Address],
        limits: PullLimits,
        cancel: PullCancel,
        initiator: Callable[[], Initiator],
        writer: Callable[[Callable[[Event], None]], PullWriter],
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper: Keeper = keeper or store
        self._store, self._wanted, self._owner = store, wanted, owner
        self._addresses, self._initiator, self._cancel = list(addresses), initiator, cancel
        self._limits = replace(limits, total_bytes_max=store.stats()["bytes_max"])
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._held: dict[bytes, Received] = {}
        self._line: _PullConnection | None = None
        self._done: terms.Done | None = None
        self._connections = 0
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._writer = writer(self._tell)

    def run(self, deadline_s: float) -> PullResult:
        """Runs the pull; see `BlockPuller.pull`. Raises `DiskError` if this node's store fails."""
        begun = time.monotonic()
        self._machine = Pull(self._limits, len(self._addresses), begun + deadline_s)
        try:
            self._cancel.attach(lambda: self._tell(terms.Cancel()))
            self._handle(terms.Want(self._wanted.chain))
            while self._done is None:
                self._turn()
            here, blocks = self._here()
            self._touch(here)
            done = self._done
            return PullResult(
                done.stop,
                done.reason,
                blocks,
                here,
                done.installed,
                done.nbytes,
                time.monotonic() - begun,
                self._connections,
                list(self._writer.retracted),
            )
        finally:
            self._close(begun + deadline_s)

    def _close(self, deadline: float) -> None:
        self._cancel.attach(None)
        self._hang_up()
        self._writer.abandon()
        self._writer.close()
        # The writer is idle, unless the pull ended before its last file was written.
        idle = self._done is not None and not self._machine.items.installing
        if self._writer.join(max(0.0, min(1.0, deadline - time.monotonic())) if idle else 0.0):
            self._wake.close()
        self._selector.close()
        self._woken.close()

    def _here(self) -> tuple[list[bytes], int]:
        """Returns the ids that are here now and how many are blocks: a late commit may have evicted earlier blocks."""
        here, blocks = self._machine.items.here(), self._machine.items.blocks_here()
        gone = set(self._writer.retracted)
        left = next((number for number, entry in enumerate(here[:blocks]) if entry in gone), blocks)
        return (here, blocks) if left == blocks else (here[:left], left)

    def _touch(self, here: list[bytes]) -> None:
        """Marks the chain as used by its owner, unless the pull was cancelled: the owner may be being forgotten."""
        if self._cancel.cancelled:
            return
        try:
            self._keeper.touch(here, self._owner)
        except SatchelError as error:
            logger.warning("pulled blocks could not be marked as used: %s", error.message)

    def _tell(self, event: Event) -> None:
        """Queues an event. Safe from any thread."""
        self._inbox.put(event)
        # A full socket means that the loop is awake, a closed one that it has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # The loop.

    def _turn(self) -> None:
        wait_s = self._machine.wakes_at() - time.monotonic()
        for key, mask in self._selector.select(max(0.0, wait_s)):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif self._line is not None and key.fileobj is self._line.sock:
                self._serve(self._line, mask)
        while self._done is None:
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._handle(event)
        if self._done is None and time.monotonic() >= self._machine.wakes_at():
            self._handle(terms.Tick())

    def _serve(self, line: _PullConnection, mask: int) -> None:
        with self._losing(line):
            if not line.standing:
                code = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise LinkError(f"no connection: {errno.errorcode.get(code, code)}")
                line.standing = True
            received = self._receive(line) if mask & selectors.EVENT_READ else 0
            if received:
                self._handle(terms.BytesArrived(line.number))
            self._take_events(line)
            self._flush(line)

    @contextmanager
    def _losing(self, line: _PullConnection) -> Iterator[None]:
        """Turns a connection's errors into a `Lost` event, after the events that it brought before."""
        try:
            yield
        except (LinkError, InvalidRecord, OSError) as error:
            self._take_events(line)
            reason = error.message if isinstance(error, SatchelError) else f"the connection broke: {error.strerror}"
            self._handle(terms.Lost(line.number, reason, isinstance(error, LinkRefused | LinkVersion)))

    def _receive(self, line: _PullConnection) -> int:
        total = 0
        wire, receive = line.wire, line.sock.recv_into
        while total < _TURN_BYTES_MAX and not wire.events:
            try:
                count = receive(wire.target)
            except BlockingIOError:
                break
            if not count:
                raise LinkError("the source closed the connection")
            total += count
            wire.filled(count)
        return total

    def _take_events(self, line: _PullConnection) -> None:
        while line.wire.events:
            event = line.wire.events.pop(0)
            if isinstance(event, terms.Chunk) and event.id in line.wire.received:
                self._held[event.id] = line.wire.received.pop(event.id)
                self._handle(event)
                number = self._machine.items.number_of(event.id)
                if number is None or self._machine.items[number].state not in (ItemState.HELD, ItemState.INSTALLING):
                    self._held.pop(event.id, None)
            else:
                self._handle(event)

    def _flush(self, line: _PullConnection) -> None:
        if line is not self._line or not line.standing:
            return
        outbox = line.wire.outbox
        while outbox:
            try:
                sent = line.sock.send(outbox[0])
            except BlockingIOError:
                break
            outbox[0] = outbox[0][sent:]
            if not len(outbox[0]):
                outbox.popleft()
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
        if interest != line.interest:
            line.interest = interest
            self._selector.modify(line.sock, interest)

    # Commands.

    def _handle(self, event: Event) -> None:
        if self._done is None:
            for command in self._machine.handle(event, time.monotonic()):
                self._obey(command)

    def _obey(self, command: Command) -> None:
        line = self._line
        if isinstance(command, terms.Connect):
            self._connect(command)
        elif isinstance(command, terms.CloseConnection):
            self._hang_up()
        elif isinstance(command, terms.Install):
            self._writer.install([self._held.pop(entry) for entry in command.ids])
        elif isinstance(command, terms.Discard):
            for entry in command.ids:
                self._held.pop(entry, None)
        elif isinstance(command, terms.Done):
            self._done = command
        elif line is not None:
            if isinstance(command, terms.Find):
                line.wire.find()
            elif isinstance(command, terms.Fetch):
                line.wire.fetch(command.ids)
            elif isinstance(command, terms.Renew):
                line.wire.renew()
            with self._losing(line):
                self._flush(line)

    def _connect(self, command: terms.Connect) -> None:
        self._connections += 1
        wire = PullWire(command.connection, self._initiator(), self._wanted, self._found(command.connection))
        try:
            host, port = self._addresses[command.address]
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        except (OSError, OverflowError, ValueError) as error:
            self._inbox.put(terms.Lost(command.connection, f"not an address: {error}", True))
            self._tell(terms.Tick())
            return
        self._line = _PullConnection(sock, wire, command.connection)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_WRITE)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(found[0][4])
        except (OSError, OverflowError) as error:
            code, reason = -1, str(error)
        else:
            reason = errno.errorcode.get(code, str(code))
        if code not in _IN_PROGRESS:
            self._tell(terms.Lost(command.connection, f"no connection: {reason}"))

    def _hang_up(self) -> None:
        if self._line is not None:
            self._selector.unregister(self._line.sock)
            self._line.sock.close()
            self._line = None

    def _found(self, number: int) -> Callable[[float, list[Described | None], list[Described]], Event]:
        def found(lease_s: float, blocks: list[Described | None], tails: list[Described]) -> Event:
            chain = self._wanted.chain
            ids = [*chain, *(tail.id for tail in tails)]
            local = self._store.locate(self._wanted.model, ids)
            if any(local):
                # Mark them as used, so that commits of this pull do not evict them.
                self._store.touch([entry for entry, location in zip(ids, local, strict=True) if location])
            offers = [_offer(*row) for row in zip(ids, [*blocks, *tails], local, strict=True)]
            ends = tuple(offer for offer in offers[len(chain) :] if offer is not None)
            return terms.Found(number, lease_s, tuple(offers[: len(chain)]), ends)

        return found


def _offer(entry: bytes, there: Described | None, here: Location | None) -> Offer | None:
    """What is here already is not fetched, but for a copy that serves where this one does not."""
    if here is not None and (there is None or not adds_to(there, here)):
        return Offer(entry, here.nbytes, held=True)
    return Offer(entry, there.nbytes) if there is not None else None
