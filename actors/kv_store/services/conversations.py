"""Agents' words as a whole: recalled, described, listed, copied, forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ....cluster.errors import AgentNotFound
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import TOKEN_BYTES
from ...protocol.replica_messages import KVSelection
from ...protocol.store_messages import AgentBranches, BranchKV, BranchMemory, Head, Limits, Recalled
from ..agents.branches import main_branch
from ..agents.claims import Branch, Claims
from ..agents.roles import Role
from .disk import kept_on
from .node_memory import NodeMemory
from .ownership import branches_of

T = TypeVar("T")


class Conversations:
    """
    Args:
        kept: awaited with a copy of an agent that is on the disk.
        forgotten: awaited with an agent that was forgotten, or may have been: erasing it has failed.
    """

    def __init__(
        self,
        memory: NodeMemory,
        *,
        kept: Callable[[str], Awaitable[object]],
        forgotten: Callable[[str], Awaitable[object]],
    ) -> None:
        self._work, self._database, self._agents = memory.work, memory.database, memory.agents
        self._roles, self._quotas, self._disk = memory.roles, memory.quotas, memory.disk
        self._kept, self._forgotten = kept, forgotten

    async def recall(
        self, agent: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Recalled:
        """What a stateless turn begins with.

        Raises:
            AgentElsewhere: this node has but a copy.
            QuotaExceeded: with `limits`, the tenant may add no words.
        """
        self._quotas.note(limits)

        def work() -> Recalled:
            self._roles.check(agent)
            if limits:
                self._quotas.check(agent)
            since, found = self._agents.recall(agent, files_id, known)
            return Recalled(since, [BranchMemory(*branch) for branch in found], self._agents.let_go(agent))

        return await self._work.answer(work)

    async def transcript(self, agent: str) -> bytes:
        """What the agent said and heard on its main branch: OpenAI messages as JSON."""
        return await self._work.answer(lambda: self._agents.transcript(agent))

    async def describe(self, agent: str) -> AgentBranches:
        """The agent's branches.

        Raises:
            AgentNotFound: there are none.
        """

        def work() -> AgentBranches:
            heads = self._agents.heads(agent)
            if not heads:
                raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
            return self._described(agent, heads)

        return await self._work.answer(work)

    async def page(self, tenant: str, after: str, limit: int) -> list[AgentBranches]:
        """Agents of the tenant, "" for all, in the order of their keys, those after the key `after`."""

        def work() -> list[AgentBranches]:
            return [
                self._described(*found) for found in self._agents.list(f"{tenant}/" if tenant else "", after, limit)
            ]

        return await self._work.answer(work)

    def _described(self, agent: str, heads: list[Head]) -> AgentBranches:
        main, place = main_branch(heads), self._roles.place(agent)
        return AgentBranches(agent, main.branch if main else None, heads, place.epoch, place.role is Role.PRIMARY)

    async def blocks(self, agent: str, replicas: Sequence[Sequence[bytes]] = ()) -> list[BranchKV]:
        """What each of the agent's branches stands on; as `StoreClient.blocks`."""

        def hashed(branches: list[Branch]) -> list[BranchKV]:
            shared = [branch for branch in branches if branch.root]
            size = BLOCK_TOKENS * TOKEN_BYTES
            stood = ((each, Claims([each])) for each in shared)
            return [
                BranchKV(at.model, KVSelection(at.root, [*on.blocks], at.tokens[:size], on.embeddings))
                for at, on in stood
            ]

        return await self._of_branches(agent, hashed, replicas)

    async def disk_kept(self, agent: str) -> int:
        """How many entries of KV on the disk, blocks and tails, the agent's branches stand on."""
        disk = self._disk.store
        return 0 if disk is None else await self._of_branches(agent, lambda found: kept_on(disk, found))

    async def _of_branches(
        self, agent: str, work: Callable[[list[Branch]], T], replicas: Sequence[Sequence[bytes]] = ()
    ) -> T:
        """What follows from the agent's token ids, not by the worker: it takes a while, and commits wait for that."""
        found = await self._work.answer(lambda: branches_of(self._agents, agent, replicas))
        return await asyncio.to_thread(work, found)

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> int:
        """Copy an agent. Returns the number of branches.

        Raises:
            AgentNotFound, AgentExists, InvalidRequest, QuotaExceeded: there is nothing to copy, or no place for it.
        """
        self._quotas.note(limits)

        def work() -> int:
            self._roles.check(source)
            self._roles.check(target)
            with self._database.transaction():
                count = self._agents.fork(source, target, time.monotonic(), time.time())
                self._roles.settle(target)
                self._quotas.check(target)
            return count

        count = await self._work.answer(work)
        await self._disk.make_room_for(target)
        # Before anybody hears of the copy, and so may forget the source.
        await self._disk.copied(source, target)
        await self._kept(target)
        self._disk.on_touched(target)
        return count

    async def forget(self, agent: str) -> bool:
        """Erase the agent's memory; turns under way cannot commit. Returns whether there was any.

        The transcript is off the disk when this returns, and KV blocks soon after.
        """

        known = begun = False

        def work() -> bool:
            nonlocal known, begun
            with self._database.transaction():
                if begun:
                    # The rest has failed, and the agent need not be known any more.
                    self._agents.bury(agent, time.time())
                else:
                    begun = self._agents.lives(agent)
                    known = self._agents.forget(agent, time.time())
                if known:
                    self._roles.bury(agent, 0)
            self._database.scrub()
            return known

        try:
            return await self._work.answer(work)
        finally:
            # Even where the answer is an error: the tombstone may be there. What still has branches keeps its KV.
            self._disk.forgotten(agent)
            await self._forgotten(agent)
