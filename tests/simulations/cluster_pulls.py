"""Pulls between simulated nodes: the real machine (`transfer.Pull`) over links and disks that fail, in virtual time.

What `PullSession`, `PullWriter` and `BlockServer` do around it with threads and sockets is played here as plainly.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from satchel.actors.kv_store.transfer.machine.pull import Pull
from satchel.actors.kv_store.transfer.machine.pull_terms import (
    Cancel,
    Chunk,
    CloseConnection,
    Command,
    Connect,
    Connected,
    Discard,
    Done,
    EntryOutcome,
    Event,
    Fetch,
    Find,
    Found,
    Install,
    Installed,
    InstallFailed,
    Lost,
    Offer,
    PullLimits,
    Renew,
    Renewed,
    Tick,
    Want,
)
from satchel.actors.kv_store.transfer.machine.pull_wire import Wanted
from satchel.actors.kv_store.transfer.pull_session import PullResult
from satchel.actors.protocol.entries import EntryRecord, owner_tag
from satchel.cluster.errors import QueueFull, SatchelError

from .cluster_disk import ENTRY_BYTES, digest, kv_of

if TYPE_CHECKING:
    from .cluster_world import ClusterWorld, KVStore

LEASE_S = 4.0
PULLS_MAX = 4
LIMITS = PullLimits(
    batch_bytes_min=2 * ENTRY_BYTES,
    batch_bytes_max=8 * ENTRY_BYTES,
    window_bytes=12 * ENTRY_BYTES,
    install_entries_max=3,
    total_bytes_max=10**9,
)


class Puller:
    """What `BlockPuller` is to a store."""

    def __init__(self, world: ClusterWorld, store: KVStore) -> None:
        self._world, self._store = world, store
        self._running: set[_Session] = set()

    async def pull(
        self, wanted: Wanted, source: str, addresses: list[Any], *, deadline_s: float, owner: str = ""
    ) -> PullResult:
        if len(self._running) >= PULLS_MAX:
            raise QueueFull("too many blocks are being fetched already")
        session = _Session(self._world, self._store, wanted, source, owner)
        self._running.add(session)
        try:
            return await session.run(len(addresses), deadline_s)
        finally:
            session.close()
            self._running.discard(session)

    def cancel_owner(self, owner: str, wait_s: float) -> bool:
        for session in [session for session in self._running if session.owner == owner]:
            session.handle(Cancel())
        return True


@dataclass
class _Line:
    """A connection to one life of the source, which keeps what it speaks of until its lease runs out."""

    number: int
    source: KVStore
    lease: str = ""
    free_at: float = 0.0

    def pin(self, chain: tuple[bytes, ...], model: bytes) -> None:
        self.unpin()
        disk = self.source.kv
        self.lease = disk.pin([found for found in disk.locate(model, chain) if found], LEASE_S).lease

    def unpin(self) -> None:
        if self.lease and self.source.process.alive:
            self.source.kv.unpin(self.lease)
        self.lease = ""


class _Session:
    """One pull."""

    def __init__(self, world: ClusterWorld, store: KVStore, wanted: Wanted, source: str, owner: str) -> None:
        self._world, self._store, self._wanted, self._source, self.owner = world, store, wanted, source, owner
        self._loop, self._rng = world.loop, world.rng
        self._line: _Line | None = None
        self._held: dict[bytes, tuple[EntryRecord, bytes]] = {}
        self._retracted: list[bytes] = []
        self._connections = 0
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[Done] = self._loop.create_future()

    async def run(self, addresses: int, deadline_s: float) -> PullResult:
        begun = self._loop.time()
        self._machine = Pull(LIMITS, addresses, begun + deadline_s)
        self.handle(Want(self._wanted.chain))
        done = await self._done
        here, blocks = self._machine.items.here(), self._machine.items.blocks_here()
        left = next((number for number, entry in enumerate(here) if entry in self._retracted), blocks)
        here, blocks = here[:left], min(blocks, left)
        if done.stop != "cancelled":
            await self._store.owned.fenced(self._touch(here))
        assert self._loop.time() <= begun + deadline_s + 40.0, "a pull ends"
        seconds = self._loop.time() - begun
        counts = (done.installed, done.nbytes, seconds, self._connections)
        return PullResult(done.stop, done.reason, blocks, here, *counts, list(self._retracted))

    def close(self) -> None:
        self._hang_up()
        if self._timer is not None:
            self._timer.cancel()

    async def _touch(self, here: list[bytes]) -> None:
        theirs = await self._store.owned.ownable(here, self.owner, wait=False) if self.owner else here
        self._store.kv.touch(theirs, self.owner)

    def handle(self, event: Event) -> None:
        if self._done.done() or not self._store.process.alive:
            return
        for command in self._machine.handle(event, self._loop.time()):
            self._obey(command)
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._timer = self._loop.call_at(self._machine.wakes_at(), self.handle, Tick())

    def _later(self, delay_s: float, event: Event) -> None:
        self._loop.call_later(delay_s, self.handle, event)
        if self._rng.random() < self._world.twice:
            self._loop.call_later(delay_s + self._rng.random(), self.handle, event)

    def _delay(self) -> float:
        return self._rng.random() * (0.01 if self._rng.random() < 0.95 else 3.0)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Connect):
            self._connect(command)
        elif isinstance(command, CloseConnection):
            self._hang_up()
        elif isinstance(command, Install):
            self._install(command)
        elif isinstance(command, Discard):
            for entry in command.ids:
                del self._held[entry]
        elif isinstance(command, Done):
            self._done.set_result(command)
        elif isinstance(command, Find | Fetch | Renew) and self._line is not None:
            self._answer(command, self._line)

    def _connect(self, command: Connect) -> None:
        self._connections += 1
        source = self._world.kv_store(self._source)
        if source is None or not self._world.reaches(self._source, self._store.name):
            if self._rng.random() < 0.5:
                self._later(self._delay(), Lost(command.connection, "nobody there"))
            return
        self._line = _Line(command.connection, source)
        self._later(self._delay(), Connected(command.connection))

    def _hang_up(self) -> None:
        # A source that cannot hear it keeps its lease until that runs out.
        if self._line is not None and self._world.reaches(self._source, self._store.name):
            self._line.unpin()
        self._line = None

    def _is_cut(self, line: _Line) -> bool:
        """Whether the connection is broken now; the target hears of it, or of nothing."""
        reached = self._world.reaches(self._source, self._store.name)
        if line.source.process.alive and reached and self._rng.random() >= self._world.loss / 4:
            return False
        if self._rng.random() < 0.5:
            self._later(self._delay(), Lost(line.number, "broken"))
        return True

    def _answer(self, command: Find | Fetch | Renew, line: _Line) -> None:
        if self._is_cut(line):
            return
        line.pin(self._wanted.chain, self._wanted.model)
        now = self._loop.time()
        line.free_at = max(line.free_at, now) + self._delay()
        if isinstance(command, Find):
            self._later(line.free_at - now, Found(line.number, LEASE_S, tuple(map(self._offer, self._wanted.chain))))
        elif isinstance(command, Renew):
            self._later(line.free_at - now, Renewed(line.number, LEASE_S))
        else:
            for entry in command.ids:
                line.free_at += ENTRY_BYTES / self._world.bytes_per_s
                self._loop.call_at(line.free_at, self._bring, line, entry)

    def _offer(self, entry: bytes) -> Offer | None:
        assert self._line is not None
        if entry in self._store.kv:
            self._store.kv.touch([entry])
            return Offer(entry, ENTRY_BYTES, held=True)
        return Offer(entry, ENTRY_BYTES) if entry in self._line.source.kv else None

    def _bring(self, line: _Line, entry: bytes) -> None:
        """What the source has there now comes through the link, and is compared with its digest."""
        if self._done.done() or self._line is not line or self._is_cut(line):
            return
        records, content = line.source.kv.records([entry]), line.source.kv.read(entry)
        if not records or content is None:
            self.handle(Chunk(line.number, entry, EntryOutcome.GONE))
            return
        if self._rng.random() < self._world.loss:
            content = b"damaged on its way"
        good = digest(content) == records[0].digest
        self._held[entry] = records[0], content
        chunk = Chunk(line.number, entry, EntryOutcome.GOOD if good else EntryOutcome.BAD)
        self.handle(chunk)
        number = self._machine.items.number_of(entry)
        if number is None or self._machine.items[number].state.value not in ("held", "installing"):
            self._held.pop(entry, None)
        if self._rng.random() < self._world.twice:
            self._later(self._rng.random(), chunk)

    def _install(self, command: Install) -> None:
        taken = [self._held.pop(entry) for entry in command.ids]
        self._store.process.start(self._write(taken))

    async def _write(self, taken: list[tuple[EntryRecord, bytes]]) -> None:
        disk, owner = self._store.kv, owner_tag(self._store.kv.key, self.owner)
        for row, content in taken:
            await asyncio.sleep(self._delay() + self._store.slow_s * self._rng.random())
            if self._done.done():
                return
            assert content == kv_of(row.id), "only what was proven is installed"
            try:
                record = disk.write(self._wanted.model, replace(row, owners=(owner,)), content)
                placed = await self._store.owned.fenced(self._commit(record))
            except SatchelError as error:
                self.handle(InstallFailed(error.message))
                return
            self._retracted += placed.retracted
            if placed.refused or not set(self._wanted.chain).isdisjoint(placed.retracted):
                self.handle(InstallFailed("its owner was forgotten, or there is no room for all of it"))
                return
            self.handle(Installed((row.id,)))

    async def _commit(self, record: Any) -> Any:
        without = await self._store.owned.unclaimed(record.entries)
        return self._store.kv.commit(record, without)
