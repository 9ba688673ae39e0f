"""The decode loop: one pipelined step of all sequences, and preemption."""

from __future__ import annotations

import logging
import time

from ..execution.executor import BatchExecutor
from ..memory.keeping import Keeping
from ..scheduling.prefill_budget import PrefillPace
from ..scheduling.scheduler import Scheduler
from .delivery import Delivery

logger = logging.getLogger(__name__)


class DecodeLoop:
    """The decode part of a step. Used on the engine's thread.

    Args:
        pace: measures how long steps take.
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
        """Decodes one token of every sequence. Returns False if no sequence decodes."""
        decoding = self._scheduler.decoding()
        if not decoding:
            return False
        delivery = self._delivery
        delivery.check()
        self._keeping.before_step([delivery.sequences[request_id] for request_id in decoding])
        self._executor.follow_prefill()
        started = time.perf_counter()
        try:
            delivered = self._begin_answers()
            ready = self._executor.step()
        except Exception:
            logger.exception(
                "a decode step of %d sequences failed; its sequences run again alone", len(self._scheduler.decoding())
            )
            self._executor.clear_batch()
            for request_id in self._scheduler.batch_failed():
                delivery.fail(request_id, "generation failed in the model")
            return True
        self._pace.note_step(time.perf_counter() - started)
        delivery.counters.steps += 1
        for drawn in ready:
            if drawn.sequence_id in delivered:
                # The same step may return another token of this sequence.
                delivered.remove(drawn.sequence_id)
            elif drawn.sequence_id in delivery.sequences:
                delivery.tell_next(drawn)
        delivery.check()
        return True

    def _begin_answers(self) -> set[str]:
        """Delivers first tokens before the next step is launched, unless they end their sequences. Returns the ids of
        the sequences."""
        delivered = {drawn.sequence_id for drawn in self._executor.first() if self._delivery.tell_first(drawn)}
        if delivered:
            self._delivery.flush()
        return delivered

    def send_back(self, request_id: str) -> None:
        """Takes a preempted sequence out of the batch and caches its KV. Its last token is delivered first, so that the
        sequence continues exactly where its KV ends: recurrent layers cannot continue from any other place."""
        delivery = self._delivery
        sequence = delivery.sequences[request_id]
        drawn = self._executor.drawn(request_id)
        if drawn is not None:
            delivery.tell_next(drawn)
            if request_id not in delivery.sequences:
                return
        self._keeping.keep(sequence, returns=True)
        sequence.span.preempt()
        delivery.vacate(sequence)
