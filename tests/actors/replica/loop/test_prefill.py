"""Prefills that the engine does not wait for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from tests.worlds.replica.bench import Bench, load_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("model"))


def running_ahead(loaded: LoadedModel, **how: Any) -> Bench:
    bench = Bench(loaded, **how)
    bench.engine.executor.batched_prefill = bench.engine.executor.runs_ahead = True
    return bench


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of the calls whose time was noted."""
    tokens: list[int] = []

    def note(pace: PrefillPace, count: int, seconds: float) -> None:
        assert 0 < seconds < 60
        tokens.append(count)

    monkeypatch.setattr(PrefillPace, "note", note)
    return tokens


def test_answers_are_those_of_an_engine_that_waits(loaded: LoadedModel):
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 900) for _ in range(rng.randrange(1, 900))] for _ in range(10)]
    waiting = [Bench(loaded).run(str(index), prompt, max_tokens=12).tokens for index, prompt in enumerate(prompts)]
    bench = running_ahead(loaded, sequences_max=4)
    for index, prompt in enumerate(prompts):
        bench.submit(str(index), prompt, max_tokens=12)
        if index % 4 == 3:
            bench.submit(f"goes{index}", prompts[0], max_tokens=12)
        for _ in range(rng.randrange(3)):
            bench.turn()
        if index % 4 == 3:
            bench.engine.abort((f"goes{index}",))
    bench.drain()
    assert [bench.sequences[str(index)].tokens for index in range(len(prompts))] == waiting


def test_the_time_of_each_prefill_is_noted_once(loaded: LoadedModel, noted: list[int]):
    """Of the last one once the engine has nothing to do, and of one that nothing is decoded after."""
    bench = running_ahead(loaded)
    bench.run("one", list(range(5, 705)), max_tokens=4)
    bench.run("two", list(range(5, 305)), max_tokens=0, reusable=False)
    bench.engine.wait()
    assert sum(noted) == bench.engine.counters.computed_tokens == 699 + 44


def test_what_is_prepared_is_not_measured(loaded: LoadedModel, noted: list[int]):
    bench = running_ahead(loaded)
    bench.run("one", list(range(5, 305)), max_tokens=2)
    bench.engine.wait()
    before = list(noted)
    bench.prepare("default/a", list(range(400, 1000)))
    assert noted == before
    assert bench.run("next", list(range(400, 1000)), max_tokens=2, agent="default/a").cached == 512


def test_a_prompt_is_not_charged_with_what_was_prepared_before_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    executor = running_ahead(loaded).engine.executor
    clock, seconds = [0.0], list[float]()

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr("satchel.actors.replica.execution.prefill_ahead.perf_counter", now)
    wait = executor.wait_for_prefill

    def waiting() -> None:
        # What runs ahead takes 5 s.
        clock[0] += 5.0 * (executor.ahead.running)
        wait()

    monkeypatch.setattr(executor, "wait_for_prefill", waiting)
    for name in ("prepared", "asked"):
        executor.open(name, [], None, 0)
    executor.prefill([("prepared", [7] * 300)])
    executor.time_next(lambda tokens, took: seconds.append(took))
    executor.prefill([("asked", [8] * 300)])
    executor.wait_for_prefill()
    assert seconds == [pytest.approx(5.0, abs=0.1)]


def test_what_asks_for_no_token_ends_once_it_is_computed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    bench = running_ahead(loaded)
    executor = bench.engine.executor
    finish = bench.engine.delivery.finish

    def finishing(*given: Any) -> None:
        assert not executor.ahead.running
        finish(*given)

    monkeypatch.setattr(bench.engine.delivery, "finish", finishing)
    assert bench.run("none", list(range(5, 305)), max_tokens=0).finish == "length"
