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
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import (
    ID_BYTES,
    TAIL_TOKENS_MAX,
    EntryRecord,
    Location,
    adds_to,
    owner_tag,
    pack_tokens,
    tail_id,
)
from ..disk.store import DiskStore
from . import wire
from .handshake import NONCE_BYTES, Initiator, checked_key
from .link import Link
from .pull_loop import EntryGone, Offer, PullEnded, PullLimits, PullLoop, Stop, Wanted
from .pull_writer import Keeper, PullWriter
from .wire import CHAIN_MAX, TAILS_MAX, FetchRequest, FindRequest, Offered

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


class BlockPuller:
    """Pulls blocks into one node's store. All methods are safe from any thread.

    Args:
        store: this node's; close it after this.
        cluster_key: at least 16 bytes, equal on all nodes.
        keeper: commits pulled segments and decides on their owners.
        limits: of each pull.
        pulls_max: at the same time, including those whose last file is still being written.

    Raises:
        LinkError: the key is too short.
    """

    def __init__(
        self,
        store: DiskStore,
        cluster_key: bytes,
        keeper: Keeper,
        *,
        limits: PullLimits | None = None,
        pulls_max: int = PULLS_MAX,
    ) -> None:
        self._store, self._keeper = store, keeper
        self._limits = limits or PullLimits()
        self._key, self._pulls_max = checked_key(cluster_key), pulls_max
        self._changed = threading.Condition()
        self._running: set[_Pull] = set()
        self._closed = False

    def pull(
        self, wanted: Wanted, source: str, addresses: Sequence[Address], *, deadline_s: float, owner: str = ""
    ) -> PullResult:
        """Fetches and commits the wanted entries that this node lacks. Blocks for at most `deadline_s` seconds.

        Args:
            wanted: what to fetch.
            source: the name of the node that has it.
            addresses: where its `BlockServer` listens, numeric, the fastest link first.
            deadline_s: when to stop; what has not arrived by then is left.
            owner: the agent whose tokens these are, "" for none.

        Raises:
            InvalidRecord: `wanted` is malformed.
            QueueFull: there are `pulls_max` pulls already, or this was closed.
            DiskError: this node's store fails.
        """
        begun = time.monotonic()
        wanted = _checked(wanted)
        limits = replace(self._limits, total_bytes_max=self._store.stats()["bytes_max"])
        with self._changed:
            if self._closed or len(self._running) >= self._pulls_max:
                raise QueueFull("too many blocks are being fetched already")
            there, until = (self._key, source, addresses), begun + deadline_s
            pull = _Pull(self._store, self._keeper, wanted, owner, there, limits, until)
            self._running.add(pull)
        writer = pull.writer
        loop = PullLoop(wanted.chain, len(addresses), limits, pull, writer, wanted.wait_s, wanted.last)
        try:
            stop, reason = _run(loop.run())
        finally:
            pull.close()
            writer.close(lambda: self._end(pull))
        installed, retracted = set(writer.installed), list(writer.retracted)
        here, blocks = loop.here(installed, retracted)
        if not pull.cancelled.is_set():
            # Otherwise the owner may be being forgotten.
            self._touch(here, owner)
        nbytes = sum(loop.received[entry] for entry in installed)
        counts = len(installed), nbytes, time.monotonic() - begun, loop.connections
        return PullResult(stop, reason, blocks, here, *counts, retracted)

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
        return self._cancel(lambda pull: pull.owner == owner, wait_s)

    def close(self, wait_s: float = 5.0) -> bool:
        """Ends all pulls and refuses new ones. Returns whether all ended, so that the store may be closed."""
        with self._changed:
            self._closed = True
        return self._cancel(lambda pull: True, wait_s)

    def _cancel(self, chosen: Callable[[_Pull], bool], wait_s: float) -> bool:
        with self._changed:
            mine = {pull for pull in self._running if chosen(pull)}
        for pull in mine:
            pull.cancel()
        with self._changed:
            return self._changed.wait_for(lambda: not mine & self._running, wait_s)

    def _end(self, pull: _Pull) -> None:
        with self._changed:
            self._running.discard(pull)
            self._changed.notify_all()


def _run(loop: Coroutine[Any, Any, tuple[Stop, str]]) -> tuple[Stop, str]:
    """Runs a coroutine whose waits are blocking calls."""
    try:
        loop.send(None)
    except StopIteration as returned:
        return returned.value
    raise AssertionError("a pull does not suspend")


class _Pull:
    """A running pull, and its `Source`: a connection to one of a node's addresses.

    Args:
        there: the cluster's key, the source's name and its addresses.
        until: monotonic seconds of its deadline.

    Attributes:
        writer: takes what comes.
    """

    def __init__(
        self,
        store: DiskStore,
        keeper: Keeper,
        wanted: Wanted,
        owner: str,
        there: tuple[bytes, str, Sequence[Address]],
        limits: PullLimits,
        until: float,
    ) -> None:
        self.owner, self.cancelled = owner, threading.Event()
        self.writer = PullWriter(store, keeper, wanted, limits.install_entries_max, self.left_s)
        self._key, self._source, self._addresses = there
        self._store, self._wanted, self._limits, self._until = store, wanted, limits, until
        self._sock = socket.socket()
        self._touched: set[bytes] = set()

    def left_s(self) -> float:
        """Returns the seconds that are left. Raises `PullEnded` if there are none."""
        if self.cancelled.is_set():
            raise PullEnded(Stop.CANCELLED, "cancelled")
        if (left := self._until - time.monotonic()) <= 0:
            raise PullEnded(Stop.DEADLINE, "the deadline is over")
        return left

    def cancel(self) -> None:
        """Ends the pull and every wait of it now. Idempotent; safe from any thread."""
        self.cancelled.set()
        self.writer.wake()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def pause(self, seconds: float) -> None:
        self.cancelled.wait(min(seconds, self.left_s()))

    async def connect(self, address: int) -> None:
        left_s = self.left_s()
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
        except (OSError, OverflowError) as error:
            raise LinkError(f"no connection: {error}") from None
        self._link = link = Link(self._sock, self._limits.stall_s)
        link.until = time.monotonic() + self.left_s()
        initiator = Initiator(self._key, self._source, secrets.token_bytes(NONCE_BYTES))
        link.send(initiator.hello())
        proof, seals = initiator.answer(link.receive_handshake())
        link.send(proof)
        link.sealed_by(seals)

    def close(self) -> None:
        self._sock.close()

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        wanted, rest = self._wanted, pack_tokens(self._wanted.rest)
        request = FindRequest(wanted.model, wanted.chain, wanted.tail_parent, rest, wanted.tails_max)
        self._link.send_message(wire.pack_request(request))
        blocks, tails = wire.read_found(self._heard("found"), request)
        named = [(tail_id(wanted.tail_parent, wanted.rest[:count]), tail) for count, tail in tails]
        ends = [(entry, tail) for entry, tail in named if entry == wanted.last or not wanted.wait_s]
        ids = [*wanted.chain, *(entry for entry, _ in ends)]
        local = self._store.locate(wanted.model, ids)
        # Marked as used, so that commits of this pull do not evict them.
        here = {entry for entry, location in zip(ids, local, strict=True) if location} - self._touched
        self._store.touch([entry for entry in ids if entry in here])
        self._touched |= here
        offers = [_offer(*row) for row in zip(ids, [*blocks, *(tail for _, tail in ends)], local, strict=True)]
        return offers[: len(wanted.chain)], [offer for offer in offers[len(wanted.chain) :] if offer is not None]

    async def ask(self, ids: Sequence[bytes]) -> None:
        self._link.send_message(wire.pack_request(FetchRequest(self._wanted.model, tuple(ids))))

    async def receive(self, offer: Offer) -> EntryRecord:
        record, layout = wire.read_entry(self._heard("entry"))
        if (record.id, record.nbytes) != (offer.id, offer.nbytes):
            raise LinkGarbage("an entry has another id or size than was announced")
        if not self._wanted.has(record):
            raise EntryDamaged("it has other tokens")
        writer, digesting = self.writer, layout.digest_of.begun()
        writer.begin(layout)

        def take(piece: memoryview) -> None:
            digesting.update(piece)
            writer.write(piece)

        self._link.receive_bytes(record.nbytes, take)
        if digesting.digest() != record.digest:
            raise EntryDamaged("it does not match its digest")
        return replace(record, owners=(owner_tag(self._store.key, self.owner),))

    def _heard(self, wanted: str) -> list[Any]:
        """Returns the fields of the next message, which must be of this kind. Raises `EntryGone`."""
        kind, fields = wire.unpack(self._link.receive_message())
        if kind == "gone" and wanted == "entry":
            raise EntryGone(wire.read_reason(fields))
        if kind == "error":
            raise LinkError(f"the source reports: {wire.read_reason(fields)}")
        if kind != wanted:
            raise LinkGarbage(f"{kind!r:.40} answers no request")
        return fields


def _offer(entry: bytes, there: Offered | None, here: Location | None) -> Offer | None:
    """Returns what to fetch of an entry. An entry that is here is only fetched if the source's copy adds to it."""
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
