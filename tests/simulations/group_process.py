"""A process of a simulated group. What decides is the real code: whether a silent peer is lost (`Silence`), and whether
the group is whole (`Wholeness`); this file does what threads, sockets and Ray do around it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from satchel.actors.protocol.group_messages import StageState
from satchel.actors.replica.group.link.broken import GroupBroken, Wholeness
from satchel.actors.replica.group.link.ending import LAST_MESSAGES_S
from satchel.actors.replica.group.link.silence import Silence
from satchel.cluster.errors import LinkError, NoRoom

from .group_net import CLOSED, End, Machine

if TYPE_CHECKING:
    from .group_world import World

COMPUTE_S = 0.05
"""How long one stage computes a step."""


class Peer:
    """Heartbeats with one peer; as `Heartbeats`."""

    def __init__(self, process: Process, end: End, name: str) -> None:
        self.process, self.end, self.name = process, end, name
        times, now = process.world.times, process.world.clock.now
        self.silence = Silence(times.beat_s, times.silent_s, times.stalled_s, now)
        self.sent, self.over = -inf, False

    def look(self) -> None:
        """One round of the thread that sends heartbeats."""
        process, every_s = self.process, self.process.world.times.beat_s
        if self.over:
            return
        if process.leaves or process.wholeness.why:
            self.end.send("end" if not process.wholeness.why else "failed")
            self.over = True
            return
        now = process.world.clock.now
        if now - self.sent >= every_s:
            self.end.send("beat")
            self.sent = now
            self.silence.sent(len(self.end.unacknowledged))
        came, self.end.came = self.end.came, []
        for (kind,) in came:
            if kind == "end":
                self.over = True
                return
            if kind != "beat":
                process.wholeness.break_off(f"{self.name} is lost")
                return
            self.silence.heard()
        if why := self.silence.lost(now, len(self.end.unacknowledged)):
            process.wholeness.break_off(f"{self.name} {why}")


class Process:
    """One process: the leader (of the last rank) or a follower.

    Attributes:
        group: the name of the group that it was called to; "" before.
        done: how many steps its stage has computed.
        paused_until: nothing runs in it until then.
        hung: whether the thread that computes stands still for ever.
        leaves: whether it ends in order.
    """

    def __init__(self, world: World, machine: Machine, rank: int) -> None:
        self.world, self.machine, self.rank = world, machine, rank
        self.alive, self.group, self.forming, self.formed = True, "", False, False
        self.done, self.paused_until, self.hung, self.leaves = 0, 0.0, False, False
        self.wholeness = Wholeness(self._shut)
        self.peers: list[Peer] = []
        self.calls: list[End] = []
        self.before: End | None = None
        self.after: End | None = None
        self.fails_next = False
        self.owner: Process | None = None
        self.loaded: StageState | NoRoom = StageState("loading")
        self._computing = False
        self._told: list[int] = []
        self._arrays: list[int] = []
        world.processes.append(self)

    def __repr__(self) -> str:
        return f"stage {self.rank} on {self.machine.name} of {self.group or 'no group'}"

    @property
    def runs(self) -> bool:
        return self.alive and self.world.clock.now >= self.paused_until

    def when_it_runs(self, do: Callable[[], object]) -> None:
        """Does something now, or when a pause ends; never if the process has ended by then."""
        if self.runs:
            do()
        elif self.alive and self.paused_until < inf:
            self.world.clock.after(self.paused_until - self.world.clock.now, lambda: self.when_it_runs(do))

    def call(self, group: str) -> bool:
        """As `StageActor.form`: returns whether it listens for the group. Only once."""
        if self.group:
            return False
        self.group = group
        return True

    def formed_in_time(self) -> None:
        """What `Member` does if nobody connects."""
        if not self.formed:
            self.fails(LinkError("nobody connects"))

    # Its threads.

    def beat(self) -> None:
        """The heartbeats' threads, for as long as it lives."""

        def round_of_all() -> None:
            for peer in self.peers:
                peer.look()
            if self.alive:
                self.world.clock.after(self.world.times.beat_s / 2, self.beat)

        self.when_it_runs(round_of_all)

    def arrived(self, end: End) -> None:
        self.when_it_runs(lambda: self._take(end))

    def _take(self, end: End) -> None:
        for peer in self.peers:
            if peer.end is end:
                peer.look()
                return
        came, end.came = end.came, []
        for said in came:
            self.world.passed(end.far.process, self)
            if said == CLOSED:
                self.fails(LinkError("the peer has left"))
            elif said[0] == "end":
                self.leaves = True
                self.world.clock.after(self.world.times.beat_s, lambda: self.when_it_runs(self.end))
            else:
                (self._told if said[0] == "step" else self._arrays).append(said[1])
                self.compute()

    def compute(self) -> None:
        """Computes the next step, if it was told and what it needs has come. The leader's `_told` are its own."""
        if self._computing or self.hung or self.wholeness.why or not self._told:
            return
        if self.before is not None and not self._arrays:
            return
        step = self._told.pop(0)
        if self.before is not None:
            assert self._arrays.pop(0) == step, "hidden states of another step"
        self._computing = True
        self.world.clock.after(COMPUTE_S, lambda: self.when_it_runs(lambda: self._computed(step)))

    def _computed(self, step: int) -> None:
        if self.hung:
            return
        self._computing = False
        try:
            with self.wholeness.kept():
                if self.fails_next:
                    raise ValueError("injected")
                self.done = step
                if self.after is not None:
                    self.after.send("array", step)
        except GroupBroken:
            self.world.broke(self)
            return
        self.world.computed(self, step)
        self.compute()

    def lead(self, step: int) -> None:
        """Tells a step to all, and does it."""
        self._told.append(step)
        for end in self.calls:
            end.send("step", step)
        self.compute()

    def fails(self, error: Exception) -> None:
        """A thread that waits for another process, or computes, gets an error."""
        if self.leaves:
            return
        try:
            with self.wholeness.kept():
                raise error
        except GroupBroken:
            pass

    def _shut(self) -> None:
        for end in (*self.calls, self.before, self.after):
            if end is not None:
                end.close()
        for peer in self.peers:
            peer.look()
        self.world.broke(self)
        self.world.clock.after(LAST_MESSAGES_S, lambda: self.when_it_runs(self.end))

    def end(self) -> None:
        """The process ends; its kernel closes its connections."""
        if self.alive:
            self.alive = False
            for end in (*self.calls, self.before, self.after, *(peer.end for peer in self.peers)):
                if end is not None:
                    end.close()
            self.world.ended(self)

    def vanish(self) -> None:
        """It ends with its machine, which says nothing of it."""
        if self.alive:
            self.alive = False
            self.world.ended(self)
