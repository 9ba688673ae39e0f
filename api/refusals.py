"""How often the endpoint refuses for want of room: a flood of it is written down, a line a minute."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

MINUTE_S = 60.0
FLOOD_MIN = 10
"""Fewer in a minute are nothing to speak of."""


class Refusals:
    """
    Args:
        tell: hears a sentence.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._counts: Counter[str] = Counter()

    def count(self, why: str) -> None:
        """One more request was refused. On an event loop."""
        if not self._counts:
            asyncio.get_running_loop().call_later(MINUTE_S, self.end_minute)
        self._counts[why] += 1

    def end_minute(self) -> None:
        counts, self._counts = self._counts, Counter()
        for why, count in counts.items():
            if count >= FLOOD_MIN:
                self._tell(f"{count} requests were refused within a minute: {why}")
