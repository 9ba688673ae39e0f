"""Agents' words among the nodes, as this one has them: copies that it keeps, homes that it takes over or gives back."""

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
        changed: told of an agent of which this node has something else now.

    Attributes:
        adopted: agents whose home this node became after theirs was lost.
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
        # Of copies that came lately: whose, of which home epoch, and the home's count.
        self._versions: FIFOCache[str, tuple[int, int]] = FIFOCache(VERSIONS_MAX)
        self.adopted = 0

    async def kept(self, agent: str) -> bool:
        """A turn has been committed: its words go to the nodes of the copies before its last event leaves. Whether all
        copies that should be are made."""
        self._changed(agent)
        copied = await self._copies.after_turn(agent)
        if not copied.at_primary:
            await self._succession.settle_with(agent)
        return copied.all_made

    async def promote(self, agent: str, above: int) -> int:
        """Become the agent's home after its own was lost; as `Succession.promote`."""
        try:
            epoch = await self._succession.promote(agent, above)
        finally:
            self._copies.be_late(agent)
        self.adopted += 1
        return epoch

    async def promote_here(self, agent: str, above: int) -> int:
        """As `adopt`, from the copy that is here: the home itself asks for it."""
        try:
            return await self._work.answer(lambda: self._roles.promote(agent, above).epoch)
        finally:
            self._changed(agent)
            self._copies.be_late(agent)

    async def take_secondary(self, copy: TakeSecondary) -> list[int]:
        """Keeps a copy of an agent's branches. Returns those whose contents are missing."""
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
                # What is here was forgotten.
                await self._tombstones.bury(agent, tombstone_epoch(Place(epoch, Role.SECONDARY)), newest(copy.heads))
            missing = await self._work.answer(work)
            await self._disk.make_room_for(agent)
            return missing
        finally:
            self._changed(agent)

    async def send_secondary(self, agent: str, to: str) -> int:
        """Bring another node's copy of the agent up to date with what is here. Returns the home epoch of that."""
        return (await self._copies.send(agent, to, self._answer_s)).epoch

    async def take_in(self, handed: TakeIn) -> int:
        """Keep what a former home of the agent has and this one has not. Returns how many branches that were."""
        agent = handed.agent
        branches = [(branch.head, branch.content) for branch in handed.branches if branch.content is not None]
        memory = Memory(agent, handed.epoch, branches)

        def work() -> int:
            self._agents.witness([head for head, _ in memory.branches])
            lacking = self._roles.lacking(memory)
            if lacking:
                self._agents.take_in(agent, lacking, time.monotonic())
            if memory.epoch == self._roles.place(agent).epoch:
                # Copies may have what that one had instead. They take a later home's in any case.
                self._roles.promote(agent, memory.epoch)
            return len(lacking)

        count = await self._work.answer(work)
        await self._disk.make_room_for(agent)
        self._changed(agent)
        self._copies.be_late(agent)
        return count

    async def standing(self, agents: Sequence[str]) -> list[Standing]:
        """What this node says of these agents, of those that it has heard of."""

        def work() -> list[Standing]:
            found = self._succession.standing(agents)
            return [replace(said, barred=self._agents.buried(said.agent)) for said in found]

        return await self._work.answer(work)
