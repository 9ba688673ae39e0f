"""Conversations to replay: made up, or recorded ones from files that are no part of this project."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from satchel.actors.protocol.block_ids import BLOCK_TOKENS

from ..recorded import blocks_of, coding_sessions


@dataclass(frozen=True)
class WorkloadTurn:
    """One request of a session: it comes `think_s` after the one before has ended."""

    agent: str
    blocks: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True)
class WorkloadSession:
    starts_s: float
    turns: list[WorkloadTurn]


def _ids(*parts: object) -> Iterator[bytes]:
    """Made-up block ids, a chain of their own for each `parts`."""
    name = "/".join(map(str, parts)).encode()
    return (name + index.to_bytes(4, "big") for index in count())


def synthetic(seed: int, *, agents: int = 64, turns: int = 12) -> list[WorkloadSession]:
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
            asked.append(WorkloadTurn(f"agent{agent}", tuple(blocks), tokens, output, rng.expovariate(1 / 8)))
            tokens += output
        sessions.append(WorkloadSession(rng.uniform(0, 30), asked))
    return sessions


def bursts(seed: int, *, width: int = 64, times: int = 4) -> list[WorkloadSession]:
    """One request with a prefix of 4,096 tokens, and 20 s later `width` with the same one at once, without agents."""
    rng, sessions = random.Random(seed), []
    for burst in range(times):
        prefix = tuple(block for block, _ in zip(_ids("burst", burst), range(16), strict=False))
        for index in range(width + 1):
            tokens = 16 * BLOCK_TOKENS + rng.randrange(50, 600)
            turn = WorkloadTurn("", prefix, tokens, rng.randrange(30, 300), 0.0)
            sessions.append(WorkloadSession(burst * 90.0 + (20.0 + rng.uniform(0, 0.2) if index else 0.0), [turn]))
    return sessions


def coding_agents(seed: int, path: Path, *, hours: float, sessions_max: int) -> list[WorkloadSession]:
    """`claude_code_agents.jsonl.gz`: sessions with think times, of which `sessions_max` begin within `hours`.

    Sub-agents are agents of their own that begin with blocks of their session. Blocks have 64 tokens and are local to
    their session.
    More sessions than there are come again, under other names and with blocks of their own.
    """
    rng = random.Random(seed)
    traces = list(coding_sessions(path))
    rng.shuffle(traces)
    sessions = []
    for copy, trace in ((n // len(traces), traces[n % len(traces)]) for n in range(sessions_max)):
        name = f"{trace['id']}+{copy}" if copy else trace["id"]
        sessions.append(WorkloadSession(rng.uniform(0, hours * 3600), _coding_turns(name, trace)))
    return sessions


def _coding_turns(name: str, trace: dict[str, Any]) -> list[WorkloadTurn]:
    turns = []
    for asked in trace["requests"][:40]:
        small = blocks_of(asked)
        # A chain over four small blocks each.
        ids, parent = [], name.encode()
        for start in range(0, len(small) - 3, 4):
            parent = sha256(parent + repr(small[start : start + 4]).encode()).digest()
            ids.append(parent)
        agent, think_s = f"{name}/{asked.get('sub', '')}", min(60.0, asked["think"] or 0.0)
        turns.append(WorkloadTurn(agent, tuple(ids), max(1, asked["input"]), max(1, asked["output"]), think_s))
    return turns


def chat_service(seed: int, path: Path, *, requests: int, per_s: float) -> list[WorkloadSession]:
    """`mooncake_conversation.jsonl`: one request a session, in the trace's rhythm at `per_s` on average; blocks of 512
    tokens, without agents. Every seed has other requests, as long as there are."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    first = seed * requests % max(1, len(rows) - requests)
    rows = rows[first : first + requests]
    begins, ends = rows[0]["timestamp"], rows[-1]["timestamp"]
    stretch = len(rows) / per_s / max(1, ends - begins)
    sessions = []
    for asked in rows:
        ids = [half + block.to_bytes(4, "big") for block in asked["hash_ids"] for half in (b"a", b"b")]
        tokens = asked["input_length"]
        turn = WorkloadTurn("", tuple(ids[: tokens // BLOCK_TOKENS]), tokens, max(1, asked["output_length"]), 0.0)
        sessions.append(WorkloadSession((asked["timestamp"] - begins) * stretch, [turn]))
    return sessions


def one_prompt(seed: int, share: float, *, nodes: int, turns: int = 6) -> list[WorkloadSession]:
    """Four agents a node, of which `share` have one system prompt of 8,192 tokens, and each other one its own."""
    rng, sessions = random.Random(seed), []
    for agent in range(4 * nodes):
        name = "all" if rng.random() < share else f"agent {agent}"
        blocks = [block for block, _ in zip(_ids("prompt", name), range(32), strict=False)]
        own, tokens, asked = _ids("talk", agent), 32 * BLOCK_TOKENS, []
        for _ in range(turns):
            tokens += rng.randrange(200, 1200)
            while len(blocks) < tokens // BLOCK_TOKENS:
                blocks.append(next(own))
            output = rng.randrange(30, 300)
            asked.append(WorkloadTurn(f"agent{agent}", tuple(blocks), tokens, output, rng.expovariate(1 / 6)))
            tokens += output
        sessions.append(WorkloadSession(rng.uniform(0, 40), asked))
    return sessions
