"""Prompts that are prepared while an engine has nothing else to do: answers are the same as without, requests go first,
and no other KV goes for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.device.device_errors import DeviceFailed
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kv.paged_cache import PagedKVCache
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.bring_back import _EndedTurn
from satchel.actors.replica.memory.budget import MemoryBudget
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.cluster.errors import Draining
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.bench_disk import Node, write_down
from tests.worlds.replica.device_faults import Fault

MakeBench = Callable[..., Bench]
ANN, BOB = "default/ann", "default/bob"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    place = Node(tmp_path)
    yield place
    place.store.close()


def words(loaded: LoadedModel, count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(loaded.vocabulary_size - 20) for _ in range(count)]


def ids_of(loaded: LoadedModel, prompt: list[int]) -> list[bytes]:
    return block_ids(root_id(loaded.model_id, "tenant:test"), prompt)


def conversed(bench: Bench, prompt: list[int], rewritten: list[int], *, prepared: bool) -> list[int]:
    """An agent's turn and its next, in which half of the first one's prompt was rewritten."""
    bench.run("first", prompt, agent=ANN, max_tokens=20)
    if prepared:
        bench.prepare(ANN, rewritten)
    return bench.run("next", [*rewritten, 5, 6, 7], agent=ANN, max_tokens=30).tokens


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] if family != "llama" else [])
        for family in ("llama", "gemma3_text", "qwen3_next")
    ],
)
def test_an_answer_is_the_same_whether_its_prompt_was_prepared_or_not(family: str, loaded: LoadedModel, tmp_path: Path):
    """With window and recurrent layers too, in float32 on the CPU."""
    if family != "llama":
        folder = write_model(tmp_path / family, family)
        how: dict[str, Any] = {"numerics": "reproducible", "progress": lambda what, fraction: None}
        loaded = models.load(str(folder), context_tokens_max=None, **how)
    prompt, rewritten = words(loaded, 1100), [*words(loaded, 300), *words(loaded, 900, seed=2)]
    alone = conversed(Bench(loaded), prompt, rewritten, prepared=False)
    bench = Bench(loaded)
    assert conversed(bench, prompt, rewritten, prepared=True) == alone
    prefixes, cached = bench.engine.prefixes, bench.sequences["next"].cached
    assert cached is not None and cached >= len(rewritten) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
    assert prefixes.used_tokens == prefixes.prepared_tokens > 0 and prefixes.wasted_tokens == 0


def test_a_request_that_comes_goes_first(bench: MakeBench, loaded: LoadedModel):
    """Nothing of the prepared prompt is computed until it has ended, and only an open block is computed twice."""
    engine, prompt, other = bench(), words(loaded, 2000), words(loaded, 600, seed=3)
    alone = bench().run("alone", other).tokens
    computed: list[tuple[str, int]] = []
    prefill = engine.engine.executor.prefill

    def noted(work: Any) -> None:
        computed.extend((name, len(tokens)) for name, tokens in work)
        prefill(work)

    engine.engine.executor.prefill = noted
    engine.prepare(ANN, prompt, most=5)
    assert engine.engine.executor.holds("prepared")
    begun = len(computed)
    engine.submit("other", other)
    while "other" not in engine.sequences or engine.sequences["other"].finish is None:
        engine.turn()
        assert not engine.engine.executor.holds("prepared")
    assert {name for name, _ in computed[begun:]} == {"other"} and engine.sequences["other"].tokens == alone
    engine.rest()
    assert engine.engine.prefixes.leading(ids_of(loaded, prompt)) == 7
    tokens = sum(count for name, count in computed if name == "prepared")
    assert 7 * BLOCK_TOKENS <= tokens < 8 * BLOCK_TOKENS
    assert engine.engine.counters.requests == 1 and engine.engine.counters.preemptions == 0


def test_an_agent_has_one_prompt_and_drained_engines_prepare_nothing(bench: MakeBench, loaded: LoadedModel):
    engine, first, second = bench(), words(loaded, 600), words(loaded, 600, seed=2)
    engine.prepare(ANN, first, most=0)
    engine.prepare(ANN, second)
    prefixes = engine.engine.prefixes
    assert [prefixes.leading(ids_of(loaded, prompt)) for prompt in (first, second)] == [0, 2]
    engine.prepare(ANN, first, most=0)
    engine.engine.refuse(Draining("test"))
    engine.rest()
    assert prefixes.leading(ids_of(loaded, first)) == 0 and not engine.engine.prepare


def evicted(loaded: LoadedModel, node: Node, prompt: list[int]) -> Bench:
    """An engine after a turn of an agent, whose KV is on disk and no longer in memory."""
    disk = DiskTier(loaded.spec, loaded.model_id, node.client)
    bench = Bench(loaded, disk=disk)
    bench.run("turn", prompt, agent=ANN, max_tokens=5)
    write_down(bench, disk)
    bench.engine.prefixes.clear()
    return bench


def wait(bench: Bench, done: Callable[[], bool], most_s: float = 20.0) -> None:
    ends = time.monotonic() + most_s
    while not done() and time.monotonic() < ends:
        bench.engine.step()
        bench.engine.wait()
    bench.engine.prefixes.check()


def test_evicted_kv_of_an_agent_is_back_before_its_next_turn(loaded: LoadedModel, node: Node):
    """As soon as there is room for it and nothing else to do, once for each turn."""
    prompt = words(loaded, 3 * BLOCK_TOKENS + 7)
    bench = evicted(loaded, node, prompt)
    prefixes, ids = bench.engine.prefixes, ids_of(loaded, prompt)
    wait(bench, lambda: prefixes.leading(ids) == 3)
    assert prefixes.leading(ids) == 3 and prefixes.prepared_tokens == 0
    assert list(bench.engine.memory.recount()) == []
    counters, said = bench.engine.counters, bench.sequences["turn"].tokens
    hot = counters.hot_tokens
    again = [*prompt, *said, 5]
    assert bench.run("next", again, agent=ANN).tokens == Bench(loaded).run("alone", again).tokens
    assert counters.hot_tokens - hot >= 3 * BLOCK_TOKENS


@pytest.mark.parametrize("why", ["no room", "forgotten"])
def test_kv_is_not_read_back_where_that_would_harm(
    why: str, loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    prompt = words(loaded, 3 * BLOCK_TOKENS + 7)
    bench = evicted(loaded, node, prompt)
    engine, ids = bench.engine, ids_of(loaded, prompt)
    if why == "no room":
        monkeypatch.setattr(MemoryBudget, "kept_bytes", lambda *_: 2 * BLOCK_TOKENS * loaded.spec.bytes_per_token)
        engine.memory.fit()
    else:
        engine.forget_prepared(ANN)
    assert not engine.bring_back.begin()
    for _ in range(2):
        engine.step()
        engine.wait()
    assert engine.prefixes.leading(ids) == 0 and list(engine.memory.recount()) == []


def test_a_request_interrupts_what_is_read_back(loaded: LoadedModel, node: Node):
    """It is read back after the request. What still comes of the first attempt does not end the second."""
    prompt, other = words(loaded, 3 * BLOCK_TOKENS + 7), words(loaded, 300, seed=2)
    bench = evicted(loaded, node, prompt)
    engine, ids = bench.engine, ids_of(loaded, prompt)
    assert engine.bring_back.begin()
    alone = Bench(loaded).run("alone", other).tokens
    assert bench.run("other", other).tokens == alone
    assert engine.prefixes.leading(ids) == 0 and list(engine.memory.recount()) == []
    wait(bench, lambda: engine.prefixes.leading(ids) == 3)
    assert engine.prefixes.leading(ids) == 3 and list(engine.memory.recount()) == []


def test_where_there_is_no_room_no_prompt_is_copied_to_look_for_it(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """An idle engine looks all the time."""
    bench = evicted(loaded, node, words(loaded, 3 * BLOCK_TOKENS + 7))
    bench.engine.memory.room = lambda: 2 * BLOCK_TOKENS * loaded.spec.bytes_per_token
    bench.engine.memory.fit()
    monkeypatch.setattr(_EndedTurn, "sequence", lambda *_: pytest.fail("its prompt is copied"))
    assert not bench.engine.bring_back.begin()


def test_a_memory_that_is_cleared_stays_empty(loaded: LoadedModel, node: Node):
    prompt, coming = words(loaded, 3 * BLOCK_TOKENS + 7), words(loaded, 600, seed=2)
    bench = evicted(loaded, node, prompt)
    engine, ids, freed = bench.engine, ids_of(loaded, prompt), list[int]()
    bench.prepare(ANN, coming, most=0)
    assert engine.bring_back.begin()
    engine.call(lambda: freed.append(engine.clear_cache()))
    for _ in range(3):
        engine.step()
        engine.wait()
    assert freed and engine.prefixes.leading(ids) == engine.prefixes.prepared_tokens == 0
    assert not engine.prepare and not engine.bring_back.begin() and list(engine.memory.recount()) == []


def test_what_cannot_be_put_back_is_left_out(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    prompt = words(loaded, 3 * BLOCK_TOKENS + 7)
    bench, tried = evicted(loaded, node, prompt), list[Any]()
    engine = bench.engine

    def fail(*given: Any) -> None:
        tried.append(given)
        raise ValueError("test")

    monkeypatch.setattr(engine.memory, "put_back", fail)
    wait(bench, lambda: bool(tried))
    assert tried and engine.prefixes.leading(ids_of(loaded, prompt)) == 0
    assert not engine.bring_back.begin() and list(engine.memory.recount()) == []


def test_what_is_being_read_back_when_the_device_fails_is_dropped(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Its blocks are not the pool's any more."""
    prompt = words(loaded, 3 * BLOCK_TOKENS + 7)
    bench, came = evicted(loaded, node, prompt), list[Any]()
    engine, take = bench.engine, bench.engine.bring_back.take
    monkeypatch.setattr(engine.bring_back, "take", lambda *found: came.append(found) or True)
    assert engine.bring_back.begin()
    wait(bench, lambda: bool(came))
    assert came[0][1] is not None

    def fail() -> None:
        raise DeviceFailed("test")

    engine.call(fail)
    engine.step()
    assert not take(*came[0]) and engine.counters.device_failures == 1
    assert engine.prefixes.leading(ids_of(loaded, prompt)) == 0 and list(engine.memory.recount()) == []


@pytest.mark.parametrize("prompt", [[], [10**6] * 300, list(range(5)), [1] * 10**6])
def test_what_cannot_be_prepared_is_left_out(bench: MakeBench, prompt: list[int]):
    engine = bench()
    engine.prepare(ANN, prompt)
    assert not engine.engine.prepare and engine.engine.prefixes.prepared_tokens == 0


@pytest.mark.parametrize("own", [False, True])
def test_nothing_is_evicted_for_a_prepared_prompt(own: bool, bench: MakeBench, loaded: LoadedModel):
    """Neither in a full memory nor of a tenant whose own limit is reached."""
    block = BLOCK_TOKENS * loaded.spec.bytes_per_token
    most = 10 * block
    engine = bench() if own else bench(prefix_bytes_max=most)
    limits: dict[str, Any] = {"tenant": "test", "memory": most} if own else {}
    held: list[list[bytes]] = []
    for number in range(4):
        talk = words(loaded, 2 * BLOCK_TOKENS, seed=10 + number)
        engine.run(str(number), [*talk, 1], max_tokens=1, agent=f"default/{number}", **limits)
        held.append(ids_of(loaded, talk))
    engine.prepare(ANN, prompt := words(loaded, 6 * BLOCK_TOKENS + 5), **limits)
    prefixes = engine.engine.prefixes
    assert [prefixes.leading(ids) for ids in held] == [2] * 4
    assert 0 <= prefixes.leading(ids_of(loaded, prompt)) <= 2 and prefixes.wasted_tokens == 0


def test_the_copy_of_a_prompt_without_a_pool_needs_room_too(loaded: LoadedModel):
    loaded = models.resealed(loaded, None)
    engine = Bench(loaded, prefix_bytes_max=10 * BLOCK_TOKENS * loaded.spec.bytes_per_token)
    prefixes = engine.engine.prefixes
    engine.prepare(ANN, words(loaded, 9 * BLOCK_TOKENS + 1))
    assert loaded.pool is None and prefixes.prepared_tokens == 0
    engine.prepare(ANN, short := words(loaded, 3 * BLOCK_TOKENS + 1, seed=2))
    assert prefixes.leading(ids_of(loaded, short)) == 3


def test_what_was_prepared_is_evicted_before_all_else(bench: MakeBench, loaded: LoadedModel):
    engine = bench(prefix_bytes_max=10 * BLOCK_TOKENS * loaded.spec.bytes_per_token)
    sizes = (3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS + 5, 5 * BLOCK_TOKENS + 1)
    old, prompt, new = (words(loaded, size, seed) for seed, size in enumerate(sizes))
    engine.run("old", [*old, 1], max_tokens=1)
    engine.prepare(ANN, prompt)
    prefixes = engine.engine.prefixes
    prepared = prefixes.prepared_tokens
    assert prepared >= 3 * BLOCK_TOKENS
    engine.run("new", new, max_tokens=1)
    assert prefixes.leading(ids_of(loaded, old)) == 3 and prefixes.leading(ids_of(loaded, new)) == 5
    assert prefixes.wasted_tokens >= prepared - 2 * BLOCK_TOKENS


def test_an_agent_that_is_forgotten_leaves_nothing_prepared(bench: MakeBench, loaded: LoadedModel):
    engine, ann, bob = bench(), words(loaded, 1500), words(loaded, 600, seed=2)
    engine.prepare(BOB, bob)
    engine.prepare(ANN, ann, most=8)
    assert engine.engine.executor.holds("prepared")
    freed: list[int] = []
    engine.engine.call(lambda: freed.append(engine.engine.prepare.forget(ANN)))
    engine.engine.step()
    prefixes = engine.engine.prefixes
    assert freed[0] > 0 and not engine.engine.prepare and not engine.engine.executor.holds("prepared")
    assert [prefixes.leading(ids_of(loaded, prompt)) for prompt in (ann, bob)] == [0, 2]
    assert list(engine.engine.memory.recount()) == []


def test_what_was_prepared_in_vain_goes_once_the_agent_has_another_prompt(bench: MakeBench, loaded: LoadedModel):
    engine, begin = bench(), words(loaded, BLOCK_TOKENS + 10)
    first, second = ([*begin, *words(loaded, 2 * BLOCK_TOKENS, seed)] for seed in (2, 3))
    engine.prepare(ANN, first)
    engine.prepare(ANN, second)
    prefixes = engine.engine.prefixes
    assert [prefixes.leading(ids_of(loaded, prompt)) for prompt in (first, second)] == [1, 3]
    assert prefixes.wasted_tokens == 2 * BLOCK_TOKENS
    freed: list[int] = []
    engine.engine.call(lambda: freed.append(engine.engine.forget_prepared(ANN)))
    engine.engine.step()
    assert freed[0] > 0 and prefixes.blocks == 0


@pytest.mark.parametrize("last", [5, 10**6])
def test_a_device_that_fails_meanwhile_costs_only_what_was_prepared(
    last: int, bench: MakeBench, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """The prompt may be why it fails, so it is not tried again."""
    prompt = words(loaded, 1000)
    alone = bench().run("alone", [*prompt, 5]).tokens
    engine = bench()
    fault = Fault(PagedKVCache.update_and_fetch, 5, last)
    monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    engine.prepare(ANN, prompt)
    assert engine.engine.counters.device_failures == 1 and not engine.engine.prepare
    monkeypatch.undo()
    assert engine.run("next", [*prompt, 5], agent=ANN).tokens == alone


def test_what_is_prepared_is_not_written_to_disk(loaded: LoadedModel, node: Node):
    """So nothing of it is there after a restart. What a request has used of it is written with the request's KV."""
    prompt = words(loaded, 3 * BLOCK_TOKENS + 7)
    disk = DiskTier(loaded.spec, loaded.model_id, node.client)
    bench = Bench(loaded, disk=disk)
    bench.prepare(ANN, prompt)
    assert bench.engine.prefixes.prepared_tokens == 3 * BLOCK_TOKENS
    assert disk.waiting_bytes == 0 and not disk.saved
    alone = Bench(loaded).run("alone", [*prompt, 5]).tokens
    again = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
    assert again.run("next", [*prompt, 5], agent=ANN).tokens == alone and again.sequences["next"].cached == 0
    assert bench.run("next", [*prompt, 5], agent=ANN).tokens == alone
    write_down(bench, disk)
    assert all(block in disk.saved for block in ids_of(loaded, prompt))
