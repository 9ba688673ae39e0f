"""Which models are unloaded for another one, and where it is loaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from satchel.actors.pool.policy import PATIENCE_S, Never, Place, Resident, Unload, Wait, Wanted, plan
from satchel.actors.replica.memory.budget import MemoryClaim, has_room

GIB = 2**30
NOW = 1000.0


def resident(name: str, gib: float, used_at: float = 0.0, node: str = "mac0", **how: bool | float) -> Resident:
    return Resident(name, {node: [int(gib * GIB)]}, used_at, **how)  # type: ignore[arg-type]


def wanted(gib: float, **how: object) -> Wanted:
    return Wanted("new", int(gib * GIB), **{"since": NOW, **how})  # type: ignore[arg-type]


def test_a_model_is_loaded_beside_others_if_each_keeps_room_for_kv():
    budgets = {"mac0": 16 * GIB}
    assert plan(wanted(4), budgets, [resident("a", 8)], NOW) == Place(["mac0"])
    # 1 GiB is left for the KV of both, and a sixteenth for each is the least.
    assert plan(wanted(7), budgets, [resident("a", 8)], NOW) == Unload(["a"])
    assert plan(wanted(15), budgets, [], NOW) == Place(["mac0"]), "alone it may take almost everything"
    assert plan(wanted(50), {"mac0": None}, [resident("a", 8)], NOW) == Place(["mac0"]), "the replica finds out"


def test_the_least_recently_used_go_first_and_only_those_that_are_in_the_way():
    budgets = {"mac0": 16 * GIB}
    there = [resident("old", 1, 1.0), resident("older", 7, 0.5), resident("young", 5, 2.0)]
    assert plan(wanted(6), budgets, there, NOW) == Unload(["older"])
    assert plan(wanted(10), budgets, there, NOW) == Unload(["older", "young"]), "the small one need not go"
    assert plan(wanted(15.5), budgets, there, NOW) == Unload(["older", "old", "young"])


def test_pinned_models_stay_and_the_error_has_the_numbers():
    there = [resident("pinned", 10, pinned=True), resident("a", 2)]
    step = plan(wanted(8), {"mac0": 16 * GIB}, there, NOW)
    assert isinstance(step, Never)
    assert "8192 MiB" in step.why and "16384 MiB" in step.why and "10240 MiB" in step.why


def test_busy_models_are_waited_for_but_not_for_ever():
    budgets, there = {"mac0": 16 * GIB}, [resident("a", 12, busy=True)]
    assert plan(wanted(8), budgets, there, NOW) == Wait(["a"])
    assert plan(wanted(8, since=NOW - PATIENCE_S), budgets, there, NOW) == Unload(["a"])
    held = [replace(there[0], busy=False, held_until=NOW + 1)]
    assert plan(wanted(8, since=0.0), budgets, held, NOW) == Wait(["a"]), "requests that waited for it are on their way"
    assert plan(wanted(8, since=0.0), budgets, [replace(there[0], coming=True)], NOW) == Wait(["a"])


def test_nothing_else_goes_while_what_makes_room_is_leaving():
    there = [resident("leaving", 12, leaving=True, busy=True), resident("idle", 1)]
    assert plan(wanted(8), {"mac0": 16 * GIB}, there, NOW) == Wait(["leaving"])
    assert plan(wanted(15.5), {"mac0": 16 * GIB}, there, NOW) == Unload(["idle"]), "and it alone is not enough"


def test_a_model_without_kv_leaves_the_rest_to_the_others():
    images = Resident("images", {"a": [10]}, kv=False)
    asked = Wanted("text", 83, count=1)
    # A sixteenth of 100 is needed for KV: 7 are left for one replica, and not for two.
    assert plan(asked, {"a": 100}, [images], 0.0) == Place(["a"])
    assert plan(asked, {"a": 100}, [replace(images, kv=True)], 0.0) != Place(["a"])
    assert plan(replace(asked, kv=False), {"a": 100}, [replace(images, kv=True)], 0.0) == Place(["a"])


def test_a_node_that_has_room_is_preferred_to_unloading():
    budgets = {"mac0": 16 * GIB, "mac1": 16 * GIB}
    there = [resident("a", 12)]
    assert plan(wanted(8), budgets, there, NOW) == Place(["mac1"])
    assert plan(wanted(8, count=2), budgets, there, NOW) == Unload(["a"]), "but two replicas need both"
    assert plan(wanted(2), budgets, there, NOW) == Place(["mac0", "mac1"]), "one on each node that has room"
    assert plan(wanted(2, count=3), budgets, [], NOW) == Place(["mac0", "mac1", "mac0"])


def test_what_a_replica_found_out_counts_more_than_the_figures():
    there = [resident("a", 1, 1.0), resident("b", 1, 2.0)]
    assert plan(wanted(1), {"mac0": 16 * GIB}, there, NOW) == Place(["mac0"])
    assert plan(wanted(1, beside_max=2), {"mac0": 16 * GIB}, there, NOW) == Unload(["a"])
    assert plan(wanted(1, beside_max=1), {"mac0": 16 * GIB}, there, NOW) == Unload(["a", "b"])


@pytest.mark.parametrize("seed", range(10))
def test_every_step_is_needed_and_enough(seed: int):
    """What is unloaded makes room, nothing of it is spared in vain, and no step touches what must stay."""
    rng = random.Random(seed)
    for _ in range(100):
        check_step(rng)


def check_step(rng: random.Random) -> None:
    nodes = [f"mac{number}" for number in range(rng.randint(1, 3))]
    budgets: dict[str, int | None] = {node: rng.randint(4, 32) * GIB for node in nodes}
    there = [
        Resident(
            f"m{number}",
            {node: [rng.randint(1, 10) * GIB] for node in rng.sample(nodes, rng.randint(1, len(nodes)))},
            used_at=rng.uniform(0, NOW),
            held_until=rng.choice([0.0, 0.0, NOW + 1]),
            pinned=rng.random() < 0.2,
            busy=rng.random() < 0.3,
        )
        for number in range(rng.randint(0, 5))
    ]
    asked = wanted(rng.randint(1, 20), count=rng.choice([None, 1, 1, 2]), since=rng.choice([NOW, 0.0]))
    step = plan(asked, budgets, there, NOW)
    movable = {one.name for one in there if not one.pinned}
    if isinstance(step, Place):
        assert len(step.nodes) == (asked.count or len(set(step.nodes)))
        for node in set(step.nodes):
            claims = [MemoryClaim(claim, 0) for one in there for claim in one.claims.get(node, ())]
            claims += [MemoryClaim(asked.need, 0)] * (step.nodes.count(node) - 1)
            assert has_room(budgets[node] or 0, claims, MemoryClaim(asked.need, 0))
    elif isinstance(step, Unload):
        gone = [one for one in there if one.name in step.names]
        assert len(gone) == len(step.names) > 0 and {one.name for one in gone} <= movable
        assert all(one.held_until <= NOW for one in gone)
        assert asked.since == 0.0 or not any(one.busy for one in gone)
        left = [one for one in there if one not in gone]
        assert isinstance(plan(asked, budgets, left, NOW), Place)
        for spared in gone:
            kept = [one for one in there if one not in gone or one is spared]
            assert not isinstance(plan(asked, budgets, kept, NOW), Place)
    elif isinstance(step, Wait):
        left = [one for one in there if one.pinned]
        assert isinstance(plan(asked, budgets, left, NOW), Place), "there is something to wait for"
    else:
        left = [one for one in there if one.pinned]
        assert isinstance(plan(asked, budgets, left, NOW), Never)
