"""This node's part in replication: copies of transcripts that it keeps, and agents whose primary it becomes or was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cachetools import FIFOCache

from ...protocol.store_messages import Standing, TakeIn, TakeSecondary
from ..agents.roles import Memory, Place, Role, life, newest, tombstone_epoch
from ..replication.copies import Secondaries
from ..replication.succession import Succession
from .node_memory import NodeMemory
from .tombstones import Tombstones

VERSIONS_MAX = 10_000


class SecondaryKeeper:
    """
    Args:
        changed: called with an agent whose state on this node has changed.

    Attributes:
        adopted: agents that this node was promoted for after their primary was lost.
    """

    def __init__(
        self,
        memory: NodeMemory,
        copies: Secondaries,
        succession: Succession,
        tombstones: Tombstones,
        *,
        changed: Callable[[str], object],
    ) -> None:
        self._answer_s = memory.timing.answer_s
        self._work, self._database, self._agents = memory.work, memory.database, memory.agents
        self._roles, self._quotas, self._disk = memory.roles, memory.quotas, memory.disk
        self._copies, self._succession, self._tombstones = copies, succession, tombstones
        self._changed = changed
        # Recent copies: the agent, the home epoch, and the home's version.
        self._versions: FIFOCache[str, tuple[int, int]] = FIFOCache(VERSIONS_MAX)
        self.adopted = 0

    async def kept(self, agent: str) -> bool:
        """Copies a committed turn to the secondaries, before its last event is sent. Returns whether all required
        copies were made."""
        self._changed(agent)
        copied = await self._copies.after_turn(agent)
        if not copied.at_primary:
            await self._succession.settle_with(agent)
        return copied.all_made

    async def promote(self, agent: str, above: int) -> int:
        """Makes this node the agent's primary after its own was lost; as `Succession.promote`."""
        try:
            epoch = await self._succession.promote(agent, above)
        finally:
            self._copies.be_late(agent)
        self.adopted += 1
        return epoch

    async def promote_here(self, agent: str, above: int) -> int:
        """As `promote`, from the copy on this node: the primary itself asks for it."""
        try:
            return await self._work.answer(lambda: self._roles.promote(agent, above).epoch)
        finally:
            self._changed(agent)
            self._copies.be_late(agent)

    async def take_secondary(self, copy: TakeSecondary) -> list[int]:
        """Stores a copy of an agent's branches. Returns the branches whose contents are missing."""
        agent, epoch = copy.agent, copy.epoch
        loop = asyncio.get_running_loop()

        def earlier() -> int:
            place = self._roles.place(agent)
            if place.role is Role.PRIMARY and place.epoch < epoch:
                loop.call_soon_threadsafe(self._succession.doubt, agent)
            return place.epoch

        def work() -> list[int]:
            if self._versions.get(agent, (0, 0)) > (epoch, copy.version):
                return []
            self._agents.witness(copy.heads)
            with self._database.transaction():
                missing = self._roles.take_secondary(agent, epoch, copy.heads, copy.contents)
                self._agents.make_room(agent, time.monotonic())
            if not missing:
                self._versions[agent] = epoch, copy.version
            return missing

        self._quotas.note(copy.limits)
        try:
            if life(await self._work.in_order(earlier)) < life(epoch):
                # The agent's old branches here were forgotten.
                await self._tombstones.bury(agent, tombstone_epoch(Place(epoch, Role.SECONDARY)), newest(copy.heads))
            missing = await self._work.answer(work)
            await self._disk.make_room_for(agent)
            return missing
        finally:
            self._changed(agent)

    async def send_secondary(self, agent: str, to: str) -> int:
        """Updates another node's copy of the agent from this node's. Returns the home epoch of the copy."""
        return (await self._copies.send(agent, to, self._answer_s)).epoch

    async def take_in(self, handed: TakeIn) -> int:
        """Stores branches that a former primary of the agent has and this one lacks. Returns how many."""
        agent = handed.agent
        branches = [(branch.head, branch.content) for branch in handed.branches if branch.content is not None]
        memory = Memory(agent, handed.epoch, branches)

        def work() -> int:
            self._agents.witness([head for head, _ in memory.branches])
            lacking = self._roles.lacking(memory)
            if lacking:
                self._agents.take_in(agent, lacking, time.monotonic())
            if memory.epoch == self._roles.place(agent).epoch:
                # Secondaries may have the former primary's branches instead. They accept a later primary's in any case.
                self._roles.promote(agent, memory.epoch)
            return len(lacking)

        count = await self._work.answer(work)
        await self._disk.make_room_for(agent)
        self._changed(agent)
        self._copies.be_late(agent)
        return count

    async def standing(self, agents: Sequence[str]) -> list[Standing]:
        """Returns this node's state of those of these agents that it knows."""

        def work() -> list[Standing]:
            found = self._succession.standing(agents)
            return [replace(said, barred=self._agents.buried(said.agent)) for said in found]

        return await self._work.answer(work)
