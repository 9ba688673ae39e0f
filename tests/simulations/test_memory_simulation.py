"""Scheduler, prefix cache and budget together, without MLX: sequences and cached prefixes never take more than the
memory, every sequence ends, and nothing in memory is computed twice."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from tests.simulations.paged_replica import BLOCK_BYTES, OPEN_BLOCK_BYTES, TOKEN_BYTES, PagedReplica

TRACE = Path(__file__).parents[2] / "../shared/traces/claude_code_agents.jsonl.gz"
SESSIONS, REQUESTS = 6, 40


@pytest.mark.parametrize("seed", range(12))
def test_sequences_and_prefixes_never_take_more_than_there_is(seed: int) -> None:
    """Sequences of all lengths, some with a shared prefix, in memory that is enough for a few of them; none waits for
    ever."""
    rng = random.Random(seed)
    replica = PagedReplica(
        rng.choice([12, 40, 150]) * (BLOCK_BYTES + OPEN_BLOCK_BYTES), sequences_max=rng.choice([2, 8, 32])
    )
    prompts = [[rng.randrange(10**6) for _ in range(int(60 * rng.paretovariate(0.6)) % 9000 + 1)] for _ in range(60)]
    for step in range(400):
        if rng.random() < 0.3:
            common, own = rng.choice(prompts[:3]), rng.choice(prompts)
            tokens = [*common[: rng.choice([0, 0, len(common)])], *own]
            replica.submit(
                f"sequence {step}", tokens, min(int(4 * rng.paretovariate(0.7)), 900), priority=rng.randrange(2)
            )
        replica.step()
    for _ in range(20_000):
        if not replica.scheduler.running + replica.scheduler.waiting:
            break
        replica.step()
    assert replica.sequences and all(sequence.ended for sequence in replica.sequences.values()), (
        f"seed {seed}: somebody starves"
    )
    lone = {name for name, sequence in replica.sequences.items() if sequence.ended == "cut"}
    most = replica.scheduler.limits.prompt_tokens_max
    assert all(len(replica.sequences[name].tokens) >= most for name in lone), "only what memory cannot hold is cut"
    replica.prefixes.check()


def test_what_sequences_have_in_common_takes_room_once() -> None:
    """Eight sequences with a shared prefix run together in memory for two sequences of 5,000 tokens."""
    prompt = list(range(5000))
    replica = PagedReplica(2 * 20 * BLOCK_BYTES + 10 * (OPEN_BLOCK_BYTES + BLOCK_BYTES))
    replica.run("first", prompt, 1)
    for number in range(8):
        replica.submit(f"sequence {number}", [*prompt, 10**6 + number], 5)
    replica.step()
    assert replica.scheduler.running == 8
    assert sum(replica.computed.values()) == 19, "and none of it was computed again"


def test_a_conversation_grows_to_100_000_tokens_and_only_what_is_new_is_read() -> None:
    """Memory has room for little more than the conversation. The tables cost less than 10 ms a turn."""
    replica = PagedReplica(105_000 * TOKEN_BYTES + 12 * OPEN_BLOCK_BYTES)
    tokens, spent, known = list(range(3000)), [], 0
    while len(tokens) < 100_000:
        before = replica.prefilled
        sequence = replica.run(f"turn {len(tokens)}", tokens, 40)
        assert sequence.ended == "length" and replica.prefilled - before == len(tokens) - 1 - (sequence.cached or 0)
        assert sequence.cached == known, f"at {len(tokens)} tokens"
        known = len(sequence.tokens) - 1
        started = time.perf_counter()
        replica.prefixes.touch(sequence.ids)
        spent.append(time.perf_counter() - started)
        tokens = [*sequence.tokens, *range(len(tokens), len(tokens) + 2000)]
    assert max(replica.computed.values()) == 1
    assert sorted(spent)[len(spent) // 2] < 0.01


def test_of_a_conversation_that_is_evicted_the_beginning_stays() -> None:
    replica = PagedReplica(60 * BLOCK_BYTES + 2 * OPEN_BLOCK_BYTES)
    first = list(range(40 * BLOCK_TOKENS))
    replica.run("first", first, 1)
    replica.run("second", [10**6 + token for token in range(30 * BLOCK_TOKENS)], 1)
    again = replica.run("again", first, 1)
    assert again.cached is not None and 20 * BLOCK_TOKENS <= again.cached < 39 * BLOCK_TOKENS


def sessions() -> Iterator[list[dict[str, Any]]]:
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            requests = json.loads(line)["requests"][:REQUESTS]
            if len(requests) == REQUESTS and max(request["input"] for request in requests) < 160_000:
                yield requests


def tokens_of(session: int, request: dict[str, Any]) -> list[int]:
    """A token is its block of 64 tokens and the session: equal blocks have equal tokens."""
    blocks = chain.from_iterable(range(first, last + 1) for first, last in request["blocks"])
    return list(chain.from_iterable(repeat(session * 10**6 + block, 64) for block in blocks))


@pytest.mark.skipif(not TRACE.exists(), reason="needs ../shared/traces")
@pytest.mark.parametrize("room", [pytest.param(0.5, marks=pytest.mark.slow), 0.3])
def test_recorded_sessions_of_coding_agents(room: float) -> None:
    """The sessions run at the same time. If memory has room for all of them, no block is computed twice. With a third
    of that room more is computed, and the limit is never exceeded."""
    recorded = [requests for requests, _ in zip(sessions(), range(SESSIONS), strict=False)]
    said: Counter[tuple[int, int]] = Counter()
    for session, requests in enumerate(recorded):
        for request in requests:
            said.update({(session, block) for first, last in request["blocks"] for block in range(first, last + 1)})
    answers = sum(request["output"] // 16 + 2 * BLOCK_TOKENS for requests in recorded for request in requests)
    everything = (64 * len(said) * 2 + answers) * TOKEN_BYTES + SESSIONS * REQUESTS * OPEN_BLOCK_BYTES
    replica = PagedReplica(int(everything * room), sequences_max=4)
    waiting = {session: iter(requests) for session, requests in enumerate(recorded)}
    running: dict[int, str] = {}
    while waiting or running:
        for session in [session for session in waiting if session not in running]:
            request = next(waiting[session], None)
            if request is None:
                del waiting[session]
                continue
            name = f"{session} at {request['t']} of {request['input']}"
            assert replica.submit(name, tokens_of(session, request), max(1, request["output"] // 16)) is None
            running[session] = name
        replica.step()
        running = {session: name for session, name in running.items() if replica.sequences[name].ended is None}
    assert all(sequence.ended == "length" for sequence in replica.sequences.values())
    twice = sum(times - 1 for times in replica.computed.values())
    prompts = sum(len(sequence.tokens) for sequence in replica.sequences.values())
    assert (twice == 0) == (room == 0.5)
    assert replica.prefilled < prompts / 2
