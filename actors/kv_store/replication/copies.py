"""Copies of agents on other nodes: words before a turn's last event leaves, KV behind it, both again where it failed.

Of one agent one copy travels to a node at a time, so a later one never arrives before an earlier one; what a caller
gave up on and arrives all the same is told by its version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ....cluster.errors import AgentNotFound, SatchelError, StaleEpoch, Unavailable
from ....cluster.timing import Timing
from ..agents.homes import Homes, Memory, Role
from ..disk.quotas import Limits
from .peers import Peers, content_to_wire, copy_nodes, head_to_wire

logger = logging.getLogger(__name__)

InOrder = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls its argument in the thread that may use `Homes`."""

FETCHING_MAX = 2
"""Agents whose KV is being copied at one time; further ones wait."""

BEHIND_MAX = 1000
"""Agents whose KV waits to be copied. Beyond it a turn's KV is not, until the agent's next one."""

LATE_MAX = 20_000
LATE_TOGETHER = 8
"""Copies that failed and are to be tried again; how many at one time."""


class Copied(NamedTuple):
    """What became of the copies of a turn: whether nobody knows of a later home, and whether all that should be are
    made."""

    at_home: bool
    all_made: bool


class Copies:
    """For one event loop.

    Args:
        node: this one.
        version: a number that grows with everything that agents do here; for the thread of `in_order`.
        count: how many copies of each agent there should be.
        machines: how many nodes there should be.
        wait_s: how long a turn's last event waits for copies of its words.
        strict: whether those that fail are tried again within that time.
        doubt: told of agents that another node says live elsewhere.
        limits: what is known of what an agent's tenant may have on a node's disk.
        timing: how long words and KV may take for which nobody waits, and how soon a copy is tried again.

    Attributes:
        failed_total: turns whose copy was not made at once.
    """

    def __init__(
        self,
        node: str,
        homes: Homes,
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
    ) -> None:
        self._node, self._homes, self._in_order, self._peers = node, homes, in_order, peers
        self._version, self._count, self._doubt, self._limits = version, count, doubt, limits
        self._least = min(count, machines - 1)
        self._wait_s, self._strict, self._timing = wait_s, strict, timing
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._late: dict[tuple[str, str], None] = {}
        self._members: frozenset[str] = frozenset()
        self._fetching = asyncio.Semaphore(FETCHING_MAX)
        self._behind: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self.failed_total = 0

    async def send(self, agent: str, to: str, timeout_s: float, *, whole: bool = False) -> Memory:
        """Bring a node's copy of the agent's words up to date.

        Args:
            whole: whether this node knows that the other one lacks what was said last.

        Returns:
            What the other node has now.

        Raises:
            AgentNotFound: there is nothing to copy.
            StaleEpoch: the other node knows of a later home.
            Unavailable: it did not work in time.
        """
        lock = self._locks.setdefault((agent, to), asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                return await self._send(agent, to, timeout_s, whole)
        except TimeoutError:
            raise Unavailable(f"node {to} takes too long for a copy") from None

    async def _send(self, agent: str, to: str, timeout_s: float, whole: bool) -> Memory:
        memory: Memory
        memory, version = await self._in_order(lambda: (self._homes.memory(agent), self._version()))
        heads = [head_to_wire(head) for head, _ in memory.branches]
        send = {memory.branches[-1][0].branch} if whole else set[int]()
        for _ in range(2):
            found = {head.branch: content_to_wire(content) for head, content in memory.branches if head.branch in send}
            what = (agent, memory.epoch, version, heads, found, self._limits(agent))
            missing = await self._peers.call(to, "take_copy", *what, timeout_s=timeout_s)
            if not missing:
                return memory
            send |= set(missing)
        raise Unavailable(f"the copy on node {to} changes meanwhile")

    async def after_turn(self, agent: str) -> Copied:
        """Copy what an agent said to where its copies belong. What fails is tried again (`catch_up`)."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._wait_s
        made: set[str] = set()
        while True:
            others = await self._peers.others()
            if frozenset(others) != self._members:
                # Whoever comes or goes before `catch_up` has seen these is not missed.
                self.be_late(agent)
            nodes = [node for node in copy_nodes(agent, others, self._count) if node not in made]
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
            at_home = not any(isinstance(result, StaleEpoch) for result in results)
            all_made = not failed and len(made) >= self._least
            if all_made or not at_home or not self._strict or ends - loop.time() <= self._timing.retry_s:
                break
            await asyncio.sleep(self._timing.retry_s)
        for node, error in failed.items():
            self.failed_total += 1
            logger.warning("node %s has no copy of what agent %s said last: %s", node, agent, error.message)
        return Copied(at_home, all_made)

    async def catch_up(self) -> None:
        """Make the copies that failed, and those that belong elsewhere since nodes have come or gone."""
        others = await self._peers.others()
        if (members := frozenset(others)) != self._members:
            for agent in await self._in_order(self._at_home):
                before = copy_nodes(agent, self._members, self._count)
                for node in copy_nodes(agent, members, self._count):
                    if node not in before:
                        self._be_late(agent, node)
            self._members = members
        for agent in [agent for agent, node in self._late if not node]:
            del self._late[agent, ""]
            for node in copy_nodes(agent, others, self._count):
                self._be_late(agent, node)
        late = list(self._late)
        for start in range(0, len(late), LATE_TOGETHER):
            batch = late[start : start + LATE_TOGETHER]
            await asyncio.gather(*(self._catch_up(agent, node, others) for agent, node in batch))

    async def _catch_up(self, agent: str, node: str, others: list[str]) -> None:
        # First: a turn that fails to be copied meanwhile adds it again.
        self._late.pop((agent, node), None)
        place = await self._in_order(lambda: self._homes.place(agent))
        if place.role is Role.HOME and node in copy_nodes(agent, others, self._count):
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

    def late(self) -> int:
        """How many copies are to be tried again."""
        return len(self._late)

    def be_late(self, agent: str) -> None:
        """The agent has changed without a turn: its copies follow."""
        if self._count:
            self._be_late(agent, "")

    def _be_late(self, agent: str, node: str) -> None:
        self._late[agent, node] = None
        if len(self._late) > LATE_MAX:
            del self._late[next(iter(self._late))]

    def _at_home(self) -> list[str]:
        claims = self._homes.claims(self._homes.every())
        return [agent for agent, place in claims if place.role is Role.HOME]

    # KV.

    def blocks_later(self, agent: str) -> None:
        """Have the agent's KV copied, one time after another; once more where it is under way."""
        if agent in self._behind:
            self._again.add(agent)
        elif self._count and len(self._behind) < BEHIND_MAX:
            task = self._behind[agent] = asyncio.create_task(self._blocks(agent))
            task.add_done_callback(lambda _: self._behind.pop(agent, None))

    async def idle(self) -> None:
        """Wait until no KV is left to copy."""
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
        place = await self._in_order(lambda: self._homes.place(agent))
        if place.role is not Role.HOME:
            return
        fetch_s = self._timing.fetch_s
        timeout_s = fetch_s + self._timing.answer_s
        for node in copy_nodes(agent, await self._peers.others(), self._count):
            try:
                await self._peers.call(node, "fetch", agent, self._node, fetch_s, timeout_s=timeout_s)
            except SatchelError as error:
                logger.warning("node %s has no copy of the KV of agent %s: %s", node, agent, error.message)
