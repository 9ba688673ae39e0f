"""Machines that sleep for hours, in virtual time: nodes come back, no turn is lost, no request waits for ever, and
nothing ends too early or too late."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import Any

import pytest

from satchel.cluster.errors import SatchelError

from .cluster_ledger import simulate
from .cluster_sleep import JOIN_S, SleepyClock, SleepyWorld
from .test_cluster_simulation import REQUEST_S, Cluster

SEEDS = int(os.environ.get("SATCHEL_SIMULATIONS", "40")) // 8
FIRST = int(os.environ.get("SATCHEL_SEED", "0"))
HOUR_S = 3600.0
BACK_S, TURNS_MAX = 20.0, 3
"""How long after its sleep a cluster has its nodes again, and in how many turns each agent is answered."""

NAPS_S = (3.0, 15.0, 40.0, 600.0, 5 * HOUR_S)


class Night(Cluster):
    """Clients speak, and now and then a node, the head, or every machine sleeps."""

    world_of = SleepyWorld
    world: Any

    def __init__(self, seed: int, who: str) -> None:
        super().__init__(seed, "calm", 3, 24)
        self.who, self.naps = who, 0

    async def play(self) -> None:
        await asyncio.sleep(2.0)
        rng, world, loop = self.rng, self.cluster, self.world.loop
        assert isinstance(world, SleepyWorld)
        for number in range(self._events):
            if number % 8 == 5:
                self.naps += 1
                await self.night(rng.choice(NAPS_S))
            agent = rng.choice(self.agents)
            world.client.start(self.ends(self.act(agent, rng.random())))
            await asyncio.sleep(rng.random() * rng.choice((0.01, 1.0, 4.0)))
        assert not loop.asleep

    async def night(self, seconds: float) -> None:
        world, rng = self.cluster, self.rng
        assert isinstance(world, SleepyWorld)
        names = {"node": [rng.choice(world.names[1:])], "head": world.names[:1], "all": world.names}[self.who]

        async def nap(name: str) -> None:
            await asyncio.sleep(rng.random() * rng.choice((0.0, 2.0, 20.0)))
            await world.nap(name, seconds + rng.random() * rng.choice((0.1, 5.0, 60.0)))

        sleeping = [asyncio.ensure_future(nap(name)) for name in names]
        # Meanwhile those that are awake go on.
        for _ in range(rng.randrange(4)):
            world.client.start(self.ends(self.act(rng.choice(self.agents), rng.random())))
            await asyncio.sleep(rng.random() * 20.0)
        await asyncio.gather(*sleeping)
        for name in world.names:
            if name not in world.stores:
                await asyncio.sleep(rng.random() * JOIN_S)
                world.start_node(name)
        await asyncio.sleep(BACK_S)
        assert {*world.alive()} == {*world.names}, "nodes come back"
        for agent in self.agents:
            await self.goes_on(agent)

    async def goes_on(self, agent: str) -> None:
        """Checks that an agent can be asked again. A turn that is still held is waited for at first."""
        before = len(self.acknowledged[agent])
        for _ in range(TURNS_MAX):
            await self.cluster.client.start(self.turn(agent, answer=self.cluster.answer))
            if len(self.acknowledged[agent]) > before:
                return
        raise AssertionError(f"{agent} is not answered any more")

    async def ends(self, work: Coroutine[Any, Any, None]) -> None:
        """Checks that a request ends while its endpoint is awake for so long."""
        world = self.world
        begun = world.awake_s(world.head)
        with contextlib.suppress(SatchelError):
            await work
        assert world.awake_s(world.head) < begun + REQUEST_S, "a request ends"


@pytest.mark.variants(1)
@pytest.mark.parametrize("stops", [True, False], ids=["the clock stops", "the clock goes on"])
@pytest.mark.parametrize(
    "who", [pytest.param("node", marks=pytest.mark.slow), pytest.param("head", marks=pytest.mark.slow), "all"]
)
def test_who_sleeps_loses_nothing(who: str, stops: bool, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    played: list[Night] = []

    def make(seed: int) -> Night:
        played.append(Night(seed, who))
        return played[-1]

    for seed in range(FIRST, FIRST + SEEDS):
        name = f"{who} sleeps, SATCHEL_SEED={seed}"
        simulate(lambda seed=seed: make(seed), name, monkeypatch, SleepyClock(stops=stops))
    assert sum(each.naps for each in played) >= 2 * SEEDS
    assert sum(each.cluster.answered for each in played) > 2 * SEEDS
