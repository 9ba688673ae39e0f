"""Where the time of a process of a group goes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter

logger = logging.getLogger(__name__)

LOGGED_EVERY_S = 30.0


@dataclass
class Spent:
    """How often something was done, and how many seconds it took in all."""

    count: int = 0
    seconds: float = 0.0


class Times:
    """What a process does, by name, and for how long. Each name is used by one thread; any may look. Something may be
    part of something else: a call waits for hidden states and launches."""

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = {}
        self._came_at: float | None = None
        self._logged_at = monotonic()

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """A context in which `what` is done."""
        began = perf_counter()
        try:
            yield
        finally:
            self._add(what, perf_counter() - began)

    def came(self) -> None:
        """Notes that an array came from another process."""
        self._came_at = perf_counter()

    def is_there(self) -> None:
        """Notes that an array for another process is there. With a single sequence it was computed from the one that
        came last."""
        came_at, self._came_at = self._came_at, None
        if came_at is not None:
            self._add("from what came to what is sent", perf_counter() - came_at)

    def _add(self, what: str, seconds: float) -> None:
        spent = self._spent.get(what) or self._spent.setdefault(what, Spent())
        spent.count += 1
        spent.seconds += seconds

    def take(self) -> dict[str, Spent]:
        """Returns what was done since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def log(self, name: str) -> None:
        """Logs now and then what was done, if anybody wants to know.

        Args:
            name: of the process.
        """
        if not logger.isEnabledFor(logging.DEBUG) or monotonic() - self._logged_at < LOGGED_EVERY_S:
            return
        passed_s, self._logged_at = monotonic() - self._logged_at, monotonic()
        done = "; ".join(f"{what} {each.seconds:.2f} s ({each.count})" for what, each in sorted(self.take().items()))
        logger.debug("%s, of %.0f s: %s", name, passed_s, done)
