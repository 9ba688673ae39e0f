"""Pulls between simulated nodes: the real `PullLoop` over links and disks that fail, in virtual time.

Simple stand-ins replace `BlockPuller`, `PullWriter` and `BlockServer` with their threads and sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from satchel.actors.kv_store.transfer.block_client import PullResult
from satchel.actors.kv_store.transfer.pull_loop import (
    EntryGone,
    Offer,
    PullEnded,
    PullLimits,
    PullLoop,
    Stop,
    Wanted,
)
from satchel.actors.protocol.entries import EntryRecord, owner_tag
from satchel.cluster.errors import DiskError, EntryDamaged, LinkError, QueueFull, SatchelError

from .cluster_disk import ENTRY_BYTES, digest, kv_of

if TYPE_CHECKING:
    from .cluster_world import ClusterWorld, KVStore

LEASE_S = 4.0
PULLS_MAX = 4
LIMITS = PullLimits(batch_entries=3, total_bytes_max=10**9)
ENTRIES_AHEAD = 11

Content = tuple[EntryRecord, bytes]


class Puller:
    """Stands for a store's `BlockPuller`."""

    def __init__(self, world: ClusterWorld, store: KVStore) -> None:
        self._world, self._store = world, store
        self._running: set[_Session] = set()

    async def pull(
        self, wanted: Wanted, source: str, addresses: list[Any], *, deadline_s: float, owner: str = ""
    ) -> PullResult:
        if len(self._running) >= PULLS_MAX:
            raise QueueFull("too many blocks are being fetched already")
        session = _Session(self._world, self._store, wanted, source, owner, deadline_s)
        self._running.add(session)
        try:
            return await session.run(len(addresses))
        finally:
            session.over = True
            self._running.discard(session)

    def cancel_owner(self, owner: str, wait_s: float) -> bool:
        for session in [session for session in self._running if session.owner == owner]:
            session.cancelled.set()
        return True


class _Session:
    """One pull: the `Source` and the `Disk` of its loop.

    Attributes:
        over: nothing more is written.
    """

    def __init__(
        self, world: ClusterWorld, store: KVStore, wanted: Wanted, source: str, owner: str, deadline_s: float
    ) -> None:
        self.world, self.store, self.wanted, self.owner = world, store, wanted, owner
        self._source, self._begun, self._awake = source, world.now_of(store.name), world.awake_s(store.name)
        self._deadline_s = deadline_s
        self.cancelled = asyncio.Event()
        self.over = False
        self._writing: deque[asyncio.Task[None]] = deque()
        self._failed = ""
        self._installed: list[bytes] = []
        self._retracted: list[bytes] = []

    async def run(self, addresses: int) -> PullResult:
        loop = PullLoop(self.wanted.chain, addresses, LIMITS, self, self, self.wanted.wait_s, self.wanted.last)
        stop, reason = await loop.run()
        self.over = True
        here, blocks = loop.here(self._installed, self._retracted)
        if not self.cancelled.is_set():
            await self.store.owned.fenced(self._touch(here))
        took_s = self.world.awake_s(self.store.name) - self._awake
        assert took_s <= self._deadline_s + 40.0, "a pull ends"
        seconds, count = self.world.now_of(self.store.name) - self._begun, len(self._installed)
        return PullResult(
            stop, reason, blocks, here, count, count * ENTRY_BYTES, seconds, loop.connections, list(self._retracted)
        )

    async def _touch(self, here: list[bytes]) -> None:
        theirs = await self.store.owned.ownable(here, self.owner, wait=False) if self.owner else here
        self.store.kv.touch(theirs, self.owner)

    # Time.

    async def pause(self, seconds: float) -> None:
        """Waits; raises `PullEnded` if that takes too long or the pull is cancelled."""
        left_s = max(0.0, self._begun + self._deadline_s - self.world.now_of(self.store.name))
        try:
            await asyncio.wait_for(self.cancelled.wait(), min(seconds, left_s))
        except TimeoutError:
            if seconds >= left_s:
                raise PullEnded(Stop.DEADLINE, "the deadline is over") from None
            return
        raise PullEnded(Stop.CANCELLED, "cancelled")

    def delay(self) -> float:
        rng = self.world.rng
        return rng.random() * (0.01 if rng.random() < 0.95 else 3.0)

    # The source.

    def reaches(self) -> bool:
        return self.world.reaches(self._source, self.store.name)

    async def connect(self, address: int) -> None:
        source = self.world.kv_store(self._source)
        if source is None or not self.reaches():
            await self.pause(self.delay() if self.world.rng.random() < 0.5 else LIMITS.connect_s)
            raise LinkError("nobody there")
        await self.pause(self.delay())
        self._line = _Line(self, source)

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        return await self._line.find()

    async def ask(self, ids: Sequence[bytes]) -> None:
        await self._line.ask()

    async def receive(self, offer: Offer) -> Content:
        return await self._line.receive(offer)

    def close(self) -> None:
        self._line.close()

    # The disk.

    async def install(self, entry: Content) -> None:
        while len(self._writing) > ENTRIES_AHEAD:
            await self._written()
        before = self._writing[-1] if self._writing else None
        self._writing.append(self.store.process.start(self._write(entry, before)))

    async def flush(self) -> None:
        # Every entry is committed as soon as it was written.
        pass

    async def finish(self) -> None:
        while self._writing:
            await self._written()

    async def _written(self) -> None:
        """Waits until the first of the entries is committed."""
        while not self._writing[0].done():
            await self.pause(0.01)
        self._writing.popleft()
        if self._failed:
            raise DiskError(self._failed)

    async def _write(self, entry: Content, before: asyncio.Task[None] | None) -> None:
        own, content = entry
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self.delay() + self.store.slow_s * self.world.rng.random())
        if self.over or self._failed:
            return
        assert content == kv_of(own.id), "only what was proven is installed"
        disk = self.store.kv
        try:
            owned = replace(own, owners=(owner_tag(disk.key, self.owner),))
            record = disk.write(self.wanted.model, owned, content)
            placed = await self.store.owned.fenced(self._commit(record))
        except SatchelError as error:
            self._failed = error.message
            return
        self._retracted += placed.retracted
        if placed.refused or not set(self.wanted.chain).isdisjoint(placed.retracted):
            self._failed = "its owner was forgotten, or there is no room for all of it"
            return
        self._installed.append(own.id)

    async def _commit(self, record: Any) -> Any:
        without = await self.store.owned.unclaimed(record.entries)
        return self.store.kv.commit(record, without)


class _Line:
    """A connection to one process of the source, which keeps the offered entries until its lease ends."""

    def __init__(self, session: _Session, source: KVStore) -> None:
        self._session, self._source, self._world = session, source, session.world
        self._lease = ""

    def close(self) -> None:
        # A source that cannot hear it keeps its lease until that runs out.
        if self._session.reaches():
            self._unpin()

    def _pin(self) -> None:
        self._unpin()
        wanted, disk = self._session.wanted, self._source.kv
        self._lease = disk.pin([found for found in disk.locate(wanted.model, wanted.chain) if found], LEASE_S)

    def _unpin(self) -> None:
        if self._lease and self._source.process.alive:
            self._source.kv.unpin(self._lease)
        self._lease = ""

    async def _carry(self, seconds: float) -> None:
        """Carries a message over the link; or the connection breaks, which is noticed at once or not at all."""
        session, rng = self._session, self._world.rng
        await session.pause(seconds)
        if not self._source.process.alive or not session.reaches() or rng.random() < self._world.loss / 4:
            await session.pause(session.delay() if rng.random() < 0.5 else LIMITS.stall_s)
            raise LinkError("broken")

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        await self._carry(self._session.delay())
        self._pin()
        return [self._offer(entry) for entry in self._session.wanted.chain], []

    def _offer(self, entry: bytes) -> Offer | None:
        here = self._session.store.kv
        if entry in here:
            here.touch([entry])
            return Offer(entry, ENTRY_BYTES, held=True)
        return Offer(entry, ENTRY_BYTES) if entry in self._source.kv else None

    async def ask(self) -> None:
        await self._carry(self._session.delay())
        self._pin()

    async def receive(self, offer: Offer) -> Content:
        """Receives the entry that the source has now, and compares it with its digest."""
        await self._carry(ENTRY_BYTES / self._world.bytes_per_s)
        records, content = self._source.kv.records([offer.id]), self._source.kv.read(offer.id)
        if not records or content is None:
            raise EntryGone("it is gone")
        if self._world.rng.random() < self._world.loss:
            content = b"damaged on its way"
        if digest(content) != records[0].digest:
            raise EntryDamaged("it does not match its digest")
        return records[0], content
