"""A divided model on a few machines in virtual time: what Ray and a leader do around its processes, what goes wrong,
and the laws. The leader's machine is also Ray's head."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf

from satchel.actors.protocol.group_messages import StageState
from satchel.actors.replica.group.forming import GroupTimes
from satchel.actors.replica.group.gathering import Gathering
from satchel.actors.supervision.stall import pause_s
from satchel.cluster.errors import ActorLost, ActorSilent, NoRoom, SatchelError

from .group_net import LATENCY_S, Clock, Machine, Network
from .group_process import Peer, Process

TIMES = GroupTimes(form_s=5.0, beat_s=0.5, silent_s=2.0, stalled_s=6.0)

LOAD_S, START_S, TEST_S, POLL_S, AGAIN_S, STEP_S = 2.0, 0.5, 0.6, 0.25, 1.0, 0.4

STUCK_S = 8.0
"""The watchdog's limit for a step."""

RAY_S, RAY_LOST_S, RAY_ALONE_S = 1.0, 6.0, 12.0
"""Ray ends and restarts actors after the first, notices a lost node after the second, and after the third a node that
does not reach the head ends its own actors."""

HOME_SILENT_S = 15.0
"""A machine ends a process that stands still after this long."""

TOKENS = 400


class Law(AssertionError):
    """A law is broken."""


class World:
    """A model whose layers are divided among so many machines.

    Args:
        ranks: how many; the last one leads.

    Attributes:
        neighbours_beat: whether followers that are neighbours send each other heartbeats.
    """

    neighbours_beat = True

    def __init__(self, ranks: int = 2) -> None:
        self.clock, self.times, self.ranks = Clock(), TIMES, ranks
        self.network = Network(self.clock)
        self.machines = [Machine(f"m{rank}") for rank in range(ranks)]
        self.processes: list[Process] = []
        self.leader: Process | None = None
        self.slots: list[Process | None] = []
        self.groups = self.starts = 0
        self.wanted, self.serving, self.refused = True, False, ""
        self.tokens: list[int] = []
        self._early, self._pauses, self._paused_until = 0, 0, 0.0
        self.start_leader()

    # What Ray does.

    def start_leader(self) -> None:
        if not self.wanted or (self.leader is not None and self.leader.alive):
            return
        if not self.machines[-1].up:
            self.clock.after(RAY_S, self.start_leader)
            return
        leader = self.leader = Process(self, self.machines[-1], self.ranks - 1)
        leader.beat()
        self.starts += 1
        self.serving = False
        self.slots = [None] * (self.ranks - 1)
        for rank in range(self.ranks - 1):
            self.start_follower(leader, rank)
        gathering = Gathering(self.ranks - 1, patient=self.starts > 1)
        self.clock.after(LOAD_S, lambda: leader.when_it_runs(lambda: self._gather(leader, gathering)))

    def start_follower(self, leader: Process, rank: int) -> None:
        before, self.slots[rank] = self.slots[rank], None
        if before is not None:
            # Its last handle is gone.
            self._end_when_reached(before)

        def start() -> None:
            if not leader.alive:
                return
            machine = self.machines[rank]
            if not self.network.passes(leader.machine, machine):
                self.clock.after(RAY_S, start)
                return
            follower = self.slots[rank] = Process(self, machine, rank)
            follower.owner = leader
            follower.beat()
            self.clock.after(LOAD_S, lambda: follower.when_it_runs(lambda: self._loaded(follower)))

        self.clock.after(START_S, start)

    def _loaded(self, follower: Process) -> None:
        others = [each for each in self.processes if each.alive and each.machine is follower.machine]
        follower.loaded = StageState("ready", None, True) if others == [follower] else NoRoom("no room")

    def ended(self, process: Process) -> None:
        """A process has ended."""
        self.processes.remove(process)
        self._must_end(process.group, self.times.silent_s + 1.0)
        if process is self.leader:
            self.serving = False
            self._early += 1
            for follower in [each for each in self.processes if each.owner is process]:
                self._end_when_reached(follower)
            self.clock.after(RAY_S + min(4.0, pause_s(self._early)), self.start_leader)

    def _end_when_reached(self, follower: Process) -> None:
        """Ray ends an actor whose owner or last handle is gone."""
        since = self.clock.now

        def end() -> None:
            alone = self.clock.now - since > RAY_ALONE_S
            if self.network.passes(self.machines[-1], follower.machine) or alone:
                follower.end()
            elif follower.alive:
                self.clock.after(RAY_S, end)

        self.clock.after(RAY_S, end)

    # What the leader does until it serves; as `Followers` and `GroupServing`.

    def _gather(self, leader: Process, gathering: Gathering) -> None:
        wait_s = POLL_S
        for rank in range(self.ranks - 1):
            said = self._state(leader, rank)
            if isinstance(said, StageState):
                gathering.told(rank, said)
                continue
            try:
                again = gathering.failed(rank, said, self.clock.now)
            except SatchelError as error:
                self.refused = error.message
                return
            if again:
                self.clock.after(AGAIN_S, lambda rank=rank: leader.alive and self.start_follower(leader, rank))
                wait_s = POLL_S + AGAIN_S
        do = self._form if gathering.states is not None else self._gather
        self.clock.after(wait_s, lambda: leader.when_it_runs(lambda: do(leader, gathering)))

    def _state(self, leader: Process, rank: int) -> StageState | SatchelError:
        follower = self.slots[rank]
        if follower is None or (follower.alive and not follower.runs):
            return ActorSilent("slow")
        if not self.network.passes(leader.machine, follower.machine):
            lost = self.clock.now - follower.machine.lost_since > RAY_LOST_S
            return ActorLost("its node is lost") if lost else ActorSilent("away")
        return follower.loaded if follower.alive else ActorLost("it has ended")

    def _form(self, leader: Process, gathering: Gathering) -> None:
        self.groups += 1
        leader.group, until = f"g{self.groups}", self.clock.now + self.times.form_s
        for rank in range(self.ranks - 1):
            follower = self.slots[rank]
            state = self._state(leader, rank)
            if (
                follower is None
                or not isinstance(state, StageState)
                or not state.ready
                or not follower.call(leader.group)
            ):
                self._not_formed(leader, f"stage {rank} does not listen")
                return
            self.clock.after(
                self.times.form_s, lambda follower=follower: follower.when_it_runs(follower.formed_in_time)
            )
        self._connect(leader, until)

    def _not_formed(self, leader: Process, why: str) -> None:
        """As `GroupServing._form` does with what `Followers.form` raises."""
        leader.wholeness.break_off(f"the group cannot be formed: {why}")

    def _connect(self, leader: Process, until: float) -> None:
        members = [*self.slots, leader]
        passes = self.network.passes
        if leader.wholeness.why:
            return
        whole = [
            one is not None and other is not None and one.runs and other.runs and passes(one.machine, other.machine)
            for one in members
            for other in members
        ]
        if not all(whole):
            if self.clock.now > until:
                leader.wholeness.break_off("a stage cannot be reached")
            else:
                self.clock.after(0.05, lambda: leader.when_it_runs(lambda: self._connect(leader, until)))
            return
        ranks = [each for each in members if each is not None]
        for rank, (one, other) in enumerate(pairwise(ranks)):
            one.after, other.before = self.network.connect(one, other)
            near, far = self.network.connect(leader, one)
            leader.calls.append(near)
            one.calls.append(far)
            self._beat(leader, one)
            if rank < self.ranks - 2 and self.neighbours_beat:
                self._beat(one, other)
        for each in ranks:
            each.formed = True
        self.clock.after(TEST_S, lambda: leader.when_it_runs(lambda: self._serve(leader)))

    def _beat(self, one: Process, other: Process) -> None:
        near, far = self.network.connect(one, other)
        one.peers.append(Peer(one, near, f"stage {other.rank}"))
        other.peers.append(Peer(other, far, f"stage {one.rank}"))

    def _serve(self, leader: Process) -> None:
        if leader.wholeness.why:
            return
        self.serving = True
        self._early = 0
        leader.done = len(self.tokens)
        self._step(leader)

    def _step(self, leader: Process) -> None:
        if not leader.alive or leader.wholeness.why or leader.leaves:
            return
        step = leader.done + 1
        leader.lead(step)

        def watch() -> None:
            if leader.alive and leader.done < step:
                leader.end()

        self.clock.after(STUCK_S, lambda: leader.when_it_runs(watch))

    # The laws.

    def computed(self, process: Process, step: int) -> None:
        if process is not self.leader:
            if process.rank == self.ranks - 1:
                raise Law(f"{process} still leads, but is not the leader")
            return
        group = [each for each in self.processes if each.group == process.group]
        if any(each.done < step for each in group) or len(group) < self.ranks:
            # What a stage sent before it ended is there all the same.
            ended = [each for each in group if each.done < step]
            if ended:
                raise Law(f"{process} has computed step {step} alone: {ended}")
        if step == len(self.tokens) + 1:
            self.tokens.append(step)
        elif step <= TOKENS:
            raise Law(f"step {step} follows on {len(self.tokens)}")
        self.clock.after(STEP_S, lambda: process.when_it_runs(lambda: self._step(process)))

    def passed(self, one: Process, other: Process) -> None:
        if one.group != other.group:
            raise Law(f"{one} speaks to {other}")

    def broke(self, process: Process) -> None:
        self._must_end(process.group, self.times.silent_s + 1.0)

    def _must_end(self, group: str, within_s: float, *, unless_paused: bool = False) -> None:
        """All processes of a group must have ended then; those that stood still may need as long from when they run
        again.

        Args:
            unless_paused: no more is demanded if a process stands still meanwhile: it may not notice what is wrong.
        """
        began = self._pauses

        def check() -> None:
            if unless_paused and (self._pauses > began or self._paused_until > self.clock.now - within_s):
                return
            for each in [each for each in self.processes if each.group == group]:
                late = each.paused_until + within_s + 2 * LATENCY_S - self.clock.now
                if late <= 0 or each.paused_until == 0.0:
                    raise Law(f"{each} lives on {within_s:g} s after its group broke")
                if late < inf:
                    self.clock.after(late, check)

        if group:
            self.clock.after(within_s, check)

    def check(self) -> None:
        """Laws that hold at any time."""
        leaders = [each for each in self.processes if each.rank == self.ranks - 1]
        if len(leaders) > 1:
            raise Law(f"two leaders at once: {leaders}")
        serving = {each.group for each in self.processes if each.formed and not each.wholeness.why and each.runs}
        if len(serving) > 1 and all(
            sum(each.group == group for each in self.processes) == self.ranks for group in serving
        ):
            raise Law(f"two groups at once: {serving}")

    # What goes wrong.

    def process(self, rank: int) -> Process | None:
        found = [each for each in self.processes if each.rank == rank]
        return found[-1] if found else None

    def on(self, rank: int, do: Callable[[Process], object]) -> None:
        """Does something to the latest process of a rank, if there is one."""
        if (process := self.process(rank)) is not None:
            do(process)

    def dies(self, rank: int) -> None:
        self.on(rank, lambda process: process.end())

    def loses_machine(self, rank: int, seconds: float) -> None:
        machine = self.machines[rank]
        if not machine.up:
            return
        machine.up, machine.lost_since = False, self.clock.now
        machine.boots += 1
        for process in [each for each in self.processes if each.machine is machine]:
            self._must_end(process.group, self.times.silent_s + 1.0)
            process.vanish()

        def back() -> None:
            machine.up = True
            self.network.flush()

        self.clock.after(seconds, back)

    def cuts(self, one: int, other: int, seconds: float) -> None:
        machines = self.machines[one], self.machines[other]
        self.network.cut(*machines, seconds)
        machines[min(one, other)].lost_since = self.clock.now
        near = self.process(one)
        if seconds > self.times.silent_s + 1.0 and near is not None and near.formed:
            self._must_end(near.group, self.times.silent_s + 1.0, unless_paused=True)

    def pauses(self, rank: int, seconds: float) -> None:
        """Nothing runs in a process, though its machine answers. For ever: until its machine ends it."""

        def pause(process: Process) -> None:
            process.paused_until = max(process.paused_until, self.clock.now + seconds)
            self._pauses += 1
            if seconds < inf:
                self._paused_until = max(self._paused_until, self.clock.now + seconds)
            if seconds > self.times.stalled_s + 1.0 and process.formed:
                self._must_end(process.group, self.times.stalled_s + 1.0 + self.times.beat_s)
            if seconds == inf:
                self.clock.after(HOME_SILENT_S, process.end)

        self.on(rank, pause)

    def hangs(self, rank: int) -> None:
        def hang(process: Process) -> None:
            process.hung = True
            if process.formed and self.serving:
                # The leader's watchdog; then Ray ends the others, which know of it at once.
                self._must_end(process.group, STUCK_S + STEP_S + self.times.silent_s + 1.0, unless_paused=True)

        self.on(rank, hang)

    def fails(self, rank: int) -> None:
        def fail(process: Process) -> None:
            process.fails_next = True

        self.on(rank, fail)

    def stops(self) -> None:
        """The model is not wanted any more."""
        self.wanted = False
        leader = self.leader
        if leader is None or not leader.alive:
            return
        for end in leader.calls:
            end.send("end")
        leader.leaves = True
        self.clock.after(self.times.beat_s, leader.end)

    # Running.

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.run(min(until, self.clock.now + 0.25))
            self.check()

    def settled(self) -> bool:
        """Whether all is as it must be in the end."""
        if not self.wanted:
            return not self.processes
        alive = {each.group for each in self.processes}
        return self.serving and len(self.processes) == self.ranks and len(alive) == 1

    def settle(self, seconds: float) -> None:
        """Runs until a group has served for some time; that must come."""
        ends, since, tokens = self.clock.now + seconds, 0.0, -1
        while since < 3.0:
            if self.clock.now > ends:
                raise Law(f"nothing is served again: {self.processes}, refused: {self.refused!r}")
            self.run(0.5)
            goes_on = not self.wanted or len(self.tokens) > tokens
            tokens = len(self.tokens)
            since = since + 0.5 if self.settled() and goes_on else 0.0
