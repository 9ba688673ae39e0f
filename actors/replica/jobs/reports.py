"""The reports to the router of a replica that does jobs: its load. It has no KV.

A prompt's tokens are what its job costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....cluster.config.timing import Timing
from ...protocol.reporter import Reporter, ToRouter
from ...protocol.router_messages import ReplicaReport
from .engine import JobEngine


class JobReports:
    """Makes reports on the reporter's thread; `reporter` sends them.

    Args:
        replica, model, node: their names.
        is_slow: whether the engine is stuck. Then no report is sent, and the router avoids the replica.
    """

    def __init__(
        self, replica: str, model: str, node: str, engine: JobEngine[Any], timing: Timing, is_slow: Callable[[], bool]
    ) -> None:
        self._replica, self._model, self._node = replica, model, node
        self._engine, self._is_slow = engine, is_slow
        self._to_router = ToRouter(timing)
        self.reporter = Reporter(self._make, timing, tell=self._tell)

    def _make(self, sequence: int, full: bool) -> ReplicaReport:
        engine = self._engine
        return ReplicaReport(
            replica=self._replica,
            model=self._model,
            incarnation=self.reporter.incarnation,
            sequence=sequence,
            running=engine.queue.running,
            waiting=max(0, engine.queue.waiting),
            pending_tokens=engine.queue.pending_tokens,
            sequences_max=1,
            prefill_tokens_per_s=engine.pace.tokens_per_s,
            active=engine.queue.request_ids,
            announced=[],
            retracted=[],
            full=full,
            node=self._node,
            model_id=engine.identity.model_id,
        )

    def _tell(self, report: ReplicaReport) -> bool:
        return not self._is_slow() and self._to_router(report)
