"""Agents without requests after the loss of their node, in virtual time: within a minute they have all their copies
again."""

from __future__ import annotations

import asyncio
import random

import pytest

from satchel.actors.kv_store.agents.roles import Role
from satchel.actors.protocol.entries import owner_tag

from .cluster_ledger import Ledger, simulate
from .cluster_world import ClusterWorld

MINUTE_S = 60.0


class Loss(Ledger):
    """The home of all agents dies, and comes back after `away_s` if that is not 0; no agent gets a request
    meanwhile."""

    def __init__(self, seed: int, nodes: int, replication: int, away_s: float = 0.0) -> None:
        world = ClusterWorld(seed, [f"n{number}" for number in range(nodes)], replication=replication, entries_max=400)
        super().__init__(world, [f"t/{letter}" for letter in "uvwxyz"])
        self.cluster, self.store, self.replication, self.away_s = world, world.api, replication, away_s
        self.rng, self.kv_copied = random.Random(seed), 0

    async def play(self) -> None:
        world = self.cluster
        await asyncio.sleep(2.0)
        for agent in self.agents:
            while not self.acknowledged[agent]:
                await self.turn(agent, tokens=700, answer=world.answer)
            # Calls may be slow, and then are given up.
            while world.stores["n0"].roles.place(agent).role is not Role.PRIMARY:
                await self.quietly("move", agent, "n0")
                await asyncio.sleep(1.0)
        await asyncio.sleep(15.0)
        before = {agent: self.having(agent) for agent in self.agents}
        assert all(len(names) > self.replication and "n0" in names for names in before.values())
        world.crash_node("n0")
        if self.away_s:
            await asyncio.sleep(self.away_s)
            world.start_node("n0")
        await asyncio.sleep(MINUTE_S - self.away_s)
        for agent in self.agents:
            if self.away_s:
                assert self.having(agent) == before[agent], "who comes back soon has lost nothing"
                assert world.stores["n0"].roles.place(agent).role is Role.PRIMARY
            else:
                self.check_copies(agent, before[agent])
        assert bool(self.kv_copied) is (not self.away_s and len(world.stores) > self.replication)

    def check_copies(self, agent: str, before: list[str]) -> None:
        world, names = self.cluster, self.having(agent)
        assert len(names) == min(self.replication + 1, len(world.stores)), agent
        said = sorted(world.texts("n0", agent))
        assert all(sorted(world.texts(name, agent)) == said for name in names)
        roles = [store.roles.place(agent).role for store in world.stores.values()]
        assert Role.PRIMARY not in roles, "nobody was promoted"
        source = min(name for name in before if name != "n0")
        for name in names:
            if name not in before:
                assert self.kv_of(agent, name) >= self.kv_of(agent, source), "and the KV that its source had"
                self.kv_copied += self.kv_of(agent, name)

    def having(self, agent: str) -> list[str]:
        return sorted(name for name in self.world.stores if self.world.texts(name, agent))

    def kv_of(self, agent: str, name: str) -> int:
        """How many entries a node's disk has for the agent."""
        disk = self.cluster.kv[name]
        return sum(owner_tag(disk.key, agent) in record.owners for record in disk.records([*disk.blocks]))


@pytest.mark.parametrize(("nodes", "replication"), [(3, 1), (4, 1), (4, 2), (3, 2), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_that_nobody_asks_has_its_copies_again_within_a_minute(nodes, replication, seed, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    simulate(lambda: Loss(seed, nodes, replication), f"seed {seed}", monkeypatch)


def test_a_node_that_comes_back_soon_has_its_agents_as_before(monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    simulate(lambda: Loss(0, 3, 1, away_s=14.0), "away", monkeypatch)
