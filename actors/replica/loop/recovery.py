"""Begins anew after the device has failed: what it touched ends or is computed again, and nothing of it is kept.

Which of the computations in flight failed is not known (`device/device_errors.py`). So all sequences leave the device,
and all KV that is kept in memory, noted for the disk or in the pool, and all image embeddings are dropped. What is on
disk was waited for before it was written. Sequences go back to the queue with the tokens that were delivered, which
were read after a wait too; one that was suspected before ends (`Scheduler.batch_failed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx

from ..device.device_errors import DeviceFailed
from ..execution.executor import BatchExecutor
from ..memory.keeping import Keeping
from ..memory.restores import Restores
from ..memory.sequence_memory import SequenceMemory
from ..scheduling.scheduler import Scheduler
from .delivery import Delivery
from .embed import EmbedLoop
from .encode_queue import PictureQueue

logger = logging.getLogger(__name__)

FAILURES_MAX = 3
"""So often in a sequence the device may fail before the process ends: another one may do better, or another node."""

ERRORS_MAX = 16
"""More than can be in flight: a step, a prefill, and copies of sequences that end."""


def _settled() -> bool:
    """Waits until all that was launched has ended, with errors of its own. Returns False if there is no end of them."""
    for _ in range(ERRORS_MAX):
        try:
            mx.synchronize()
        except RuntimeError as error:
            logger.warning("the device failed at what was launched before, too: %s", error)
        else:
            return True
    return False


class Recovery:
    """Used on the engine's thread.

    Args:
        tell: called with what the device has failed at.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: BatchExecutor,
        memory: SequenceMemory,
        keeping: Keeping,
        pictures: PictureQueue,
        restores: Restores,
        embed: EmbedLoop,
        delivery: Delivery,
        tell: Callable[[str], object],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._memory = memory
        self._keeping = keeping
        self._pictures = pictures
        self._restores = restores
        self._embed = embed
        self._delivery = delivery
        self._tell = tell
        self._failures = 0

    def note_sound(self) -> None:
        """Notes that something was told that had been read from the device."""
        self._failures = 0

    def begin_anew(self, error: DeviceFailed) -> None:
        """Drops what the device may have touched.

        Raises:
            DeviceFailed: it has failed `FAILURES_MAX` times with nothing done in between.
        """
        self._failures += 1
        self._delivery.counters.device_failures += 1
        self._tell(f"the device failed ({error})")
        if self._failures >= FAILURES_MAX or not _settled():
            raise error
        logger.error(
            "the device failed: all that it holds is dropped, and sequences are computed again", exc_info=error
        )
        with suppress(DeviceFailed):
            # What sequences met that ended meanwhile is dropped too.
            self._delivery.check()
        self._executor.reset()
        self._memory.reset()
        self._keeping.reset()
        self._pictures.embeddings.clear()
        for sequence in self._delivery.sequences.values():
            self._restores.leave(sequence.id)
            self._pictures.drop_embeddings(sequence)
            sequence.forget()
        for request_id in self._scheduler.batch_failed(device=True):
            self._delivery.fail(request_id, "the device failed while it was computed, twice")
        self._embed.begin_anew()
        mx.clear_cache()
