"""The scheduler in worlds drawn from a seed, with an engine that computes nothing: laws that hold at every step.

The engine here behaves as the real one: a decode step is launched before the last one is read, blocks and whole
prompts that were computed can be reused, sequences fail when they are opened, prefilled, joined or decoded.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

import pytest

from satchel.actors.replica.scheduling.fairness import FLOW_TIMES
from satchel.actors.replica.scheduling.limits import STEP_TOKENS
from satchel.actors.replica.scheduling.prefill_budget import TOKENS_MIN
from satchel.actors.replica.scheduling.scheduler import HEADROOM_TOKENS, PrefillChunk, Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence, SequenceState
from tests.worlds.replica.scheduler_worlds import World, make_world

BLOCK = 256
PATIENCE = 20


@pytest.mark.variants(20)
@dataclass
class Request:
    prompt: int
    max_tokens: int
    deadline: float
    poisoned: bool
    keys: tuple[bytes, ...]
    twin: bytes
    patience: int = 0
    """The step by which it has ended, if the world is fair."""
    emitted: int = 0
    ending: str | None = None


@dataclass
class Simulation:
    world: World
    now: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    alive: list[str] = field(default_factory=list)
    fed: set[str] = field(default_factory=set)
    cached: set[bytes] = field(default_factory=set)
    blocks_computed: Counter[bytes] = field(default_factory=Counter)
    tokens_computed: int = 0
    passed: set[str] = field(default_factory=set)
    """Sequences that were the oldest when another one had their turn."""
    sent_back: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.world.seed + 10**6)
        self.scheduler = Scheduler(self.world.limits)

    def say(self, what: str) -> str:
        return f"seed {self.world.seed}, step {self.now}: {what}"

    def sequence(self, name: str) -> ScheduledSequence:
        sequence = self.scheduler.sequence(name)
        assert sequence is not None, self.say(f"{name} is lost")
        return sequence

    def sequences(self, *states: SequenceState) -> list[ScheduledSequence]:
        return [sequence for sequence in map(self.sequence, self.alive) if sequence.state in states]

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def check(self) -> None:
        """The scheduler's tables agree with themselves and with what the engine knows."""
        self.scheduler.check()
        prefilling, running = self.sequences(SequenceState.PREFILLING), self.sequences(SequenceState.RUNNING)
        assert len(prefilling) <= self.world.limits.prefill_sequences_max, self.say("too many prompts at once")
        assert self.scheduler.running == len(prefilling) + len(running) <= self.world.limits.sequences_max
        assert self.scheduler.waiting == len(self.alive) - self.scheduler.running
        assert self.scheduler.pending_tokens == sum(
            sequence.prompt - sequence.done
            for sequence in self.sequences(SequenceState.WAITING, SequenceState.PREFILLING)
        )

    def run(self) -> None:
        while self.alive or self.now < self.world.steps:
            self.now += 1
            assert self.now < 20 * self.world.steps, self.say(f"starved: {self.alive}")
            if self.now < self.world.steps and self.rng.random() < self.world.bursts:
                for _ in range(self.rng.choice([1, 1, 2, 8])):
                    self.arrive()
            if self.alive and self.chance(self.world.aborts):
                self.leave(self.rng.choice(self.alive), "abort")
            if self.world.forgetful and self.cached:
                lost = set(self.rng.sample(sorted(self.cached), len(self.cached) // 4))
                # What sequences hold stays, where they share it.
                held = (
                    self.sequences(SequenceState.PREFILLING, SequenceState.RUNNING) if self.world.limits.shares else []
                )
                self.cached -= lost - {key for sequence in held for key in sequence.keys[: sequence.done // BLOCK]}
            self.plan()
            self.prefill()
            self.decode()
        assert all(request.ending for request in self.requests.values())
        assert self.scheduler.running == self.scheduler.waiting == self.scheduler.pending_tokens == 0

    # What the world does.

    def arrive(self) -> None:
        """A request, or several with one prompt; most prompts begin as others do."""
        rng, name = self.rng, f"r{len(self.requests)}"
        length = min(int(150 * rng.paretovariate(0.9)), 24 * BLOCK)
        if rng.random() < 0.2:
            length += -length % BLOCK
        elif rng.random() < 0.05:
            most = self.world.limits.kv_tokens_max - self.world.limits.sequence_tokens
            length = max(1, min(24 * BLOCK, most) - rng.randrange(30))
        family, shared = rng.randrange(2), rng.choice([0, 1, 3, 9, 9])
        keys = tuple(
            f"{f'family{family}' if index < shared else name}:{index}".encode() for index in range(length // BLOCK)
        )
        copies = rng.choice([1, 1, 1, 2, 5])
        for copy in range(copies):
            limits, free = self.world.limits, self.world.limits.sequences_max - self.scheduler.running
            reason = self.scheduler.refusal(length - 1)
            if self.crowd([], length - 1 + STEP_TOKENS) > limits.kv_tokens_max:
                assert reason == "too_long"
            else:
                room = limits.queue_requests_max + free - self.scheduler.waiting
                assert (reason == "full") == (room <= 0)
                assert (reason == "full_for_it") == (0 < room <= self.scheduler.waiting / FLOW_TIMES)
            if reason is not None:
                return
            request = Request(
                length - 1,
                max_tokens=min(int(3 * rng.paretovariate(0.7)) - 2, 300),
                deadline=self.now + rng.choice([3, 200, 1000]) if self.world.deadlines else float("inf"),
                poisoned=self.chance(self.world.poisoned),
                keys=keys,
                twin=name.encode() if copies > 1 else b"",
            )
            member = f"{name}.{copy}"
            request.patience = self.patience(request)
            self.requests[member] = request
            self.alive.append(member)
            sequence = ScheduledSequence(
                member, request.prompt, request.max_tokens, rng.randrange(self.world.priorities)
            )
            sequence.deadline, sequence.keys, sequence.twin = request.deadline, keys, request.twin
            self.scheduler.add(sequence)
            self.check()

    def patience(self, request: Request) -> int:
        """When the request has ended at the latest: everything before it could go one by one, and of what comes after
        it every second chunk, and as much as joined while it waited for a shared block."""
        chunks = (
            sum(sequence.prompt // BLOCK + 1 for sequence in map(self.sequence, self.alive))
            + request.prompt // BLOCK
            + 1
        )
        tokens = (
            sum(sequence.max_tokens - sequence.generated + 2 for sequence in map(self.sequence, self.alive))
            + request.max_tokens
        )
        return self.now + 2 * chunks + tokens + PATIENCE

    def leave(self, name: str, why: str) -> None:
        self.scheduler.finish(name)
        self.ended(name, why)
        self.check()

    def ended(self, name: str, why: str) -> None:
        request = self.requests[name]
        assert request.ending is None, self.say(f"{name} ends twice")
        assert why != "length" or request.emitted == request.max_tokens, self.say(f"{name} has too few tokens")
        assert request.emitted <= request.max_tokens
        assert not self.world.fair or self.now <= request.patience, self.say(f"{name} waited too long")
        request.ending = why
        self.alive.remove(name)
        self.forget([name])

    def forget(self, names: list[str]) -> None:
        """The engine's caches of sequences that left the batch or the prefill."""
        self.fed -= set(names)
        self.passed -= set(names)

    # The engine's step.

    def plan(self) -> None:
        late = {name for name in self.alive if self.requests[name].deadline <= self.now}
        placed = [
            sequence
            for sequence in self.sequences(SequenceState.PREFILLING, SequenceState.RUNNING)
            if sequence.request_id not in late
        ]
        before = {sequence.request_id: (sequence.rank, sequence.state) for sequence in placed}
        crowded = self.crowd(placed) > self.world.limits.kv_tokens_max
        plan = self.scheduler.plan(self.now)
        assert set(plan.expired) == late
        for name in (*plan.expired, *plan.cut):
            self.ended(name, "cut" if name in plan.cut else "expired")
        assert not plan.cut or len(before) - len(plan.preempted) == 1, self.say("only a sequence alone is cut")
        self.forget(plan.preempted)
        self.sent_back.update(plan.preempted)
        self.check()
        for name in plan.preempted:
            rank, state = before[name]
            kept = [sequence for sequence in self.sequences(state) if sequence.request_id in before]
            # Where each sequence costs its own, one that costs less may stay beside whom this one has no room.
            least = min((sequence.length // BLOCK for sequence in kept if sequence.rank > rank), default=inf)
            limits = self.world.limits
            costs_less = limits.shares or (limits.paged and least < self.sequence(name).length // BLOCK)
            assert costs_less or all(sequence.rank < rank for sequence in kept), self.say(
                f"{name} should have kept its place"
            )
        if plan.preempted and not crowded:
            urgency = max(-before[name][0][0] for name in plan.preempted)
            admitted = self.admit()
            assert admitted is not None, self.say("sent back in vain")
            assert admitted.priority > urgency, self.say("equals send nobody back")

    def crowd(self, sequences: list[ScheduledSequence], *coming: int, keys: tuple[bytes, ...] = ()) -> int:
        """Tokens of the batch when the next step has been launched.

        Args:
            coming: lengths of a sequence beside them.
            keys: its blocks.
        """
        limits, lengths = self.world.limits, [*(sequence.length + STEP_TOKENS for sequence in sequences), *coming]
        besides = len(lengths) * limits.sequence_tokens
        if not limits.paged:
            return len(lengths) * max(lengths, default=0) + besides
        held = [sequence.keys[: sequence.done // BLOCK] for sequence in sequences] if limits.shares else []
        once = {key for each in held for key in each}
        again = sum(map(len, held)) - len(once) + len(list(takewhile(once.__contains__, keys)))
        return (sum(length // BLOCK for length in lengths) - again) * BLOCK + besides

    def waits_for(self, sequence: ScheduledSequence, other: ScheduledSequence) -> bool:
        """Whether `sequence` gains by waiting for `other`, which is being prefilled, by comparing all of their
        blocks."""
        blocks = zip(sequence.keys[: sequence.prompt // BLOCK], other.keys[: other.prompt // BLOCK], strict=False)
        common = sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], blocks))
        return common > other.done // BLOCK or (sequence.twin != b"" and sequence.twin == other.twin)

    def kept_out(self, sequence: ScheduledSequence) -> bool:
        """Whether a limit, or the search for a sequence that broke a step, is a reason for `sequence` to wait."""
        placed, limits = self.sequences(SequenceState.PREFILLING, SequenceState.RUNNING), self.world.limits
        prefilling = sum(other.state is SequenceState.PREFILLING for other in placed)
        need = sequence.prompt + max(STEP_TOKENS, min(sequence.max_tokens, HEADROOM_TOKENS))
        return bool(
            len(placed) == limits.sequences_max
            or prefilling == limits.prefill_sequences_max
            or (
                placed
                and self.crowd(placed, need, keys=sequence.keys[: sequence.prompt // BLOCK]) > limits.kv_tokens_max
            )
            or any(other.suspect for other in [sequence, *placed])
        )

    def admit(self) -> ScheduledSequence | None:
        prefilling = self.sequences(SequenceState.PREFILLING)
        free = [
            sequence
            for sequence in self.sequences(SequenceState.WAITING)
            if not any(ahead.rank < sequence.rank and self.waits_for(sequence, ahead) for ahead in prefilling)
        ]
        first = min(free, key=lambda sequence: sequence.rank, default=None)
        name = self.scheduler.admit()
        if name is None:
            assert first is None or self.kept_out(first), self.say(f"{first.request_id} waits for nothing")
            return None
        sequence = self.sequence(name)
        assert sequence is first, self.say(f"{name} goes before {first.request_id if first else 'those it waits for'}")
        if self.chance(self.world.failures):
            self.leave(name, "error")
            return sequence
        request, known = self.requests[name], 0
        while known < sequence.prompt // BLOCK and known < len(sequence.keys) and sequence.keys[known] in self.cached:
            known += 1
        assert sequence.twin == (request.twin if sequence.prompt == request.prompt else b"")
        self.scheduler.reused(name, sequence.prompt if sequence.twin in self.cached else known * BLOCK)
        self.check()
        return sequence

    def prefill(self) -> None:
        step = budget = self.rng.choice([90, BLOCK, 2 * BLOCK, 2 * BLOCK + 77])
        while True:
            while self.admit() is not None:
                pass
            chunk = self.scheduler.next_chunk(budget, step)
            assert self.scheduler.next_chunk(budget, step) == chunk, self.say("a question changes nothing")
            if chunk is None:
                assert budget < step or not self.sequences(SequenceState.PREFILLING), self.say("nothing is prefilled")
                assert not any(self.is_end(sequence, budget) for sequence in self.rivals()), self.say(
                    "an end would have fitted"
                )
                return
            assert 0 < chunk.stop - chunk.start <= budget
            self.check_worth(chunk, budget, step)
            if self.chance(self.world.failures):
                self.leave(chunk.request_id, "error")
                budget -= chunk.stop - chunk.start
                continue
            self.take_turns(chunk, budget, step)
            budget -= chunk.stop - chunk.start
            self.compute(chunk)
            self.check()

    def rivals(self) -> list[ScheduledSequence]:
        """The most urgent of the sequences being prefilled."""
        sequences = self.sequences(SequenceState.PREFILLING)
        urgency = max((sequence.priority for sequence in sequences), default=0)
        return [sequence for sequence in sequences if sequence.priority == urgency]

    def is_end(self, sequence: ScheduledSequence, budget: int) -> bool:
        """Whether the budget completes the sequence's prompt in one chunk."""
        size = self.world.limits.prefill_chunk_tokens
        return sequence.prompt - sequence.done <= budget and sequence.prompt <= (sequence.done // size + 1) * size

    def check_worth(self, chunk: PrefillChunk, budget: int, step: int) -> None:
        """A chunk ends its prompt or lies within a border. Of a step's whole budget another one uses at least half, up
        to half a grain; what is left of one is used up to where whole ones end, or not at all."""
        size, tokens = self.world.limits.prefill_chunk_tokens, chunk.stop - chunk.start
        if chunk.stop == self.sequence(chunk.request_id).prompt or chunk.stop % size == 0:
            return
        if budget < step:
            assert tokens >= TOKENS_MIN, self.say(f"a fragment: {chunk}")
            assert chunk.stop % step == 0, self.say(f"{chunk} moves the chunks after it")
        else:
            assert 2 * tokens >= budget, self.say(f"{chunk} of {budget}")
            assert chunk.stop % (TOKENS_MIN // 2) == 0, self.say(f"{chunk} ends anywhere")

    def take_turns(self, chunk: PrefillChunk, budget: int, step: int) -> None:
        """The oldest of the most urgent has every second chunk, and the shortest of them the others; where the oldest
        has no use for the rest of a budget, it waits for the next one, and prompts that end go before."""
        sequence, rivals = self.sequence(chunk.request_id), self.rivals()
        assert sequence in rivals, self.say("a less urgent prompt goes first")
        oldest = min(rivals, key=lambda rival: rival.order)
        shortest = min(rival.prompt - rival.done for rival in rivals)
        if sequence is oldest:
            passed = oldest.request_id in self.passed
            assert sequence.prompt - sequence.done == shortest or passed, self.say("a short prompt waits")
            self.passed.discard(oldest.request_id)
            return
        assert sequence.prompt - sequence.done == shortest, self.say("neither the oldest nor the shortest")
        if oldest.request_id in self.passed:
            assert budget < step and not self.is_end(oldest, budget), self.say("the oldest waits")
            assert self.is_end(sequence, budget), self.say("the oldest waits for a prompt that does not end")
        self.passed.add(oldest.request_id)

    def compute(self, chunk: PrefillChunk) -> None:
        sequence = self.sequence(chunk.request_id)
        assert chunk.start == sequence.done
        self.scheduler.prefilled(chunk)
        self.tokens_computed += chunk.stop - chunk.start
        for index in range(chunk.start // BLOCK, min(chunk.stop // BLOCK, len(sequence.keys))):
            self.blocks_computed[sequence.keys[index]] += 1
            self.cached.add(sequence.keys[index])
        if sequence.state is SequenceState.RUNNING and sequence.twin:
            self.cached.add(sequence.twin)

    def decode(self) -> None:
        assert (
            self.crowd(self.sequences(SequenceState.PREFILLING, SequenceState.RUNNING))
            <= self.world.limits.kv_tokens_max
        ), self.say("memory is full")
        batch = self.scheduler.decoding()
        assert set(batch) == {sequence.request_id for sequence in self.sequences(SequenceState.RUNNING)}
        if not batch:
            return
        broken = any(self.requests[name].poisoned for name in batch)
        if broken or self.chance(self.world.failures):
            self.forget(batch)
            for name in self.scheduler.batch_failed():
                assert self.requests[name].poisoned or self.world.failures, self.say(f"{name} is innocent")
                self.leave(name, "error")
            self.check()
            return
        for name in batch:
            if name not in self.fed:
                self.fed.add(name)
                continue
            self.scheduler.decoded(name)
            self.requests[name].emitted += 1
            sequence = self.sequence(name)
            if sequence.generated == sequence.max_tokens:
                self.leave(name, "length")


@pytest.mark.parametrize("seed", range(40))
def test_laws(seed: int):
    """Every sequence ends once, with its tokens, in time; limits hold at every step; nothing is done twice for
    nothing."""
    world = make_world(seed)
    simulation = Simulation(world)
    simulation.run()
    endings = Counter(request.ending for request in simulation.requests.values())
    if not (world.failures or world.poisoned):
        assert endings["error"] == 0
    if not world.failures:
        poisoned = {name for name, request in simulation.requests.items() if request.poisoned}
        failed = {name for name, request in simulation.requests.items() if request.ending == "error"}
        assert failed <= poisoned
    if world.calm:
        assert set(endings) == {"length"}
        assert simulation.sent_back.total() == 0
        check_computed_once(simulation)


def check_computed_once(simulation: Simulation) -> None:
    """Every block once, and what is left of a prompt after its last whole block once for all sequences of that
    prompt."""
    say = f"seed {simulation.world.seed}"
    assert max(simulation.blocks_computed.values(), default=1) == 1, say
    blocks: set[bytes] = set()
    rests: dict[bytes, int] = {}
    for name, request in simulation.requests.items():
        blocks.update(request.keys[: request.prompt // BLOCK])
        rests[request.twin or name.encode()] = request.prompt % BLOCK
    assert simulation.tokens_computed == len(blocks) * BLOCK + sum(rests.values()), say
