"""How long a process that takes the place of another waits before it starts. Pure."""

from __future__ import annotations

FIRST_S = 1.0
PAUSE_S_MAX = 60.0


def pause_s(ended: int) -> float:
    """After so many that have ended soon after their start, one after the other: 0, 1, 2, 4 … 60 seconds."""
    return 0.0 if ended <= 0 else min(PAUSE_S_MAX, FIRST_S * 2.0 ** min(ended - 1, 10))
