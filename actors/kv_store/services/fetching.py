"""Fetches KV from other nodes, and serves this node's KV to them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ....cluster.config.nodes import Node
from ....cluster.errors import SatchelError, Unavailable
from ...protocol.store_messages import Content, Fetched, Head, PullKV
from ..replication.peers import Peers
from ..transfer.node_blocks import NodeBlocks
from ..transfer.pull_loop import Wanted
from .node_memory import NodeMemory
from .ownership import OwnedKeeper

logger = logging.getLogger(__name__)


class Fetching:
    """Made on the event loop that it lives on.

    Args:
        cluster_key: the key by which nodes authenticate each other.
        node: this node's name.
        of_all_models: whether KV of agents is fetched under all models under which another node has it, because models
            are divided; else only under the model of each branch.

    Attributes:
        blocks: None as long as the node keeps no KV on disk.
    """

    def __init__(
        self, memory: NodeMemory, peers: Peers, *, cluster_key: bytes, node: Node, of_all_models: bool = False
    ) -> None:
        self._timing = memory.timing
        self._work, self._agents, self._disk, self._peers = memory.work, memory.agents, memory.disk, peers
        self._cluster_key, self._node, self._of_all_models = cluster_key, node, of_all_models
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

        blocks = self._open()
        models: list[bytes] = []
        try:
            if self._of_all_models:
                models = await self._peers.client(source).kv_models(agent).within(self._timing.ask_s)
        except SatchelError as error:
            logger.info("%s does not say under which models it has KV of %s: %s", source, agent, error.message)

        def contents() -> list[tuple[Head, Content]]:
            found: list[tuple[Head, Content]] = []
            for head in [head for head in self._agents.heads(agent) if head.root]:
                if (content := self._agents.content(head)) is not None:
                    others = [model for model in models if model != head.model]
                    roots = {model: self._agents.root_of(agent, model) for model in others}
                    found += [(head, content)]
                    found += [(replace(head, model=model, root=root), content) for model, root in roots.items() if root]
            return found

        return await blocks.fetch(agent, await self._work.in_order(contents), source, deadline_s)

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
