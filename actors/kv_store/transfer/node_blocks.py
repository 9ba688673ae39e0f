"""Exchanges KV and image embeddings with other nodes: one block server, and pulls into the node's store."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ....cluster.config.nodes import Node
from ....cluster.config.timing import USUAL, Timing
from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import tail_id
from ...protocol.media_ids import embeddings_parent, names_in
from ...protocol.store_messages import Content, Fetched, Head
from ..disk.store import DiskStore
from ..replication.peers import Peers
from .block_client import PULLS_MAX, BlockPuller, PullResult
from .block_server import BlockServer, ServerLimits
from .priority import give_way
from .pull_loop import Stop, Wanted
from .pull_writer import Keeper

logger = logging.getLogger(__name__)

LINK_BYTES_MIN = 8 * 2**20
"""How many bytes a complete pull must have moved to measure the link: a smaller one mostly connects and commits."""

LINK_SLOW_BYTES_MIN, LINK_SLOW_S_MIN = 2**20, 1.0
"""A pull that moved fewer bytes also measures the link if it took at least this long for at least these bytes:
connecting takes less than a second."""


def link_rate(result: PullResult) -> float | None:
    """Returns the bytes per second that a pull measured of its link, None if it moved too little or failed.

    A pull that its deadline ended had more to move, so what came in that time says how slow the link is.
    """
    whole = result.stop in (Stop.COMPLETE, Stop.MISSING, Stop.DEADLINE)
    slow = result.seconds >= LINK_SLOW_S_MIN and (result.nbytes >= LINK_SLOW_BYTES_MIN or result.stop is Stop.DEADLINE)
    enough = result.nbytes >= LINK_BYTES_MIN or slow
    return result.nbytes / result.seconds if whole and enough and result.nbytes and result.seconds > 0 else None


class NodeBlocks:
    """A node's block server and puller, for one event loop.

    Args:
        keeper: decides who may have what was pulled.
        timing: how long files are kept for another node, and how long it may take to tell its addresses.

    Raises:
        LinkError: the cluster's key is too short.
        PortInUse: the server cannot listen.
    """

    def __init__(
        self,
        disk: DiskStore,
        cluster_key: bytes,
        node: Node,
        peers: Peers,
        keeper: Keeper,
        timing: Timing = USUAL,
    ) -> None:
        self._answer_s = timing.answer_s
        self._disk, self._keeper, self._peers = disk, keeper, peers
        listen = [(link.address, 0) for link in node.data_links]
        limits = ServerLimits(lease_s=timing.block_lease_s)
        self._server = BlockServer(
            disk, cluster_key, node.name, listen, limits=limits, bytes_per_s=node.give_bytes_per_s_max
        )
        self._puller = BlockPuller(disk, cluster_key, keeper)
        # One more, to be refused. They end with this object.
        self._threads = ThreadPoolExecutor(PULLS_MAX + 1, thread_name_prefix="pull", initializer=give_way)
        self._lock = threading.Lock()
        self._links: dict[str, float] = {}

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port each, the fastest link first."""
        return list(self._server.addresses)

    def take_links(self) -> dict[str, float]:
        """Returns bytes per second by source node, as measured since the last call. Safe from any thread."""
        with self._lock:
            links, self._links = self._links, {}
        return links

    def end_pulls(self, owner: str) -> bool:
        """Ends the pulls for an agent. Blocks for at most a second; returns whether they have ended."""
        return self._puller.cancel_owner(owner, 1.0)

    def close(self) -> None:
        """Ends all pulls and the server. Close the store afterwards."""
        self._puller.close()
        self._server.close()

    async def fetch(
        self, agent: str, branches: Sequence[tuple[Head, Content]], source: str, deadline_s: float
    ) -> Fetched:
        """Pulls these branches' KV and image embeddings, as far as they are not here.

        Raises:
            SatchelError: a pull cannot begin.
        """
        ends = time.monotonic() + deadline_s
        total = Fetched()
        for wanted in await asyncio.to_thread(self._wanted, agent, branches):
            left = ends - time.monotonic()
            if left <= 0:
                break
            came = await self.pull(wanted, source, agent, left)
            tokens, blocks, nbytes = total.tokens + came.tokens, total.blocks + came.blocks, total.nbytes + came.nbytes
            total = Fetched(tokens, blocks, nbytes, total.seconds + came.seconds)
        return total

    def _wanted(self, agent: str, branches: Sequence[tuple[Head, Content]]) -> list[Wanted]:
        """Returns what to pull. KV comes first: embeddings are only needed if the text before the image differs. Also
        makes the agent an owner of embeddings that are on this node already."""
        chains: list[Wanted] = []
        embeddings: dict[bytes, Wanted] = {}
        for head, content in branches:
            tokens = array("I", content.tokens)
            chain = block_ids(head.root, tokens)
            rest = tokens[len(chain) * BLOCK_TOKENS :]
            chains.append(Wanted(head.model, head.root, tuple(chain), tokens, rest))
            for name in names_in(tokens):
                wanted = Wanted(head.model, embeddings_parent(head.root, name), (), None, name, tails_max=1)
                embeddings[wanted.root] = wanted
        ids = [tail_id(wanted.root, wanted.rest) for wanted in embeddings.values()]
        local = [
            self._disk.locate(wanted.model, [entry])[0] for wanted, entry in zip(embeddings.values(), ids, strict=True)
        ]
        if any(local):
            self._keeper.touch([location.id for location in local if location is not None], agent)
        return chains + [
            wanted for wanted, location in zip(embeddings.values(), local, strict=True) if location is None
        ]

    async def pull(self, wanted: Wanted, source: str, owner: str, deadline_s: float) -> Fetched:
        """Pulls a chain.

        Raises:
            SatchelError: the source does not tell its addresses, or there are too many pulls.
        """
        told = await self._peers.client(source).block_addresses().within(self._answer_s)
        addresses = [(host, port) for host, port in told]
        begin = partial(self._puller.pull, wanted, source, addresses, deadline_s=deadline_s, owner=owner)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, begin)
        # A pull that waits measures the other node's prefill.
        if not wanted.wait_s and (rate := link_rate(found)) is not None:
            with self._lock:
                self._links[source] = rate
        if found.blocks < len(wanted.chain):
            logger.info("of %d blocks from %s %d came: %s", len(wanted.chain), source, found.blocks, found.reason)
        ends = found.stop is Stop.COMPLETE, found.stop in (Stop.MISSING, Stop.DEADLINE)
        return Fetched(found.blocks * BLOCK_TOKENS, found.installed, found.nbytes, found.seconds, *ends)
