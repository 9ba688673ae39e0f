"""The replica's reports to the router: its load, and which KV and image embeddings are in its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...cluster.config.timing import Timing
from ...cluster.devices.energy import EnergyMeter
from ..protocol.reporter import Reporter, ToRouter
from ..protocol.router_messages import ReplicaReport
from .energy_pace import EnergyReading
from .loop.engine import Engine
from .memory.disk_tier import DiskTier


class EngineReports:
    """Makes reports on the reporter's thread; `reporter` sends them.

    Args:
        replica, model, node: their names.
        disk: None if nothing is read back.
        timing: how often reports are sent, and how long the engine may take to list what came into memory and left it.
        is_slow: whether the engine is stuck. Then no report is sent, and the router avoids the replica.
        coming: the sequences that the engine does not know yet, because they are being looked up.
        meter: of the node's energy; None if it is not measured.
    """

    def __init__(
        self,
        replica: str,
        model: str,
        node: str,
        engine: Engine,
        disk: DiskTier | None,
        timing: Timing,
        is_slow: Callable[[], bool] = lambda: False,
        coming: Callable[[], list[str]] = list,
        meter: EnergyMeter | None = None,
    ) -> None:
        self._meter = meter
        self._is_slow, self._coming, self._timing = is_slow, coming, timing
        self._to_router = ToRouter(timing)
        self.reporter = Reporter(self._make, timing, tell=self._tell)
        self._replica, self._model, self._node = replica, model, node
        self._engine, self._disk = engine, disk
        self._failed_checks = 0
        self._events_taken = False

    def follow(self, engine: Engine, disk: DiskTier | None) -> None:
        """Reports on another engine from now on, which has replaced the former one."""
        self._engine, self._disk, self._events_taken, self._failed_checks = engine, disk, False, 0

    def _make(self, sequence: int, full: bool) -> ReplicaReport:
        """Makes a report. During a long step it lacks the changes of memory."""
        engine = self._engine
        if engine.failed_checks != self._failed_checks:
            # The tables were reset, so it is unknown what they announced before.
            full, self._failed_checks = True, engine.failed_checks
        taken: list[tuple[list[bytes], list[bytes]]] = []
        done = threading.Event()

        def take() -> None:
            taken.append(engine.changes(whole=full))
            done.set()

        engine.call(take)
        self._events_taken = done.wait(self._timing.report_s)
        announced, retracted = taken[0] if self._events_taken else ([], [])
        self._note_energy()
        return ReplicaReport(
            replica=self._replica,
            model=self._model,
            incarnation=self.reporter.incarnation,
            sequence=sequence,
            running=engine.scheduler.running,
            waiting=engine.waiting,
            pending_tokens=engine.pending_tokens,
            sequences_max=engine.scheduler.limits.sequences_max,
            prefill_tokens_per_s=engine.pace.tokens_per_s,
            active=[*engine.active, *self._coming()],
            announced=announced,
            retracted=retracted,
            full=full and self._events_taken,
            node=self._node,
            decode_token_s=engine.pace.step_s,
            restore_bytes_per_s=self._disk.restore_bytes_per_s if self._disk is not None else 0.0,
            kv_bytes_per_token=float(engine.loaded.spec.bytes_per_token),
            free_bytes=engine.scheduler.free_tokens * engine.loaded.spec.bytes_per_token,
            encode_token_s=engine.pictures.encode_token_s,
            model_id=engine.loaded.model_id,
            moves_kv=self._disk is not None,
            prefill_token_j=engine.energy.prefill_token_j,
            decode_token_j=engine.energy.decode_token_j,
        )

    def _note_energy(self) -> None:
        if self._meter is not None:
            counters, running = self._engine.counters, self._engine.scheduler.running
            tokens = counters.computed_tokens, counters.generated_tokens
            self._engine.energy.note(EnergyReading(self._meter.read(), *tokens, running))

    def _tell(self, report: ReplicaReport) -> bool:
        return not self._is_slow() and self._to_router(report) and self._events_taken
