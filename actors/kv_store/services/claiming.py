"""Asks the other nodes what an agent may own that was forgotten here and lives again elsewhere.

A follower of a divided model writes its part of an agent's KV on its own node, which may have no branch of the agent.
That is enough while nobody was forgotten. After that, only branches say what KV belongs to the agent's new life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ....cluster.errors import SatchelError
from ...protocol.entries import NOBODY, EntryRecord
from ..agents.roles import Role, tombstone_epoch
from ..replication.peers import Peers
from .node_memory import NodeMemory

logger = logging.getLogger(__name__)


class Claiming:
    """Made on the event loop that it lives on."""

    def __init__(self, memory: NodeMemory, peers: Peers) -> None:
        self._memory, self._peers = memory, peers

    async def elsewhere(self, agent: str, models: Sequence[bytes], entries: Sequence[EntryRecord]) -> set[bytes]:
        """Returns the ids of those entries that the agent's branches on other nodes claim, if it lives there in a later
        life than the one that ended here.

        Args:
            models: whose entries they are.
        """
        memory = self._memory
        place = await memory.work.in_order(lambda: memory.roles.place(agent))
        facts = [entry.facts() for entry in entries]

        async def ask(node: str) -> list[bytes]:
            call = self._peers.client(node).claimed(agent, tombstone_epoch(place), list(models), facts)
            try:
                return await call.within(memory.timing.claim_wait_s + memory.timing.ask_s)
            except SatchelError as error:
                logger.info("%s does not say what KV agent %s has: %s", node, agent, error.message)
                return []

        answers = await asyncio.gather(*map(ask, await self._peers.others()))
        return {entry for answer in answers for entry in answer}

    async def claimed(self, agent: str, above: int, models: list[bytes], entries: list[bytes]) -> list[bytes]:
        """As `StoreClient.claimed`."""
        memory = self._memory
        place = await memory.work.in_order(lambda: memory.roles.place(agent))
        owned = memory.disk.owned
        if place.role is not Role.PRIMARY or place.epoch <= above or owned is None:
            return []
        records = [EntryRecord.from_facts(facts, (NOBODY,)).checked() for facts in entries]
        return await owned.claimed(agent, models, records)
