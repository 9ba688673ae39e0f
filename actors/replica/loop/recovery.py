"""Recovers after the device has failed: nothing that it may have touched is kept, and sequences are computed again.

It is not known which of the computations in flight failed (`device/device_errors.py`). So all sequences leave the
device. All KV in memory, in the pool and on its way to the disk is dropped, and all image embeddings too. KV on disk is
sound: it was written only after a wait for the device. Sequences go back to the queue with their delivered tokens,
which were also read after such a wait. A sequence that was a suspect before ends (`Scheduler.batch_failed`).
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
"""After this many failures in a row the process ends: another process may do better, or another node."""

ERRORS_MAX = 16
"""More errors than computations can be in flight: a step, a prefill, and copies of sequences that end."""


def _settled() -> bool:
    """Waits until all that was launched has ended, and logs its errors. Returns False if the errors do not end."""
    for _ in range(ERRORS_MAX):
        try:
            mx.synchronize()
        except RuntimeError as error:
            logger.warning("work that was launched earlier failed too: %s", error)
        else:
            return True
    return False


class Recovery:
    """Used on the engine's thread.

    Args:
        tell: called with the error's text.
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
        """Notes that a result was read from the device, so it works: failures are counted from 0 again."""
        self._failures = 0

    def begin_anew(self, error: DeviceFailed) -> None:
        """Drops what the device may have touched.

        Raises:
            DeviceFailed: it has failed `FAILURES_MAX` times without a result in between.
        """
        self._failures += 1
        self._delivery.counters.device_failures += 1
        self._tell(f"the device failed ({error})")
        if self._failures >= FAILURES_MAX or not _settled():
            raise error
        logger.error("the device failed: all KV in memory is dropped, and sequences are computed again", exc_info=error)
        with suppress(DeviceFailed):
            # An error that was met while sequences ended is about the same failure.
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
