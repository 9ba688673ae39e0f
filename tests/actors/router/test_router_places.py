"""Where agents live, whatever order reports come in."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from satchel.actors.router.directory import PART_BLOCKS
from satchel.actors.router.places import AgentPlaces, Whereabouts


def update(
    places: AgentPlaces,
    node: str,
    claimed: list[tuple[str, int, bool]] | None = None,
    retracted: list[str] | None = None,
    buried: list[tuple[str, int]] | None = None,
    *,
    whole: bool = False,
) -> int:
    """Take a report, and check the tables at every pause. Returns how many there were."""
    pauses = 0
    for _ in places.update(node, claimed or [], retracted or [], buried or [], whole=whole):
        pauses += 1
        places.check()
    return pauses


def test_the_highest_epoch_is_home_in_whatever_order_it_is_heard():
    """Also a copy's: who claims to be home with a lower one than any copy has was home once."""
    claims = [("a", 5, True), ("b", 6, True), ("c", 6, False), ("d", 5, False)]
    for order in permutations(claims):
        places = AgentPlaces()
        for node, epoch, is_primary in order:
            update(places, node, [("x", epoch, is_primary)])
        assert places.where("x") == Whereabouts("b", 6, ("c", "a", "d"))
    places = AgentPlaces()
    update(places, "c", [("x", 6, False)])
    update(places, "a", [("x", 5, True)])
    assert places.where("x") == Whereabouts("", 6, ("c", "a"))


def test_a_node_that_returns_with_an_old_epoch_takes_nothing_back():
    """Not even when whoever adopted its agents is gone with all it claimed: its epoch is remembered."""
    places = AgentPlaces()
    update(places, "old", [("x", 1, True)])
    places.forget("old")
    assert places.where("x") is None
    update(places, "new", [("x", 2, True)])
    places.forget("new")
    update(places, "old", [("x", 1, True)], whole=True)
    places.check()
    assert places.where("x") == Whereabouts("", 2, ("old",))
    update(places, "old", [("x", 3, True)])
    assert places.where("x") == Whereabouts("old", 3)


def test_a_tombstone_ends_every_claim_up_to_its_epoch():
    """Those that were heard and those that come late; whoever speaks again has a higher one."""
    places = AgentPlaces()
    update(places, "a", [("x", 2, True), ("y", 1, True)])
    update(places, "b", [("x", 2, False)])
    update(places, "a", buried=[("x", 2)])
    assert places.where("x") is None and places.agents_on("a") == ["y"]
    update(places, "b", [("x", 2, False), ("x", 1, True)])
    assert places.where("x") is None
    update(places, "c", [("x", 3, True)])
    update(places, "a", buried=[("x", 1)])
    assert places.where("x") == Whereabouts("c", 3)


def test_a_full_report_is_all_that_a_node_has():
    places = AgentPlaces()
    many = [(f"a{index}", 1, index % 2 == 0) for index in range(PART_BLOCKS * 2)]
    assert update(places, "n", many, whole=True) >= 3, "it is taken in parts"
    update(places, "m", many[:1])
    assert places.agents_on("m") == ["a0"], "two homes at once: the first by name"
    assert (1 + len(places.agents_on("n")), places.count("n")) == (PART_BLOCKS, 2 * PART_BLOCKS)
    assert update(places, "n", many[:2], whole=True) >= 3
    assert (places.agents_on("n"), places.count("n")) == ([], 2)
    places.forget("m")
    assert places.agents_on("n") == ["a0"]


def test_what_is_remembered_of_the_gone_is_bounded():
    places = AgentPlaces(remembered_max=3)
    for index in range(9):
        update(places, "n", [(f"a{index}", 5, True)])
        update(places, "n", retracted=[f"a{index}"])
        update(places, "n", buried=[(f"b{index}", 5)])
    update(places, "n", [("a8", 4, True), ("a0", 4, True), ("b8", 5, True), ("b0", 5, True)])
    assert [places.where(agent) for agent in ("a8", "a0", "b8", "b0")] == [
        Whereabouts("", 5, ("n",)),
        Whereabouts("n", 4),
        None,
        Whereabouts("n", 5),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_reports_in_any_order_lead_to_the_same(seed: int):
    """Each node's own come in their order, as the sequence sees to; those of different nodes do not."""
    rng = random.Random(seed)
    reports = {
        node: [
            (
                [(rng.choice("xyz"), rng.randrange(1, 9), rng.random() < 0.5) for _ in range(3)],
                [(rng.choice("xyz"), rng.randrange(1, 4))] if rng.random() < 0.3 else [],
            )
            for _ in range(6)
        ]
        for node in "abc"
    }
    ends = []
    for _ in range(20):
        places, left = AgentPlaces(), {node: list(own) for node, own in reports.items()}
        while any(left.values()):
            node = rng.choice([node for node, own in left.items() if own])
            claimed, buried = left[node].pop(0)
            update(places, node, claimed, buried=buried)
        ends.append([places.where(agent) for agent in "xyz"])
    assert all(end == ends[0] for end in ends)


def test_an_agent_is_answered_elsewhere_twice_in_a_row_or_not():
    """Whatever happened before: at its home, or on a third node, it begins again; so does a new home."""
    places = AgentPlaces()
    assert not places.answer("x", "b"), "nobody claims it"
    update(places, "a", [("x", 1, True)])
    answers = [("b", False), ("b", True), ("b", True), ("a", False), ("b", False), ("c", False), ("b", False)]
    for node, twice in [*answers, ("", False), ("", False), ("b", False), ("b", True)]:
        assert places.answer("x", node) == twice, node
    update(places, "b", [("x", 2, True)])
    assert not places.answer("x", "b"), "it lives there"
    assert not places.answer("x", "a") and places.answer("x", "a")


def test_what_was_said_again_is_remembered_longer():
    """Of the gone those go first of whom nothing was heard for longest, not those that were first heard of."""
    places = AgentPlaces(remembered_max=2)
    for agent, epoch in (("x", 5), ("y", 5), ("x", 6), ("z", 5)):
        update(places, "n", buried=[(agent, epoch)])
    update(places, "n", [("x", 6, True), ("y", 5, True), ("z", 5, True)])
    assert [places.where(agent) for agent in "xyz"] == [None, Whereabouts("n", 5), None]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_the_least_tombstone_ends_claims_too(epoch: int):
    places = AgentPlaces()
    update(places, "a", [("x", epoch, True)])
    update(places, "b", buried=[("x", epoch)])
    update(places, "c", [("x", epoch, True)])
    assert places.where("x") is None
