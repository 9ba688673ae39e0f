"""Whether something that ought to answer stands still. Pure: time is counted in polls.

A process that was stopped, or a machine that slept, has polled nothing meanwhile, so it has not stood still here.
"""

from __future__ import annotations

from enum import Enum

TIMES = 20.0
"""A step that takes so many times what steps take is no slow one."""

SLOW_FRACTION = 1 / 3
"""Of what may pass before it counts as stuck: from there on it is slow, and asked for nothing new."""

PAGING_TIMES = 10
"""So much longer may it take while the machine is reading memory back from the disk."""


FIRST_S = 1.0

PAUSE_S_MAX = 60.0


class Pulse(Enum):
    MOVING = "moving"
    SLOW = "slow"
    STUCK = "stuck"


def limit_s(floor_s: float, expected_s: float | None) -> float:
    """How long a step may take.

    Args:
        floor_s: the least that is waited.
        expected_s: what a step takes as measured; None where none was: the first one prepares the device.
    """
    return TIMES * floor_s if expected_s is None else max(floor_s, TIMES * expected_s)


class Stall:
    """One thing that is polled."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._polls = 0
        self._paging_polls = 0

    def poll(self, moved: bool, limit_s: float, *, paging: bool = False) -> Pulse:
        """
        Args:
            moved: whether it has since the last poll.
            limit_s: how long it may stand still.
            paging: whether the process waited for memory that lay on the disk since then.
        """
        if moved:
            self._polls = self._paging_polls = 0
            return Pulse.MOVING
        self._polls += not paging
        self._paging_polls += paging
        still_s = self._poll_s * (self._polls + self._paging_polls / PAGING_TIMES)
        if still_s >= limit_s:
            return Pulse.STUCK
        return Pulse.SLOW if still_s >= SLOW_FRACTION * limit_s else Pulse.MOVING


def pause_s(ended: int) -> float:
    """After so many that have ended soon after their start, one after the other: 0, 1, 2, 4 … 60 seconds."""
    return 0.0 if ended <= 0 else min(PAUSE_S_MAX, FIRST_S * 2.0 ** min(ended - 1, 10))
