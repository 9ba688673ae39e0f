"""A request whose model is unloaded before a replica takes it, or under it, waits for the model's next load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.protocol import registry
from satchel.actors.protocol.clients import PoolClient
from satchel.actors.protocol.pool_messages import LOADED, LOADING, WAITING, PooledModel
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend.model_pool import ModelPool
from satchel.api.ray_backend.served import ServedModels
from satchel.api.requests.loading import Loading
from satchel.cluster.config.config import Model
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import Draining, GenerationFailed, ModelLoadError, NoReplica, QueueFull, Unavailable
from tests.api.ray_backend.test_dispatch import SOON, FakeBackend, generation, said
from tests.api.ray_backend.test_pooling import ANSWER, REQUEST, Cluster
from tests.api.ray_backend.test_pooling import RayPooling as Pooling
from tests.worlds.direct import Direct, model_info

BRIEF = replace(SOON, recovery_s=0.2)


async def test_a_refused_sequence_waits_until_its_model_is_loaded_again():
    backend = FakeBackend(a=[Draining("it is unloaded"), Draining("it is unloaded"), "take"])
    backend.unloaded = [True, True]
    sequence = generation(backend)
    await sequence.start()
    assert backend.unloaded == [] and len(backend.links["a"].taken) == 1
    backend.links["a"].say(7, finish="stop")
    assert await said(sequence) == [7]


async def test_a_model_that_stays_loaded_is_not_waited_for():
    with pytest.raises(Draining):
        await generation(FakeBackend(a=[Draining("the server stops")])).start()


async def test_a_full_queue_is_an_answer_at_once():
    backend = FakeBackend(a=[QueueFull("full")])
    backend.unloaded = [True]
    with pytest.raises(QueueFull):
        await generation(backend).start()
    assert backend.unloaded == [True]


async def test_a_loaded_model_whose_replicas_refuse_is_not_tried_for_ever():
    backend = FakeBackend(BRIEF, a=[Draining("the server stops")] * 1000)
    backend.unloaded = []
    async with asyncio.timeout(10):
        with pytest.raises(Draining):
            await generation(backend).start()


async def test_a_stream_goes_on_after_its_model_was_unloaded_under_it():
    """As if a pool that was killed had left a replica that somebody ended."""
    backend = FakeBackend(a=["take", NoReplica("none"), "take"])
    backend.unloaded = [True]
    sequence = generation(backend)
    await sequence.start()
    backend.links["a"].say(7)
    reading = asyncio.create_task(said(sequence))
    await asyncio.sleep(0)
    backend.links["a"].lose()
    async with asyncio.timeout(10):
        while len(backend.links["a"].taken) < 2:
            await asyncio.sleep(0.01)
    assert backend.links["a"].taken[1].prompt[-1] == 7, "the answer so far is in its prompt"
    backend.links["a"].say(8, finish="stop")
    assert await reading == [7, 8]


async def test_an_unloaded_replica_s_process_was_not_ended_by_the_sequence():
    backend = FakeBackend(a=["end"], b=["end"], c=["take"])
    backend.unloaded, backend.gone = [], {"a", "b"}
    sequence = generation(backend)
    await sequence.start()
    assert len(backend.links["c"].taken) == 1
    backend = FakeBackend(a=["end"], b=["end"], c=["take"])
    backend.unloaded = []
    with pytest.raises(GenerationFailed):
        await generation(backend).start()


async def test_a_load_error_is_the_answer():
    backend = FakeBackend(a=[NoReplica("none")])

    async def fails(model: str, loading: Loading) -> bool:
        raise ModelLoadError("no room")

    backend.load_again = fails
    with pytest.raises(ModelLoadError, match="no room"):
        await generation(backend).start()


async def test_a_request_for_vectors_waits_too():
    cluster = Cluster(BRIEF, a=[Draining("it is unloaded"), "answer"])
    cluster.unloaded = [True]
    assert (await Pooling(cluster, REQUEST).run()).pooled == ANSWER  # type: ignore[arg-type]
    cluster = Cluster(BRIEF, a=["answer"])
    cluster.unloaded, cluster.away = [], 1
    assert (await Pooling(cluster, REQUEST).run()).pooled == ANSWER, "its report is on its way"  # type: ignore[arg-type]


class Registry:
    """A registry and a pool that plays a script of states and errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Any) -> None:
        self.entry = ServedEntry(1, Model(name="m", source="s", load="request"))
        self.files = b"first"
        self.script = list(script)
        self.asked = 0
        monkeypatch.setattr(registry, "entries", lambda: (self.entry,))
        timing = Timing(retry_s=0.01, recovery_s=0.05, registry_s=3600.0)
        self.served = ServedModels(self.info, timing)
        self.pool = ModelPool(self.served, timing)
        self.pool._client = PoolClient(timing, Direct(lambda: self))

    async def info(self, replica: str) -> Any:
        return model_info(name="m", files_id=self.files)

    async def ensure(self, data: bytes) -> bytes:
        name, _ = PoolClient.ensure.asked(data)
        assert name == "m"
        self.asked += 1
        step = self.script.pop(0)
        return encode_error(step) if isinstance(step, Exception) else encode(PooledModel("m", *step))  # type: ignore[arg-type]


def noting(loading: Loading, seen: list[str]) -> Callable[[], None]:
    return lambda: seen.append(loading.progress)


async def test_the_pool_is_asked_until_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    world = Registry(monkeypatch, (WAITING, "room is taken by n"), (LOADING, "reading weights", 0.43), (LOADED,))

    class Noted(Loading):
        def __setattr__(self, name: str, value: str) -> None:
            seen.append(value)
            super().__setattr__(name, value)

    assert not await world.pool.is_loaded("m") and await world.pool.comes_and_goes("m")
    assert await world.pool.load("m", Noted())
    assert seen == ["", "waiting m: room is taken by n", "loading m 43%: reading weights", ""]
    world.script = [(LOADED,)]
    assert not await world.pool.load("m", Loading()), "it was loaded"


async def test_a_pool_that_restarts_is_asked_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    world = Registry(monkeypatch, Unavailable("away"), Unavailable("away"), (LOADED,))
    assert not await world.pool.load("m", Loading())
    world.script = [Unavailable("away")] * 1000
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="away"):
            await world.pool.load("m", Loading())


async def test_a_restarting_replica_does_not_count_as_unloaded(monkeypatch: pytest.MonkeyPatch):
    """A request that ends every process that computes it must still be given up."""
    world = Registry(monkeypatch, (LOADING, "reading weights", None, None, "", True), (LOADED,))
    assert not await world.pool.load("m", Loading())


async def test_after_a_load_the_model_is_described_anew(monkeypatch: pytest.MonkeyPatch):
    """Its files may be others than before it was unloaded."""
    world = Registry(monkeypatch, (LOADING, "starting"), (LOADED,), (LOADING, "starting"), (LOADED,))

    async def loaded(files: bytes) -> list[bytes]:
        world.files = files
        world.entry = replace(world.entry, replicas={})
        world.served.refresh()
        await world.served.entries()
        world.entry = replace(world.entry, replicas={"m-0": "local"})
        await world.pool.load("m", Loading())
        return [model.info.files_id for model in await world.served.models()]

    assert await loaded(b"first") == [b"first"]
    assert await loaded(b"second") == [b"second"]
