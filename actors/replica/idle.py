"""What an engine does with nothing to do: it counts again. A wrong table would give wrong answers; an empty one costs
work only, so what does not add up is thrown away."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .memory import RowMemory
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

IDLE_S = 2.0
"""How long nothing must have been asked."""


class IdleCheck:
    """Counts once in every time without requests.

    Args:
        busy: asked every few thousand entries; counting is given up where somebody wants something.
    """

    def __init__(self, memory: RowMemory, busy: Callable[[], bool]) -> None:
        self.failures = 0
        self._memory = memory
        self._busy = busy
        self._idle_since_s: float | None = None
        self._counted = False

    def note_work(self) -> None:
        """Somebody wants something."""
        self._idle_since_s, self._counted = None, False

    def look(self, scheduler: Scheduler, now_s: float) -> bool:
        """Called while there is no request. Counts when it is time to.

        Returns:
            False where something did not add up: what rows left is forgotten by now, and the scheduler is of no use.
        """
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if self._counted or now_s - self._idle_since_s < IDLE_S:
            return True
        self._counted = True
        try:
            scheduler.check()
            if scheduler.running or scheduler.waiting:
                raise AssertionError(f"{scheduler.running + scheduler.waiting} rows are nobody's")
            for _ in self._memory.recount():
                if self._busy():
                    break
        except Exception:
            # Whatever it is: in a broken table anything may fail.
            logger.exception("the replica's tables are wrong; it forgets what rows left in memory")
            self.failures += 1
            self._memory.reset()
            return False
        return True
