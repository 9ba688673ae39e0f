"""A node's KV and pictures' features for the others, and theirs for it: one server, and pulls into the node's store."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from ....cluster.nodes import Node
from ....cluster.timing import USUAL, Timing
from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import tail_id
from ...protocol.media_ids import features_parent, names_in
from ..agents.branches import Content, Head
from ..disk.store import DiskStore
from ..replication.peers import Peers
from .block_client import BlockPuller
from .block_server import BlockServer, ServerLimits
from .machine.pull_terms import Stop
from .machine.pull_wire import Wanted
from .pull_session import PullResult
from .pull_writer import Keeper

logger = logging.getLogger(__name__)

LINK_BYTES_MIN, LINK_S_MIN = 8 * 2**20, 0.2
"""A pull of fewer bytes that took less time says how long connecting and committing take, and little of the link."""


def link_rate(found: PullResult) -> float | None:
    """Bytes a second of the link over which this came, None where the pull does not tell."""
    whole = found.stop in (Stop.COMPLETE, Stop.MISSING, Stop.DEADLINE)
    enough = found.nbytes >= LINK_BYTES_MIN or found.seconds >= LINK_S_MIN
    return found.nbytes / found.seconds if whole and enough and found.nbytes and found.seconds > 0 else None


class NodeBlocks:
    """For one event loop.

    Args:
        session: of the store's writers.
        keeper: decides who may have what was pulled.
        timing: for how long files are kept for another node, which has to say where its own are.

    Raises:
        LinkError: the cluster's key is too short.
    """

    def __init__(
        self,
        disk: DiskStore,
        cluster_key: bytes,
        node: Node,
        session: str,
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
        self._puller = BlockPuller(disk, cluster_key, node.name, session, keeper=keeper)
        self._lock = threading.Lock()
        self._links: dict[str, float] = {}

    @property
    def addresses(self) -> list[list[Any]]:
        """[host, port] each, the fastest link first."""
        return [list(address) for address in self._server.addresses]

    def take_links(self) -> dict[str, float]:
        """Bytes a second by node, as measured since the last call. From any thread."""
        with self._lock:
            links, self._links = self._links, {}
        return links

    def end_pulls(self, owner: str) -> bool:
        """End what is being pulled for an agent. Blocks for a second at the most; whether that was enough."""
        return self._puller.cancel_owner(owner, 1.0)

    def close(self) -> None:
        """End everything; the store is closed after this."""
        self._puller.close()
        self._server.close()

    async def fetch(
        self, agent: str, branches: Sequence[tuple[Head, Content]], source: str, deadline_s: float
    ) -> dict[str, int]:
        """Pull the KV of these branches and the features of their pictures, as far as they are not here.

        Returns:
            `{"tokens", "blocks", "bytes"}`: tokens of the chains that are here now, and what has come.

        Raises:
            SatchelError: a pull cannot be made.
        """
        ends = time.monotonic() + deadline_s
        total = {"tokens": 0, "blocks": 0, "bytes": 0}
        for wanted in await asyncio.to_thread(self._wanted, agent, branches):
            left = ends - time.monotonic()
            if left <= 0:
                break
            found = await self.pull(wanted, source, agent, left)
            total = {name: total[name] + found[name] for name in total}
        return total

    def _wanted(self, agent: str, branches: Sequence[tuple[Head, Content]]) -> list[Wanted]:
        """All KV first: with it nobody needs the features, unless other words come before the pictures. Features that
        are here already are the agent's from now on."""
        chains: list[Wanted] = []
        features: dict[bytes, Wanted] = {}
        for head, content in branches:
            tokens = array("I", content.tokens)
            chain = block_ids(head.root, tokens)
            rest = tokens[len(chain) * BLOCK_TOKENS :]
            chains.append(Wanted(head.model, head.root, tuple(chain), tokens, rest))
            for name in names_in(tokens):
                found = Wanted(head.model, features_parent(head.root, name), (), None, name, tails_max=1)
                features[found.root] = found
        ids = [tail_id(wanted.root, wanted.rest) for wanted in features.values()]
        here = [
            self._disk.locate(wanted.model, [entry])[0] for wanted, entry in zip(features.values(), ids, strict=True)
        ]
        if any(here):
            self._keeper.touch([found.id for found in here if found is not None], agent)
        return chains + [wanted for wanted, found in zip(features.values(), here, strict=True) if found is None]

    async def pull(self, wanted: Wanted, source: str, owner: str, deadline_s: float) -> dict[str, Any]:
        """Fetch a chain: `{"tokens", "blocks", "bytes", "seconds"}`.

        Raises:
            SatchelError: the source does not say where its blocks are, or there are too many pulls.
        """
        addresses = await self._peers.call(source, "block_addresses", timeout_s=self._answer_s)
        found = await asyncio.to_thread(
            self._puller.pull,
            wanted,
            source,
            [(host, port) for host, port in addresses],
            deadline_s=deadline_s,
            owner=owner,
        )
        if (rate := link_rate(found)) is not None:
            with self._lock:
                self._links[source] = rate
        if found.blocks < len(wanted.chain):
            logger.info("of %d blocks from %s %d came: %s", len(wanted.chain), source, found.blocks, found.reason)
        tokens = found.blocks * BLOCK_TOKENS
        return {"tokens": tokens, "blocks": found.installed, "bytes": found.nbytes, "seconds": found.seconds}
