"""What stands still is noticed by polls alone."""

from __future__ import annotations

from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from satchel.actors.supervision.stall import PAGING_TIMES, PAUSE_S_MAX, Pulse, Stall, limit_s, pause_s


def polled(stall: Stall, polls: int, limit: float, *, paging: bool = False) -> list[Pulse]:
    return [stall.poll(False, limit, paging=paging) for _ in range(polls)]


def test_what_does_not_move_is_slow_first_and_stuck_then():
    stall = Stall(1.0)
    assert stall.poll(True, 9.0) is Pulse.MOVING
    assert polled(stall, 9, 9.0) == [Pulse.MOVING] * 2 + [Pulse.SLOW] * 6 + [Pulse.STUCK]


def test_what_moves_again_begins_anew():
    stall = Stall(0.5)
    assert polled(stall, 17, 9.0)[-1] is Pulse.SLOW
    assert stall.poll(True, 9.0) is Pulse.MOVING
    assert Pulse.STUCK not in polled(stall, 17, 9.0) and polled(stall, 1, 9.0) == [Pulse.STUCK]


def test_a_machine_that_reads_its_memory_back_is_given_more_time():
    stall = Stall(1.0)
    assert Pulse.STUCK not in polled(stall, 9 * PAGING_TIMES - 1, 9.0, paging=True)
    assert polled(stall, 1, 9.0, paging=True) == [Pulse.STUCK]


def test_the_limit_follows_what_steps_take():
    assert limit_s(30.0, None) == 600.0, "the first step prepares the device"
    assert limit_s(30.0, 0.01) == 30.0
    assert limit_s(30.0, 4.0) == 80.0, "a slow machine"


def test_a_pace_tells_what_a_step_takes():
    pace = PrefillPace(2048, 0.25)
    assert pace.usual_s is None
    pace.note_step(0.02)
    # A chunk of 256 tokens, of which nothing is known but that each takes no longer than a decode step.
    assert pace.usual_s == 0.02 + 256 * 0.02
    pace.note(256, 0.5)
    assert pace.usual_s == 0.02 + pace.budget(False) / 512


def test_pauses_grow_up_to_a_minute():
    assert [pause_s(ended) for ended in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_s(10_000) == PAUSE_S_MAX
