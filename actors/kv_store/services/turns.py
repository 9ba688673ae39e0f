"""Turns of agents: who waits for one, and how they end, many with one sync of the disk."""

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
"""How many turns of one agent may wait for the one before them."""

TOGETHER_MAX = 64
"""How many turns may share one transaction."""


@dataclass
class _Waiting:
    """Somebody in line for an agent's turn. A caller that gives up cannot cancel its call, but abandons the turn."""

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
        kept: awaited with an agent of which a turn is on the disk; its commit returns after this. Whether as many other
            nodes have it as should.
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
        """Take the agent's turn, in the order of asking.

        Raises:
            AgentBusy: another one has it for too long.
            QuotaExceeded: the tenant may add no words.
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
                    await asyncio.wait_for(waiting.woken.wait(), min(1.0, left))
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
        """A sign of life of a long turn. False when the turn was lost."""
        return await self._work.answer(lambda: self._agents.renew(agent, turn, time.monotonic(), self._lease_s))

    async def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> CommitOutcome:
        """End a turn; it is on the disk when this returns.

        Args:
            limits: of the tenant, whose KV makes room for the words.
        """
        self._quotas.note(limits)
        ending = _Ending(agent, commit)
        self._endings.append(ending)
        try:
            # Whoever comes first takes all that wait with it: one sync of the disk ends many turns.
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
            # Its own: others' turns that share the transaction are kept, and this one is not given back.
            ending.failure = error
            return
        if self._quotas.is_over(ending.agent):
            # It began before another one took them over it.
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
            # What nobody can write is its caller's own trouble, and not that of the others.
            ending.failure = error

    async def abandon(self, agent: str, turn: str) -> None:
        """End the turn without a word, or stop waiting for it."""
        for waiting in self._lines.get(agent, ()):
            if waiting.turn == turn:
                waiting.gone = True
                waiting.woken.set()
        # After a `begin` that is under way: the worker takes both in order.
        await self._work.answer(lambda: self._agents.abandon(agent, turn))
        self.wake(agent)

    def wake(self, agent: str) -> None:
        """The agent's turn may be free: who waits longest looks again."""
        line = self._lines.get(agent)
        if line:
            line[0].woken.set()
        elif line is not None:
            del self._lines[agent]
