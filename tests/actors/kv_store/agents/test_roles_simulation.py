"""The laws of agents' homes in a cluster of which every part fails, in virtual time. A failing seed is printed.

A turn that was acknowledged is on some disk, and disks come back; so it must be with the agent's home in the end,
unless the agent was forgotten. What was forgotten is nowhere in the end. There is one home, which the router knows.

What cannot be had: while a cluster is in two parts, each part may have a home of its own (in the same epoch even, where
both parts adopt, or begin the agent), and a turn that a home hears which nobody told of a burial is forgotten with it.
A home that dies before the router hears of it is taken for none, and so is one that is away with all copies while the
router begins anew. What both heard is in the one home that is left in the end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random

import pytest

from satchel.api.ray_backend.store import RayStore
from tests.simulations.cluster_ledger import Ledger, simulate
from tests.worlds.kv_store.store_world import CLIENT, Endpoint, World

ROUNDS = int(os.environ.get("SATCHEL_SIMULATIONS", "30"))
AGENTS = ["t/x", "t/y"]


# What happens how often: a turn, a forgetting, a move, an endpoint that takes the home for lost; else something fails.
ACTS = {"crashes": (55, 7, 10, 0, 28), "bad": (55, 7, 10, 4, 24), "parted": (50, 12, 3, 30, 5)}
FAULTS = {
    "crashes": ["crash", "return", "router"],
    "bad": ["crash", "return", "router"] + ["cut", "mend"] * 2,
    "parted": ["crash", "return", "mend"],
}


class Run(Ledger):
    """One simulation."""

    def __init__(self, seed: int, mode: str) -> None:
        rng = random.Random(f"{seed} {mode}")
        self.mode, bad = mode, mode == "bad"
        names, replication = "abc"[: rng.choice((2, 3))], rng.choice((mode == "parted", 1, 1, 2))
        super().__init__(World(seed, names, replication=replication, loss=0.1 * bad, twice=0.1 * bad), AGENTS)
        self.store, self.one_at_a_time = RayStore(Endpoint(self.world), self.world.config.timing), mode == "crashes"

    def disturb(self) -> None:
        world, rng = self.world, self.rng
        kind = rng.choice(FAULTS[self.mode])
        name = rng.choice(world.names)
        if kind == "crash" and len(world.stores) > 1:
            world.crash(name)
        elif kind == "return" and name not in world.stores:
            world.start(name)
        elif kind == "router" and rng.random() < 0.3:
            world.restart_router()
        elif kind == "cut":
            world.cut.add(frozenset(rng.sample([*world.names, CLIENT], 2)))
        elif kind == "mend":
            world.cut.clear()

    async def play(self) -> None:
        await asyncio.sleep(2.0)
        tasks: list[asyncio.Task[None]] = []
        parted = self.mode == "parted"
        for number in range(self.rng.randint(20, 40) if parted else self.rng.randint(8, 20)):
            if parted and number == 4:
                # No node reaches another one, while clients and the router reach all.
                self.world.cut.update(map(frozenset, itertools.combinations(self.world.names, 2)))
            agent, rng = self.rng.choice(AGENTS), self.rng
            (what,) = rng.choices(("turn", "forget", "move", "suspect", "fault"), ACTS[self.mode])
            if what == "turn":
                work = self.turn(agent, turn=f"turn {rng.random()}" if rng.random() < 0.4 + 0.3 * parted else "")
            elif what == "forget":
                work = self.forget(agent)
            elif what == "move":
                work = self.quietly("move", agent, rng.choice(self.world.names))
            elif what == "suspect":
                work = self.suspect(agent)
            else:
                self.disturb()
                await asyncio.sleep(rng.random() * rng.choice((0.1, 1.0, 8.0)))
                continue
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(rng.random() * rng.choice((0.01, 1.0, 4.0)))
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("mode", list(ACTS))
def test_agents_survive_what_happens_to_their_nodes(mode, monkeypatch, caplog):
    """`crashes`: nodes die and come back, calls are slow; `bad`: links break too, calls are lost and come twice;
    `parted`: nodes do not reach each other while endpoints reach them all, and take their homes for lost."""
    caplog.set_level("CRITICAL")
    first = int(os.environ.get("SATCHEL_SEED", "0"))
    for seed in range(first, first + ROUNDS):
        simulate(lambda seed=seed: Run(seed, mode), f"seed {seed}, mode {mode}", monkeypatch)
