"""What a replica tells of its sequences' waits, and of what they found and hold in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from satchel.actors.protocol.replica_messages import ReplicaStats
from satchel.actors.replica.execution.loaded_model import LoadedModel
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.bench_disk import Node, process, write_down

MakeBench = Callable[..., Bench]


def test_a_sequence_says_how_long_it_waited_and_how_long_its_prompt_took(bench: MakeBench, prompts: list[list[int]]):
    engine = bench(sequences_max=1)
    engine.submit("first", prompts[7])
    engine.submit("second", prompts[2])
    while engine.sequences.get("first") is None or not engine.sequences["first"].tokens:
        engine.turn()
    time.sleep(0.1)
    engine.drain()
    first, second = engine.sequences["first"], engine.sequences["second"]
    assert first.queued_s is not None and second.queued_s is not None
    assert 0 <= first.queued_s < second.queued_s and second.queued_s >= 0.1, "it waited for the first one's place"
    assert first.prefill_s is not None and 0 < first.prefill_s < second.queued_s
    assert second.prefill_s is not None and second.prefill_s > 0


def test_a_prompt_without_an_answer_says_how_long_it_took(bench: MakeBench, prompts: list[list[int]]):
    found = bench().run("r", prompts[6], max_tokens=0)
    assert found.tokens == [] and found.prefill_s is not None and found.prefill_s > 0


def test_prompts_count_once_they_have_a_place(bench: MakeBench, prompts: list[list[int]]):
    engine = bench(sequences_max=1)
    counters = engine.engine.counters
    engine.submit("first", prompts[6], max_tokens=30)
    engine.submit("second", prompts[6])
    engine.turn()
    assert (counters.requests, counters.prompt_tokens, counters.hot_tokens) == (2, len(prompts[6]), 0)
    engine.drain()
    cached = engine.sequences["second"].cached
    assert cached == 299 and counters.prompt_tokens == 2 * len(prompts[6])
    assert counters.hot_tokens == counters.cached_tokens == cached


def test_what_is_read_back_is_reused_and_was_not_in_memory(loaded: LoadedModel, tmp_path: Path):
    node, prompt = Node(tmp_path), [3 + token % 200 for token in range(600)]
    before, disk = process(loaded, node)
    before.run("first", prompt, agent="t/ann")
    write_down(before, disk)
    after, _ = process(loaded, node)
    found = after.run("second", prompt, agent="t/ann", remembered=len(prompt))
    counters = after.engine.counters
    assert found.cached and found.read == found.cached == counters.cached_tokens
    assert counters.hot_tokens == 0


def test_running_sequences_use_a_part_of_the_memory_for_kv(bench: MakeBench, prompts: list[list[int]]):
    engine = bench(kv_tokens_max=2048)

    def usage() -> float:
        engine.engine.room.fit()
        used = engine.engine.room.usage
        return ReplicaStats("r", "m", True, kv_tokens=used["kv_tokens"], kv_tokens_max=used["kv_tokens_max"]).kv_usage

    assert usage() == 0.0
    engine.submit("r", prompts[7], max_tokens=40)
    for _ in range(8):
        engine.turn()
    assert usage() == pytest.approx(512 / 2048, abs=0.01), "two whole blocks"
    engine.drain()
    assert usage() == 0.0, "what is kept for later prompts is free for sequences"
    assert ReplicaStats("r", "m", True, kv_tokens=9, kv_tokens_max=3).kv_usage == 1.0


def test_a_sequence_that_gives_its_place_to_another_is_counted(bench: MakeBench, prompts: list[list[int]]):
    engine = bench(sequences_max=1)
    engine.submit("first", prompts[2], max_tokens=40)
    engine.turn()
    assert engine.engine.counters.preemptions == 0
    engine.submit("urgent", prompts[1], priority=1)
    engine.drain()
    assert engine.engine.counters.preemptions == 1
    assert len(engine.sequences["first"].tokens) == 40
