"""The load `agents`: many agents behind one system prompt, whose conversations grow, all at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recorded import blocks_of, coding_sessions, own_requests
from .measures import percentile
from .prompts import Prompts
from .protocol import Agents, StreamedTimes

RECORDING = "claude_code_agents.jsonl.gz"


@dataclass(frozen=True)
class AgentLoad:
    """Lengths in tokens: of the system prompt, of what every turn adds, and of an answer. A block of a recording, which
    is 64 tokens, becomes `block_tokens`, and prompts longer than `prompt_max` are left out."""

    system_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int
    block_tokens: int
    prompt_max: int


LOADS = {"gpu": AgentLoad(4352, 1200, 96, 6, 64, 36_000), "cpu": AgentLoad(272, 75, 16, 4, 2, 1200)}
"""By device. A CPU gets a sixteenth of the tokens, or less."""


@dataclass(frozen=True)
class AgentMeasures:
    """What `agents` agents got. Times to first token are in milliseconds, over all turns that were answered, and over
    those after each agent's first. `tokens_per_s` counts the tokens of whole answers, from the first request to the end
    of the last answer. `failed` counts turns without an answer, those that were not sent any more among them."""

    load: str
    agents: int
    turns: int
    failed: int
    errors: list[str]
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    later_p50_ms: float
    later_p95_ms: float
    later_p99_ms: float


def growing(prompts: Prompts, load: AgentLoad, agents: int, seed: str, timeout_s: float) -> Agents:
    """Conversations of random words, in which every turn adds the same number."""
    turns = [
        [
            (prompts.one(load.turn_tokens, f"{seed}/{agent}/{turn}", as_ids=False), load.answer_tokens)
            for turn in range(load.turns)
        ]
        for agent in range(agents)
    ]
    system = prompts.one(load.system_tokens, f"{seed}/system", as_ids=False)
    return Agents(system, _names(seed, agents), turns, grows=True, timeout_s=timeout_s)


def recorded(folder: Path, prompts: Prompts, load: AgentLoad, agents: int, seed: str, timeout_s: float) -> Agents:
    """The first turns of recorded sessions, taken round about if there are more agents, without those of subagents. A
    recording knows blocks of tokens by number. Here each number of a session is a block of random words, so prompts
    have the beginnings in common that they had; agents of one session share them all.

    Raises:
        ValueError: no session has as many turns that are short enough.
    """
    sessions = [
        found[: load.turns]
        for session in coding_sessions(folder / RECORDING)
        if len(found := [each for each in own_requests(session) if _tokens(each, load) <= load.prompt_max])
        >= load.turns
    ]
    if not sessions:
        raise ValueError(f"no session in {RECORDING} has {load.turns} prompts of at most {load.prompt_max:,} tokens")
    turns = []
    for agent in range(agents):
        which = agent % len(sessions)
        turns.append(
            [
                (_text(prompts, load, request, f"{seed}/{which}"), max(1, min(request["output"], load.answer_tokens)))
                for request in sessions[which]
            ]
        )
    return Agents("", _names(seed, agents), turns, grows=False, timeout_s=timeout_s)


def _tokens(request: dict[str, Any], load: AgentLoad) -> int:
    return len(blocks_of(request)) * load.block_tokens


def _text(prompts: Prompts, load: AgentLoad, request: dict[str, Any], session: str) -> str:
    blocks = (f"{session}/{block}" for block in blocks_of(request))
    return "".join(prompts.one(load.block_tokens, block, as_ids=False) for block in blocks)


def _names(seed: str, agents: int) -> list[str]:
    """Names that no other run on the same server has."""
    run = random.Random(seed).randrange(10**9)
    return [f"agent-{run}-{index}" for index in range(agents)]


def measured(load: str, command: Agents, streams: Sequence[StreamedTimes]) -> AgentMeasures:
    """What the agents of a command got.

    Args:
        streams: one for every turn, one agent's after the other's.
    """
    turns = [turn for agent in command.turns for turn in range(len(agent))]
    answered = [(turn, stream) for turn, stream in zip(turns, streams, strict=True) if not stream.error]
    sent = [stream for stream in streams if stream.sent]
    seconds = max(stream.ended for stream in sent) - min(stream.sent for stream in sent)
    waits = [(turn, (stream.times[0] - stream.sent) * 1e3) for turn, stream in answered if stream.times]
    every, later = [wait for _, wait in waits], [wait for turn, wait in waits if turn]
    return AgentMeasures(
        load=load,
        agents=len(command.turns),
        turns=len(turns),
        failed=len(turns) - len(answered),
        errors=sorted({stream.error for stream in streams if stream.error}),
        seconds=seconds,
        tokens_per_s=sum(stream.tokens or 0 for _, stream in answered) / seconds,
        ttft_p50_ms=percentile(every, 0.5),
        ttft_p95_ms=percentile(every, 0.95),
        ttft_p99_ms=percentile(every, 0.99),
        later_p50_ms=percentile(later, 0.5),
        later_p95_ms=percentile(later, 0.95),
        later_p99_ms=percentile(later, 0.99),
    )
