"""Replays conversations against the router's rules: simulated replicas, a simulated clock, no model.

A replica here computes one prefill chunk between decode steps, first come first served, and keeps finished prompts'
blocks, least recently used first out. Its rates are made up; what is compared are the rules.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path

from satchel.actors.kv_store.blocks import BLOCK_TOKENS
from satchel.actors.messages import ReplicaReport, RouteRequest
from satchel.actors.router.policy import Policy

REPORT_S = 0.5
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Machine:
    """What every simulated replica can do."""

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    """A decode step of one row."""
    step_row_s: float = 0.002
    """What each further row adds to it."""
    rows_max: int = 16
    blocks_max: int = 2000


@dataclass(frozen=True)
class Turn:
    """One request of a session: it comes `think_s` after the one before has ended."""

    agent: str
    blocks: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True)
class Session:
    starts_s: float
    turns: list[Turn]


@dataclass(eq=False)
class Row:
    request_id: str
    turn: Turn
    arrived_s: float
    left_tokens: int
    """To be prefilled."""
    cached_tokens: int = 0
    decoded: int = 0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    looked_up: bool = False


@dataclass
class Outcome:
    """Of one rule on one trace."""

    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        ttft, spread = sorted(self.ttft_s), list(self.requests.values())
        return {
            "requests": len(ttft),
            "ttft_mean_s": sum(ttft) / len(ttft),
            "ttft_p50_s": ttft[len(ttft) // 2],
            "ttft_p99_s": ttft[int(len(ttft) * 0.99)],
            "total_mean_s": sum(self.total_s) / len(self.total_s),
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "most_over_mean_requests": max(spread) * len(spread) / sum(spread),
        }


class Replica:
    """A simulated engine. `advance` brings it to a time; what ended by then is returned."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.assigned = 0
        self._machine = machine
        self._now = 0.0
        self._waiting: list[Row] = []
        self._prefilling: list[Row] = []
        self._decoding: list[Row] = []
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._events: tuple[set[bytes], set[bytes]] = (set(), set())
        self._sequence = 0

    def submit(self, row: Row) -> None:
        self.assigned += 1
        if not (self._waiting or self._prefilling or self._decoding):
            self._now = max(self._now, row.arrived_s)
        self._waiting.append(row)

    def advance(self, until_s: float) -> list[Row]:
        ended: list[Row] = []
        while self._now < until_s:
            places = self._machine.rows_max - len(self._decoding) - len(self._prefilling)
            admitted, self._waiting = self._waiting[:places], self._waiting[places:]
            self._prefilling += admitted
            if not self._prefilling and not self._decoding:
                break
            self._step(until_s, ended)
        return ended

    def report(self) -> ReplicaReport:
        announced, retracted = self._events
        self._events = (set(), set())
        self._sequence += 1
        rows = self._waiting + self._prefilling + self._decoding
        return ReplicaReport(
            replica=self.name,
            model="m",
            incarnation="1",
            sequence=self._sequence,
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            pending_tokens=sum(row.left_tokens for row in rows),
            rows_max=self._machine.rows_max,
            prefill_tokens_per_s=self._machine.prefill_tokens_per_s,
            active=[row.request_id for row in rows],
            announced=sorted(announced),
            retracted=sorted(retracted),
            full=self._sequence == 1,
        )

    def _step(self, until_s: float, ended: list[Row]) -> None:
        """One step; many at once while the same rows only decode."""
        machine, rows = self._machine, len(self._decoding)
        step_s = machine.step_s + machine.step_row_s * rows if rows else 0.0
        steps = 1
        if self._prefilling:
            step_s += self._prefill(self._prefilling[0]) / machine.prefill_tokens_per_s
        else:
            left = min(row.turn.output_tokens - row.decoded for row in self._decoding)
            steps = max(1, min(left, int((until_s - self._now) / step_s)))
        self._now += steps * step_s
        for row in self._decoding:
            row.decoded += steps
        if self._prefilling and not self._prefilling[0].left_tokens:
            row = self._prefilling.pop(0)
            row.first_token_s, row.decoded = self._now, 1
            self._keep(row.turn.blocks)
            self._decoding.append(row)
        for row in [row for row in self._decoding if row.decoded >= row.turn.output_tokens]:
            row.ended_s = self._now
            ended.append(row)
            self._decoding.remove(row)

    def _prefill(self, row: Row) -> int:
        if not row.looked_up:
            row.looked_up = True
            held = 0
            for block in row.turn.blocks:
                if block not in self._cache:
                    break
                held += BLOCK_TOKENS
            row.cached_tokens = min(held, row.turn.prompt_tokens - 1)
            row.left_tokens = row.turn.prompt_tokens - row.cached_tokens
        tokens = min(CHUNK_TOKENS, row.left_tokens)
        row.left_tokens -= tokens
        return tokens

    def _keep(self, blocks: tuple[bytes, ...]) -> None:
        came, went = self._events
        for block in reversed(blocks):
            if block not in self._cache:
                came.add(block)
                went.discard(block)
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._machine.blocks_max:
            block, _ = self._cache.popitem(last=False)
            went.add(block)
            came.discard(block)


def replay(sessions: list[Session], rule: str, *, replicas: int = 8, machine: Machine | None = None) -> Outcome:
    """All sessions through one rule."""
    machine = machine or Machine()
    policy = Policy(timeout_s=5.0, sticky_penalty_s_max=2.0, rule=rule)
    engines = {f"r{index}": Replica(f"r{index}", machine) for index in range(replicas)}
    outcome, names, rows = Outcome(), count(), dict[str, tuple[int, int]]()
    arrivals = [(session.starts_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    report_s = 0.0
    while arrivals or rows:
        now = min(arrivals[0][0], report_s) if arrivals else report_s
        for engine in engines.values():
            for row in engine.advance(now):
                session, turn = rows.pop(row.request_id)
                policy.release(engine.name, row.request_id)
                _note(outcome, row)
                if turn + 1 < len(sessions[session].turns):
                    think_s = sessions[session].turns[turn + 1].think_s
                    heapq.heappush(arrivals, (now + think_s, session, turn + 1))
        if now == report_s:
            for engine in engines.values():
                policy.observe(engine.report(), now)
            report_s += REPORT_S
        while arrivals and arrivals[0][0] <= now:
            _, session, turn = heapq.heappop(arrivals)
            asked = sessions[session].turns[turn]
            request = RouteRequest(f"q{next(names)}", "m", asked.agent, list(asked.blocks), asked.prompt_tokens)
            decision = policy.route(request, now)
            assert decision is not None
            outcome.reasons[decision.why] = outcome.reasons.get(decision.why, 0) + 1
            engines[decision.replica].submit(Row(request.request_id, asked, now, asked.prompt_tokens))
            rows[request.request_id] = (session, turn)
    outcome.requests = {engine.name: engine.assigned for engine in engines.values()}
    return outcome


def _note(outcome: Outcome, row: Row) -> None:
    outcome.ttft_s.append(row.first_token_s - row.arrived_s)
    outcome.total_s.append(row.ended_s - row.arrived_s)
    outcome.prompt_tokens += row.turn.prompt_tokens
    outcome.cached_tokens += row.cached_tokens


# Traces.


def _ids(*parts: object) -> Iterator[bytes]:
    """Made-up block ids, a chain of their own for each `parts`."""
    name = "/".join(map(str, parts)).encode()
    return (name + index.to_bytes(4, "big") for index in count())


def synthetic(seed: int, *, agents: int = 64, turns: int = 12) -> list[Session]:
    """Agents with one system prompt of 4,096 tokens and conversations that grow by 300 to 1,500 tokens a turn."""
    rng = random.Random(seed)
    shared = [block for block, _ in zip(_ids("system"), range(16), strict=False)]
    sessions = []
    for agent in range(agents):
        own, tokens, asked = _ids("agent", agent), 16 * BLOCK_TOKENS, []
        blocks = list(shared)
        for _ in range(turns):
            tokens += rng.randrange(300, 1500)
            while len(blocks) < tokens // BLOCK_TOKENS:
                blocks.append(next(own))
            output = rng.randrange(30, 400)
            asked.append(Turn(f"agent{agent}", tuple(blocks), tokens, output, rng.expovariate(1 / 8)))
            tokens += output
        sessions.append(Session(rng.uniform(0, 30), asked))
    return sessions


def bursts(seed: int, *, width: int = 64, times: int = 4) -> list[Session]:
    """One request with a prefix of 4,096 tokens, and 20 s later `width` with the same one at once, without agents."""
    rng, sessions = random.Random(seed), []
    for burst in range(times):
        prefix = tuple(block for block, _ in zip(_ids("burst", burst), range(16), strict=False))
        for index in range(width + 1):
            tokens = 16 * BLOCK_TOKENS + rng.randrange(50, 600)
            turn = Turn("", prefix, tokens, rng.randrange(30, 300), 0.0)
            sessions.append(Session(burst * 90.0 + (20.0 + rng.uniform(0, 0.2) if index else 0.0), [turn]))
    return sessions


def coding_agents(path: Path, *, hours: float = 0.3) -> list[Session]:
    """`claude_code_agents.jsonl.gz`: sessions with think times; blocks of 64 tokens, local to their session."""
    sessions, rng = [], random.Random(0)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            trace = json.loads(line)
            turns = []
            for asked in trace["requests"]:
                small = [block for first, last in asked["blocks"] for block in range(first, last + 1)]
                # A chain over four small blocks each.
                ids, parent = [], trace["id"].encode()
                for start in range(0, len(small) - 3, 4):
                    parent = sha256(parent + repr(small[start : start + 4]).encode()).digest()
                    ids.append(parent)
                turns.append(
                    Turn(
                        f"{trace['id']}/{asked.get('sub', '')}",
                        tuple(ids),
                        max(1, asked["input"]),
                        max(1, asked["output"]),
                        min(60.0, asked["think"] or 0.0),
                    )
                )
            sessions.append(Session(rng.uniform(0, hours * 3600), turns[:40]))
    return sessions


def chat_service(path: Path, *, requests: int = 2000, stretch: float = 12.0) -> list[Session]:
    """`mooncake_conversation.jsonl`: one request a session, at its time; blocks of 512 tokens, without agents."""
    sessions = []
    with path.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(requests), strict=False):
            asked = json.loads(line)
            ids = [half + block.to_bytes(4, "big") for block in asked["hash_ids"] for half in (b"a", b"b")]
            tokens = asked["input_length"]
            turn = Turn("", tuple(ids[: tokens // BLOCK_TOKENS]), tokens, max(1, asked["output_length"]), 0.0)
            sessions.append(Session(asked["timestamp"] / 1000 * stretch, [turn]))
    return sessions
