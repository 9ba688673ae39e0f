"""Sends the heartbeats of a replica or a store to the router, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ...cluster.timing import Timing
from .clients import RouterClient
from .messages import ReplicaReport, StoreReport

logger = logging.getLogger(__name__)


def tell_router(report: ReplicaReport | StoreReport, timing: Timing) -> bool:
    """Send a report. Returns whether the router understood it; False asks for a full one."""
    return RouterClient(timing).report(report).within(timing.brief_answer_s).wait()


Report = TypeVar("Report", ReplicaReport, StoreReport)


class Reporter(Generic[Report]):
    """
    Args:
        make: the report with a sequence number, and everything in it if it is to be full.
        before_full: called before every full report. So what was forgotten while the router did not see this node is
            known before its agents are announced.
        timing: of the cluster.
        tell: sends a report, and says whether the next one may leave out what this one had; to the router, where
            nothing else is given.
    """

    def __init__(
        self,
        make: Callable[[int, bool], Report],
        timing: Timing,
        *,
        before_full: Callable[[], None] = lambda: None,
        tell: Callable[[Report], bool] | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._make, self._before_full, self._report_s = make, before_full, timing.report_s
        self._tell = tell or partial(tell_router, timing=timing)
        self._awake = threading.Event()
        self._stopped = False
        self._sequence, self._full = 0, True

    def wake(self) -> None:
        """Report now."""
        self._awake.set()

    def stop(self) -> None:
        """Let `run` return soon."""
        self._stopped = True
        self._awake.set()

    def run(self) -> None:
        """Returns after `stop` only."""
        while not self._stopped:
            self._awake.clear()
            try:
                self.step()
            except Exception as error:
                # The router restarts or is slow: what this report said may be lost, so the next one says everything.
                # Whatever else it is, who stops reporting is taken for lost.
                logger.warning("a report did not arrive: %s: %s", type(error).__name__, error)
                time.sleep(self._report_s)
            if not self._stopped:
                self._awake.wait(self._report_s)

    def step(self) -> None:
        """Send one report. Whatever it raises, the next one is full."""
        full, self._full = self._full, True
        if full:
            self._before_full()
        report = self._make(self._sequence, full)
        self._sequence += 1
        self._full = not self._tell(report)
