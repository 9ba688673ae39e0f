"""Decides which node is an agent's primary after nodes were lost, partitioned, or came back.

No node has the whole state, so nodes ask each other which agents were forgotten and which have a later primary. A node
asks before it announces its agents (after its start, and after the router lost it), periodically, and when another node
tells it to. A primary that steps down hands over the branches that the new one lacks, and stays a secondary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ....cluster.config.timing import Timing
from ....cluster.errors import AgentNotFound, SatchelError
from ...protocol.store_messages import BranchMemory, Standing, TakeIn
from ..agents.roles import NOWHERE, Memory, Place, Role, RoleTable, newest, outranks, tombstone_epoch
from .copies import InOrder
from .peers import Peers

logger = logging.getLogger(__name__)

HANDING_MAX = 3
"""How often handing over begins again because the agent had a turn meanwhile."""

TOGETHER = 512
DOUBTS_MAX = 10_000


class Succession:
    """Settles primaries with the other nodes, for one event loop.

    Args:
        node: this one.
        heads: an agent's branches; for the thread of `in_order`.
        bury: forgets an agent here, up to an epoch; the number is that of its tombstone elsewhere.
        changed: called with agents whose place has changed.
        timing: how long another node may take to answer, and to take an agent.
    """

    def __init__(
        self,
        node: str,
        roles: RoleTable,
        heads: Callable[[str], Sequence[Any]],
        in_order: InOrder,
        peers: Peers,
        *,
        bury: Callable[[str, int, int], Awaitable[object]],
        changed: Callable[[str], None],
        timing: Timing,
    ) -> None:
        self._node, self._roles, self._heads, self._in_order, self._peers = node, roles, heads, in_order, peers
        self._bury, self._changed = bury, changed
        self._ask_s, self._hand_s = timing.ask_s, timing.answer_s
        self._doubts: dict[str, None] = {}
        # Nodes that have not answered `learn` yet.
        self._unheard: set[str] = set()
        self.awake = asyncio.Event()

    def doubt(self, agent: str) -> None:
        """Notes that the agent may have another primary: `resolve` asks the other nodes soon."""
        if len(self._doubts) < DOUBTS_MAX:
            self._doubts[agent] = None
            self.awake.set()

    def standing(self, agents: Sequence[str]) -> list[Standing]:
        """Returns this node's state of the agents that it knows. Call it in the thread of `in_order`."""
        standings: list[Standing] = []
        for agent in agents:
            place = self._roles.place(agent)
            if place != NOWHERE:
                latest = newest(self._heads(agent))
                standings.append(Standing(agent, place.epoch, int(place.role), latest, tombstone_epoch(place)))
        return standings

    async def learn(self) -> None:
        """Asks all other nodes which agents were forgotten and which have a later primary. `resolve` retries nodes that
        do not answer."""
        self._unheard = set(await self._peers.others())
        await self._learn_from_unheard()

    @property
    def heard(self) -> bool:
        """Whether every node that `learn` asked has answered."""
        return not self._unheard

    async def _learn_from_unheard(self) -> None:
        await asyncio.gather(*map(self._learn_from, self._unheard))

    async def _learn_from(self, node: str) -> None:
        try:
            told = await self._peers.client(node).buried().within(self._ask_s)
            numbers = {each.agent: each.number for each in told}
            pairs = [(each.agent, each.epoch) for each in told]
            for agent, epoch in await self._in_order(lambda: self._roles.to_bury(pairs)):
                await self._bury(agent, epoch, numbers[agent])
            mine = await self._in_order(self._roles.every)
            for start in range(0, len(mine), TOGETHER):
                await self._ask(node, mine[start : start + TOGETHER])
        except SatchelError as error:
            logger.warning("node %s did not tell its forgotten and moved agents: %s", node, error.message)
        else:
            self._unheard.discard(node)

    async def resolve(self) -> None:
        """Asks the other nodes about doubtful agents, and retries `learn` with nodes that have not answered."""
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
                    logger.info("node %s did not tell its agents' places: %s", node, error.message)

    async def settle_with(self, agent: str) -> None:
        """Resolves an agent at once of which another node knows a later primary or a tombstone."""
        self.doubt(agent)
        await self.resolve()

    async def _ask(self, node: str, agents: Sequence[str]) -> None:
        for said in await self._peers.client(node).standing(agents).within(self._ask_s):
            await self._hear(node, said)

    async def _hear(self, node: str, theirs: Standing) -> None:
        mine: Place = await self._in_order(lambda: self._roles.place(theirs.agent))
        if mine != NOWHERE and mine.role is not Role.FORGOTTEN and theirs.buried >= mine.epoch:
            await self._bury(theirs.agent, theirs.buried, theirs.barred)
        elif mine.role is Role.PRIMARY and outranks(theirs.epoch, node, mine.epoch, self._node):
            if theirs.role == Role.PRIMARY:
                try:
                    await self.step_down(theirs.agent, node, theirs.epoch)
                except SatchelError as error:
                    logger.warning("agent %s is not handed over to %s yet: %s", theirs.agent, node, error.message)
                    self._doubts[theirs.agent] = None
            elif theirs.epoch > mine.epoch:
                # A secondary of a later primary on some other node.
                self._doubts[theirs.agent] = None

    async def step_down(self, agent: str, to: str, epoch: int, sent: Memory | None = None) -> bool:
        """Steps down for the primary `to` in `epoch`, after handing over the branches that it lacks.

        Args:
            sent: what `to` has already.

        Returns:
            Whether this node stepped down; False if new turns kept changing the agent's branches.

        Raises:
            SatchelError: the other node refused the branches.
        """
        for _ in range(HANDING_MAX):
            had = frozenset((head.branch, head.epoch) for head, _ in sent.branches) if sent else frozenset()
            if await self._in_order(lambda had=had: self._roles.demote(agent, epoch, had)):
                logger.warning("agent %s lives on %s now (epoch %d)", agent, to, epoch)
                self._changed(agent)
                return True
            try:
                memory: Memory = await self._in_order(lambda: self._roles.memory(agent))
            except AgentNotFound:
                # No branch verifies.
                return await self._in_order(lambda: self._roles.demote(agent, epoch))
            handed = TakeIn(agent, memory.epoch, [BranchMemory(*branch) for branch in memory.branches])
            await self._peers.client(to).take_in(handed).within(self._hand_s)
            sent = memory
        self.doubt(agent)
        return False

    async def promote(self, agent: str, above: int) -> int:
        """Promotes this node after the primary was lost, with the latest copy among the nodes that answer.

        Returns:
            The new home epoch.

        Raises:
            AgentNotFound: no node has a copy, or the agent was forgotten.
        """
        (mine,) = await self._in_order(lambda: self.standing([agent])) or [
            Standing(agent, 0, int(Role.FORGOTTEN), 0, -1)
        ]
        if mine.role == Role.PRIMARY and mine.epoch > above:
            return mine.epoch
        others = await self._peers.others()
        answers = await asyncio.gather(*(self._standing_of(node, agent) for node in others))
        theirs = {node: answer for node, answer in zip(others, answers, strict=True) if answer is not None}
        buried, barred = max(((each.buried, each.barred) for each in theirs.values()), default=(-1, 0))
        if buried >= max(mine.epoch, 1):
            await self._bury(agent, buried, barred)
        best = max(theirs, key=lambda node: (theirs[node].epoch, theirs[node].newest), default="")
        if best and theirs[best].newest and (theirs[best].epoch, theirs[best].newest) > (mine.epoch, mine.newest):
            try:
                await self._peers.client(best).send_secondary(agent, self._node).within(self._ask_s)
            except SatchelError as error:
                logger.warning("node %s has a later copy of agent %s, but: %s", best, agent, error.message)
        above = max([above, *(each.epoch for each in theirs.values() if each.role != Role.FORGOTTEN)])
        place: Place = await self._in_order(lambda: self._roles.promote(agent, above))
        self._changed(agent)
        primaries = [node for node, each in theirs.items() if each.role == Role.PRIMARY]
        await asyncio.gather(*(self._tell(node, agent) for node in primaries))
        return place.epoch

    async def _standing_of(self, node: str, agent: str) -> Standing | None:
        try:
            said = await self._peers.client(node).standing([agent]).within(self._ask_s)
        except SatchelError:
            return None
        return said[0] if said else None

    async def _tell(self, node: str, agent: str) -> None:
        try:
            await self._peers.client(node).doubt(agent).within(self._ask_s)
        except SatchelError as error:
            # A node that comes back asks by itself.
            logger.info("node %s does not know that agent %s has moved: %s", node, agent, error.message)
