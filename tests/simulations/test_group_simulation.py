"""The processes of a divided model under every order of failures, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from math import inf

import pytest

from satchel.actors.replica.group.gathering import Gathering
from satchel.actors.replica.group.link.silence import Silence

from .group_process import Process
from .group_world import TIMES, Law, World

DEPTH = 3 if int(os.environ.get("SATCHEL_SIMULATIONS", "40")) >= 300 else 2
"""How many events come one after the other."""

GAPS_S = (0.7, 0.1, 3.0)
"""Seconds between two events."""

Event = Callable[[World], object]

HARMLESS: dict[str, Event] = {
    "nothing": lambda world: None,
    "a heartbeat is lost": lambda world: world.cuts(0, world.ranks - 1, 0.3),
    "the link is cut for a second": lambda world: world.cuts(0, world.ranks - 1, 1.0),
    "a follower is held up": lambda world: world.pauses(0, TIMES.stalled_s - 2.0),
    "the leader is held up": lambda world: world.pauses(world.ranks - 1, TIMES.stalled_s - 2.0),
}
"""What no group breaks by, if they come one at a time."""

EVENTS: dict[str, Event] = {
    **{name: do for name, do in HARMLESS.items() if name != "nothing"},
    "a follower dies": lambda world: world.dies(0),
    "the leader dies": lambda world: world.dies(world.ranks - 1),
    "a follower's node dies": lambda world: world.loses_machine(0, 5.0),
    "the leader's node dies": lambda world: world.loses_machine(world.ranks - 1, 5.0),
    "the link is cut": lambda world: world.cuts(0, world.ranks - 1, 4.0),
    "the link is cut for long": lambda world: world.cuts(0, world.ranks - 1, 20.0),
    "a call fails in a follower": lambda world: world.fails(0),
    "a call fails in the leader": lambda world: world.fails(world.ranks - 1),
    "a follower hangs": lambda world: world.hangs(0),
    "the leader hangs": lambda world: world.hangs(world.ranks - 1),
    "a follower is frozen": lambda world: world.pauses(0, inf),
    "the leader is frozen": lambda world: world.pauses(world.ranks - 1, inf),
    "stop": World.stops,
}

OF_THREE: dict[str, Event] = {
    "two followers do not reach each other": lambda world: world.cuts(0, 1, 4.0),
    "the second follower dies": lambda world: world.dies(1),
    "a call fails in the second follower": lambda world: world.fails(1),
    "the second follower's node dies": lambda world: world.loses_machine(1, 5.0),
}
"""With three stages also these."""

BEGINNINGS = {"loading": 1.0, "loaded": 2.6, "forming": 2.77, "testing": 3.0, "serving": 5.0}
"""Seconds after the start at which the first event comes."""

SETTLES_S = 90.0


def play(world: World, begins_s: float, events: tuple[str, ...], gap_s: float) -> None:
    """Has events happen, and waits until the group serves again."""
    try:
        world.run(begins_s)
        for name in events:
            (EVENTS | OF_THREE)[name](world)
            world.run(gap_s)
        world.settle(SETTLES_S)
    except Law as law:
        raise Law(f"{begins_s:g} s after the start, {gap_s:g} s apart: {', '.join(events)}: {law}") from None


def test_a_group_forms_and_answers():
    world = World(3)
    world.settle(10.0)
    assert world.groups == 1 and world.starts == 1


@pytest.mark.parametrize("phase", BEGINNINGS)
def test_every_event_in_every_phase_with_three_stages(phase: str):
    for name in EVENTS | OF_THREE:
        play(World(3), BEGINNINGS[phase], (name,), 0.5)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_breaks_no_group(name: str):
    world = World()
    world.run(BEGINNINGS["serving"])
    HARMLESS[name](world)
    world.settle(20.0)
    assert world.groups == 1


@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("phase", BEGINNINGS)
def test_every_order_of_events(phase: str, first: str):
    for rest in product(EVENTS, repeat=DEPTH - 1):
        for gap_s in GAPS_S if phase == "serving" else GAPS_S[:1]:
            play(World(), BEGINNINGS[phase], (first, *rest), gap_s)


def acknowledgements_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    lost = Silence.lost
    patch.setattr(Silence, "lost", lambda silence, now, unacknowledged: lost(silence, now, None))


def nobody_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Silence, "lost", lambda silence, now, unacknowledged: "")


def a_silent_process_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    made = Silence.__init__
    patch.setattr(
        Silence, "__init__", lambda silence, every, silent, stalled, now: made(silence, every, silent, inf, now)
    )


def neighbours_send_no_heartbeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "neighbours_beat", False)


def what_is_broken_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "_shut", lambda process: None)


def a_stage_goes_on_without_a_step(patch: pytest.MonkeyPatch) -> None:
    """As if the error of a call were handled where it came up."""

    def computed(process: Process, step: int) -> None:
        failed, process.fails_next = process.fails_next, False
        before = process.done
        done(process, step)
        if failed:
            process.done = before

    done = Process._computed
    patch.setattr(Process, "_computed", computed)


def a_leader_that_cannot_form_its_group_stays(patch: pytest.MonkeyPatch) -> None:
    def stays(world: World, leader: Process, why: str) -> None:
        world.refused = why

    patch.setattr(World, "_not_formed", stays)


def a_leader_asks_nobody_again(patch: pytest.MonkeyPatch) -> None:
    """As if a follower that ended while others load were ready."""
    patch.setattr(Gathering, "failed", lambda gathering, rank, error, now: False)


@pytest.mark.parametrize(
    "fault, ranks, phase, event",
    [
        (acknowledgements_are_not_seen, 2, "serving", "a follower is held up"),
        (nobody_is_lost, 2, "serving", "the link is cut for long"),
        (a_silent_process_is_waited_for, 2, "serving", "the leader is frozen"),
        (neighbours_send_no_heartbeats, 3, "serving", "two followers do not reach each other"),
        (what_is_broken_goes_on, 2, "serving", "a call fails in a follower"),
        (a_stage_goes_on_without_a_step, 2, "serving", "a call fails in a follower"),
        (a_leader_that_cannot_form_its_group_stays, 2, "loaded", "a follower dies"),
        (a_leader_asks_nobody_again, 2, "loading", "a follower dies"),
    ],
)
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], ranks: int, phase: str, event: str, monkeypatch: pytest.MonkeyPatch
):
    """The simulation would find each of these in the code."""
    fault(monkeypatch)
    world = World(ranks)
    with pytest.raises(Law):
        play(world, BEGINNINGS[phase], (event,), 0.5)
        if event in HARMLESS and world.groups > 1:
            raise Law("a group broke by what is harmless")
