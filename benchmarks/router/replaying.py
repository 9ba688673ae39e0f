"""Replays conversations through a router, before simulated nodes (`engines.py`), in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.actors.router.policy import Policy

from .engines import Blocks, Machine, Replica, SimulatedSequence
from .workloads import WorkloadSession

REPORT_S = 0.5


class Router(Protocol):
    """What says where a request goes: Satchel's, or another's."""

    def route(self, request: RouteRequest, now: float) -> Decision: ...

    def release(self, replica: str, request_id: str) -> None:
        """The request's answer has ended."""

    def observe(self, engines: Iterable[Replica], now: float) -> None:
        """What the engines report every `REPORT_S`."""


class Satchel:
    """Satchel's policy under one of its rules."""

    def __init__(self, rule: str) -> None:
        self._policy = Policy(timeout_s=5.0, sticky_penalty_s_max=2.0, rule=rule)

    def route(self, request: RouteRequest, now: float) -> Decision:
        decision = self._policy.route(request, now)
        assert decision is not None
        return decision

    def release(self, replica: str, request_id: str) -> None:
        self._policy.members.release(replica, request_id)

    def observe(self, engines: Iterable[Replica], now: float) -> None:
        for engine in engines:
            self._policy.members.observe(engine.report(), now)
            if engine.has_disk:
                self._policy.members.observe_store(engine.store_report(), now)


@dataclass
class ReplayOutcome:
    """Of one router, on one workload or several."""

    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0
    """What one cache without limits that all replicas share would have held of the prompts."""
    pulled_tokens: int = 0
    ended_s: float = 0.0
    """When the last answer ended."""
    imbalances: list[float] = field(default_factory=list)
    """Of each workload, the most requests that a replica got over their mean."""

    def add(self, other: ReplayOutcome) -> None:
        """Take another workload's outcome as well."""
        self.ttft_s += other.ttft_s
        self.total_s += other.total_s
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.known_tokens += other.known_tokens
        self.pulled_tokens += other.pulled_tokens
        self.ended_s = max(self.ended_s, other.ended_s)
        self.imbalances += other.imbalances

    def figures(self) -> dict[str, float]:
        ttft = sorted(self.ttft_s)
        return {
            "requests": len(ttft),
            "ttft_mean_s": sum(ttft) / len(ttft),
            "ttft_p50_s": ttft[len(ttft) // 2],
            "ttft_p99_s": ttft[int(len(ttft) * 0.99)],
            "total_mean_s": sum(self.total_s) / len(self.total_s),
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "of_infinite_cache": self.cached_tokens / max(1, self.known_tokens),
            "pulled": self.pulled_tokens / self.prompt_tokens,
            "most_over_mean_requests": sum(self.imbalances) / len(self.imbalances),
        }


def names(replicas: int) -> list[str]:
    return [f"r{index}" for index in range(replicas)]


def replay(
    sessions: Sequence[WorkloadSession], router: Router, *, replicas: int = 8, machine: Machine | None = None
) -> ReplayOutcome:
    """All sessions through one router."""
    return _RouterReplay(sessions, router, replicas, machine or Machine()).run()


class _RouterReplay:
    """The clock, the engines, and the turns that are under way or yet to come."""

    def __init__(self, sessions: Sequence[WorkloadSession], router: Router, replicas: int, machine: Machine) -> None:
        self._sessions = sessions
        self._router = router
        self._engines = {name: Replica(name, machine) for name in names(replicas)}
        self._arrivals = [(session.starts_s, index, 0) for index, session in enumerate(sessions)]
        heapq.heapify(self._arrivals)
        self._under_way: dict[str, tuple[int, int]] = {}
        self._ids = count()
        self._everything = Blocks(10**9)
        self._outcome = ReplayOutcome()

    def run(self) -> ReplayOutcome:
        report_s = 0.0
        while self._arrivals or self._under_way:
            now = min(self._arrivals[0][0], report_s) if self._arrivals else report_s
            self._end(now)
            if now == report_s:
                self._router.observe(self._engines.values(), now)
                report_s += REPORT_S
            while self._arrivals and self._arrivals[0][0] <= now:
                _, session, turn = heapq.heappop(self._arrivals)
                self._ask(session, turn, now)
        assigned = [engine.assigned for engine in self._engines.values()]
        self._outcome.imbalances.append(max(assigned) * len(assigned) / sum(assigned))
        return self._outcome

    def _end(self, now: float) -> None:
        """Bring the engines to `now`. Who got an answer by then thinks, and asks again."""
        for engine in self._engines.values():
            for sequence in engine.advance(now):
                session, turn = self._under_way.pop(sequence.request_id)
                self._router.release(engine.name, sequence.request_id)
                self._note(sequence)
                turns = self._sessions[session].turns
                if turn + 1 < len(turns):
                    heapq.heappush(self._arrivals, (now + turns[turn + 1].think_s, session, turn + 1))

    def _ask(self, session: int, turn: int, now: float) -> None:
        asked = self._sessions[session].turns[turn]
        request = RouteRequest(f"q{next(self._ids)}", "m", asked.agent, list(asked.blocks), asked.prompt_tokens)
        decision = self._router.route(request, now)
        source = self._engines[decision.pull_from] if decision.pull_from else None
        sequence = SimulatedSequence(request.request_id, asked, now, asked.prompt_tokens)
        outcome = self._outcome
        outcome.pulled_tokens += self._engines[decision.replica].submit(sequence, decision, source)
        outcome.known_tokens += min(self._everything.run(asked.blocks) * BLOCK_TOKENS, asked.prompt_tokens - 1)
        self._everything.keep(asked.blocks)
        self._under_way[request.request_id] = (session, turn)

    def _note(self, sequence: SimulatedSequence) -> None:
        self._outcome.ttft_s.append(sequence.first_token_s - sequence.arrived_s)
        self._outcome.total_s.append(sequence.ended_s - sequence.arrived_s)
        self._outcome.ended_s = max(self._outcome.ended_s, sequence.ended_s)
        self._outcome.prompt_tokens += sequence.turn.prompt_tokens
        self._outcome.cached_tokens += sequence.cached_tokens
