"""Builds a store's services from its node's memory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from ....cluster.config.config import Config
from ....cluster.config.nodes import Node
from ...protocol.store_messages import StoreStats
from ..replication.copies import Secondaries
from ..replication.orphans import Orphans
from ..replication.peers import Peers
from ..replication.succession import Succession
from .claiming import Claiming
from .conversations import Conversations
from .copying import SecondaryKeeper
from .fetching import Fetching
from .moving import Moving
from .node_memory import NodeMemory
from .reports import StoreReports
from .satchels import Satchels
from .tending import Tending
from .tombstones import Tombstones
from .turns import Turns

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

NUMBERS = 2**14
"""Each node has one residue modulo this for its sequence numbers. It follows from a hash, so 16 nodes have different
ones in 99% of clusters."""


class StoreServices:
    """A store's services. Made on the event loop that they live on.

    Args:
        cluster_key: the key by which nodes authenticate each other.
    """

    def __init__(self, config: Config, node: Node, memory: NodeMemory, peers: Peers, cluster_key: bytes) -> None:
        self.memory = memory
        memory.agents.count_apart(_residue(node.name), NUMBERS)
        divided = any(model.split for model in config.models)
        self.fetching = Fetching(memory, peers, cluster_key=cluster_key, node=node, of_all_models=divided)
        self.claiming = Claiming(memory, peers)
        if divided:
            memory.disk.ask_elsewhere(self.claiming.elsewhere)
        self.reports = StoreReports(
            node.name, memory, links=self.fetching.take_links, introduce=lambda: self.tending.introduce()
        )
        changed, in_order = self.reports.changed, memory.work.in_order
        self.turns = Turns(memory, wait_s=config.timeouts.turn_wait_s, kept=lambda agent: self.copying.kept(agent))
        self.tombstones = Tombstones(memory, peers, wake=self.turns.wake, changed=changed)
        self.succession = Succession(
            node.name,
            memory.roles,
            memory.agents.heads,
            in_order,
            peers,
            bury=self.tombstones.bury,
            changed=changed,
            timing=memory.timing,
        )

        def gather(agent: str, source: str) -> Awaitable[object]:
            return self.fetching.fetch(agent, source, memory.timing.fetch_s)

        self.copies = Secondaries(
            node.name,
            memory.roles,
            in_order,
            peers,
            version=lambda: memory.agents.sequence,
            count=config.replication,
            machines=len(config.machines),
            wait_s=config.copy_wait_s,
            strict=config.replication_wait == "strict",
            doubt=self.succession.doubt,
            limits=memory.quotas.of,
            timing=memory.timing,
            gather=gather if divided else None,
        )
        self.copying = SecondaryKeeper(memory, self.copies, self.succession, self.tombstones, changed=changed)
        self.conversations = Conversations(memory, kept=self.copying.kept, forgotten=self.tombstones.spread)
        self.moving = Moving(node.name, memory, self.turns, self.copies, self.succession, peers, changed=changed)
        self.satchels = Satchels(
            config,
            memory,
            cluster_key,
            belongs_here=self.copies.belongs_here,
            kept=self.copying.kept,
            forgotten=self.tombstones.spread,
            changed=changed,
        )
        self.orphans = Orphans(
            node.name,
            memory.roles,
            self.succession,
            self.copies,
            in_order,
            peers,
            count=config.replication,
            timing=memory.timing,
        )
        self.tending = Tending(self.succession, self.copies, self.orphans, self.tombstones, memory.timing)
        memory.disk.on_touched = self.copies.kv_written

    def share_blocks(self) -> None:
        """Serves KV to the other nodes and pulls theirs, from now on or from when the disk can be opened."""

        def opened() -> None:
            self.fetching.serve()
            self.reports.reporter.wake()

        self.memory.disk.on_opened = opened
        self.fetching.serve()

    def introduced(self, do: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        """Returns `do`, delayed until the store has heard what it missed, or has tried to."""

        async def later(*args: P.args, **kwargs: P.kwargs) -> R:
            await self.tending.ready()
            return await do(*args, **kwargs)

        return later

    async def stats(self) -> StoreStats:
        """Returns bytes and counts of this node's memory."""
        memory = self.memory

        def work() -> StoreStats:
            return StoreStats(
                agents_bytes=memory.agents.nbytes,
                agents_evicted_total=memory.agents.evicted,
                rows_damaged_total=memory.database.damaged_total,
                files_set_aside_total=memory.database.set_aside_total,
                disk=memory.disk.store.stats() if memory.disk.store is not None else {},
                disk_error=memory.disk.error,
                moves_total=self.moving.moves,
                moved_bytes_total=self.moving.moved_bytes,
                adopted_total=self.copying.adopted,
                copies_failed_total=self.copies.failed_total,
                copies_late=self.copies.late(),
            )

        return await memory.work.answer(work)


def _residue(node: str) -> int:
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "big") % NUMBERS
