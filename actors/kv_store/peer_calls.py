"""The methods of a node's store that the stores of other nodes call. Every answer is `{"result": ...}` or an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from cachetools import FIFOCache

from ...cluster.errors import SatchelError, Unavailable
from .actor import Answer, KVStoreActor
from .agents.branches import Content, Head
from .agents.homes import Memory, Place, Role, buried_up_to, life, newest
from .disk.quotas import Limits
from .replication.copies import Copies
from .replication.peers import head_from_wire
from .replication.succession import Succession
from .transfer.machine.pull_wire import Wanted
from .transfer.node_blocks import NodeBlocks

VERSIONS_MAX = 10_000


class PeerCalls(KVStoreActor):
    """A part of `NodeStoreActor`, which sets these."""

    _loop: asyncio.AbstractEventLoop
    _succession: Succession
    _copies: Copies
    _blocks: NodeBlocks | None
    # Of copies that came lately: of which home epoch, and the home's count.
    _versions: FIFOCache[str, tuple[int, int]]

    def _note(self, agent: str) -> None:
        """What this node has of the agent has changed."""
        raise NotImplementedError

    async def become_home(self, agent: str, above: int) -> Answer:
        """As `adopt`, from the copy that is here: the home itself asks for it. Returns the new epoch."""
        answer = await self._answer(lambda: self._homes.adopt(agent, above).epoch)
        self._note(agent)
        self._copies.be_late(agent)
        return answer

    async def take_copy(
        self,
        agent: str,
        epoch: int,
        version: int,
        heads: list[dict[str, Any]],
        contents: dict[int, list[Any]],
        limits: Limits | None = None,
    ) -> Answer:
        """Keep a copy of an agent's words.

        Args:
            epoch: the home's.
            version: the home's count when it had these branches. What was sent earlier and comes later changes nothing.
            limits: of the tenant, as the home knows them. A copy is never refused for them; KV makes room for it.

        Returns:
            The branches whose contents are missing (`Homes.take_copy`).
        """
        copied = [head_from_wire(head) for head in heads]
        found = {branch: Content(*content) for branch, content in contents.items()}

        def earlier() -> int:
            place = self._homes.place(agent)
            if place.role is Role.HOME and place.epoch < epoch:
                self._loop.call_soon_threadsafe(self._succession.doubt, agent)
            return place.epoch

        def work() -> list[int]:
            if self._versions.get(agent, (0, 0)) > (epoch, version):
                return []
            self._agents.witness(copied)
            with self._database.transaction():
                missing = self._homes.take_copy(agent, epoch, copied, found)
                self._agents.make_room(agent, time.monotonic())
            if not missing:
                self._versions[agent] = epoch, version
            return missing

        self._quotas.note(limits)

        try:
            if life(await self._in_order(earlier)) < life(epoch):
                # What is here was forgotten.
                await self._bury(agent, buried_up_to(Place(epoch, Role.COPY)), newest(copied))
            answer = await self._answer(work)
            await self._make_room_for(agent)
            return answer
        except SatchelError as error:
            return {"error": error.to_wire()}
        finally:
            self._note(agent)

    async def send_copy(self, agent: str, to: str) -> Answer:
        """Bring another node's copy of the agent up to date with what is here. Returns the home epoch of that."""

        async def work() -> int:
            return (await self._copies.send(agent, to, self._timing.answer_s)).epoch

        return await self._guarded(work())

    async def take_in(
        self, agent: str, epoch: int, heads: list[dict[str, Any]], contents: dict[int, list[Any]]
    ) -> Answer:
        """Keep what a former home of the agent has and this one has not. Returns how many branches that were."""
        memory = Memory(agent, epoch, [(head_from_wire(head), Content(*contents[head["branch"]])) for head in heads])

        def work() -> int:
            self._agents.witness([head for head, _ in memory.branches])
            lacking = self._homes.lacking(memory)
            if lacking:
                self._agents.take_in(agent, lacking, time.monotonic())
            if memory.epoch == self._homes.place(agent).epoch:
                # Copies may have what that one had instead. They take a later home's in any case.
                self._homes.adopt(agent, memory.epoch)
            return len(lacking)

        answer = await self._answer(work)
        if "result" in answer:
            await self._make_room_for(agent)
            self._note(agent)
            self._copies.be_late(agent)
        return answer

    async def standing(self, agents: list[str]) -> Answer:
        """What this node says of these agents (`succession.Standing`), of those that it has heard of."""

        def work() -> list[list[Any]]:
            found = self._succession.standing(agents)
            return [list(said._replace(barred=self._agents.buried(said.agent))) for said in found]

        return await self._answer(work)

    async def doubt(self, agent: str) -> Answer:
        """The agent may have another home now; this node finds out."""
        self._succession.doubt(agent)
        return {"result": None}

    async def fetch(self, agent: str, source: str, deadline_s: float) -> Answer:
        """Pull what another node's disk has of the agent's KV and this one's has not, of all branches known here.

        Returns:
            `{"tokens", "blocks", "bytes"}`: tokens of the chains that are here now, and what has come for it.
        """

        def contents() -> list[tuple[Head, Content]]:
            heads = [head for head in self._agents.heads(agent) if head.root]
            return [(head, found) for head in heads if (found := self._agents.content(head)) is not None]

        async def work() -> dict[str, int]:
            if self._blocks is None:
                raise Unavailable("this node keeps no KV on disk")
            return await self._blocks.fetch(agent, await self._in_order(contents), source, deadline_s)

        return await self._guarded(work())

    async def pull(
        self, source: str, wanted: list[Any], owner: str, deadline_s: float, limits: Limits | None = None
    ) -> Answer:
        """Fetch a chain for a request that is about to be computed here.

        Args:
            wanted: model id, root id, block ids, and the tokens after them.
            limits: of the tenant whose KV it is.
        """
        model, root, chain, rest = wanted
        await self._limit_kv(limits)

        async def work() -> dict[str, Any]:
            if self._blocks is None:
                raise Unavailable("this node keeps no KV on disk")
            return await self._blocks.pull(Wanted(model, root, tuple(chain), None, rest), source, owner, deadline_s)

        return await self._guarded(work())

    async def block_addresses(self) -> Answer:
        """Where this node's blocks are served, the fastest link first: [host, port] each."""
        return {"result": self._blocks.addresses if self._blocks is not None else []}

    async def buried(self) -> Answer:
        """[agent, epoch, number] of those that were forgotten: nothing up to that epoch may be there any more, and what
        turns say that began before that number is not kept."""

        def work() -> list[tuple[str, int, int]]:
            places = [(agent, self._homes.place(agent)) for agent in self._agents.forgotten()]
            found = [(agent, epoch) for agent, place in places if (epoch := buried_up_to(place)) >= 0]
            return [(agent, epoch, self._agents.buried(agent)) for agent, epoch in found]

        return await self._answer(work)

    async def bury(self, agent: str, epoch: int, number: int) -> Answer:
        """Forget an agent that was forgotten elsewhere (see `buried`), unless it lives again in a later epoch."""
        return await self._guarded(self._bury(agent, epoch, number))

    async def _bury(self, agent: str, epoch: int, number: int) -> bool:
        begun = False

        def work() -> bool:
            nonlocal begun
            # Where only the rest fails, it is no news any more when all is done again.
            if not begun and not self._homes.to_bury([(agent, epoch)]):
                return False
            begun = True
            with self._database.transaction():
                self._agents.bury(agent, time.time(), number)
                self._homes.bury(agent, epoch)
            self._database.scrub()
            return True

        if self._owned is not None:
            await self._owned.ready()
        buried = await self._in_order(work)
        if buried:
            self._wake(agent)
            self._note(agent)
            if self._owned is not None:
                self._owned.forgotten(agent)
        return buried

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> Answer:
        try:
            found = await work
        except SatchelError as error:
            return {"error": error.to_wire()}
        return found if isinstance(found, dict) and "error" in found else {"result": found}
