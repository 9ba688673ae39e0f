"""The store actor of a node: agents' memory and KV, for the endpoint, the node's replicas and the other nodes' stores.

A thin shell: a method takes a message, has a service do it, and gives a message back.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...cluster.config import Config
from ...cluster.environment import cluster_key, default_home
from ...cluster.incidents import note_incident
from ...cluster.nodes import Node
from ..protocol.answers import answers
from ..protocol.handles import store_actor_name
from ..protocol.messages import Count, Nothing
from ..protocol.router_messages import AgentKeys
from ..protocol.store_messages import (
    Addresses,
    AgentBranches,
    AgentKey,
    AgentKV,
    AgentPage,
    AgentTo,
    AskKV,
    AskRoom,
    AskUnpack,
    Begin,
    Begun,
    BranchIds,
    CommitOutcome,
    CommitSegment,
    CommitTurn,
    DiskSession,
    EntryIds,
    Fetched,
    FetchKV,
    FilePath,
    FindKV,
    Flag,
    Fork,
    FoundKV,
    ListAgents,
    MoveAgent,
    Moved,
    Packed,
    PrimaryEpoch,
    Promote,
    PullKV,
    ReadDone,
    Recall,
    Recalled,
    Standings,
    StoreStats,
    TakeIn,
    TakeSecondary,
    Tombstone,
    TombstoneList,
    TouchChain,
    Transcript,
    TurnName,
    Unpacked,
)
from ..supervision.watchdog import Watchdog
from .disk.probe import DiskProbe
from .replication.peers import Peers, RayPeers
from .services.composition import StoreServices
from .services.memory import open_memory

STUCK_S = 600.0
"""So long may the store's threads take for one thing, as long as the disk answers; else until it does."""


@dataclass(frozen=True)
class Surroundings:
    """What a test gives a store instead of the cluster."""

    folder: Path
    cluster_key: bytes
    peers: Peers


class KVStoreActor:
    """Named `kv_store:<node>` in the cluster's namespace. Made on the event loop that it lives on.

    It is called through `StoreClient`, which says what its methods do: what they take and return travels as bytes, and
    errors with them.

    Args:
        given: instead of the cluster's own; then nothing is reported, and nothing tended by itself but the disk.

    Raises:
        ClusterError: the folder cannot be used, or belongs to a newer version.
    """

    def __init__(self, config: Config, node: Node, given: Surroundings | None = None) -> None:
        memory = open_memory(config, given.folder if given else default_home().kv)
        peers = given.peers if given else RayPeers(node.name, config.timing)
        self.services = StoreServices(config, node, memory, peers, given.cluster_key if given else cluster_key())
        self.services.share_blocks()
        if given is None:
            self._watch(node.name, default_home().kv, config.timing.heartbeat_s)
            services = self.services
            services.reports.on_full = _note_room
            threading.Thread(target=services.reports.reporter.run, name="reporter", daemon=True).start()
            self._tending = asyncio.create_task(services.tending.run())
            memory.disk.tend()

    def _watch(self, node: str, folder: Path, poll_s: float) -> None:
        self._watchdog = Watchdog(store_actor_name(node), poll_s=poll_s)
        probe = DiskProbe(folder)

        def watch(name: str, pool: ThreadPoolExecutor) -> None:
            self._watchdog.watch(f"thread {name}", pool.submit, lambda: STUCK_S, may_end=probe.answers)

        self._watchdog.watch("event loop", asyncio.get_running_loop().call_soon_threadsafe)
        watch("agents", self.services.memory.work.thread)
        watch("disk", self.services.memory.disk.threads)
        self._watchdog.start()

    # Turns.

    @answers(Recall)
    async def recall(self, asked: Recall) -> Recalled:
        await self.services.tending.ready()
        return await self.services.conversations.recall(asked.agent, asked.files_id, asked.known, asked.limits)

    @answers(Begin)
    async def begin(self, asked: Begin) -> Begun:
        await self.services.tending.ready()
        return await self.services.turns.begin(asked.agent, asked.turn, asked.files_id, asked.known, asked.limits)

    @answers(TurnName)
    async def renew(self, which: TurnName) -> Flag:
        return Flag(await self.services.turns.renew(which.agent, which.turn))

    @answers(CommitTurn)
    async def commit(self, asked: CommitTurn) -> CommitOutcome:
        return await self.services.turns.commit(asked.agent, asked.commit, asked.limits)

    @answers(TurnName)
    async def abandon(self, which: TurnName) -> None:
        await self.services.turns.abandon(which.agent, which.turn)

    # Agents.

    @answers(AgentKey)
    async def transcript(self, which: AgentKey) -> Transcript:
        return Transcript(await self.services.conversations.transcript(which.agent))

    @answers(AgentKey)
    async def info(self, which: AgentKey) -> AgentBranches:
        return await self.services.conversations.describe(which.agent)

    @answers(ListAgents)
    async def agents(self, which: ListAgents) -> AgentPage:
        return AgentPage(await self.services.conversations.page(which.tenant, which.after, which.limit))

    @answers(AskKV)
    async def blocks(self, which: AskKV) -> AgentKV:
        return AgentKV(await self.services.conversations.blocks(which.agent, which.replicas))

    @answers(AgentKey)
    async def disk_kept(self, which: AgentKey) -> Count:
        return Count(await self.services.conversations.disk_kept(which.agent))

    @answers(Fork)
    async def fork(self, asked: Fork) -> Count:
        return Count(await self.services.conversations.fork(asked.source, asked.target, asked.limits))

    @answers(AskRoom)
    async def room(self, asked: AskRoom) -> FilePath:
        return FilePath(str(self.services.satchels.room(asked.nbytes, asked.agent, asked.limits)))

    @answers(AskKV)
    async def pack(self, which: AskKV) -> Packed:
        return await self.services.satchels.pack(which.agent, which.replicas)

    @answers(AgentTo)
    async def borrow(self, asked: AgentTo) -> None:
        await self.services.satchels.borrow(asked.agent, asked.to)

    @answers(AgentKey)
    async def give_back(self, which: AgentKey) -> None:
        await self.services.satchels.give_back(which.agent)

    @answers(AskUnpack)
    async def unpack(self, asked: AskUnpack) -> Unpacked:
        await self.services.tending.ready()
        return await self.services.satchels.unpack(asked)

    @answers(AgentKey)
    async def forget(self, which: AgentKey) -> Flag:
        return Flag(await self.services.conversations.forget(which.agent))

    @answers(Nothing)
    async def stats(self, _: Nothing) -> StoreStats:
        return await self.services.stats()

    # KV on the disk.

    @answers(Nothing)
    async def disk_session(self, _: Nothing) -> DiskSession | None:
        return self.services.memory.disk.describe()

    @answers(CommitSegment)
    async def disk_commit(self, written: CommitSegment) -> EntryIds | None:
        return _ids(await self.services.memory.disk.commit(written.record, written.limits))

    @answers(TouchChain)
    async def disk_touch(self, used: TouchChain) -> EntryIds | None:
        return _ids(await self.services.memory.disk.touch(used.model, used.chain, used.owner))

    @answers(FindKV)
    async def disk_find(self, wanted: FindKV) -> FoundKV | None:
        return await self.services.memory.disk.find(wanted)

    @answers(ReadDone)
    async def disk_read(self, done: ReadDone) -> None:
        await self.services.memory.disk.read(done)

    @answers(PullKV)
    async def pull(self, wanted: PullKV) -> Fetched:
        return await self.services.fetching.pull(wanted)

    # Where agents live.

    @answers(MoveAgent)
    async def move(self, asked: MoveAgent) -> Moved:
        return await self.services.moving.move(asked.agent, asked.to, at_once=asked.at_once)

    @answers(Promote)
    async def promote(self, asked: Promote) -> PrimaryEpoch:
        return PrimaryEpoch(await self.services.copying.promote(asked.agent, asked.above))

    @answers(Nothing)
    async def drain(self, _: Nothing) -> None:
        self.services.reports.drain()

    # For the stores of other nodes.

    @answers(Promote)
    async def promote_here(self, asked: Promote) -> PrimaryEpoch:
        return PrimaryEpoch(await self.services.copying.promote_here(asked.agent, asked.above))

    @answers(TakeSecondary)
    async def take_secondary(self, copy: TakeSecondary) -> BranchIds:
        return BranchIds(await self.services.copying.take_secondary(copy))

    @answers(AgentTo)
    async def send_secondary(self, asked: AgentTo) -> PrimaryEpoch:
        return PrimaryEpoch(await self.services.copying.send_secondary(asked.agent, asked.to))

    @answers(TakeIn)
    async def take_in(self, memory: TakeIn) -> Count:
        return Count(await self.services.copying.take_in(memory))

    @answers(AgentKeys)
    async def standing(self, which: AgentKeys) -> Standings:
        return Standings(await self.services.copying.standing(which.agents))

    @answers(AgentKey)
    async def doubt(self, which: AgentKey) -> None:
        self.services.succession.doubt(which.agent)

    @answers(Nothing)
    async def buried(self, _: Nothing) -> TombstoneList:
        return TombstoneList(await self.services.tombstones.told())

    @answers(Tombstone)
    async def bury(self, told: Tombstone) -> Flag:
        return Flag(await self.services.tombstones.bury(told.agent, told.epoch, told.number))

    @answers(FetchKV)
    async def fetch(self, asked: FetchKV) -> Fetched:
        return await self.services.fetching.fetch(asked.agent, asked.source, asked.deadline_s)

    @answers(Nothing)
    async def block_addresses(self, _: Nothing) -> Addresses:
        return Addresses(self.services.fetching.addresses)


def _ids(found: list[bytes] | None) -> EntryIds | None:
    return None if found is None else EntryIds(found)


def _note_room(full: bool) -> None:
    has = "is full: no KV is kept there now" if full else "has room again"
    home = default_home()
    note_incident(home, "disk", f"the disk of {home.kv} {has}")
