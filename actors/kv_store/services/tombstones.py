"""Forgotten agents: on this node, and on other nodes, some of which must still be told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ....cluster.errors import SatchelError
from ...protocol.store_messages import Tombstone
from ..agents.roles import Role, tombstone_epoch
from ..replication.peers import Peers
from .node_memory import NodeMemory

logger = logging.getLogger(__name__)

UNBURIED_MAX = 10_000


class Tombstones:
    """
    Args:
        wake: called with an agent whose turn may have ended.
        changed: called with an agent whose state on this node has changed.
    """

    def __init__(
        self,
        memory: NodeMemory,
        peers: Peers,
        *,
        wake: Callable[[str], object],
        changed: Callable[[str], object],
    ) -> None:
        self._work, self._database, self._agents = memory.work, memory.database, memory.agents
        self._roles, self._disk, self._peers = memory.roles, memory.disk, peers
        self._wake, self._changed = wake, changed
        # For nodes that could not be told: by node and agent, the epoch up to which the agent was forgotten.
        self._unburied: dict[tuple[str, str], int] = {}

    async def told(self) -> list[Tombstone]:
        """Returns the agents that were forgotten here."""

        def work() -> list[Tombstone]:
            places = [(agent, self._roles.place(agent)) for agent in self._agents.forgotten()]
            found = [(agent, epoch) for agent, place in places if (epoch := tombstone_epoch(place)) >= 0]
            return [Tombstone(agent, epoch, self._agents.buried(agent)) for agent, epoch in found]

        return await self._work.answer(work)

    async def bury(self, agent: str, epoch: int, number: int) -> bool:
        """Forgets an agent that was forgotten on another node, unless it lives again in a later epoch. Returns whether
        that was new here."""
        begun = False

        def work() -> bool:
            nonlocal begun
            # If only the rest fails, the retry finds the tombstone and does not count it as new.
            if not begun and not self._roles.to_bury([(agent, epoch)]):
                return False
            begun = True
            with self._database.transaction():
                self._agents.bury(agent, time.time(), number)
                self._roles.bury(agent, epoch)
            self._database.scrub()
            return True

        if self._disk.owned is not None:
            await self._disk.owned.ready()
        buried = await self._work.in_order(work)
        if buried:
            self._wake(agent)
            self._changed(agent)
            self._disk.forgotten(agent)
        return buried

    async def spread(self, agent: str) -> None:
        """Tells the other nodes that the agent was forgotten here."""
        self._wake(agent)
        self._changed(agent)
        place = await self._work.in_order(lambda: self._roles.place(agent))
        if (epoch := tombstone_epoch(place)) >= 0 and place.role is Role.FORGOTTEN:
            others = await self._peers.others()
            await asyncio.gather(*(self._bury_at(node, agent, epoch) for node in others))

    async def again(self) -> None:
        """Tells the nodes that could not be told before."""
        others = await self._peers.others()
        for (node, agent), epoch in list(self._unburied.items()):
            if node in others:
                await self._bury_at(node, agent, epoch)
            else:
                del self._unburied[node, agent]

    async def _bury_at(self, node: str, agent: str, epoch: int) -> None:
        try:
            number = await self._work.in_order(lambda: self._agents.buried(agent))
            await self._peers.client(node).bury(agent, epoch, number)
        except SatchelError as error:
            # A node that was away asks before it announces anything. A node that is present is told again.
            logger.warning("node %s has not forgotten agent %s yet: %s", node, agent, error.message)
            if len(self._unburied) < UNBURIED_MAX:
                self._unburied[node, agent] = epoch
        else:
            self._unburied.pop((node, agent), None)
