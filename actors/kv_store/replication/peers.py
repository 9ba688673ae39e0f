"""The other nodes' stores, and which of them keep copies. `Peers` finds them; `RayPeers` does so over Ray."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from ....cluster.config.timing import Timing
from ....cluster.errors import NoAnswer
from ...protocol.clients import RouterClient
from ...protocol.store_client import StoreClient

logger = logging.getLogger(__name__)


class Peers(Protocol):
    """The other nodes' stores, for one event loop."""

    async def others(self) -> list[str]:
        """Returns the names of the live nodes, except this one."""
        ...

    def client(self, node: str) -> StoreClient:
        """The store of a node."""
        ...


def secondary_nodes(agent: str, nodes: Iterable[str], count: int) -> list[str]:
    """Returns the `count` secondaries of an agent by rendezvous hashing: equal for all callers, spread evenly, and few
    change when nodes come or go."""

    def weight(node: str) -> bytes:
        return hashlib.blake2b(f"{node}\0{agent}".encode(), digest_size=8).digest()

    return sorted(nodes, key=weight, reverse=True)[:count]


class RayPeers:
    """The stores of this actor's Ray cluster.

    Args:
        node: this one.
        timing: of the cluster.
    """

    def __init__(self, node: str, timing: Timing) -> None:
        self._node, self._timing = node, timing
        self._others: list[str] = []
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._clients: dict[str, StoreClient] = {}

    async def others(self) -> list[str]:
        age_s = float("inf") if self._read_at is None else time.monotonic() - self._read_at
        if age_s > self._timing.peers_s and self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if age_s > self._timing.peers_old_s and self._reading is not None:
            # Only if the list is old: otherwise turns need not wait for a slow router.
            await asyncio.shield(self._reading)
        return self._others

    async def _read(self) -> None:
        try:
            self._others = await asyncio.to_thread(self._ask_router)
            self._read_at = time.monotonic()
        finally:
            self._reading = None

    def _ask_router(self) -> list[str]:
        try:
            found = RouterClient(self._timing).nodes().within(self._timing.brief_answer_s).wait()
        except NoAnswer as error:
            # The router restarts; the previous list is the best guess.
            logger.warning("the router did not list the nodes: %s", type(error).__name__)
            return self._others
        return [state.name for state in found if state.alive and state.name != self._node]

    def client(self, node: str) -> StoreClient:
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = StoreClient(node, self._timing, unanswered=self._ask_anew)
        return client

    def _ask_anew(self) -> None:
        """Forgets the list of nodes, because one may be gone: the next call asks the router again, so nobody waits for
        a lost node twice."""
        self._read_at = None
