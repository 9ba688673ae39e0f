"""The laws of a whole cluster in which anything may fail, in virtual time. A failing seed is printed and can be
replayed.

Agents speak, fork, move and are forgotten; requests are routed, pull KV, are answered and remembered; turns and KV are
copied. Meanwhile calls and reports are slow, lost, doubled and out of order, links are cut, disks are slow, full and go
bad, processes and nodes die and come back, with the last of their KV or without it, a machine is gone for ever, the
router begins anew, and the head takes everything with it.

In every case: every request ends; no block with wrong content is used or installed; acknowledged turns are at the
agent's home in the end (`cluster_ledger`), also if a disk is gone and a copy survives; nothing is left of forgotten
agents; leases run out; and the router knows what exists.

In half of the clusters some nodes prefill faster and others decode faster, so prompts are split between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
from collections.abc import Coroutine
from typing import Any

import pytest

from satchel.actors.kv_store.agents.roles import NOWHERE, Role
from satchel.actors.protocol.entries import owner_tag
from satchel.actors.protocol.router_messages import StoreReport
from satchel.actors.router.directory import Disk
from satchel.actors.router.policy import Policy
from satchel.cluster.errors import SatchelError

from ..worlds.kv_store.store_world import CLIENT
from .cluster_disk import kv_of
from .cluster_ledger import Ledger, simulate
from .cluster_world import ClusterWorld

MODES = {
    "calm": [],
    "crashes": ["crash", "crash", "writing", "return", "return", "store", "replica", "router", "head", "disk"],
    "links": ["cut", "cut", "mend", "crash", "writing", "return", "router", "replica"],
    "disks": ["disk", "disk", "disk", "rot", "crash", "writing", "return", "destroy"],
}
SEEDS = int(os.environ.get("SATCHEL_SIMULATIONS", "16"))
FIRST = int(os.environ.get("SATCHEL_SEED", "0"))
REQUEST_S = 120.0
SYSTEM = [7] * 600
"""The tokens with which all conversations begin."""


class Cluster(Ledger):
    """One simulation of `mode` with so many nodes."""

    world_of: type[ClusterWorld] = ClusterWorld

    def __init__(self, seed: int, mode: str, nodes: int, events: int) -> None:
        rng = random.Random(f"{seed} {mode} {nodes}")
        self._kinds, self._events = MODES[mode], events
        bad = 0.1 if mode == "links" else 0.0
        names = [f"n{number}" for number in range(nodes)]
        given = {"replication": rng.choice((1, 1, 2)), "entries_max": rng.choice((8, 40, 200))}
        world = self.world_of(seed, names, loss=bad, twice=bad, uneven=rng.random() < 0.5, **given)
        super().__init__(world, [f"t/{letter}" for letter in "uvwxyz"[: rng.randint(2, 3 if nodes < 5 else 6)]])
        self.cluster, self.one_at_a_time = world, mode != "links"
        self.store = world.api

    # What happens.

    async def play(self) -> None:
        await asyncio.sleep(2.0)
        rng = self.rng
        for _ in range(self._events):
            what = rng.random()
            if what < 0.35 and self._kinds:
                await self.fail(rng.choice(self._kinds))
            else:
                agent = rng.choice(self.agents)
                self.cluster.client.start(self.ends(self.act(agent, rng.random())))
            await asyncio.sleep(rng.random() * rng.choice((0.01, 1.0, 4.0, 8.0)))

    async def act(self, agent: str, what: float) -> None:
        rng = self.rng
        if what < 0.72:
            tokens, turn = rng.choice((40, 300, 700)), f"turn {rng.random()}" if rng.random() < 0.4 else ""
            await self.turn(agent, tokens=tokens, opening=SYSTEM, turn=turn, answer=self.cluster.answer)
        elif what < 0.82:
            await self.forget(agent)
        elif what < 0.92:
            await self.quietly("move", agent, rng.choice(self.world.names))
        else:
            await self.quietly("fork", agent, rng.choice(self.agents))

    async def ends(self, work: Coroutine[Any, Any, None]) -> None:
        """Checks that a request ends, with an answer or a typed error."""
        begun = self.world.loop.time()
        with contextlib.suppress(SatchelError):
            await work
        assert self.world.loop.time() < begun + REQUEST_S, "a request ends"

    async def fail(self, kind: str) -> None:
        world, rng = self.cluster, self.rng
        name = rng.choice(world.names)
        up = name in world.stores
        if kind == "crash" and up and len(world.stores) > 1:
            world.crash_node(name, lost=rng.choice((0, 0, 1, 5)))
            if rng.random() < 0.5:
                await world.router_now().lose_node(name)
        elif kind == "writing" and up and len(world.stores) > 1:
            self.die_writing(name)
        elif kind == "return" and not up:
            world.start_node(name)
        elif kind == "store" and up:
            world.crash(name)
            world.start(name)
        elif kind == "replica" and up:
            world.kill_engine(name)
            world.start_engine(name)
        elif kind == "router" and rng.random() < 0.5:
            world.restart_router()
        elif kind == "head" and rng.random() < 0.3:
            self.lose_head()
        elif kind == "cut":
            world.cut.add(frozenset(rng.sample([*world.names, CLIENT], 2)))
        elif kind == "mend":
            world.cut.clear()
        elif kind == "disk" and up:
            self.change_disk(name)
        elif kind == "rot" and world.kv[name].blocks:
            world.kv[name].rot(rng.choice(sorted(world.kv[name].blocks)))
        elif kind == "destroy" and len(world.stores) == len(world.names) > 2 and rng.random() < 0.5:
            await self.destroy(name)

    def die_writing(self, name: str) -> None:
        """The node dies at its next write or a little later, and the write is lost."""
        left = itertools.count(self.rng.randint(-2, 0))

        def sync() -> None:
            if next(left) == 0:
                self.cluster.crash_node(name)
                raise asyncio.CancelledError

        self.world.disks[name].syncs = sync

    def lose_head(self) -> None:
        """The router and the endpoint die, all nodes end, and everything is started again."""
        world = self.cluster
        for name in world.names:
            world.crash_node(name)
        world.restart_router()
        world.new_endpoint()
        self.store = world.api
        for name in world.names:
            world.start_node(name)

    def change_disk(self, name: str) -> None:
        """It becomes slow, full, or itself again."""
        world, rng = self.cluster, self.rng
        world.stores[name].slow_s = rng.choice((0.0, 0.01, 0.5))
        world.kv[name].full = rng.random() < 0.3
        world.disks[name].full = rng.random() < 0.2

    async def destroy(self, name: str) -> None:
        """A machine is gone for ever. What another disk had of the latest is not, once somebody looks for it."""
        world = self.cluster
        for disk in world.disks.values():
            disk.syncs = lambda: None
        for agent in self.agents:
            self.expect_no_more_than_others_have(agent, name)
        world.destroy(name)
        # So long that all see that it is gone: who comes back empty and unseen gets no copies before the next turn.
        await asyncio.sleep(12.0)
        for agent in self.agents:
            await self.quietly("info", agent)
        world.start_node(name)

    def expect_no_more_than_others_have(self, agent: str, lost: str) -> None:
        world = self.world
        if world.stores[lost].roles.place(agent).role is Role.SECONDARY:
            return
        others = [name for name in world.names if name != lost]
        if not any(agent in world.disks[name].graves for name in others):
            self.forgotten[agent] = -1
        copies = [(place.epoch, name) for name in others if (place := world.disks[name].place(agent)) is not None]
        said = self.said(max(copies)[1], agent) if copies else set()
        self.acknowledged[agent] = {turn: at for turn, at in self.acknowledged[agent].items() if turn in said}

    def said(self, name: str, agent: str) -> set[int]:
        return {*map(int, re.findall(r"<(\d+)>", " ".join(self.world.texts(name, agent))))}

    async def heal(self) -> None:
        world = self.cluster
        for name in world.names:
            world.kv[name].full = world.disks[name].full = False
            world.disks[name].syncs = lambda: None
            if name not in world.stores:
                world.start_node(name)
            world.stores[name].slow_s = 0.0
            if name not in world.engines:
                world.start_engine(name)
        await super().heal()
        # Of an agent whose home is gone a copy becomes the home when somebody asks.
        for agent in self.agents:
            await self.quietly("info", agent)
        await asyncio.sleep(8.0)

    # What must hold.

    def check(self) -> None:
        super().check()
        world = self.cluster
        assert len(world.client.tasks) == 0, "every request has ended"
        assert len(world.policy.members.requests) == 0, "and is counted no more"
        world.policy.members.check()
        for name, disk in self.cluster.kv.items():
            assert world.policy.members.directory.held(Disk(name)) == disk.blocks, "the directory has what disks have"
            assert not disk.leases.held(world.loop.time()), "leases drain"
            wrong = {block for block in disk.blocks - disk.rotten if disk.read(block) != kv_of(block)}
            assert not wrong, "a wrong block is installed"
        for name, engine in self.cluster.engines.items():
            assert world.policy.members.directory.held(f"r-{name}") == {*engine.replica.cache}
            assert not engine.replica.sequences
        for agent in self.agents:
            self.check_erased(agent)

    def check_erased(self, agent: str) -> None:
        """Checks that no turn is held, and that no disk has anything of a forgotten agent that lives nowhere."""
        now, stores = self.world.loop.time(), self.world.stores
        ends = [store._agents.turn_ends(agent) or 0.0 for store in stores.values()]
        assert max(ends) <= now, "a turn's lease has run out"
        places = {name: store.roles.place(agent) for name, store in stores.items()}
        if all(place.role is Role.FORGOTTEN for place in places.values()):
            # Of one that never came to be, KV may be there.
            for name, disk in self.cluster.kv.items():
                if places[name] != NOWHERE:
                    assert owner_tag(disk.key, agent) not in disk.owners(), f"KV of {agent} is on {name}: {places}"


def simulate_many(mode: str, nodes: int, seeds: range, monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    played: list[Cluster] = []

    def make(seed: int) -> Cluster:
        played.append(Cluster(seed, mode, nodes, 20 if nodes < 10 else 50))
        return played[-1]

    for seed in seeds:
        simulate(lambda seed=seed: make(seed), f"mode {mode}, {nodes} nodes, SATCHEL_SEED={seed}", monkeypatch)
    return played


@pytest.mark.parametrize("mode", MODES)
def test_whatever_fails_a_small_cluster_keeps_its_laws(mode, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    count = SEEDS if MODES[mode] else SEEDS // 10
    played = simulate_many(mode, 3, range(FIRST, FIRST + count), monkeypatch)
    if count >= 15:
        # Else it would say nothing.
        assert sum(each.cluster.answered for each in played) > 2 * count
        assert any(each.cluster.pulled for each in played)
        split = sum(each.cluster.split for each in played)
        assert split >= count / 8 and sum(each.cluster.handed_on for each in played) > 0
        assert sum(len(turns) for each in played for turns in each.acknowledged.values()) > 2 * count


@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        ("crashes", 16),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("links", 16), ("disks", 16), ("crashes", 64))),
    ],
)
def test_whatever_fails_a_large_cluster_keeps_its_laws(mode, nodes, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    simulate_many(mode, nodes, range(FIRST, FIRST + max(1, SEEDS // (3 * nodes))), monkeypatch)


@pytest.mark.parametrize(
    "mode", [mode if mode == "disks" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_a_seed_replays(mode, monkeypatch, caplog):
    """Otherwise a failing seed would be useless."""
    caplog.set_level("CRITICAL")

    def told() -> list[object]:
        played = simulate_many(mode, 3, range(3), monkeypatch)
        return [(each.acknowledged, each.world.accepted, each.rng.random()) for each in played]

    assert told() == told()


def test_what_a_new_router_missed_stays_missed_until_everything_is_said_again():
    """A report that the former router had taken arrives again (links, seed 1). Its sender has been answered and goes on
    with changes only. The new router once took these for everything, and the node's agents and blocks stayed
    unknown."""
    policy = Policy(timeout_s=5.0, sticky_penalty_s_max=2.0)

    def hear(sequence: int, *, full: bool, announced: list[bytes]) -> bool:
        return policy.members.observe_store(StoreReport("n", "process", sequence, announced, [], full), float(sequence))

    assert not hear(7, full=False, announced=[b"7"])
    assert not hear(8, full=False, announced=[b"8"])
    assert hear(9, full=True, announced=[b"0", b"7", b"8"])
    assert hear(10, full=False, announced=[b"10"])
    assert policy.members.directory.held(Disk("n")) == {b"0", b"7", b"8", b"10"}
