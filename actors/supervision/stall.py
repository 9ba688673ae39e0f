"""Detects a part of a process that stands still. Pure: time is counted in polls.

Nothing is polled while the process is stopped or the machine sleeps, so that time does not count.
"""

from __future__ import annotations

from enum import Enum

TIMES = 20.0
"""A step that takes this many times the measured time is stuck, not slow."""

SLOW_FRACTION = 1 / 3
"""After this fraction of the limit a part counts as slow and gets nothing new to do."""

PAGING_TIMES = 10
"""The limit is this many times as long while the machine reads memory back from the disk."""

FIRST_S = 1.0

PAUSE_S_MAX = 60.0


class Pulse(Enum):
    MOVING = "moving"
    SLOW = "slow"
    STUCK = "stuck"


def limit_s(floor_s: float, expected_s: float | None) -> float:
    """Returns how long a step may take, in seconds.

    Args:
        floor_s: the lower bound.
        expected_s: the measured time of a step; None before the first one, which also prepares the device.
    """
    return TIMES * floor_s if expected_s is None else max(floor_s, TIMES * expected_s)


class Stall:
    """How long one polled part has stood still."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._polls = 0
        self._paging_polls = 0

    def poll(self, moved: bool, limit_s: float, *, paging: bool = False) -> Pulse:
        """Counts one poll.

        Args:
            moved: whether the part has made progress since the last poll.
            limit_s: how long it may stand still.
            paging: whether the process waited for swapped-out memory since then.
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
    """Returns the seconds before a restart after `ended` early ends in a row: 0, 1, 2, 4 … 60."""
    return 0.0 if ended <= 0 else min(PAUSE_S_MAX, FIRST_S * 2.0 ** min(ended - 1, 10))
