"""Copies agents to their secondaries: branches before a turn's last event is sent, KV afterwards. Retries failures.

A secondary takes only KV of branches that it has. A replica may write a turn's KV before the turn is committed and its
branch copied; that KV is copied after the branch.

Only one copy of an agent is on its way to a node at a time, so copies arrive in order. A copy that arrives after its
caller gave up is recognized by its version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ....cluster.config.timing import Timing
from ....cluster.errors import AgentNotFound, SatchelError, StaleEpoch, Unavailable
from ...protocol.store_messages import Limits, TakeSecondary
from ..agents.roles import Memory, Role, RoleTable
from .peers import Peers, secondary_nodes

logger = logging.getLogger(__name__)

InOrder = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs its argument in the thread that owns `RoleTable`."""

FETCHING_MAX = 2
"""Agents whose KV is copied at the same time; others wait."""

BEHIND_MAX = 1000
"""Agents whose KV waits to be copied. Beyond it, an agent's KV is not copied before its next turn."""

LATE_MAX = 20_000
LATE_TOGETHER = 8
"""Failed copies that are retried at most, and how many of them at the same time."""


WRITTEN_MAX = 20_000
"""Agents of which it is remembered that KV was written since their branch was copied."""


class Copied(NamedTuple):
    """The result of copying a turn: whether no node knows a later primary, and whether all required copies were
    made."""

    at_primary: bool
    all_made: bool


class Secondaries:
    """The copies of this node's agents on other nodes. Belongs to one event loop.

    Args:
        node: this one.
        version: returns a number that grows with every change of agents here; for the thread of `in_order`.
        count: how many copies of each agent there should be.
        machines: how many nodes there should be.
        wait_s: how long a turn's last event waits for its copies.
        strict: whether failed copies are retried within that time.
        doubt: called with agents that have another primary according to another node.
        limits: returns the known limit of an agent's tenant on a node's disk.
        timing: how long background copies of branches and KV may take, and how soon a copy is retried.
        gather: fetches an agent's KV from a node to this one, before secondaries get it from here; None if other nodes
            have none that this one lacks. If models are divided, each node of a group has its layers' part.

    Attributes:
        failed_total: copies that were not made in time.
    """

    def __init__(
        self,
        node: str,
        roles: RoleTable,
        in_order: InOrder,
        peers: Peers,
        *,
        version: Callable[[], int],
        count: int,
        machines: int = 1,
        wait_s: float = 1.0,
        strict: bool = False,
        doubt: Callable[[str], None],
        limits: Callable[[str], Limits] = lambda agent: {},
        timing: Timing,
        gather: Callable[[str, str], Awaitable[object]] | None = None,
    ) -> None:
        self._node, self._roles, self._in_order, self._peers = node, roles, in_order, peers
        self._gather = gather
        self._version, self._count, self._doubt, self._limits = version, count, doubt, limits
        self._least = min(count, machines - 1)
        self._wait_s, self._strict, self._timing = wait_s, strict, timing
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._late: dict[tuple[str, str], None] = {}
        self._members: frozenset[str] = frozenset()
        self._fetching = asyncio.Semaphore(FETCHING_MAX)
        self._behind: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._written: dict[str, None] = {}
        self.failed_total = 0

    async def send(self, agent: str, to: str, timeout_s: float, *, whole: bool = False) -> Memory:
        """Updates a node's copy of the agent's branches.

        Args:
            whole: whether the other node certainly lacks the latest content, so that it is sent at once.

        Returns:
            The copy that the other node has now.

        Raises:
            AgentNotFound: there is nothing to copy.
            StaleEpoch: the other node knows a later primary.
            Unavailable: the copy failed or took too long.
        """
        lock = self._locks.setdefault((agent, to), asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                return await self._send(agent, to, timeout_s, whole)
        except TimeoutError:
            raise Unavailable(f"node {to} takes too long for a copy") from None

    async def _send(self, agent: str, to: str, timeout_s: float, whole: bool) -> Memory:
        memory: Memory
        memory, version = await self._in_order(lambda: (self._roles.memory(agent), self._version()))
        heads = [head for head, _ in memory.branches]
        send = {memory.branches[-1][0].branch} if whole else set[int]()
        for _ in range(2):
            found = {head.branch: content for head, content in memory.branches if head.branch in send}
            copy = TakeSecondary(agent, memory.epoch, version, heads, found, self._limits(agent))
            missing = await self._peers.client(to).take_secondary(copy).within(timeout_s)
            if not missing:
                return memory
            send |= set(missing)
        raise Unavailable(f"the copy on node {to} changed at the same time")

    async def after_turn(self, agent: str) -> Copied:
        """Copies an agent's latest turn to its secondaries. `catch_up` retries failures."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._wait_s
        made: set[str] = set()
        while True:
            others = await self._peers.others()
            if frozenset(others) != self._members:
                # `catch_up` has not seen this change of membership yet.
                self.be_late(agent)
            nodes = [node for node in secondary_nodes(agent, others, self._count) if node not in made]
            left = ends - loop.time()
            results = await asyncio.gather(
                *(self.send(agent, node, left, whole=True) for node in nodes), return_exceptions=True
            )
            failed: dict[str, SatchelError] = {}
            for node, result in zip(nodes, results, strict=True):
                if isinstance(result, SatchelError) and not isinstance(result, AgentNotFound | StaleEpoch):
                    self._be_late(agent, node)
                    failed[node] = result
                elif isinstance(result, BaseException) and not isinstance(result, SatchelError):
                    raise result
                else:
                    made.add(node)
            at_primary = not any(isinstance(result, StaleEpoch) for result in results)
            all_made = not failed and len(made) >= self._least
            if all_made or not at_primary or not self._strict or ends - loop.time() <= self._timing.retry_s:
                break
            await asyncio.sleep(self._timing.retry_s)
        if agent in self._written:
            del self._written[agent]
            self.blocks_later(agent)
        for node, error in failed.items():
            self.failed_total += 1
            logger.warning("node %s has no copy of the last turn of agent %s: %s", node, agent, error.message)
        return Copied(at_primary, all_made)

    async def catch_up(self) -> None:
        """Retries failed copies, and copies agents whose secondaries changed with the cluster's nodes."""
        others = await self._peers.others()
        if (members := frozenset(others)) != self._members:
            for agent in await self._in_order(self._at_primary):
                before = secondary_nodes(agent, self._members, self._count)
                for node in secondary_nodes(agent, members, self._count):
                    if node not in before:
                        self._be_late(agent, node)
            self._members = members
        for agent in [agent for agent, node in self._late if not node]:
            del self._late[agent, ""]
            for node in secondary_nodes(agent, others, self._count):
                self._be_late(agent, node)
        late = list(self._late)
        for start in range(0, len(late), LATE_TOGETHER):
            batch = late[start : start + LATE_TOGETHER]
            await asyncio.gather(*(self._catch_up(agent, node, others) for agent, node in batch))

    async def _catch_up(self, agent: str, node: str, others: list[str]) -> None:
        # First: a turn whose copy fails during this one adds the entry again.
        self._late.pop((agent, node), None)
        place = await self._in_order(lambda: self._roles.place(agent))
        if place.role is Role.PRIMARY and node in secondary_nodes(agent, others, self._count):
            try:
                await self.send(agent, node, self._timing.answer_s)
            except StaleEpoch:
                self._doubt(agent)
            except AgentNotFound:
                pass  # Evicted since.
            except SatchelError as error:
                logger.info("node %s still has no copy of agent %s: %s", node, agent, error.message)
                self._be_late(agent, node)
            else:
                self.blocks_later(agent)

    async def belongs_here(self, agent: str, home: str) -> bool:
        """Returns whether this node should have a copy of an agent that lives on `home`."""
        nodes = {self._node, *await self._peers.others()} - {home}
        return self._node in secondary_nodes(agent, sorted(nodes), self._count)

    def late(self) -> int:
        """Returns how many copies wait for a retry."""
        return len(self._late)

    def be_late(self, agent: str) -> None:
        """Schedules copies of an agent that has changed without a turn."""
        if self._count:
            self._be_late(agent, "")

    def _be_late(self, agent: str, node: str) -> None:
        self._late[agent, node] = None
        if len(self._late) > LATE_MAX:
            del self._late[next(iter(self._late))]

    def _at_primary(self) -> list[str]:
        claims = self._roles.claims(self._roles.every())
        return [agent for agent, place in claims if place.role is Role.PRIMARY]

    # KV.

    def kv_written(self, agent: str) -> None:
        """Schedules a copy of KV that a replica has written for the agent, and another one after its next branch's."""
        self._written[agent] = None
        if len(self._written) > WRITTEN_MAX:
            del self._written[next(iter(self._written))]
        self.blocks_later(agent)

    def blocks_later(self, agent: str) -> None:
        """Schedules a copy of the agent's KV. If one is running, another follows it."""
        if agent in self._behind:
            self._again.add(agent)
        elif self._count and len(self._behind) < BEHIND_MAX:
            task = self._behind[agent] = asyncio.create_task(self._blocks(agent))
            task.add_done_callback(lambda _: self._behind.pop(agent, None))

    async def idle(self) -> None:
        """Waits until no KV is left to copy."""
        while self._behind:
            await asyncio.wait(list(self._behind.values()))

    async def _blocks(self, agent: str) -> None:
        while True:
            self._again.discard(agent)
            async with self._fetching:
                await self._copy_blocks(agent)
            if agent not in self._again:
                return

    async def _copy_blocks(self, agent: str) -> None:
        place = await self._in_order(lambda: self._roles.place(agent))
        if place.role is not Role.PRIMARY:
            return
        others = await self._peers.others()
        if (gather := self._gather) is not None:
            for node in others:
                try:
                    await gather(agent, node)
                except SatchelError as error:
                    logger.warning("node %s gives no KV of agent %s: %s", node, agent, error.message)
        for node in secondary_nodes(agent, others, self._count):
            try:
                await self._peers.client(node).fetch(agent, self._node, self._timing.fetch_s)
            except SatchelError as error:
                logger.warning("node %s has no copy of the KV of agent %s: %s", node, agent, error.message)
