"""The pool with replicas that are only a table, and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from satchel.actors.pool import pool
from satchel.actors.pool.pool import ERROR_S, LOADS_MAX, LOST_S, LoadLost, Pool, View
from satchel.actors.protocol.pool_messages import LOADED, LOADING, UNLOADED, UNLOADING, WAITING, PooledModel
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.protocol.replica_messages import ReplicaStats
from satchel.cluster.config.config import Model
from satchel.cluster.errors import ModelBusy, ModelLoadError, ModelNotFound, NoRoom, SatchelError

GIB = 2**30


class Replicas:
    """`Work` on a table. `fails` has what loads of a model raise, one after the other; `gates` what they wait for."""

    def __init__(self, *models: Model, **nodes: int | None) -> None:
        self.entries = {model.name: ServedEntry(order, model) for order, model in enumerate(models)}
        self.nodes: dict[str, int | None] = nodes or {"mac0": 16 * GIB}
        self.stats: dict[str, ReplicaStats] = {}
        self.starting: dict[str, tuple[str, float | None] | SatchelError] = {}
        self.needs = dict.fromkeys(self.entries, 10 * GIB)
        self.fails: dict[str, list[Exception]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.left: dict[str, list[str]] = {}
        self.did: list[str] = []

    async def look(self) -> View:
        return View(tuple(self.entries.values()), dict(self.nodes), dict(self.stats), dict(self.starting))

    async def need(self, model: Model) -> int:
        return self.needs[model.name]

    async def load(self, model: Model, placed: Mapping[str, str], report: Callable[[str, float | None], None]) -> None:
        self.did.append(f"load {model.name} on {','.join(placed.values())}")
        report("reading weights", 0.43)
        if model.name in self.gates:
            await self.gates[model.name].wait()
        if errors := self.fails.get(model.name):
            raise errors.pop(0)
        self.place(model.name, placed)

    def place(self, name: str, placed: Mapping[str, str]) -> None:
        self.entries[name] = replace(self.entries[name], replicas=dict(placed))
        claimed = self.needs[name]
        for replica, node in placed.items():
            self.stats[replica] = ReplicaStats(replica, name, True, node=node, claimed_bytes=claimed)

    async def unload(self, replicas: Sequence[str]) -> None:
        self.did.append(f"unload {','.join(replicas)}")
        for name, entry in self.entries.items():
            kept = {replica: node for replica, node in entry.replicas.items() if replica not in replicas}
            self.entries[name] = replace(entry, replicas=kept)
        if any(gate in self.gates for gate in replicas):
            await self.gates[replicas[0]].wait()
        for replica in replicas:
            self.stats.pop(replica, None)
            self.starting.pop(replica, None)

    async def leftovers(self, model: Model) -> list[str]:
        return self.left.pop(model.name, [])


class World:
    def __init__(self, work: Replicas) -> None:
        self.work, self.now = work, 1000.0
        self.pool = Pool(work, lambda: self.now)

    async def settle(self, ticks: int = 6) -> None:
        """Lets the pool look and its tasks run."""
        for _ in range(ticks):
            await self.pool.tick()
            for _ in range(6):
                await asyncio.sleep(0)

    def asks(self, name: str) -> asyncio.Task[PooledModel]:
        return asyncio.create_task(self.pool.ensure(name, 60.0))

    def states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.pool.models()}

    async def loaded(self, name: str) -> None:
        await self.settle(1)
        asked = self.asks(name)
        await self.settle()
        assert (await asked).is_loaded
        self.now += 100.0


def model(name: str, **fields: object) -> Model:
    return Model(name=name, source="s", load="request", **fields)  # type: ignore[arg-type]


@pytest.fixture
async def world() -> World:
    return World(Replicas(model("a"), model("b"), model("c", idle_s=60.0), Model(name="pinned", source="s")))


async def test_many_callers_at_once_start_one_load_and_a_cancelled_one_does_not_end_it(world: World):
    world.work.gates["a"] = asyncio.Event()
    await world.settle(1)
    callers = [world.asks("a") for _ in range(20)]
    await world.settle()
    assert world.states() == {"a": LOADING, "b": UNLOADED, "c": UNLOADED}
    told = await world.pool.ensure("a", 0.0)
    assert told.progress == "loading a 43%: reading weights" and not told.is_loaded
    callers[0].cancel()
    world.work.gates["a"].set()
    await world.settle()
    assert all([(await caller).is_loaded for caller in callers[1:]])
    assert world.work.did == ["load a on mac0"]
    assert (await world.pool.ensure("a", 0.0)).is_loaded


async def test_the_least_recently_used_model_goes_and_comes_back_after_what_asked_for_its_room(world: World):
    await world.loaded("a")
    asked = world.asks("b")
    await world.settle()
    assert (await asked).is_loaded and world.states()["a"] == UNLOADED
    assert world.work.did[1:] == ["unload a-0", "load b on mac0"]


async def test_a_request_for_a_model_that_is_being_unloaded_waits_for_its_next_load(world: World):
    await world.loaded("a")
    gate = world.work.gates["a-0"] = asyncio.Event()
    first = world.asks("b")
    await world.settle()
    assert world.states() == {"a": UNLOADING, "b": WAITING, "c": UNLOADED}
    world.now += 1.0
    second = world.asks("a")
    await world.settle()
    gate.set()
    await world.settle()
    assert (await first).is_loaded and not second.done()
    world.now += 100.0
    await world.settle()
    assert (await second).is_loaded
    assert world.work.did == ["load a on mac0", "unload a-0", "load b on mac0", "unload b-0", "load a on mac0"]


async def test_a_busy_model_is_waited_for(world: World):
    await world.loaded("a")
    world.work.stats["a-0"] = replace(world.work.stats["a-0"], running=1)
    asked = world.asks("b")
    await world.settle()
    assert world.states()["a"] == LOADED and "a" in world.pool.models()[1].what
    world.work.stats["a-0"] = replace(world.work.stats["a-0"], running=0)
    await world.settle()
    assert (await asked).is_loaded


async def test_an_idle_model_goes_after_its_time_and_one_without_a_time_stays(world: World):
    world.work.needs = dict.fromkeys(world.work.needs, GIB)
    await world.loaded("a")
    await world.loaded("c")
    world.work.stats["c-0"] = replace(world.work.stats["c-0"], requests_total=1)
    await world.settle(2)
    world.now += 59.0
    await world.settle(2)
    assert world.states()["c"] == LOADED, "a request used it"
    world.now += 2.0
    await world.settle(2)
    assert world.states() == {"a": LOADED, "b": UNLOADED, "c": UNLOADED}


async def test_a_failed_load_is_remembered_for_a_moment(world: World):
    world.work.fails["a"] = [ModelLoadError("no such file")]
    await world.settle(1)
    callers = [world.asks("a") for _ in range(3)]
    await world.settle()
    for caller in callers:
        with pytest.raises(ModelLoadError, match="no such file"):
            await caller
    with pytest.raises(ModelLoadError, match="no such file"):
        await world.pool.ensure("a", 60.0)
    assert len(world.work.did) == 1 and world.pool.models()[0].error == "no such file"
    world.now += ERROR_S
    await world.loaded("a")
    assert world.pool.models()[0].error == ""


async def test_a_replica_that_dies_while_it_loads_is_started_again_but_not_for_ever(world: World):
    world.work.fails["a"] = [LoadLost("died")] * (LOADS_MAX - 1)
    await world.loaded("a")
    assert len(world.work.did) == LOADS_MAX
    world.work.fails["b"] = [LoadLost("died")] * LOADS_MAX
    world.work.needs["b"] = GIB
    asked = world.asks("b")
    await world.settle()
    with pytest.raises(ModelLoadError, match="died"):
        await asked


async def test_a_node_that_is_lost_during_a_load_is_replaced_by_another():
    world = World(Replicas(model("a", replicas=1), mac0=16 * GIB, mac1=12 * GIB))
    gate = world.work.gates["a"] = asyncio.Event()
    world.work.fails["a"] = [LoadLost("the node mac0 is away")]
    await world.settle(1)
    asked = world.asks("a")
    await world.settle()
    del world.work.nodes["mac0"]
    gate.set()
    await world.settle()
    assert (await asked).is_loaded and world.work.did == ["load a on mac0", "load a on mac1"]
    del world.work.nodes["mac1"], world.work.stats["a-0"]
    world.work.nodes["mac2"] = 16 * GIB
    await world.settle()
    assert world.pool.models()[0].restarts, "its node may come back"
    world.now += LOST_S
    again = world.asks("a")
    await world.settle()
    assert (await again).is_loaded and world.work.did[2:] == ["unload a-0", "load a on mac2"]


async def test_a_replica_that_finds_no_room_makes_another_model_go(world: World):
    """The figures of the files did not say what it needs besides its weights."""
    world.work.needs = dict.fromkeys(world.work.needs, GIB)
    await world.loaded("a")
    world.work.fails["b"] = [NoRoom("no room")]
    asked = world.asks("b")
    await world.settle()
    assert (await asked).is_loaded
    assert world.work.did == ["load a on mac0", "load b on mac0", "unload a-0", "load b on mac0"]
    world.work.fails["c"] = [NoRoom("no room"), NoRoom("no room")]
    world.now += 100.0
    asked = world.asks("c")
    await world.settle()
    with pytest.raises(NoRoom):
        await asked
    assert world.states()["b"] == UNLOADED


async def test_what_does_not_fit_beside_models_that_stay_is_an_error_and_unloads_nothing(world: World):
    world.work.place("pinned", {"pinned-0": "mac0"})
    world.work.needs["a"] = GIB
    await world.loaded("a")
    asked = world.asks("b")
    await world.settle()
    with pytest.raises(NoRoom, match=r"'b': no room.*10240 MiB"):
        await asked
    assert world.states()["a"] == LOADED


async def test_a_pool_that_was_killed_begins_again_from_the_registry():
    work = Replicas(model("a"), model("b"))
    work.place("a", {"a-0": "mac0"})
    work.left["b"] = ["b-0"]
    world = World(work)
    await world.settle()
    assert work.did == ["unload b-0"], "what was being loaded or unloaded is not in the registry"
    assert (await world.pool.ensure("a", 0.0)).is_loaded and world.states()["b"] == UNLOADED


async def test_a_replica_that_restarts_is_waited_for(world: World):
    await world.loaded("a")
    stats = world.work.stats.pop("a-0")
    world.work.starting["a-0"] = ("reading weights", 0.5)
    await world.settle(1)
    asked = world.asks("a")
    await world.settle()
    shown = world.pool.models()[0]
    assert not asked.done() and shown.restarts and shown.progress == "loading a 50%: reading weights"
    world.work.stats["a-0"] = stats
    await world.settle()
    assert (await asked).is_loaded and world.work.did == ["load a on mac0"]


async def test_a_replica_that_restarts_and_cannot_load_is_ended(world: World):
    await world.loaded("a")
    del world.work.stats["a-0"]
    world.work.starting["a-0"] = ModelLoadError("its files are gone")
    await world.settle(1)
    with pytest.raises(ModelLoadError, match="gone"):
        await world.pool.ensure("a", 60.0)
    await world.settle()
    assert world.work.did[1:] == ["unload a-0"] and world.states()["a"] == UNLOADED


async def test_a_model_that_is_removed_is_forgotten_and_those_who_wait_are_told(world: World):
    world.work.gates["a"] = asyncio.Event()
    await world.settle(1)
    asked = world.asks("a")
    await world.settle()
    del world.work.entries["a"]
    await world.settle()
    with pytest.raises(ModelNotFound):
        await asked
    with pytest.raises(ModelNotFound):
        await world.pool.ensure("a", 0.0)
    with pytest.raises(ModelNotFound):
        await world.pool.ensure("pinned", 0.0)


async def test_a_model_is_loaded_only_where_it_may_run():
    world = World(Replicas(model("a", nodes=("mac1",)), mac0=16 * GIB))
    await world.settle(1)
    asked = world.asks("a")
    await world.settle()
    with pytest.raises(ModelLoadError, match="mac1"):
        await asked
    world.work.nodes["mac1"] = 16 * GIB
    world.now += ERROR_S
    await world.loaded("a")
    assert world.work.did == ["load a on mac1"]


async def test_a_model_may_be_unloaded_unless_somebody_waits_for_it(world: World):
    await world.loaded("a")
    world.pool.unload("a")
    gate = world.work.gates["a"] = asyncio.Event()
    waiting = world.asks("a")
    await world.settle()
    with pytest.raises(ModelBusy, match="requests wait for the model 'a'"):
        world.pool.unload("a")
    gate.set()
    await world.settle()
    assert (await waiting).is_loaded
    assert world.work.did == ["load a on mac0", "unload a-0", "load a on mac0"]
    world.pool.unload("b")
    await world.settle()
    assert len(world.work.did) == 3
    with pytest.raises(ModelNotFound):
        world.pool.unload("pinned")


async def test_room_for_a_model_that_stays_is_given_by_the_least_recently_used_one(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    monkeypatch.setattr(pool, "GIVE_ROOM_S", 0.1)
    world.work.needs = dict.fromkeys(world.work.needs, GIB)
    await world.loaded("a")
    await world.loaded("b")
    assert not await world.pool.give_room(["mac1"], 60.0), "nothing is there"
    assert await world.pool.give_room(["mac0", "mac1"], 60.0)
    assert world.states()["a"] == UNLOADED and world.states()["b"] == LOADED
    world.work.stats["b-0"] = replace(world.work.stats["b-0"], waiting=1)
    await world.settle()
    assert not await world.pool.give_room(["mac0"], 60.0), "it has requests"
    given = asyncio.create_task(world.pool.give_room(["mac0"], 60.0))
    await asyncio.sleep(0)
    world.work.stats["b-0"] = replace(world.work.stats["b-0"], waiting=0)
    await world.settle()
    assert await given


async def test_a_model_that_nobody_waits_for_any_more_takes_no_room(world: World):
    await world.loaded("a")
    world.work.stats["a-0"] = replace(world.work.stats["a-0"], running=1)
    asked = world.asks("b")
    await world.settle()
    asked.cancel()
    await world.settle()
    world.work.stats["a-0"] = replace(world.work.stats["a-0"], running=0)
    world.now += pool.FORGOTTEN_S
    await world.settle()
    assert world.states() == {"a": LOADED, "b": UNLOADED, "c": UNLOADED} and len(world.work.did) == 1
    await world.loaded("b")
