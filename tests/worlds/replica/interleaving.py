"""Agents on one engine in virtual time: the scheduler and the pace are real, what calls take is a formula."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from satchel.actors.replica.scheduling.limits import Limits
from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from satchel.actors.replica.scheduling.scheduler import PrefillChunk, Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence

PAUSE_S = 0.25
LIMITS = Limits(
    sequences_max=32, queue_requests_max=256, prefill_chunk_tokens=2048, kv_tokens_max=10**7, prefill_sequences_max=8
)


@dataclass(frozen=True)
class Costs:
    """Seconds: of a prefill call, of each of its tokens, of each of its pairs of a token and an earlier one; of a
    decode step, and of each of its sequences."""

    call: float
    token: float
    pair: float
    step: float
    sequence: float

    def chunk(self, chunk: PrefillChunk) -> float:
        tokens = chunk.stop - chunk.start
        return self.call + tokens * (self.token + self.pair * (chunk.start + tokens / 2))


DEVICES = {
    "two cores, 5 million parameters": Costs(0.015, 0.0019, 1.45e-6, 0.005, 0.005),
    "a Mac, 8 billion": Costs(0.02, 0.0025, 1e-7, 0.02, 0.001),
    "a Mac, 70 billion": Costs(0.1, 0.016, 5e-7, 0.1, 0.003),
    "an H200, 600 million": Costs(0.008, 2e-5, 1e-10, 0.006, 1e-4),
}
"""The first and the last as measured; Macs by their arithmetic and memory bandwidth."""


def any_costs(rng: random.Random) -> Costs:
    """A call's fixed part is about that of a decode step: both read all weights once."""
    step, token = 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-4.7, -2.3)
    return Costs(
        step * rng.uniform(0.2, 2), token, token * 10 ** rng.uniform(-5, -3.3), step, step * rng.uniform(0, 0.5)
    )


@dataclass
class Agent:
    """`tokens` are what it says after a prompt that needs KV for `prompt` tokens. Times in seconds."""

    name: str
    arrival: float
    prompt: int
    tokens: int
    priority: int = 0
    first: float = 0.0
    ended: float = 0.0
    said: int = 0


@dataclass(frozen=True)
class Turn:
    """One turn of the engine: from when to when, what it prefilled within which budget, and who decoded."""

    began: float
    ended: float
    budget: int
    chunks: tuple[PrefillChunk, ...]
    prefill_s: float
    decoding: tuple[str, ...]
    """Who was decoding before, and so waited for the chunks."""
    stepped: tuple[str, ...]


@dataclass
class VirtualEngine:
    """Turns as the real one does: commands, plan, chunks within the budget, one step; the first step of a sequence
    yields nothing, because a step is launched before the last one is read."""

    costs: Costs
    limits: Limits = LIMITS
    now: float = 0.0
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.pace = PrefillPace(self.limits.prefill_chunk_tokens, PAUSE_S)
        self._agents: dict[str, Agent] = {}
        self._fed: set[str] = set()

    @property
    def chunks(self) -> list[PrefillChunk]:
        return [chunk for turn in self.turns for chunk in turn.chunks]

    def run(self, agents: Iterable[Agent]) -> float:
        """Until all have ended. Returns when that was."""
        todo = deque(sorted(agents, key=lambda agent: agent.arrival))
        while todo or self._agents:
            if not self._agents:
                self.now = max(self.now, todo[0].arrival)
            while todo and todo[0].arrival <= self.now:
                self._submit(todo.popleft())
            self._turn()
        return self.now

    def run_one_by_one(self, agents: Iterable[Agent]) -> float:
        """Each when the one before has ended."""
        for agent in sorted(agents, key=lambda agent: agent.arrival):
            self.run([replace(agent, arrival=max(agent.arrival, self.now))])
        return self.now

    def _submit(self, agent: Agent) -> None:
        assert self.scheduler.refusal(agent.prompt) is None
        self._agents[agent.name] = agent
        self.scheduler.add(ScheduledSequence(agent.name, agent.prompt, agent.tokens, agent.priority))

    def _turn(self) -> None:
        began, decoding = self.now, tuple(self.scheduler.decoding())
        assert not self.scheduler.plan(self.now).cut
        budget = left = self.pace.budget(bool(decoding))
        done: list[PrefillChunk] = []
        while left > 0:
            while (admitted := self.scheduler.admit()) is not None:
                self.scheduler.reused(admitted, 0)
            chunk = self.scheduler.next_chunk(left, budget)
            if chunk is None:
                break
            self.scheduler.prefilled(chunk)
            seconds = self.costs.chunk(chunk)
            self.now += seconds
            self.pace.note(chunk.stop - chunk.start, seconds)
            left -= chunk.stop - chunk.start
            done.append(chunk)
        self.scheduler.check()
        prefill_s, stepped = self.now - began, tuple(self.scheduler.decoding())
        assert done or stepped, "a turn that does nothing, while agents wait"
        if stepped:
            self._step(stepped)
        self.turns.append(Turn(began, self.now, budget, tuple(done), prefill_s, decoding, stepped))

    def _step(self, sequences: tuple[str, ...]) -> None:
        self.now += self.costs.step + self.costs.sequence * len(sequences)
        for name in sequences:
            if name not in self._fed:
                self._fed.add(name)
                continue
            agent = self._agents[name]
            self.scheduler.decoded(name)
            agent.said += 1
            agent.first = agent.first or self.now
            if agent.said == agent.tokens:
                agent.ended = self.now
                self.scheduler.finish(name)
                self._fed.discard(name)
                del self._agents[name]


def some_agents(rng: random.Random, costs: Costs, count: int, tokens_min: int = 2) -> list[Agent]:
    """Prompts of 30 to 8,000 tokens; all come while about half of the work is still to do."""
    agents = [
        Agent(f"agent-{number}", 0.0, int(10 ** rng.uniform(1.5, 3.9)), rng.randint(tokens_min, 250))
        for number in range(count)
    ]
    work = sum(
        costs.chunk(PrefillChunk("", 0, agent.prompt)) + agent.tokens * (costs.step + costs.sequence)
        for agent in agents
    )
    span = work * rng.choice([0.1, 0.5])
    for agent in agents[1:]:
        agent.arrival = rng.uniform(0, span)
    return agents
