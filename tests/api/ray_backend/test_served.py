"""The served models, with a fake registry and fake replicas: no request waits for a replica that does not answer."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.protocol import registry
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.protocol.replica_messages import ModelInfo
from satchel.api.client import cluster
from satchel.api.ray_backend import served
from satchel.api.ray_backend.routing import Routing
from satchel.api.ray_backend.served import ServedModels
from satchel.cluster.config.config import Model, default_config
from satchel.cluster.config.stages import Stage
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import NoReplica
from tests.worlds.direct import model_info

A = Model(name="a", source="s", template_kwargs={"clear_thinking": False}, schema_in_prompt="never")
B = Model(name="b", source="s", replicas=2, control_tokens_in_text="tokens", unseen_media="refuse")


def entry(order: int, model: Model) -> ServedEntry:
    return ServedEntry(order, model, {f"{model.slug}-{number}": "local" for number in range(model.replicas or 1)})


TIMING = Timing(registry_s=3600.0)


class World:
    """A registry and replicas. A replica answers at once with its entry in `answers`, or hangs while it has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: tuple[ServedEntry, ...] | Exception = (entry(1, A), entry(2, B))
        self.answers: dict[str, ModelInfo | None] = {}
        self.asked: list[str] = []
        self.reads = 0
        monkeypatch.setattr(registry, "entries", self.read)
        monkeypatch.setattr(served, "FIRST_ANSWER_S", 0.2)
        monkeypatch.setattr(served, "ASK_AGAIN_S", 0.0)
        self.models = ServedModels(self.ask, TIMING)

    def read(self) -> tuple[ServedEntry, ...]:
        self.reads += 1
        if isinstance(self.entries, Exception):
            raise self.entries
        return self.entries

    async def ask(self, replica: str) -> ModelInfo | None:
        self.asked.append(replica)
        while replica not in self.answers:
            await asyncio.sleep(0.01)
        return self.answers[replica]

    async def names(self) -> list[str]:
        return [model.info.name for model in await self.models.models()]

    def load(self, replica: str, name: str, *, context: int = 8, proving: str = "") -> None:
        self.answers[replica] = model_info(name=name, context_tokens=context, proving=proving)

    def forget_the_reading(self) -> None:
        self.models._read_at = -math.inf


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_first_request_waits_for_a_model_that_answers(world: World):
    world.load("a-0", "a")
    world.load("b-1", "b")
    assert await world.names() == ["a", "b"], "one replica of b is enough"
    served = await world.models.models()
    assert [model.template_kwargs for model in served] == [{"clear_thinking": False}, {}]
    assert [model.schema_in_prompt for model in served] == [False, True]
    assert [model.omits_unseen for model in served] == [True, False]
    assert [model.marks_are_tokens for model in served] == [False, True]
    asked = len(world.asked)
    assert await world.names() == ["a", "b"]
    assert (len(world.asked), world.reads) == (asked, 1), "what is known is not asked again"


async def test_a_replica_that_hangs_costs_the_first_requests_a_moment_and_later_ones_nothing(world: World):
    world.load("a-0", "a")
    async with asyncio.timeout(10):
        assert await world.names() == ["a"]
    asked = len(world.asked)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a later request must not wait")

    wait, asyncio.wait = asyncio.wait, refuse  # type: ignore[assignment]
    try:
        for _ in range(100):
            assert await world.names() == ["a"]
    finally:
        asyncio.wait = wait
    assert len(world.asked) == asked, "one asking runs, not one a request"
    world.load("b-0", "b")
    await asyncio.sleep(0.05)
    assert await world.names() == ["a", "b"]


async def test_a_model_that_is_still_loading_is_found_when_it_is_ready(world: World):
    world.load("a-0", "a")
    world.answers |= {"b-0": None, "b-1": None}
    assert await world.names() == ["a"]
    world.load("b-0", "b")
    async with asyncio.timeout(20):
        while await world.names() != ["a", "b"]:
            await asyncio.sleep(0.01)


async def test_a_model_that_was_unloaded_and_loaded_again_is_another_one(world: World):
    world.load("a-0", "a", context=8)
    world.load("b-0", "b")
    await world.names()
    world.entries = (entry(2, B),)
    world.forget_the_reading()
    assert await world.names() == ["b"]
    world.load("a-0", "a", context=99)
    world.entries = (entry(2, B), entry(3, A))
    world.forget_the_reading()
    infos = [model.info for model in await world.models.models()]
    assert [(info.name, info.context_tokens) for info in infos] == [("b", 8), ("a", 99)]


async def test_for_a_while_after_a_request_no_request_waits_for_the_registry(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served, "FOLLOWED_S", 0.5)
    models = ServedModels(world.ask, Timing(registry_s=0.1))
    assert [entry.model.name for entry in await models.entries()] == ["a", "b"]
    asked, world.entries = world.reads, (entry(2, B),)
    async with asyncio.timeout(20):
        while world.reads < asked + 2:
            await asyncio.sleep(0.01)
        assert models._following is not None
        # Nothing is awaited, so nothing is read now.
        with pytest.raises(StopIteration) as read:
            models.entries().send(None)
        assert [entry.model.name for entry in read.value.value] == ["b"]
        await models._following


async def test_a_reading_that_began_before_a_change_does_not_show_it(world: World, monkeypatch: pytest.MonkeyPatch):
    """Whoever knows of a change asks for another one, and what the first one found is not taken."""
    began, go_on, readings = threading.Event(), threading.Event(), [(entry(1, A),), (entry(2, B),)]

    def read() -> tuple[ServedEntry, ...]:
        found = readings.pop(0)
        if readings:
            began.set()
            go_on.wait(20)
        return found

    monkeypatch.setattr(registry, "entries", read)
    first = asyncio.create_task(world.models.entries())
    await asyncio.to_thread(began.wait, 5)
    world.models.refresh()
    assert [entry.model.name for entry in await world.models.entries()] == ["b"]
    go_on.set()
    await first
    assert [entry.model.name for entry in await world.models.entries()] == ["b"]


async def test_a_handle_that_has_loaded_a_model_finds_it_at_once(world: World, monkeypatch: pytest.MonkeyPatch):
    async def pooled(name: str) -> None:
        return None

    async def load_model(model: Model, *_: object) -> None:
        world.entries = (entry(1, A), entry(2, model))

    monkeypatch.setattr(cluster, "load_model", load_model)
    world.entries = (entry(1, A),)
    assert [entry.model.name for entry in await world.models.entries()] == ["a"]
    routing = SimpleNamespace(served=world.models)
    handle: Any = SimpleNamespace(
        config=default_config(), _pool=SimpleNamespace(pooled=pooled), _backend=SimpleNamespace(routing=routing)
    )
    name = await inspect.unwrap(cluster.Cluster.load)(handle, "embedded:recall")
    assert [entry.model.name for entry in await world.models.entries()] == ["a", name]


async def test_without_the_control_store_what_was_read_last_counts(world: World):
    world.load("a-0", "a")
    world.load("b-0", "b")
    await world.names()
    world.entries = ConnectionError("gone")
    world.forget_the_reading()
    assert await world.names() == ["a", "b"]
    fresh = ServedModels(world.ask, TIMING)
    with pytest.raises(NoReplica):
        await fresh.models()


async def test_a_model_that_is_being_proven_is_asked_again_until_it_is(world: World):
    """No request waits for that: the known description is used meanwhile."""
    world.load("a-0", "a", proving="how it keeps its KV")
    world.load("b-0", "b")
    world.load("b-1", "b")
    assert [model.info.proving for model in await world.models.models()] == ["how it keeps its KV", ""]
    asked = world.asked.count("a-0")
    del world.answers["a-0"]
    async with asyncio.timeout(20):
        assert await world.names() == ["a", "b"]
    world.load("a-0", "a", context=16)
    async with asyncio.timeout(20):
        while (await world.models.models())[0].info.proving:
            await asyncio.sleep(0.005)
    assert (await world.models.models())[0].info.context_tokens == 16 and world.asked.count("a-0") > asked
    asked = len(world.asked)
    assert await world.names() == ["a", "b"] and len(world.asked) == asked


@pytest.mark.parametrize("first", ["b-0", "b-1"])
async def test_a_replica_that_is_proven_speaks_for_its_model(world: World, first: str):
    world.load("a-0", "a")
    for name in ("b-0", "b-1"):
        world.load(name, "b", proving="" if name == first else "how it keeps its KV")
    async with asyncio.timeout(20):
        while [model.info.proving for model in await world.models.models()] != ["", ""]:
            await asyncio.sleep(0.005)


async def test_a_sequence_of_a_divided_model_waits_longer_for_its_replica(monkeypatch: pytest.MonkeyPatch):
    """All of its processes load their layers again, and a node may have to come back."""
    divided = ServedEntry(3, Model(name="c", source="s"), {"c-0": "mac1"}, {"c-0": (Stage("mac0", 0, 1, 9),)})
    monkeypatch.setattr(registry, "entries", lambda: (entry(1, A), divided))
    locator: Any = None
    routing = Routing(default_config(), locator)
    try:
        timing = routing.config.timing
        assert await routing.recovery_s("c") == timing.group_recovery_s
        assert await routing.recovery_s("a") == await routing.recovery_s("unknown") == timing.recovery_s
    finally:
        await routing.close()
