"""An engine's memory: sequences of any lengths in a small budget, a pool that gives slots back, and other programs."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory import room
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench, load_tiny
from tests.worlds.replica.bench_disk import Node, process, write_down

DEVICE = 2**40


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("memory"))


def prompt_of(tokens: int, seed: int, vocabulary: int = 64) -> list[int]:
    return [(seed * 31 + at * 7 + at // 11) % vocabulary for at in range(tokens)]


def fresh(loaded: LoadedModel, **how: Any) -> Bench:
    """An engine with an empty pool of its own."""
    pool = loaded.pool
    assert pool is not None
    gc.collect()
    bench = Bench(loaded, **how)
    bench.engine.executor.give_back(0)
    return bench


def check(bench: Bench, budget: int) -> None:
    """Between two steps. More than the budget is held only if all of it is needed."""
    held, sequences = bench.engine.room.held(), bench.engine.room.sequences()
    if held.loose or held.pool > held.slots or not held.unwritten:
        assert bench.engine.room.budget.used(sequences, held) <= budget, (sequences, held)


def of_blocks(loaded: LoadedModel, sequences: int, blocks: int) -> int:
    return sequences * loaded.spec.bytes_per_sequence + blocks * BLOCK_TOKENS * loaded.spec.bytes_per_token


def test_a_long_sequence_and_31_short_ones_say_what_each_says_alone(loaded: LoadedModel):
    """In memory for the long one and a few others: nothing is ever above the budget, and all end."""
    lengths = [1700, *(20 + 37 * number % 330 for number in range(31))]
    prompts = [prompt_of(length, number) for number, length in enumerate(lengths)]
    alone = [Bench(loaded).run("alone", prompt, max_tokens=9).tokens for prompt in prompts]
    budget = of_blocks(loaded, sequences=5, blocks=14)
    bench, most = fresh(loaded, memory_bytes_max=budget, sequences_max=32, kv_bytes_max=budget), 0
    assert loaded.pool is not None
    for number, prompt in enumerate(prompts):
        bench.submit(str(number), prompt, max_tokens=9)
    while bench.turn():
        assert loaded.pool.nbytes <= budget
        check(bench, budget)
        most = max(most, bench.engine.scheduler.running)
    assert not bench.refused and [bench.sequences[str(number)].tokens for number in range(32)] == alone
    assert most >= 4


def test_kept_prefixes_take_what_sequences_do_not_need(loaded: LoadedModel):
    """Without being told how much: a prompt is found again until sequences need its room; the least recent one goes."""
    budget = of_blocks(loaded, sequences=1, blocks=20)
    bench = fresh(loaded, memory_bytes_max=budget, kv_bytes_max=budget)
    first, second = prompt_of(6 * BLOCK_TOKENS + 1, 1), prompt_of(6 * BLOCK_TOKENS + 1, 2)
    for prompt in (first, second):
        bench.run(f"cold {prompt[0]}", prompt, max_tokens=1)
    assert [bench.run(f"hot {at}", prompt, max_tokens=1).cached for at, prompt in enumerate((first, second))] == [
        6 * BLOCK_TOKENS
    ] * 2
    bench.run("large", prompt_of(13 * BLOCK_TOKENS, 3), max_tokens=1)
    assert bench.engine.prefixes.leading(bench_ids(bench, second)) >= bench.engine.prefixes.leading(
        bench_ids(bench, first)
    )
    assert bench.engine.prefixes.leading(bench_ids(bench, first)) < 6


def bench_ids(bench: Bench, prompt: list[int]) -> list[bytes]:
    return block_ids(root_id(bench.loaded.model_id, "tenant:test"), prompt)


def test_what_memory_can_never_hold_is_refused_with_the_number(loaded: LoadedModel):
    budget = of_blocks(loaded, sequences=1, blocks=3) + loaded.spec.bytes_per_token
    bench = fresh(loaded, memory_bytes_max=budget, kv_bytes_max=budget)
    bench.submit("long", prompt_of(1030, 1))
    bench.submit("short", prompt_of(1020, 1), max_tokens=1)
    bench.drain()
    assert "memory holds 1022 on this machine" in bench.refused["long"].message
    assert bench.sequences["short"].finish == "length"


@pytest.mark.slow
def test_slots_at_the_end_are_given_back_while_sequences_run(loaded: LoadedModel):
    """Blocks of sequences and of the cache move to other slots, and no answer changes."""
    prompts = [prompt_of(300 + 256 * number, number) for number in range(4)]
    alone = [Bench(loaded).run("alone", prompt, max_tokens=40).tokens for prompt in prompts]
    bench = fresh(loaded)
    pool = loaded.pool
    assert pool is not None
    for number, prompt in enumerate(prompts[:2]):
        bench.run(f"kept {number}", prompt, max_tokens=40)
    bench.run("gone", prompt_of(12 * BLOCK_TOKENS, 9), max_tokens=1)
    for number, prompt in enumerate(prompts[2:], 2):
        bench.submit(f"runs {number}", prompt, max_tokens=40)
    for _ in range(8):
        bench.turn()
    ids = bench_ids(bench, prompt_of(12 * BLOCK_TOKENS, 9))
    bench.engine.prefixes.drop(b"", ids, [])
    before, taken = pool.nbytes, pool.taken_bytes
    bench.engine.executor.give_back(0)
    pool.check()
    assert pool.nbytes == pool.taken_bytes == taken < before
    bench.drain()
    assert [bench.sequences[f"runs {number}"].tokens for number in (2, 3)] == alone[2:]
    for number, prompt in enumerate(prompts):
        again = bench.run(f"again {number}", prompt, max_tokens=40)
        assert again.tokens == alone[number] and (again.cached or 0) >= len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_replica_yields_to_other_programs_and_comes_back(loaded: LoadedModel):
    bench = fresh(loaded, memory_bytes_max=2**30)
    for number in range(4):
        bench.run(f"sequence {number}", prompt_of(8 * BLOCK_TOKENS, number), max_tokens=1)
    room, held = bench.engine.room, bench.engine.prefixes.nbytes
    # Free slots would be given back first.
    bench.engine.executor.give_back(0)
    used = room.budget.used(room.sequences(), room.held())
    room.resize(2**30, DEVICE // 32 - used // 2, DEVICE)
    assert (
        0 < bench.engine.prefixes.nbytes < held and room.budget.used(room.sequences(), room.held()) <= used // 2 + 2**18
    )
    assert bench.engine.scheduler.limits.kv_tokens_max > bench.engine.scheduler.room_tokens, "it refuses nothing for it"
    room.resize(2**30, DEVICE, DEVICE)
    assert room.budget.bytes_max == 2**30
    room.resize(2**29, DEVICE, DEVICE)
    assert bench.engine.scheduler.limits.kv_tokens_max * loaded.spec.bytes_per_token <= 2**29


def test_a_sequence_that_waited_while_memory_became_too_little_is_told(loaded: LoadedModel):
    bench = fresh(loaded, sequences_max=1)
    bench.submit("runs", prompt_of(20, 1), max_tokens=20)
    bench.turn()
    bench.submit("waits", prompt_of(9 * BLOCK_TOKENS, 2), max_tokens=20)
    bench.turn()
    bench.engine.room.resize(of_blocks(loaded, sequences=1, blocks=4), DEVICE, DEVICE)
    bench.drain()
    error = bench.sequences["waits"].error
    assert bench.sequences["runs"].finish == "length" and error is not None and error["kind"] == "ContextLengthExceeded"


def test_free_slots_are_given_back_after_a_while(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "MUCH_BYTES", 1)
    bench = fresh(loaded)
    pool = loaded.pool
    assert pool is not None
    bench.run("one", prompt_of(12 * BLOCK_TOKENS, 1), max_tokens=1)
    bench.engine.prefixes.clear()
    bench.engine.room.resize(2**32, DEVICE, DEVICE)
    assert pool.nbytes > 0
    monkeypatch.setattr(room, "IDLE_S", 0.0)
    bench.engine.room.resize(2**32, DEVICE, DEVICE)
    assert pool.nbytes == 0 and bench.engine.room.usage["slots_running"] == 0


@pytest.mark.parametrize(("family", "kv"), [("gemma3_text", "q4"), ("qwen3_next", "q4"), ("llama", "fp16")])
def test_windows_states_and_dense_caches_stay_within_the_budget(tmp_path: Path, family: str, kv: str):
    folder = write_model(tmp_path / family, family)
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", kv=kv, numerics="reproducible"
    )
    prompts = [prompt_of(length, number) for number, length in enumerate((900, 40, 300, 520, 700, 64))]
    budget = of_blocks(loaded, sequences=6, blocks=16)
    bench = Bench(loaded, memory_bytes_max=budget, kv_bytes_max=budget, prefill_chunk_tokens=256)
    for number, prompt in enumerate(prompts):
        bench.submit(str(number), prompt, max_tokens=9)
    while bench.turn():
        check(bench, budget)
    assert not bench.refused and all(sequence.finish == "length" for sequence in bench.sequences.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 7])
def test_sequences_that_come_and_end_at_any_time_stay_within_the_budget(loaded: LoadedModel, tmp_path: Path, seed: int):
    """Some are an agent's, whose KV goes to the disk: the copies that this takes have room before they are made."""
    chance, spec = random.Random(seed), loaded.spec
    sequences = chance.choice((2, 4, 8))
    budget = chance.choice((3000, 6000)) * spec.bytes_per_token + 2 * sequences * spec.bytes_per_sequence
    fresh(loaded)
    how = {"memory_bytes_max": budget, "sequences_max": sequences, "prefill_chunk_tokens": chance.choice((256, 512))}
    bench, disk = process(loaded, Node(tmp_path / "kv"), drafts=False, **how)
    texts = [[chance.randrange(64) for _ in range(chance.choice((50, 600, 1200)))] for _ in range(3)]
    for number in range(40):
        if chance.random() < 0.6:
            text = chance.choice(texts)
            prompt = [*text[: chance.randrange(1, len(text) + 1)], *prompt_of(chance.choice((1, 40, 400)), number)]
            limit, agent = chance.choice((1, 30, 300)), chance.choice(("", "default/a"))
            bench.submit(str(number), prompt, max_tokens=limit, agent=agent)
        for _ in range(chance.randrange(1, 20)):
            bench.turn()
            check(bench, budget)
    bench.drain()
    write_down(bench, disk)
    assert all(sequence.finish != "error" for sequence in bench.sequences.values())
