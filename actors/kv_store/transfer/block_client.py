"""Pulls KV blocks from another node into this node's store.

A pull that fails brings fewer blocks than wanted, but never wrong ones, and it always ends by its deadline. `PullLoop`
runs on the caller's thread: it receives and verifies while the writer's thread writes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....cluster.errors import EntryDamaged, InvalidRecord, LinkError, LinkGarbage, LinkRefused, QueueFull, SatchelError
from ...protocol.entries import (
    BLOCK_TOKENS,
    ID_BYTES,
    TAIL_TOKENS_MAX,
    EntryRecord,
    Location,
    adds_to,
    pack_tokens,
)
from ..disk.io import DiskIO
from ..disk.store import DiskStore
from . import messages
from .handshake import NONCE_BYTES, Initiator
from .link import Link
from .messages import CHAIN_MAX, TAILS_MAX, Described, FetchRequest, FindRequest
from .pull_loop import EntryGone, Offer, PullEnded, PullLimits, PullLoop, Stop, Wanted
from .pull_writer import Keeper, PullWriter

logger = logging.getLogger(__name__)

PULLS_MAX = 4
"""Pulls at a time of one node."""

Address = tuple[str, int]


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
        self._wake: Callable[[], None] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Ends the pull now. Idempotent. The pull still returns a `PullResult`."""
        with self._lock:
            self.cancelled = True
            if self._wake is not None:
                self._wake()

    def attach(self, wake: Callable[[], None] | None) -> None:
        """Sets the callback for a cancellation, and calls it at once if cancelled already. None removes it."""
        with self._lock:
            self._wake = wake
            if wake is not None and self.cancelled:
                wake()


@dataclass(eq=False)
class _Running:
    owner: str
    cancel: PullCancel


class BlockPuller:
    """Pulls blocks into one node's store. All methods are safe from any thread.

    Args:
        store: this node's; close it after this.
        cluster_key: at least 16 bytes, equal on all nodes.
        node: this node's name.
        session: of the store's writers, under which uncommitted files are kept.
        limits: of each pull.
        pulls_max: at the same time, including those whose last file is still being written.
        wall_clock: seconds since 1970, written into files.
        io: the disk.
        keeper: commits pulled segments and decides on their owners; None for the store itself.

    Raises:
        LinkError: the key is too short, or the name is invalid.
    """

    def __init__(
        self,
        store: DiskStore,
        cluster_key: bytes,
        node: str,
        session: str,
        *,
        limits: PullLimits | None = None,
        pulls_max: int = PULLS_MAX,
        wall_clock: Callable[[], float] = time.time,
        io: DiskIO | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        Initiator(cluster_key, node, node, bytes(NONCE_BYTES))
        self._store, self._session, self._keeper = store, session, keeper or store
        self._limits = limits or PullLimits()
        self._wall_clock, self._io = wall_clock, io or DiskIO()
        self._key, self._node, self._pulls_max = cluster_key, node, pulls_max
        self._changed = threading.Condition()
        self._running: set[_Running] = set()
        self._closed = False

    def pull(
        self,
        wanted: Wanted,
        source: str,
        addresses: Sequence[Address],
        *,
        deadline_s: float,
        owner: str = "",
        cancel: PullCancel | None = None,
    ) -> PullResult:
        """Fetches and commits the wanted entries that this node lacks. Blocks for at most `deadline_s` seconds.

        Args:
            wanted: what to fetch.
            source: the name of the node that has it.
            addresses: where its `BlockServer` listens, numeric, the fastest link first.
            deadline_s: when to stop; what has not arrived by then is left.
            owner: the agent whose tokens these are, "" for none.
            cancel: ends the pull from another thread.

        Raises:
            InvalidRecord: `wanted` is malformed.
            QueueFull: there are `pulls_max` pulls already, or this was closed.
            DiskError: this node's store fails.
        """
        begun = time.monotonic()
        wanted = _checked(wanted)
        limits = replace(self._limits, total_bytes_max=self._store.stats()["bytes_max"])
        Initiator(self._key, self._node, source, bytes(NONCE_BYTES))
        running = self._begin(owner, cancel or PullCancel())

        def left_s() -> float:
            if running.cancel.cancelled:
                raise PullEnded(Stop.CANCELLED, "cancelled")
            if (left := begun + deadline_s - time.monotonic()) <= 0:
                raise PullEnded(Stop.DEADLINE, "the deadline is over")
            return left

        writer = self._writer(running, wanted, limits, left_s)

        def initiator() -> Initiator:
            return Initiator(self._key, self._node, source, secrets.token_bytes(NONCE_BYTES))

        sock = _Socket(self._store, wanted, addresses, limits, left_s, initiator, writer)
        loop = PullLoop(wanted.chain, len(addresses), limits, sock, writer, wanted.wait_s, wanted.last)
        running.cancel.attach(sock.wake)
        try:
            stop, reason = _run(loop.run())
        finally:
            running.cancel.attach(None)
            sock.close()
            writer.close()
        installed, retracted = set(writer.installed), list(writer.retracted)
        here, blocks = loop.here(installed, retracted)
        if not running.cancel.cancelled:
            # Otherwise the owner may be being forgotten.
            self._touch(here, owner)
        nbytes = sum(loop.received[entry] for entry in installed)
        counts = len(installed), nbytes, time.monotonic() - begun, loop.connections
        return PullResult(stop, reason, blocks, here, *counts, retracted)

    def _begin(self, owner: str, cancel: PullCancel) -> _Running:
        with self._changed:
            if self._closed or len(self._running) >= self._pulls_max:
                raise QueueFull("too many blocks are being fetched already")
            running = _Running(owner, cancel)
            self._running.add(running)
            return running

    def _writer(self, running: _Running, wanted: Wanted, limits: PullLimits, left_s: Callable[[], float]) -> PullWriter:
        """Returns the pull's writer, which ends the pull when it has nothing more to write."""
        try:
            return PullWriter(
                self._store,
                self._session,
                wanted,
                running.owner,
                limits,
                left_s,
                wall_clock=self._wall_clock,
                ended=lambda: self._end(running),
                io=self._io,
                keeper=self._keeper,
            )
        except BaseException:
            self._end(running)
            raise

    def _touch(self, here: list[bytes], owner: str) -> None:
        """Marks the chain as used by its owner."""
        try:
            self._keeper.touch(here, owner)
        except SatchelError as error:
            logger.warning("pulled blocks could not be marked as used: %s", error.message)

    def pulling(self) -> int:
        """Returns the number of running pulls."""
        with self._changed:
            return len(self._running)

    def cancel_owner(self, owner: str, wait_s: float) -> bool:
        """Ends the pulls for `owner`. Once they have ended, nothing more is committed and the store can forget it.

        Returns:
            Whether they all ended within `wait_s`.
        """
        return self._cancel(lambda running: running.owner == owner, wait_s)

    def close(self, wait_s: float = 5.0) -> bool:
        """Ends all pulls and refuses new ones. Returns whether all ended, so that the store may be closed."""
        with self._changed:
            self._closed = True
        return self._cancel(lambda running: True, wait_s)

    def _cancel(self, chosen: Callable[[_Running], bool], wait_s: float) -> bool:
        with self._changed:
            mine = {running for running in self._running if chosen(running)}
        for running in mine:
            running.cancel.cancel()
        with self._changed:
            return self._changed.wait_for(lambda: not mine & self._running, wait_s)

    def _end(self, running: _Running) -> None:
        with self._changed:
            self._running.discard(running)
            self._changed.notify_all()


def _run(loop: Coroutine[Any, Any, tuple[Stop, str]]) -> tuple[Stop, str]:
    """Runs a coroutine whose waits are blocking calls."""
    try:
        loop.send(None)
    except StopIteration as returned:
        return returned.value
    raise AssertionError("a pull does not suspend")


class _Socket:
    """The `Source` of a pull: a connection to one of a node's addresses.

    Args:
        left_s: returns the seconds that are left, or raises `PullEnded`.
        initiator: creates the state of a handshake.
    """

    def __init__(
        self,
        store: DiskStore,
        wanted: Wanted,
        addresses: Sequence[Address],
        limits: PullLimits,
        left_s: Callable[[], float],
        initiator: Callable[[], Initiator],
        writer: PullWriter,
    ) -> None:
        self._store, self._wanted, self._addresses, self._limits = store, wanted, addresses, limits
        self._left_s, self._initiator, self._writer = left_s, initiator, writer
        self._woken = threading.Event()
        self._sock = socket.socket()
        self._chain = set(wanted.chain)
        self._touched: set[bytes] = set()
        self._known: dict[bytes, Described] = {}

    def wake(self) -> None:
        """Ends every wait. Safe from any thread."""
        self._woken.set()
        self._writer.wake()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def pause(self, seconds: float) -> None:
        self._woken.wait(min(seconds, self._left_s()))

    async def connect(self, address: int) -> None:
        left_s = self._left_s()
        self.close()
        try:
            host, port = self._addresses[address]
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            self._sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        except (OSError, OverflowError, ValueError) as error:
            raise LinkRefused(f"not an address: {error}") from None
        try:
            self._sock.settimeout(min(self._limits.connect_s, left_s))
            self._sock.connect(found[0][4])
            self._sock.settimeout(None)
        except (OSError, OverflowError) as error:
            raise LinkError(f"no connection: {error}") from None
        self._link = link = Link(self._sock, self._limits.stall_s)
        link.until = time.monotonic() + self._left_s()
        initiator = self._initiator()
        link.send(initiator.hello())
        link.send(initiator.answer(link.receive_handshake()))
        link.sealed_by(initiator.seals())

    def close(self) -> None:
        self._sock.close()

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        wanted = self._wanted
        tokens = pack_tokens(wanted.rest)
        request = FindRequest(wanted.model, wanted.chain, wanted.tail_parent, tokens, wanted.tails_max)
        self._link.send_message(messages.pack_request(request))
        blocks, tails = messages.read_found(self._heard("found"), wanted.chain)
        if not all(wanted.is_tail(tail.id, packed) for packed, tail in tails):
            raise LinkGarbage("a tail does not match the request")
        ends = [tail for _, tail in tails[: wanted.tails_max] if tail.id == wanted.last or not wanted.wait_s]
        self._known = {entry.id: entry for entry in (*blocks, *ends) if entry is not None}
        ids = [*wanted.chain, *(tail.id for tail in ends)]
        local = self._store.locate(wanted.model, ids)
        # Marked as used, so that commits of this pull do not evict them.
        here = {entry for entry, location in zip(ids, local, strict=True) if location} - self._touched
        self._store.touch([entry for entry in ids if entry in here])
        self._touched |= here
        offers = [_offer(*row) for row in zip(ids, [*blocks, *ends], local, strict=True)]
        return offers[: len(wanted.chain)], [offer for offer in offers[len(wanted.chain) :] if offer is not None]

    async def ask(self, ids: Sequence[bytes]) -> None:
        self._link.send_message(messages.pack_request(FetchRequest(self._wanted.model, tuple(ids))))

    async def receive(self, offer: Offer) -> EntryRecord:
        what, tail = self._known[offer.id], offer.id not in self._chain
        tokens, layout = messages.read_entry(self._heard("entry"))
        if layout.nbytes != what.nbytes:
            raise LinkGarbage("an entry has another size than was announced")
        writer, digesting = self._writer, layout.digest_of.begun()
        writer.begin(layout, len(tokens))

        def take(piece: memoryview) -> None:
            digesting.update(piece)
            writer.write(piece)

        self._link.receive_bytes(what.nbytes, take)
        self._heard("sent")
        if not (self._wanted.is_tail if tail else self._wanted.is_block)(what.id, tokens):
            raise EntryGone("it has other tokens")
        if digesting.digest() != what.digest:
            raise EntryDamaged("it does not match its digest")
        return writer.record(what, tail, tokens)

    def _heard(self, wanted: str) -> list[Any]:
        """Returns the fields of the next message, which must be of this kind. Raises `EntryGone`."""
        kind, fields = messages.unpack(self._link.receive_message())
        if kind == "gone" and wanted != "found":
            raise EntryGone(messages.read_reason(fields))
        if kind == "error":
            raise LinkError(f"the source reports: {messages.read_reason(fields)}")
        if kind != wanted:
            raise LinkGarbage(f"{kind!r:.40} answers no request")
        return fields


def _offer(entry: bytes, there: Described | None, here: Location | None) -> Offer | None:
    """What is here already is not fetched, but for a copy that serves where this one does not."""
    if here is not None and (there is None or not adds_to(there, here)):
        return Offer(entry, here.nbytes, held=True)
    return Offer(entry, there.nbytes) if there is not None else None


def _checked(wanted: Wanted) -> Wanted:
    """Returns `wanted` with `rest` cut to the longest possible tail. Raises `InvalidRecord` if it is malformed."""
    ids = (wanted.model, wanted.root, *wanted.chain)
    if not all(isinstance(value, bytes) and len(value) == ID_BYTES for value in ids):
        raise InvalidRecord(f"ids have {ID_BYTES} bytes")
    if len(wanted.chain) > CHAIN_MAX or len(set(wanted.chain)) != len(wanted.chain):
        raise InvalidRecord(f"a chain is up to {CHAIN_MAX} blocks, each once")
    if wanted.tokens is not None and len(wanted.tokens) < len(wanted.chain) * BLOCK_TOKENS:
        raise InvalidRecord("the tokens end before the chain")
    if not 0 <= wanted.tails_max <= TAILS_MAX:
        raise InvalidRecord(f"a pull has up to {TAILS_MAX} tails")
    # No tail is longer.
    rest = wanted.rest[:TAIL_TOKENS_MAX]
    pack_tokens(rest)
    return replace(wanted, rest=rest)
