"""Agents' turns: the queue for each agent, and commits, of which many share one sync of the disk."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from ....cluster.errors import AgentBusy, AgentElsewhere, SatchelError
from ...protocol.store_messages import Begun, BranchMemory, Commit, CommitOutcome, Limits
from .node_memory import NodeMemory

WAITING_MAX = 64
"""How many turns of one agent may wait."""

TOGETHER_MAX = 64
"""How many turns may share one transaction."""


@dataclass
class _Waiting:
    """A caller that waits for an agent's turn. A caller that gives up cannot cancel its call; it abandons the turn."""

    turn: str
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


@dataclass
class _Ending:
    """A turn that waits to be committed."""

    agent: str
    commit: Commit
    outcome: CommitOutcome | None = None
    failure: Exception | None = None


class Turns:
    """
    Args:
        wait_s: how long a turn may wait for the one before it.
        kept: awaited with an agent once its turn is on the disk; the commit returns afterwards. It returns whether all
            required copies were made.
    """

    def __init__(
        self,
        memory: NodeMemory,
        *,
        wait_s: float,
        kept: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._work, self._database, self._agents = memory.work, memory.database, memory.agents
        self._roles, self._quotas, self._disk = memory.roles, memory.quotas, memory.disk
        self._wait_s, self._lease_s, self._kept = wait_s, memory.timing.turn_lease_s, kept
        self._endings: deque[_Ending] = deque()
        self._lines: dict[str, deque[_Waiting]] = {}

    async def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Begun:
        """Begins the agent's turn, in the order of the calls.

        Raises:
            AgentBusy: another turn of the agent takes too long.
            QuotaExceeded: the tenant may add no transcripts.
        """
        self._quotas.note(limits)
        line = self._lines.setdefault(agent, deque())
        busy = AgentBusy(f"agent {agent.partition('/')[2]!r} is still busy with another turn")
        if len(line) >= WAITING_MAX:
            raise busy
        waiting = _Waiting(turn)
        line.append(waiting)
        ends = time.monotonic() + self._wait_s
        try:
            while not waiting.gone:
                if line[0] is waiting:
                    begun = await self._work.answer(
                        lambda: self._begin(agent, turn, files_id, known, adds=bool(limits)),
                    )
                    if begun is not None:
                        return begun
                left = ends - time.monotonic()
                if left <= 0:
                    break
                # Woken when the turn before it ends; a lease that runs out wakes nobody.
                try:
                    async with asyncio.timeout(min(1.0, left)):
                        await waiting.woken.wait()
                except TimeoutError:
                    continue
                waiting.woken.clear()
            raise busy
        finally:
            line.remove(waiting)
            self.wake(agent)

    def _begin(self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], *, adds: bool) -> Begun | None:
        self._roles.check(agent)
        if adds:
            self._quotas.check(agent)
        begun = self._agents.begin(agent, turn, time.monotonic(), self._lease_s)
        if begun is None:
            return None
        since, main = begun
        let_go = self._agents.let_go(agent)
        if main is None:
            return Begun(since, None, let_go)
        head, content = main
        if head.files_id == files_id and known.get(head.branch) != head.epoch:
            return Begun(since, BranchMemory(head, content), let_go)
        return Begun(since, BranchMemory(head, None), let_go, content.messages)

    async def renew(self, agent: str, turn: str) -> bool:
        """Extends the lease of a long turn. Returns False if the turn was lost."""
        return await self._work.answer(lambda: self._agents.renew(agent, turn, time.monotonic(), self._lease_s))

    async def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> CommitOutcome:
        """Ends a turn. It is on the disk when this returns.

        Args:
            limits: of the tenant. Its KV is evicted to make room for its transcripts.
        """
        self._quotas.note(limits)
        ending = _Ending(agent, commit)
        self._endings.append(ending)
        try:
            # The first caller commits all waiting turns with its own: one sync of the disk ends many turns.
            await self._work.answer(self._end_turns)
            if ending.failure is not None:
                raise ending.failure
            assert ending.outcome is not None
            await self._disk.make_room_for(agent)
            return replace(ending.outcome, copied=await self._kept(agent)) if ending.outcome.kept else ending.outcome
        finally:
            self.wake(agent)
            self._disk.committed(agent)

    def _end_turns(self) -> None:
        endings: list[_Ending] = []
        while self._endings and len(endings) < TOGETHER_MAX:
            endings.append(self._endings.popleft())
        if not endings:
            return

        def end_all() -> None:
            with self._database.transaction():
                for ending in endings:
                    self._end_turn(ending)

        try:
            self._work.though_full(end_all)
        except SatchelError as error:
            for ending in endings:
                ending.failure = error
                if ending.commit.turn:
                    self._agents.retake(ending.agent, ending.commit.turn, time.monotonic(), self._lease_s)

    def _end_turn(self, ending: _Ending) -> None:
        ending.failure = None
        try:
            self._roles.check(ending.agent)
        except AgentElsewhere as error:
            # For each turn its own: the other turns of the transaction stay if this one fails.
            ending.failure = error
            return
        if self._quotas.is_over(ending.agent):
            # The turn began before another one exceeded the tenant's limit.
            self._agents.abandon(ending.agent, ending.commit.turn)
            ending.outcome = CommitOutcome("over quota")
            return
        try:
            ending.outcome = self._agents.commit(ending.agent, ending.commit, time.monotonic(), time.time())
            if ending.outcome.kept:
                self._roles.settle(ending.agent)
        except SatchelError:
            raise
        except Exception as error:
            # A turn that cannot be written fails alone, not the others.
            ending.failure = error

    async def abandon(self, agent: str, turn: str) -> None:
        """Ends the turn without a commit, or stops waiting for it."""
        for waiting in self._lines.get(agent, ()):
            if waiting.turn == turn:
                waiting.gone = True
                waiting.woken.set()
        # After a running `begin`: the worker runs both in order.
        await self._work.answer(lambda: self._agents.abandon(agent, turn))
        self.wake(agent)

    def wake(self, agent: str) -> None:
        """Wakes the longest waiting caller: the agent's turn may be free."""
        line = self._lines.get(agent)
        if line:
            line[0].woken.set()
        elif line is not None:
            del self._lines[agent]
