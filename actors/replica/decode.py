"""Rows that decode: one step for all of them, pipelined with the last one, and the way back to the queue."""

from __future__ import annotations

import logging
import time

from .delivery import Delivery
from .execution.executor import BatchExecutor
from .scheduling.prefill_budget import PrefillPace
from .scheduling.scheduler import Scheduler
from .tiers.keeping import Keeping

logger = logging.getLogger(__name__)


class DecodeLoop:
    """For the engine's thread.

    Args:
        pace: is told how long steps take.
    """

    def __init__(
        self, scheduler: Scheduler, executor: BatchExecutor, keeping: Keeping, pace: PrefillPace, delivery: Delivery
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._keeping = keeping
        self._pace = pace
        self._delivery = delivery

    def step(self) -> bool:
        """One token of every row. False where there is none."""
        decoding = self._scheduler.decoding()
        if not decoding:
            return False
        delivery = self._delivery
        self._keeping.before_step([delivery.rows[request_id] for request_id in decoding])
        started = time.perf_counter()
        try:
            told = self._begin_answers()
            ready = self._executor.step()
        except Exception:
            logger.exception(
                "a decode step of %d rows failed; its rows run again alone", len(self._scheduler.decoding())
            )
            self._executor.clear_batch()
            for request_id in self._scheduler.batch_failed():
                delivery.fail(request_id, "generation failed in the model")
            return True
        self._pace.note_step(time.perf_counter() - started)
        delivery.counters.steps += 1
        for drawn in ready:
            if drawn.row_id not in told:
                delivery.tell_next(drawn)
        return True

    def _begin_answers(self) -> set[str]:
        """Tell first tokens before the next step is made ready. Returns whose; rows that they end wait for it."""
        told = {drawn.row_id for drawn in self._executor.first() if self._delivery.tell_first(drawn)}
        if told:
            self._delivery.flush()
        return told

    def send_back(self, request_id: str) -> None:
        """A row that has lost its place keeps its KV. The token that it has drawn last is told first: so it goes on
        just where its KV ends, which is the only place where recurrent layers can."""
        delivery = self._delivery
        sequence = delivery.rows[request_id]
        drawn = self._executor.drawn(request_id)
        if drawn is not None:
            delivery.tell_next(drawn)
            if request_id not in delivery.rows:
                return
        self._keeping.keep(sequence, returns=True)
        delivery.vacate(sequence)
