"""Agents whose primary is on no live node: their copies are made again before anybody asks for them.

After the loss of a node the next turn of an agent promotes a secondary, which then copies it. An agent that has no turn
would stay with one copy less, and a second loss would be the last. So a secondary looks after every change of the
cluster's nodes which of its agents have no primary any more, and copies them to where a primary here would have its
secondaries. Nobody is promoted: a lost node that comes back has its agents as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ....cluster.config.timing import Timing
from ....cluster.errors import SatchelError
from ...protocol.store_messages import Standing
from ..agents.roles import Role, RoleTable
from .copies import LATE_TOGETHER, InOrder, Secondaries
from .peers import Peers, secondary_nodes
from .succession import TOGETHER, Succession

logger = logging.getLogger(__name__)

RETURN_S = 20.0
"""How long a lost node may take to come back before its agents are copied: a restart moves nothing."""

WAITS_S = 40.0
"""How long nodes that come and go may put that off."""

RETRY_S = 5.0
"""After which copies that failed are tried again."""

FETCHES_MAX = 3
"""How often a node is told to fetch an agent's KV, if it cannot."""


class Orphans:
    """The orphans among this node's copies. Belongs to one event loop.

    Args:
        node: this one.
        count: how many copies of each agent there should be, besides the primary.
    """

    def __init__(
        self,
        node: str,
        roles: RoleTable,
        succession: Succession,
        copies: Secondaries,
        in_order: InOrder,
        peers: Peers,
        *,
        count: int,
        timing: Timing,
    ) -> None:
        self._node, self._roles, self._in_order, self._peers = node, roles, in_order, peers
        self._succession, self._copies, self._count, self._timing = succession, copies, count, timing
        self._members: frozenset[str] | None = None
        # When to look, None while nothing has changed, and since when that is put off.
        self._look_at: float | None = None
        self._since = 0.0
        self._again = False
        self._looking: asyncio.Task[None] | None = None

    async def tend(self) -> None:
        """Begins to look if nodes came or went a while ago. Does not wait for the copies."""
        now = asyncio.get_running_loop().time()
        members = frozenset(await self._peers.others())
        if members != self._members:
            self._members = members
            self._changed(now)
        if self._look_at is None or now < self._look_at or (self._looking is not None and not self._looking.done()):
            return
        self._look_at = None
        if self._again:
            self._changed(now)
        self._looking = asyncio.create_task(self._look())

    def _changed(self, now: float) -> None:
        """Puts the next look off, so that whoever has just gone can come back."""
        if self._look_at is None:
            self._since = now
        self._look_at = min(now + RETURN_S, self._since + WAITS_S)
        self._again = self._look_at < now + RETURN_S

    async def _look(self) -> None:
        try:
            made = await self.copy()
        except SatchelError as error:
            logger.info("agents without a primary are not all copied yet: %s", error.message)
            made = False
        except Exception as error:
            # The next time tries again; nobody waits for this task.
            logger.exception("agents without a primary are not copied: %s", type(error).__name__)
            made = False
        if not made and self._look_at is None:
            self._since = asyncio.get_running_loop().time()
            self._look_at = self._since + RETRY_S

    async def copy(self) -> bool:
        """Copies this node's agents whose primary is on no live node to where copies are missing.

        Returns:
            Whether nothing is left to try again.

        Raises:
            SatchelError: another node does not say what it has.
        """
        others = await self._peers.others()
        if not self._count or not others:
            return True
        agents = await self._in_order(self._at_secondary)
        made = True
        for start in range(0, len(agents), TOGETHER):
            missing = await self._missing(agents[start : start + TOGETHER], others)
            for first in range(0, len(missing), LATE_TOGETHER):
                batch = missing[first : first + LATE_TOGETHER]
                made &= all(await asyncio.gather(*(self._copy(agent, node) for agent, node in batch)))
        return made

    def _at_secondary(self) -> list[str]:
        claims = self._roles.claims(self._roles.every())
        return [agent for agent, place in claims if place.role is Role.SECONDARY]

    async def _missing(self, agents: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
        """Returns agents that have no primary, each with a node that should get a copy from here."""
        mine: list[Standing] = await self._in_order(lambda: self._succession.standing(agents))
        theirs: dict[str, dict[str, Standing]] = {agent: {} for agent in agents}
        for node in others:
            for said in await self._peers.client(node).standing(agents).within(self._timing.ask_s):
                theirs[said.agent][node] = said
        missing: list[tuple[str, str]] = []
        for own in mine:
            known = theirs[own.agent]
            if own.role != Role.SECONDARY or not own.newest or not self._is_ours(own, known):
                continue
            for node in secondary_nodes(own.agent, others, self._count):
                has = known.get(node)
                if has is None or _rank(has) < _rank(own):
                    missing.append((own.agent, node))
        return missing

    def _is_ours(self, own: Standing, known: dict[str, Standing]) -> bool:
        """Whether the agent has no primary, and this node's copy is the latest, or the first of these by name."""
        if any(each.buried >= own.epoch or _is_primary(each, own.epoch) for each in known.values()):
            return False
        return all((_rank(own), node) > (_rank(each), self._node) for node, each in known.items())

    async def _copy(self, agent: str, node: str) -> bool:
        try:
            await self._copies.send(agent, node, self._timing.answer_s)
        except SatchelError as error:
            logger.info("node %s has no copy of agent %s, whose primary is lost: %s", node, agent, error.message)
            return False
        for _ in range(FETCHES_MAX):
            try:
                await self._peers.client(node).fetch(agent, self._node, self._timing.fetch_s)
                break
            except SatchelError as error:
                # It is computed again if a turn needs it.
                logger.info("node %s has no copy of the KV of agent %s: %s", node, agent, error.message)
        return True


def _is_primary(standing: Standing, epoch: int) -> bool:
    return standing.role == Role.PRIMARY and standing.epoch >= epoch


def _rank(standing: Standing) -> tuple[int, int]:
    """Returns what makes one copy later than another; a forgotten agent has none."""
    return (standing.epoch, standing.newest) if standing.role != Role.FORGOTTEN and standing.newest else (-1, 0)
