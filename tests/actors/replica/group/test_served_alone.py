"""A divided model is served while its self-test still runs: with right answers, and the test finds what it would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.replica.execution.followers import Followers
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.group.self_test import prove_group
from satchel.actors.replica.group.served_alone import ServedAlone
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.selftest.self_test import Proven
from satchel.cluster.config.config import Scheduling, parse_model
from tests.worlds.models.families import write_model
from tests.worlds.replica.group import Led, Process

from .test_serving import Doubled

PROMPT = [7, 3, 19, 4, 23, 5, 40, 2] * 40
TOKENS = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


class Told:
    """The tokens of sequences, and how they ended, by name."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.cached: set[int] = set()

    def take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for update in updates.get("c", []):
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)
            if update.finish is not None:
                self.ends[update.request_id] = update.finish

    def ask(self, engine: Engine, name: str, prompt: list[int]) -> None:
        root, model_id = root_id(engine.loaded.model_id, "tenant:t"), engine.loaded.model_id
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        request = GenerateRequest(
            name, "c", "m", "", prompt, block_ids(root, prompt), root, sampling, model_id=model_id
        )
        engine.submit(request, lambda refusal: self.ends.update({name: str(refusal)}) if refusal else None)


@contextmanager
def group(folder: Path) -> Iterator[tuple[LoadedModel, Followers]]:
    """The last stage of a model, and its follower in another process."""
    last = load_stage(str(folder), 2, 4)
    led = Led(last, Process(folder, 0, 2).address)
    try:
        followers = led.bench.engine.executor.followers
        assert followers is not None
        yield last, followers
    finally:
        led.member.close()


def prove(folder: Path, loaded: LoadedModel, followers: Followers, told: Told | None, engines: list[Engine]) -> Proven:
    model = parse_model(name="m", source=str(folder))
    if told is None:
        return prove_group(loaded, followers, "0 to 2; 2 to 4", model, lambda what, done: None, None)

    def begin(alone: LoadedModel) -> Engine:
        assert not alone.spec.reusable
        engines.append(engine_of(alone, followers, told))
        return engines[0]

    served = ServedAlone(0.0, begin, lambda: pytest.fail("the engine failed"))

    numbers = count()

    def come() -> None:
        if engines:
            # Of different lengths, and two at a time, of which one waits.
            number = next(numbers)
            told.ask(engines[0], f"{number}", PROMPT)
            told.ask(engines[0], f"{number} short", PROMPT[:9])
        served.serve()

    asked: Any = SimpleNamespace(serve=come, offer=served.offer)
    return prove_group(loaded, followers, "0 to 2; 2 to 4", model, lambda what, done: None, None, asked)


def engine_of(loaded: LoadedModel, followers: Followers, told: Told) -> Engine:
    return Engine(loaded, Scheduling(sequences_max=1), 2**32, told.take, followers=followers)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_between_the_runs_of_a_self_test_are_right_and_do_not_disturb_it(family: str, tmp_path: Path):
    folder = write_model(tmp_path / family, family, num_hidden_layers=4, **FAMILIES[family])
    with group(folder) as (last, followers):
        alone = prove(folder, last, followers, None, [])
        told, engines = Told(), list[Engine]()
        proven = prove(folder, last, followers, told, engines)
        assert (proven.notes, proven.together) == (alone.notes, alone.together) and proven.together
        assert proven.loaded.spec.reusable == last.spec.reusable
        assert len(told.ends) >= 4 and {*told.ends.values()} == {"length"}
        # As the model answers afterwards.
        later = engine_of(proven.loaded, followers, told)
        for name, prompt in (("long", PROMPT), ("short", PROMPT[:9])):
            told.ask(later, name, prompt)
            later.serve()
        for name, tokens in told.tokens.items():
            assert tokens == told.tokens["short" if "short" in name else "long"], name


def test_a_fault_of_batches_is_found_meanwhile(tmp_path: Path):
    folder = write_model(tmp_path / "llama", "llama", num_hidden_layers=4)
    with group(folder) as (last, followers):
        told, engines = Told(), list[Engine]()
        proven = prove(folder, replace(last, model=Doubled(last.model)), followers, told, engines)
        assert not proven.together and {*told.ends.values()} == {"length"}


def test_a_model_is_not_served_before_it_computes_one_sequence_alone():
    begun, ended = [], []
    delivery = SimpleNamespace(sequences={})
    alone: Any = SimpleNamespace(executor=SimpleNamespace(clear_batch=lambda: None), delivery=delivery)
    served = ServedAlone(0.0, lambda loaded: begun.append(loaded) or alone, lambda: ended.append(1))
    served.serve()
    assert not begun and served.engine is None
    delivery.sequences["one"] = "waits, and its engine fails"
    alone.serve = lambda: 1 / 0
    served._offered = "a model"  # type: ignore[assignment]
    served.serve()
    assert begun == ["a model"] and ended == [1], "an error of the engine is none of the self-test"
