"""Records what clients did and which answers they got, and checks in the end what must be true after any failure."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from satchel.actors.kv_store.agents.roles import LIFE, NOWHERE, Role, life
from satchel.actors.kv_store.replication.peers import secondary_nodes
from satchel.actors.kv_store.services import conversations, copying, moving, reports, tending, tombstones, turns
from satchel.actors.kv_store.transfer import node_blocks
from satchel.actors.router import actor as router
from satchel.api.ray_backend import locator as agent_locator
from satchel.api.ray_backend.store import RayStore
from satchel.cluster.errors import SatchelError

from ..worlds.kv_store.store_world import World, speak
from .cluster_time import Clock


class Ledger:
    """Clients of a simulated cluster.

    Attributes:
        store: what they call; set before the first call.
        acknowledged: by agent the turns and when they were acknowledged, by how much had happened then.
        forgotten: by agent when the last forgetting began that was acknowledged, -1 for never.
        one_at_a_time: nobody is cut off, so that no epoch can have two homes while one router hears of all.
    """

    store: RayStore
    one_at_a_time = False

    def __init__(self, world: World, agents: Sequence[str]) -> None:
        self.world, self.rng, self.agents = world, world.rng, list(agents)
        self.acknowledged: dict[str, dict[int, int]] = {agent: {} for agent in agents}
        self.forgotten: dict[str, int] = dict.fromkeys(agents, -1)
        self._turns = self._happened = 0

    def tick(self) -> int:
        self._happened += 1
        return self._happened

    async def turn(self, agent: str, **given: Any) -> None:
        self.tick()
        self._turns += 1
        number = self._turns
        if await speak(self.store, agent, number, self.rng, **given) is not None:
            self.acknowledged[agent][number] = self.tick()

    async def forget(self, agent: str) -> None:
        with contextlib.suppress(SatchelError):
            began = self.tick()
            if await self.store.forget(agent):
                self.forgotten[agent] = max(self.forgotten[agent], began)

    async def quietly(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(SatchelError):
            await getattr(self.store, method)(*arguments)

    async def suspect(self, agent: str) -> None:
        """An endpoint that believes the agent's home lost promotes another node, above the highest epoch that it
        knows."""
        known = [(store.roles.place(agent), name) for name, store in self.world.stores.items()]
        place, lost = max((each for each in known if each[0].role is not Role.FORGOTTEN), default=(NOWHERE, ""))
        others = [name for _, name in known if name != lost]
        if others:
            store = self.world.way_to("another endpoint", self.rng.choice(others))
            with contextlib.suppress(SatchelError):
                await store.promote(agent, place.epoch).within(4.0)

    async def play(self) -> None:
        """Plays the clients' actions and the failures."""
        raise NotImplementedError

    async def heal(self) -> None:
        world = self.world
        world.cut.clear()
        world.loss = world.twice = 0.0
        for name in world.names:
            if name not in world.stores:
                world.start(name)
        await asyncio.sleep(14.0)
        for _ in range(3):
            for store in world.stores.values():
                await store.services.tending.learn()
            await asyncio.sleep(7.0)

    def check(self) -> None:
        for agent in self.agents:
            self.check_agent(agent)
        if self.one_at_a_time and not self.world.routers_lost:
            epochs: dict[tuple[str, int], set[str]] = {}
            for agent, epoch, node in self.world.accepted:
                epochs.setdefault((agent, epoch), set()).add(node)
            # A first home may die before anybody has heard of it.
            twice = {key: nodes for key, nodes in epochs.items() if len(nodes) > 1 and key[1] % LIFE > 1}
            assert not twice, f"two homes of one epoch: {twice}"

    def check_agent(self, agent: str) -> None:
        world = self.world
        places = {name: store.roles.place(agent) for name, store in world.stores.items()}
        said = {name: {*map(int, re.findall(r"<(\d+)>", " ".join(world.texts(name, agent))))} for name in places}
        homes = [name for name, place in places.items() if place.role is Role.PRIMARY]
        assert len(homes) <= 1, f"{agent} has homes {homes}: {places}"
        forgotten = self.forgotten[agent]
        for name, numbers in said.items():
            back = {number for number in numbers if self.acknowledged[agent].get(number, 10**9) < forgotten}
            assert not back, f"{agent}: {back} came back on {name}, {places}"
        if not homes:
            # Forgotten last, perhaps by a call that nobody heard the answer of; or never begun.
            assert all(place.role is not Role.SECONDARY for place in places.values()), f"{agent} is nowhere: {places}"
            assert world.places.where(agent) is None
            return
        (home,) = homes
        assert all(place.epoch <= places[home].epoch for place in places.values()), f"{agent}: {places}"
        found = world.places.where(agent)
        assert found is not None and (found.node, found.epoch) == (home, places[home].epoch), f"{found}, {places}"
        if life(places[home].epoch) == 0 and forgotten < 0:
            missing = {*self.acknowledged[agent]} - said[home]
            assert not missing, f"{agent}: {missing} were acknowledged and are lost: {said}, {places}"
        copied = secondary_nodes(agent, [name for name in places if name != home], world.config.replication)
        assert all(said[name] == said[home] for name in copied), f"{agent}: a copy differs, {said}"


def simulate(
    make: Callable[[], Ledger], name: str, monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None
) -> None:
    """Plays, heals and checks in virtual time; prints `name` if that fails."""
    clock = clock or Clock()
    for module in (tombstones, conversations, copying, moving, tending, turns, node_blocks, router, agent_locator):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(reports, "node_available_bytes", lambda: 2**34)

    async def whole() -> None:
        ledger = make()
        try:
            await ledger.play()
            await ledger.heal()
            if clock.loop.failures:
                raise clock.loop.failures[0]
            ledger.check()
        finally:
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    try:
        clock.loop.run_until_complete(whole())
    except BaseException:
        print(name)
        raise
    finally:
        clock.loop.close()
