"""Agents as a whole: recalls, describes, lists, forks and forgets them."""

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
        kept: awaited with a fork once it is on the disk.
        forgotten: awaited with an agent that was forgotten, or may have been, if erasing failed.
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
        """Returns the memory that a stateless turn begins with.

        Raises:
            AgentElsewhere: this node has only a copy.
            QuotaExceeded: with `limits`, the tenant may add no transcripts.
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
        """Returns the transcript of the agent's main branch: OpenAI messages as JSON."""
        return await self._work.answer(lambda: self._agents.transcript(agent))

    async def describe(self, agent: str) -> AgentBranches:
        """Returns the agent's branches.

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
        """Returns agents of the tenant ("" for all), sorted by key, from the first after the key `after`."""

        def work() -> list[AgentBranches]:
            return [
                self._described(*found) for found in self._agents.list(f"{tenant}/" if tenant else "", after, limit)
            ]

        return await self._work.answer(work)

    def _described(self, agent: str, heads: list[Head]) -> AgentBranches:
        main, place = main_branch(heads), self._roles.place(agent)
        return AgentBranches(agent, main.branch if main else None, heads, place.epoch, place.role is Role.PRIMARY)

    async def blocks(self, agent: str, replicas: Sequence[Sequence[bytes]] = ()) -> list[BranchKV]:
        """Returns the KV that each of the agent's branches uses; as `StoreClient.blocks`."""

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
        """Returns how many KV entries on the disk, blocks and tails, the agent's branches use."""
        disk = self._disk.store
        return 0 if disk is None else await self._of_branches(agent, lambda found: kept_on(disk, found))

    async def _of_branches(
        self, agent: str, work: Callable[[list[Branch]], T], replicas: Sequence[Sequence[bytes]] = ()
    ) -> T:
        """Returns what `work` derives from the agent's branches. It takes a while, so it does not run in the thread
        that commits wait for."""
        found = await self._work.answer(lambda: branches_of(self._agents, agent, replicas))
        return await asyncio.to_thread(work, found)

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> int:
        """Copies an agent under a new name. Returns the number of branches.

        Raises:
            AgentNotFound, AgentExists, InvalidRequest, QuotaExceeded: there is nothing to copy, or no room for it.
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
        # Before the caller hears of the fork, and so may forget the source.
        await self._disk.copied(source, target)
        await self._kept(target)
        self._disk.on_touched(target)
        return count

    async def forget(self, agent: str) -> bool:
        """Erases the agent's memory; running turns cannot commit. Returns whether there was any.

        The transcript is erased from the disk when this returns, KV blocks soon after.
        """

        known = begun = False

        def work() -> bool:
            nonlocal known, begun
            with self._database.transaction():
                if begun:
                    # The rest has failed, and the agent may be unknown now.
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
            # Even if the answer is an error: the tombstone may have been written. An agent that still has branches
            # keeps its KV.
            self._disk.forgotten(agent)
            await self._forgotten(agent)
