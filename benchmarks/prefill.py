"""Simulates in which chunks prompts of agents are prefilled, and what that costs.

    python -m benchmarks.prefill [--agents 8,32] [--rounds 20] [--token-us 36]

The scheduler, the pace and the batches are the replica's own; only the time of a call is made up, as measured with the
8B shape on an H200. Each agent sends its next turn as soon as it has the answer to the last one. A simulation has no
noise: figures of two versions may be compared, and say nothing about a machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from satchel.actors.replica.execution.padding import CALL_TOKENS, batches_of, padded_tokens
from satchel.actors.replica.scheduling.limits import Limits
from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from satchel.actors.replica.scheduling.scheduler import PrefillChunk, Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence
from satchel.cluster.config.config import Scheduling

from .parts import median, percentile

CALL_S, TOKEN_S = 0.022, 36e-6
STEP_S, ROW_S = 0.010, 0.0002
"""A decode step, and what a sequence adds to it."""

SYSTEM_TOKENS, ANSWER_TOKENS, TURNS = 4352, 96, 6
THINKING_S = (0.005, 0.04)
"""Between an answer and the next turn."""


@dataclass
class Agent:
    """Its conversation has `length` tokens after its last answer."""

    number: int
    length: int = SYSTEM_TOKENS
    turns: int = 0
    sent_s: float = 0.0


@dataclass
class Simulation:
    """Agents that begin at once behind a system prompt that has KV.

    Args:
        turn_tokens: what a turn adds: the least and the most.
    """

    agents: int
    turn_tokens: tuple[int, int]
    seed: int
    token_s: float = TOKEN_S
    now_s: float = 0.0
    prefill_s: float = 0.0
    calls: int = 0
    tokens: int = 0
    firsts_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = Scheduling()
        self._rng = random.Random(self.seed)
        self._limits = Limits(
            config.sequences_max,
            config.queue_requests_max,
            config.prefill_chunk_tokens,
            10**9,
            config.prefill_sequences_max,
        )
        self._scheduler = Scheduler(self._limits)
        self._pace = PrefillPace(config.prefill_chunk_tokens, config.prefill_pause_s)
        for tokens in (64, 20, 2048, 20, 2048):
            self._pace.note(tokens, CALL_S + tokens * self.token_s)
        self._agents = [Agent(number) for number in range(self.agents)]
        self._coming: list[tuple[float, int]] = []

    def run(self) -> None:
        """Runs all turns of all agents."""
        for agent in self._agents:
            self._send_later(agent)
        while self._coming or self._scheduler.running or self._scheduler.waiting:
            if not (self._scheduler.running or self._scheduler.waiting):
                self.now_s = max(self.now_s, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now_s:
                self._send(self._agents[heappop(self._coming)[1]])
            self._scheduler.plan(self.now_s)
            self._prefill()
            self._decode()

    def _send_later(self, agent: Agent) -> None:
        heappush(self._coming, (self.now_s + self._rng.uniform(*THINKING_S), agent.number))

    def _send(self, agent: Agent) -> None:
        known, agent.sent_s = agent.length, self.now_s
        agent.length += self._rng.randint(*self.turn_tokens)
        sequence = ScheduledSequence(str(agent.number), agent.length - 1, ANSWER_TOKENS, known=known)
        self._scheduler.add(sequence)

    def _prefill(self) -> None:
        """As `PrefillLoop.step`."""
        decoding = bool(self._scheduler.decoding())
        began, step_budget = self.now_s, self._pace.budget(decoding)
        budget = step_budget
        while budget > 0:
            while (admitted := self._scheduler.admit()) is not None:
                sequence = self._scheduler.sequence(admitted)
                assert sequence is not None
                self._scheduler.reused(admitted, sequence.known)
            chunks = list[PrefillChunk]()
            while (chunk := self._scheduler.next_chunk(budget, step_budget)) is not None:
                if any(chunk.request_id == other.request_id for other in chunks):
                    break
                self._scheduler.prefilled(chunk)
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
            if not chunks:
                break
            self._compute(chunks)
        if decoding and self.now_s > began:
            self.pauses_s.append(self.now_s - began)

    def _compute(self, chunks: Sequence[PrefillChunk]) -> None:
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        batches = batches_of(
            [(chunk.start, length) for chunk, length in zip(chunks, lengths, strict=True)], CALL_TOKENS
        )
        tokens = sum(len(batch) * padded_tokens(max(lengths[number] for number in batch)) for batch in batches)
        seconds = len(batches) * CALL_S + tokens * self.token_s
        self._pace.note(sum(lengths), seconds)
        self.now_s += seconds
        self.prefill_s += seconds
        self.calls += len(batches)
        self.tokens += tokens

    def _decode(self) -> None:
        decoding = self._scheduler.decoding()
        self.now_s += (STEP_S + ROW_S * len(decoding)) * bool(decoding)
        for name in decoding:
            self._scheduler.decoded(name)
            sequence, agent = self._scheduler.sequence(name), self._agents[int(name)]
            assert sequence is not None
            if sequence.generated == 1:
                self.firsts_s.append(self.now_s - agent.sent_s)
            if sequence.generated == ANSWER_TOKENS:
                self._scheduler.finish(name)
                agent.length, agent.turns = agent.length + ANSWER_TOKENS - 1, agent.turns + 1
                if agent.turns < TURNS:
                    self._send_later(agent)


def main() -> None:
    """Prints a line for every load."""
    parser = argparse.ArgumentParser(description="simulate the chunks of prompts")
    parser.add_argument("--agents", default="8,32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--token-us", type=float, default=1e6 * TOKEN_S)
    given = parser.parse_args()
    print("| agents | tokens a turn | prefill s | calls | first token s | its p95 | all s | pauses s | most |")
    print("| --- " * 9 + "|")
    for agents in map(int, given.agents.split(",")):
        for turn_tokens in ((1200, 1200), (100, 2500), (20, 600), (2000, 9000)):
            runs = [Simulation(agents, turn_tokens, seed, given.token_us / 1e6) for seed in range(given.rounds)]
            for run in runs:
                run.run()
            firsts = [seconds for run in runs for seconds in run.firsts_s]
            pauses = [seconds for run in runs for seconds in run.pauses_s] or [0.0]
            prefill_s, calls, all_s = (
                sum(values) / len(runs)
                for values in zip(*((run.prefill_s, run.calls, run.now_s) for run in runs), strict=True)
            )
            turn = "-".join(map(str, sorted(set(turn_tokens))))
            print(
                f"| {agents} | {turn} | {prefill_s:.2f} | {calls:.0f} | {median(firsts):.3f} | "
                f"{percentile(firsts, 0.95):.3f} | {all_s:.2f} | {median(pauses):.3f} | {max(pauses):.3f} |"
            )


if __name__ == "__main__":
    main()
