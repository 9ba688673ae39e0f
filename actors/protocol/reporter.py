"""Sends the heartbeats of a replica or a store to the router, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from ...cluster.config.timing import Timing
from ..rpc.local_threads import NearActorOfThreads
from .clients import RouterClient
from .router_messages import ReplicaReport, StoreReport

logger = logging.getLogger(__name__)


class ToRouter:
    """Sends a process's reports to the router. Used on one thread."""

    def __init__(self, timing: Timing) -> None:
        self._router = RouterClient(timing, kind=NearActorOfThreads)

    def __call__(self, report: ReplicaReport | StoreReport) -> bool:
        """Sends a report. Returns False if the router missed an earlier one; the next must then be full."""
        router = self._router
        sent = router.report(report) if isinstance(report, ReplicaReport) else router.store_report(report)
        return sent.within(router.timing.brief_answer_s).wait()


Report = TypeVar("Report", ReplicaReport, StoreReport)


class Reporter(Generic[Report]):
    """Sends one process's heartbeats, every `timing.report_s` and at every `wake`.

    Args:
        make: returns the report with this sequence number; the second argument is whether it must be full.
        before_full: called before every full report, so that tombstones which arrived while the router did not see this
            node are known before its agents are announced.
        timing: of the cluster.
        tell: sends a report and returns whether the next one need not be full; by default to the router.
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
        self._tell = tell or ToRouter(timing)
        self._awake = threading.Event()
        self._stopped = False
        self._sequence, self._full = 0, True

    def wake(self) -> None:
        """Makes `run` report now."""
        self._awake.set()

    def stop(self) -> None:
        """Makes `run` return soon."""
        self._stopped = True
        self._awake.set()

    def run(self) -> None:
        """Sends reports until `stop` is called."""
        while not self._stopped:
            self._awake.clear()
            try:
                self.step()
            except Exception as error:
                # The router restarts or is slow. This report may be lost, so the next one is full. Whatever the error
                # is, go on: a process that stops reporting is taken for lost.
                logger.warning("a report did not arrive: %s: %s", type(error).__name__, error)
                time.sleep(self._report_s)
            if not self._stopped:
                self._awake.wait(self._report_s)

    def step(self) -> None:
        """Sends one report. If this raises, the next one is full."""
        full, self._full = self._full, True
        if full:
            self._before_full()
        report = self._make(self._sequence, full)
        self._sequence += 1
        self._full = not self._tell(report)
