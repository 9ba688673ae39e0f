"""A recorded session of a coding agent on one replica, turn after turn: what is computed, and what of it twice.

A request of the recording is a list of blocks of 64 tokens, known by number; each number stands for 64 random tokens
here. Replies are the model's own, so the next prompt, with the recorded reply, is new from the reply on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.api.text.spelling import common_length

from ..parts import Budget, ResultTable, Say, median
from ..recorded import TRACE_BLOCK, blocks_of, coding_sessions, own_requests
from .desk import SPECIAL_TOKENS, Desk

ANSWER_SHARE = 16
"""One of so many recorded tokens of a reply is generated."""

BUCKETS = 4


@dataclass(frozen=True)
class SessionTurn:
    """Tokens of one request, how many of them were computed, how many of these an earlier prompt had, and the time to
    the first token."""

    prompt: int
    computed: int
    again: int
    first_ms: float


def recorded(trace: Path, tokens_max: int) -> list[dict[str, Any]]:
    """Returns the requests of the first recorded session that grows from a fourth of `tokens_max` or less to nearly
    that many, without its subagents' and those that are longer.

    Raises:
        ValueError: there is none.
    """
    for each in coding_sessions(trace):
        fitting = [request for request in own_requests(each) if request["input"] <= tokens_max]
        sizes = [request["input"] for request in fitting]
        if sizes and min(sizes) <= tokens_max / 4 and max(sizes) >= 0.9 * tokens_max:
            return fitting
    raise ValueError(f"no session in {trace} grows to {tokens_max:,} tokens")


def play(desk: Desk, requests: Sequence[dict[str, Any]], budget: Budget) -> Iterator[SessionTurn]:
    """Sends one request after the other."""
    size = desk.loaded.vocabulary_size - SPECIAL_TOKENS

    @cache
    def tokens_of(block: int) -> list[int]:
        rng = random.Random(block)
        return [rng.randrange(size) for _ in range(TRACE_BLOCK)]

    said: list[list[int]] = []
    for request in requests:
        if budget.left_s <= 0:
            return
        prompt = [token for block in blocks_of(request) for token in tokens_of(block)]
        known = max((common_length(prompt, earlier) for earlier in said), default=0)
        answer = desk.ask(prompt, max(1, request["output"] // ANSWER_SHARE))
        said.append(prompt)
        computed = len(prompt) - answer.cached
        again = max(0, computed - (len(prompt) - known))
        yield SessionTurn(len(prompt), computed, again, (answer.first - answer.sent) * 1e3)


def session(desk: Desk, trace: Path | None, tokens_max: int, budget: Budget, say: Say) -> ResultTable:
    """Plays the session, and shows its turns by length of the prompt."""
    loaded = desk.loaded
    tokens_max = min(tokens_max, loaded.context_tokens - BLOCK_TOKENS)
    table = ResultTable(f"A coding agent's session that grows to {tokens_max:,} tokens, KV {loaded.kv}")
    if trace is None or not trace.exists():
        table.notes.append("Skipped: it needs claude_code_agents.jsonl.gz (`--traces`).")
        return table
    desk.clear()
    turns = []
    for turn in play(desk, recorded(trace, tokens_max), budget):
        turns.append(turn)
        say(f"  {turn.prompt:,} tokens: {turn.computed:,} computed, {turn.again} of them again; {turn.first_ms:.0f} ms")
    for bucket in range(BUCKETS):
        low, high = (tokens_max * edge // BUCKETS for edge in (bucket, bucket + 1))
        those = [turn for turn in turns if low < turn.prompt <= high]
        if those:
            prompts, computed = sum(turn.prompt for turn in those), sum(turn.computed for turn in those)
            table.rows.append(
                {
                    "prompts of tokens": f"to {high:,}",
                    "turns": len(those),
                    "sent": prompts,
                    "computed": computed,
                    "share": round(computed / prompts, 4),
                    "again": sum(turn.again for turn in those),
                    "first token, ms (median)": round(median([turn.first_ms for turn in those]), 1),
                }
            )
    most = max(turn.again for turn in turns)
    # Of a sealed block that a prompt shares in part, its tokens of that part are computed again.
    table.at_most("tokens computed again in any turn", most, BLOCK_TOKENS - 1)
    table.notes.append(f"{len(turns)} turns, {sum(turn.prompt for turn in turns):,} tokens sent.")
    return table
