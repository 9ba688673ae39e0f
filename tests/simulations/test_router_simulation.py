"""The router with failing replicas, stores, consumers and network, in virtual time from a seed. A failure names its
seed."""

from __future__ import annotations

from collections import Counter

import pytest

from satchel.actors.router.directory import Disk

from .router_world import STEP_S, World

SEEDS = 6


@pytest.mark.variants(2)
@pytest.mark.parametrize("part", range(4))
def test_whatever_fails_the_router_counts_right_and_forgets(part: int):
    """Nodes, replicas, stores, consumers, links and the router itself fail; reports are lost, late, doubled and out of
    order; agents move, are adopted and forgotten, and nodes return with what they knew before.

    At every step the tables agree, the directory is what was reported, every request gets a decision while anybody
    lives, and none names a replica or node that is dead or excluded; in the end nothing is left of requests that nobody
    has, and the directory is what replicas and stores hold.
    """
    pulled = adopted = 0
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        try:
            world = World(seed, replicas=5, agents=14, faults=1.0, checked_every=2)
            for _ in range(int(25 / STEP_S)):
                world.step()
            world.settle()
            check_the_end(world)
        except BaseException:
            print("seed", seed)
            raise
        pulled, adopted = pulled + world.pulled, adopted + world.adopted
    assert pulled and adopted, "something happened"


def check_the_end(world: World) -> None:
    assert len(world.decisions) > 50
    assert not any(consumer.asks or consumer.waiting for consumer in world.consumers), "every request ended"
    assert not any(replica.sequences for replica in world.replicas.values())
    assert world.policy.members.requests == {}
    for replica in world.replicas.values():
        assert replica.up
        assert world.policy.members.directory.held(replica.name) == set(replica.cache)
    for store in world.stores.values():
        assert store.up
        assert world.policy.members.directory.held(Disk(store.node)) == set(store.disk)
    caches = [replica.cache for replica in world.replicas.values()]
    held = {block for kept in [*caches, *(store.disk for store in world.stores.values())] for block in kept}
    assert world.policy.members.directory.blocks == len(held), "nothing is expected any more"
    for agent in world.talks:
        place = world.policy.members.where(agent)
        home, epoch = world.homes.get(agent, ("", 0))
        assert (place.node, place.epoch) == (home, epoch) if home and place else not home, agent
    assert world.policy.members.directory.agents <= len(world.talks)


@pytest.mark.parametrize("seed", range(3))
def test_an_unloaded_cluster_brings_agents_home_and_spreads_them(seed: int):
    """Nothing fails and there is room: over 95% of an agent's turns after its first come home, and no replica has more
    than twice its share of the requests, though all agents share one system prompt."""
    world = World(seed, replicas=4, agents=16, faults=0.0, think_s=12.0, checked_every=10)
    for _ in range(int(200 / STEP_S)):
        world.step()
    homes: dict[str, str] = {}
    turns = returns = 0
    for ask, decision in world.decisions:
        if ask.agent:
            turns += ask.agent in homes
            returns += homes.get(ask.agent) == decision.replica
            homes[ask.agent] = decision.replica
    spread = Counter(decision.replica for _, decision in world.decisions)
    assert turns > 150
    assert returns / turns > 0.95
    assert max(spread.values()) <= 2 * len(world.decisions) / len(world.replicas)
