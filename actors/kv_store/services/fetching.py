"""Fetches KV from other nodes, and serves this node's KV to them."""

from __future__ import annotations

import asyncio

from ....cluster.errors import Unavailable
from ....cluster.nodes import Node
from ...protocol.store_messages import Content, Fetched, Head, PullKV
from ..replication.peers import Peers
from ..transfer.node_blocks import NodeBlocks
from ..transfer.pull_loop import Wanted
from .node_memory import NodeMemory
from .ownership import OwnedKeeper


class Fetching:
    """Made on the event loop that it lives on.

    Args:
        cluster_key: the key by which nodes authenticate each other.
        node: this node's name.

    Attributes:
        blocks: None as long as the node keeps no KV on disk.
    """

    def __init__(self, memory: NodeMemory, peers: Peers, *, cluster_key: bytes, node: Node) -> None:
        self._timing = memory.timing
        self._work, self._agents, self._disk, self._peers = memory.work, memory.agents, memory.disk, peers
        self._cluster_key, self._node = cluster_key, node
        self._loop = asyncio.get_running_loop()
        self.blocks: NodeBlocks | None = None

    def serve(self) -> None:
        """Begins to serve and fetch KV: the disk has been opened."""
        store, owned = self._disk.store, self._disk.owned
        if store is None or owned is None:
            return
        keeper = OwnedKeeper(store, owned, self._loop)
        blocks = NodeBlocks(store, self._cluster_key, self._node, self._peers, keeper, self._timing)
        self.blocks = blocks
        owned.end_pulls = blocks.end_pulls

    def addresses(self) -> list[tuple[str, int]]:
        """Returns where this node's blocks are served, the fastest link first."""
        return self.blocks.addresses if self.blocks is not None else []

    def take_links(self) -> dict[str, float]:
        """As `NodeBlocks.take_links`."""
        return self.blocks.take_links() if self.blocks is not None else {}

    async def fetch(self, agent: str, source: str, deadline_s: float) -> Fetched:
        """Pulls the agent's KV that another node's disk has and this node's lacks, for all branches known here.

        Raises:
            Unavailable: this node keeps no KV on disk, or the other one gives none.
        """

        def contents() -> list[tuple[Head, Content]]:
            heads = [head for head in self._agents.heads(agent) if head.root]
            return [(head, found) for head in heads if (found := self._agents.content(head)) is not None]

        return await self._open().fetch(agent, await self._work.in_order(contents), source, deadline_s)

    async def pull(self, wanted: PullKV) -> Fetched:
        """Pulls a chain for a request that is about to be computed here.

        Raises:
            Unavailable: this node keeps no KV on disk, or the other one gives none.
        """
        await self._disk.limit(wanted.limits)
        chain = Wanted(wanted.model, wanted.root, tuple(wanted.block_ids), None, wanted.rest, wait_s=wanted.wait_s)
        return await self._open().pull(chain, wanted.source, wanted.owner, wanted.deadline_s)

    def _open(self) -> NodeBlocks:
        if self.blocks is None:
            raise Unavailable("this node keeps no KV on disk")
        return self.blocks
