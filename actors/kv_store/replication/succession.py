"""Which of several nodes is an agent's home, after nodes were lost, cut off, and came back.

No node knows it all, so they ask each other: what was forgotten, and whether somebody is home in a later epoch. A node
does so before it announces everything (when it starts, and when the router has lost sight of it), every now and then,
and where another one says so. Who is home no more hands over what the new home has not, and keeps a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ....cluster.errors import AgentNotFound, SatchelError
from ....cluster.timing import Timing
from ..agents.homes import NOWHERE, Homes, Memory, Place, Role, buried_up_to, newest, outranks
from .copies import InOrder
from .peers import Peers, content_to_wire, head_to_wire

logger = logging.getLogger(__name__)

HANDING_MAX = 3
"""How often handing over begins again because the agent speaks meanwhile."""

TOGETHER = 512
DOUBTS_MAX = 10_000


class Standing(NamedTuple):
    """What a node says of an agent: its place, when the agent spoke last (0 where it has nothing), up to which epoch it
    was forgotten, and the number before which turns that began are barred since."""

    agent: str
    epoch: int
    role: int
    newest: int
    buried: int
    barred: int = 0


class Succession:
    """For one event loop.

    Args:
        node: this one.
        heads: an agent's branches; for the thread of `in_order`.
        bury: forgets an agent here, up to an epoch; the number is that of its tombstone elsewhere.
        changed: told of agents whose place has changed.
        timing: how long another node has to say what it knows, and to take an agent.
    """

    def __init__(
        self,
        node: str,
        homes: Homes,
        heads: Callable[[str], Sequence[Any]],
        in_order: InOrder,
        peers: Peers,
        *,
        bury: Callable[[str, int, int], Awaitable[object]],
        changed: Callable[[str], None],
        timing: Timing,
    ) -> None:
        self._node, self._homes, self._heads, self._in_order, self._peers = node, homes, heads, in_order, peers
        self._bury, self._changed = bury, changed
        self._ask_s, self._hand_s = timing.ask_s, timing.answer_s
        self._doubts: dict[str, None] = {}
        # Nodes that did not say what happened there when they were asked.
        self._unheard: set[str] = set()
        self.awake = asyncio.Event()

    def doubt(self, agent: str) -> None:
        """It may live elsewhere: the others are asked soon."""
        if len(self._doubts) < DOUBTS_MAX:
            self._doubts[agent] = None
            self.awake.set()

    def standing(self, agents: Sequence[str]) -> list[Standing]:
        """What this node says of those that it has heard of. For the thread of `in_order`."""
        found: list[Standing] = []
        for agent in agents:
            place = self._homes.place(agent)
            if place != NOWHERE:
                spoke = newest(self._heads(agent))
                found.append(Standing(agent, place.epoch, int(place.role), spoke, buried_up_to(place)))
        return found

    async def learn(self) -> None:
        """Hear from all other nodes what was forgotten and who lives elsewhere now; `resolve` asks those again that do
        not answer."""
        self._unheard = set(await self._peers.others())
        await self._learn_from_unheard()

    @property
    def heard(self) -> bool:
        """Whether everybody who was asked has answered."""
        return not self._unheard

    async def _learn_from_unheard(self) -> None:
        await asyncio.gather(*map(self._learn_from, self._unheard))

    async def _learn_from(self, node: str) -> None:
        try:
            told = await self._peers.call(node, "buried", timeout_s=self._ask_s)
            numbers = {agent: number for agent, _, number in told}
            pairs = [(agent, epoch) for agent, epoch, _ in told]
            for agent, epoch in await self._in_order(lambda: self._homes.to_bury(pairs)):
                await self._bury(agent, epoch, numbers[agent])
            mine = await self._in_order(self._homes.every)
            for start in range(0, len(mine), TOGETHER):
                await self._ask(node, mine[start : start + TOGETHER])
        except SatchelError as error:
            logger.warning("not all is known of what happened elsewhere: %s", error.message)
        else:
            self._unheard.discard(node)

    async def resolve(self) -> None:
        """Ask the others of those that are in doubt, and those that have not answered before; again later where nobody
        can tell."""
        if self._unheard:
            others = await self._peers.others()
            self._unheard.intersection_update(others)
            await self._learn_from_unheard()
        doubts, self._doubts = list(self._doubts), {}
        if doubts:
            for node in await self._peers.others():
                try:
                    await self._ask(node, doubts)
                except SatchelError as error:
                    logger.info("node %s does not tell where agents live: %s", node, error.message)

    async def settle_with(self, agent: str) -> None:
        """Another node knows of a later home, or that the agent was forgotten: find out, and give way."""
        self.doubt(agent)
        await self.resolve()

    async def _ask(self, node: str, agents: Sequence[str]) -> None:
        for said in await self._peers.call(node, "standing", list(agents), timeout_s=self._ask_s):
            await self._hear(node, Standing(*said))

    async def _hear(self, node: str, said: Standing) -> None:
        mine: Place = await self._in_order(lambda: self._homes.place(said.agent))
        if mine != NOWHERE and mine.role is not Role.GONE and said.buried >= mine.epoch:
            await self._bury(said.agent, said.buried, said.barred)
        elif mine.role is Role.HOME and outranks(said.epoch, node, mine.epoch, self._node):
            if said.role == Role.HOME:
                try:
                    await self.give_way(said.agent, node, said.epoch)
                except SatchelError as error:
                    logger.warning("agent %s is not handed over to %s yet: %s", said.agent, node, error.message)
                    self._doubts[said.agent] = None
            elif said.epoch > mine.epoch:
                # A copy of a later home, which another node is.
                self._doubts[said.agent] = None

    async def give_way(self, agent: str, to: str, epoch: int, sent: Memory | None = None) -> bool:
        """Be no home of the agent any more, since another node is in that epoch; it gets what it has not.

        Args:
            sent: what it has already.

        Returns:
            Whether that is done; False where the agent goes on speaking here.

        Raises:
            SatchelError: the other node does not take it.
        """
        for _ in range(HANDING_MAX):
            handed = frozenset((head.branch, head.epoch) for head, _ in sent.branches) if sent else frozenset()
            if await self._in_order(lambda handed=handed: self._homes.demote(agent, epoch, handed)):
                logger.warning("agent %s lives on %s now (epoch %d)", agent, to, epoch)
                self._changed(agent)
                return True
            try:
                memory: Memory = await self._in_order(lambda: self._homes.memory(agent))
            except AgentNotFound:
                # What there is does not verify.
                return await self._in_order(lambda: self._homes.demote(agent, epoch))
            heads = [head_to_wire(head) for head, _ in memory.branches]
            contents = {head.branch: content_to_wire(content) for head, content in memory.branches}
            await self._peers.call(to, "take_in", agent, memory.epoch, heads, contents, timeout_s=self._hand_s)
            sent = memory
        self.doubt(agent)
        return False

    async def adopt(self, agent: str, above: int) -> int:
        """Become the agent's home after its own was lost: with the latest copy that any node has that answers.

        Returns:
            The new home epoch.

        Raises:
            AgentNotFound: nobody has a copy, or the agent was forgotten.
        """
        (mine,) = await self._in_order(lambda: self.standing([agent])) or [Standing(agent, 0, int(Role.GONE), 0, -1)]
        if mine.role == Role.HOME and mine.epoch > above:
            return mine.epoch
        others = await self._peers.others()
        answers = await asyncio.gather(*(self._standing_of(node, agent) for node in others))
        told = {node: said for node, said in zip(others, answers, strict=True) if said is not None}
        buried, barred = max(((said.buried, said.barred) for said in told.values()), default=(-1, 0))
        if buried >= max(mine.epoch, 1):
            await self._bury(agent, buried, barred)
        best = max(told, key=lambda node: (told[node].epoch, told[node].newest), default="")
        if best and told[best].newest and (told[best].epoch, told[best].newest) > (mine.epoch, mine.newest):
            try:
                await self._peers.call(best, "send_copy", agent, self._node, timeout_s=self._ask_s)
            except SatchelError as error:
                logger.warning("node %s has a later copy of agent %s: %s", best, agent, error.message)
        above = max([above, *(said.epoch for said in told.values() if said.role != Role.GONE)])
        place: Place = await self._in_order(lambda: self._homes.adopt(agent, above))
        self._changed(agent)
        homes = [node for node, said in told.items() if said.role == Role.HOME]
        await asyncio.gather(*(self._tell(node, agent) for node in homes))
        return place.epoch

    async def _standing_of(self, node: str, agent: str) -> Standing | None:
        try:
            said = await self._peers.call(node, "standing", [agent], timeout_s=self._ask_s)
        except SatchelError:
            return None
        return Standing(*said[0]) if said else None

    async def _tell(self, node: str, agent: str) -> None:
        try:
            await self._peers.call(node, "doubt", agent, timeout_s=self._ask_s)
        except SatchelError as error:
            # It asks by itself when it is back.
            logger.info("node %s does not know that agent %s has moved: %s", node, agent, error.message)
