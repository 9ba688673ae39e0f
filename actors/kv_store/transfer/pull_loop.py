"""One pull of a chain of blocks and its tails from another node: ask for a batch, verify, install, until done. Pure.

Entries are asked for, received and installed in the order of the chain, its tails last, and the first block that does
not come ends the pull. So the blocks here are always a beginning of the chain, however the pull ends: at its deadline,
cancelled, with a full disk or without a connection; the others are computed. A connection that breaks is replaced once.
A pull may wait for what the source is still making: it asks again and again, and commits what has come meanwhile.

The loop is a coroutine, and what it waits for is behind `Source` and `Disk`. `block_client` has sockets and
files there and never suspends; simulations have virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from ....cluster.errors import DiskError, EntryDamaged, InvalidRecord, LinkError, LinkRefused, LinkVersion
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import EntryRecord, pack_tokens, tail_id

LINES_MAX = 2
"""Connections that may break."""

ASK_AGAIN_S = 0.02
"""How long a waiting pull pauses before it asks the source again."""


class Stop(StrEnum):
    """Why a pull ended."""

    COMPLETE = "complete"
    """All wanted entries are here."""
    MISSING = "missing"
    """The source does not have the next block, or lost it."""
    DAMAGED = "damaged"
    """The next block arrived damaged, over the second connection too."""
    TOO_LARGE = "too_large"
    UNREACHABLE = "unreachable"
    """No address answered, or every connection broke."""
    REFUSED = "refused"
    """No address has an authentic peer of this cluster."""
    DISK = "disk"
    """This node could not write or commit it."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class PullLimits:
    """Limits of a pull.

    Attributes:
        connect_s: until a connection is established.
        stall_s: without a byte of an answer.
        backoff_s: before addresses are tried a second time.
        batch_entries: of one fetch request; two are outstanding, so that the source always has something to send.
        install_entries_max: of one segment; few enough that syncing keeps up with receiving.
        total_bytes_max: of all fetched entries.
    """

    connect_s: float = 3.0
    stall_s: float = 4.0
    backoff_s: float = 0.3
    batch_entries: int = 64
    install_entries_max: int = 8
    total_bytes_max: int = 2**62


@dataclass(frozen=True)
class Wanted:
    """A chain of blocks, and the tokens after it.

    Attributes:
        model: the model id, 32 bytes.
        root: the parent of the first block, `block_ids.root_id`.
        chain: the ids of the blocks, in order.
        tokens: the tokens of the chain if they are known; blocks with other tokens are then refused.
        rest: the tokens after the chain. Tails whose tokens are a prefix of these are pulled too.
        tails_max: how many tails at most.
        wait_s: if above 0, the source is computing the KV now. The pull ends after this long without new entries. The
            only tail that it takes is that of all of `rest`.
    """

    model: bytes
    root: bytes
    chain: tuple[bytes, ...]
    tokens: Sequence[int] | None = None
    rest: Sequence[int] = ()
    tails_max: int = 2
    wait_s: float = 0.0

    @property
    def last(self) -> bytes:
        """The tail that a pull waits for, b"" for none."""
        return tail_id(self.tail_parent, self.rest) if self.wait_s and len(self.rest) else b""

    @property
    def tail_parent(self) -> bytes:
        return self.chain[-1] if self.chain else self.root

    def has(self, entry: EntryRecord) -> bool:
        """Whether this is one of the wanted entries, with its tokens as far as they are known."""
        if entry.tail:
            # Its id follows from its parent and tokens.
            return entry.parent == self.tail_parent and pack_tokens(self.rest).startswith(entry.tokens)
        number = self.chain.index(entry.id)
        start = number * BLOCK_TOKENS
        known = entry.tokens if self.tokens is None else pack_tokens(self.tokens[start : start + BLOCK_TOKENS])
        return entry.parent == (self.root, *self.chain)[number] and entry.tokens == known


class Offer(NamedTuple):
    """An entry that the source has, or that is here already (`held`)."""

    id: bytes
    nbytes: int
    held: bool = False


class PullEnded(Exception):
    """The pull ends now: it was cancelled, or its deadline is over."""

    def __init__(self, stop: Stop, reason: str) -> None:
        super().__init__(reason)
        self.stop, self.reason = stop, reason


class EntryGone(Exception):
    """The source cannot send an entry."""


class Source(Protocol):
    """The node that has the entries, over one connection at a time. All methods raise `LinkError` if that breaks, and
    `PullEnded` if the pull must end."""

    async def connect(self, address: int) -> None:
        """Connects to a peer that proves the key."""
        ...

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        """Returns the chain's available entries, None for a block that neither side has; and the tails."""
        ...

    async def ask(self, ids: Sequence[bytes]) -> None:
        """Asks for entries."""
        ...

    async def receive(self, offer: Offer) -> Any:
        """Returns the next entry that was asked for, verified. Raises `EntryGone`, `EntryDamaged`, and `DiskError` if
        its bytes cannot be written."""
        ...

    async def pause(self, seconds: float) -> None: ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class Disk(Protocol):
    """Where entries go. All methods raise `DiskError`, and `PullEnded` if the pull must end."""

    async def install(self, entry: Any) -> None:
        """Takes a received entry for a later commit; waits while too much is uncommitted."""
        ...

    async def flush(self) -> None:
        """Begins to commit what was taken, without waiting for it."""
        ...

    async def finish(self) -> None:
        """Returns when everything is committed."""
        ...


@dataclass
class PullLoop:
    """One pull, for one call of `run`.

    Attributes:
        chain: ids of the wanted blocks, in order.
        addresses: how many addresses the source has, the best first.
        wait_s, last: as in `Wanted`.
        tails: ids of the tails that were found, in order.
        held: ids that were here before.
        received: ids of received entries, in order, and their bytes.
        connections: how many were tried.
    """

    chain: Sequence[bytes]
    addresses: int
    limits: PullLimits
    source: Source
    disk: Disk
    wait_s: float = 0.0
    last: bytes = b""
    tails: list[bytes] = field(default_factory=list)
    held: set[bytes] = field(default_factory=set)
    received: dict[bytes, int] = field(default_factory=dict)
    connections: int = 0
    _missing: tuple[Stop, str] | None = None

    async def run(self) -> tuple[Stop, str]:
        """Returns why it ended; what was received is installed, as far as there was time."""
        try:
            ended = await self._connect()
        except DiskError as error:
            ended = Stop.DISK, error.message
        except PullEnded as end:
            return end.stop, end.reason
        try:
            await self.disk.finish()
        except DiskError as error:
            ended = Stop.DISK, error.message
        except PullEnded as end:
            ended = end.stop, end.reason
        return ended

    async def _connect(self) -> tuple[Stop, str]:
        """Follows one connection after the other. Every address is tried twice at most, one with a stranger once."""
        ended = Stop.UNREACHABLE, "the source has no address"
        refused: set[int] = set()
        broken = 0
        for number in range(2 * self.addresses):
            address = number % self.addresses
            if len(refused) == self.addresses or broken == LINES_MAX:
                break
            if number == self.addresses:
                await self.source.pause(self.limits.backoff_s)
            if address in refused:
                continue
            self.connections += 1
            try:
                await self.source.connect(address)
            except LinkError as error:
                strange = isinstance(error, LinkRefused | LinkVersion)
                refused |= {address} if strange else set()
                ended = Stop.REFUSED if strange else Stop.UNREACHABLE, error.message
                continue
            try:
                await self._follow()
                return self._missing or (Stop.COMPLETE, "")
            except (LinkError, InvalidRecord) as error:
                broken += 1
                ended = Stop.DAMAGED if isinstance(error, EntryDamaged) else Stop.UNREACHABLE, error.message
            finally:
                self.source.close()
        return ended

    async def _follow(self) -> None:
        """Receives what is missing over one connection, and what the source makes meanwhile."""
        idle_s, came = 0.0, len(self.received)
        while True:
            await self._fetch(self._consider(*await self.source.find()))
            if self._missing is None or self._missing[0] is not Stop.MISSING:
                return
            if len(self.received) > came:
                idle_s, came = 0.0, len(self.received)
                await self.disk.flush()
            if idle_s >= self.wait_s:
                return
            await self.source.pause(ASK_AGAIN_S)
            idle_s += ASK_AGAIN_S

    async def _fetch(self, todo: deque[Offer]) -> None:
        """Receives what the source has now."""
        asked: deque[Offer] = deque()
        while True:
            while todo and len(asked) <= self.limits.batch_entries:
                batch = [todo.popleft() for _ in range(min(len(todo), self.limits.batch_entries))]
                await self.source.ask([offer.id for offer in batch])
                asked += batch
            if not asked:
                return
            offer = asked.popleft()
            try:
                entry = await self.source.receive(offer)
            except EntryGone as gone:
                self._miss(offer.id, str(gone))
                if offer.id not in self.tails:
                    return
                continue
            self.received[offer.id] = offer.nbytes
            await self.disk.install(entry)

    def _consider(self, blocks: Sequence[Offer | None], tails: Sequence[Offer]) -> deque[Offer]:
        """Returns what to ask for."""
        self._missing, self.held = None, set()
        came = [tail for tail in self.tails if tail in self.received]
        self.tails = list(dict.fromkeys([*came, *(tail.id for tail in tails)]))
        todo: deque[Offer] = deque()
        total = sum(self.received.values())
        for entry, offer in (*zip(self.chain, blocks, strict=True), *((tail.id, tail) for tail in tails)):
            if entry in self.received:
                continue
            if offer is not None and offer.held:
                self.held.add(entry)
                continue
            if offer is None:
                self._miss(entry, "the source does not have it")
            elif (total := total + offer.nbytes) <= self.limits.total_bytes_max:
                todo.append(offer)
                continue
            else:
                self._miss(entry, f"there is no room for its {offer.nbytes} bytes", Stop.TOO_LARGE)
            if entry not in self.tails:
                # Nothing behind a missing block can be used.
                break
        if self.last and self.last not in self.tails and self._missing is None:
            self._missing = Stop.MISSING, "the source does not have the tail"
        return todo

    def _miss(self, entry: bytes, reason: str, stop: Stop = Stop.MISSING) -> None:
        number = [*self.chain, *self.tails].index(entry)
        self._missing = self._missing or (stop, f"entry {number}: {reason}")

    def here(self, installed: Collection[bytes], retracted: Collection[bytes]) -> tuple[list[bytes], int]:
        """Returns the ids of the chain's first blocks that are here, then of the tails if all blocks are; and how many
        are blocks. `installed` were committed, and the commits evicted `retracted`."""
        here = self.held.union(installed).difference(retracted)
        count = next((number for number, entry in enumerate(self.chain) if entry not in here), len(self.chain))
        tails = [tail for tail in self.tails if tail in here] if count == len(self.chain) else []
        return [*self.chain[:count], *tails], count
