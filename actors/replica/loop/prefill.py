"""The prefill loop: admits sequences, reads their KV back from disk, and prefills chunks within the step's budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...protocol.replica_messages import SequenceUpdate
from ..execution.executor import BatchExecutor
from ..kv.caches import PooledBlock
from ..memory.keeping import Keeping
from ..memory.restores import Reading, Restores
from ..memory.sequence_memory import Restored, Sequence, SequenceMemory
from ..scheduling.prefill_budget import PrefillPace
from ..scheduling.scheduler import PrefillChunk, Scheduler
from .delivery import Delivery
from .encode_queue import PictureQueue

logger = logging.getLogger(__name__)


class PrefillLoop:
    """The prefill part of a step. Used on the engine's thread.

    Args:
        make_room: calls `MemoryRoom.fit` for a sequence that was admitted.

    Attributes:
        pace: limits what a step may prefill, and measures it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: BatchExecutor,
        memory: SequenceMemory,
        keeping: Keeping,
        pictures: PictureQueue,
        restores: Restores,
        pace: PrefillPace,
        delivery: Delivery,
        make_room: Callable[[], None],
    ) -> None:
        self.pace = pace
        self._scheduler = scheduler
        self._executor = executor
        self._memory = memory
        self._keeping = keeping
        self._pictures = pictures
        self._restores = restores
        self._delivery = delivery
        self._make_room = make_room

    def step(self) -> bool:
        """Admits sequences and prefills a step's budget. Returns False if there was nothing to do."""
        scheduler, delivery = self._scheduler, self._delivery
        step_budget = budget = self.pace.budget(bool(scheduler.decoding()))
        busy = False
        while budget > 0:
            while not self._keeping.behind and (admitted := scheduler.admit()) is not None:
                busy = True
                delivery.attempt(admitted, self._admit, admitted)
                self._make_room()
            chunks = self._next_chunks(budget, step_budget)
            if not chunks:
                break
            busy = True
            budget -= sum(chunk.stop - chunk.start for chunk in chunks)
            self._compute(chunks)
        return busy

    # Admission.

    def _admit(self, request_id: str) -> None:
        """Opens an admitted sequence, or first begins to read its KV back."""
        sequence = self._delivery.sequences[request_id]
        if sequence.placed_at is None:
            sequence.placed_at = time.monotonic()
        hot = self._memory.peek(sequence)
        if self._restores.asks(sequence, hot, plain=self._memory.prefixes.is_plain):
            # Other sequences must not evict these blocks while it waits.
            self._memory.pin(sequence, hot)
            self._scheduler.await_restore(request_id, hot)
            sequence.span.restore()
            alone = self._scheduler.running == 1 and not self._scheduler.waiting
            # Pictures whose KV is on the disk are not encoded, and may have come without pixels.
            may_compute = alone and not sequence.request.media
            self._restores.begin(sequence, hot, self.pace.tokens_per_s, may_compute=may_compute)
        else:
            self._open(request_id)

    def open_restored(self, reading: Reading, restored: Restored | None) -> None:
        """Opens a sequence after the attempt to read its KV back, if it still waits for that."""
        if self._restores.end(reading):
            request_id = reading.prompt.request_id
            self._delivery.attempt(request_id, self._open, request_id, restored, reading.hot_tokens)

    def open_overdue(self) -> None:
        """Opens sequences whose KV was not read back in time, without it."""
        for request_id in self._restores.overdue():
            # KV may also be read back for no sequence.
            if request_id not in self._delivery.sequences:
                continue
            self._delivery.attempt(request_id, self._open, request_id)

    def _open(self, request_id: str, restored: Restored | None = None, hot: int = 0) -> None:
        """Opens a sequence with the KV that memory has of it.

        Args:
            restored: what was read from disk for it, beside the `hot` first tokens that memory had.
        """
        sequence = self._delivery.sequences[request_id]
        scheduled = self._scheduler.sequence(request_id)
        assert scheduled is not None
        if restored is not None:
            self._keeping.put_back(sequence, restored)
        hit = self._memory.find(sequence, scheduled.prompt)
        assert not isinstance(hit.tail, PooledBlock), "a tail is not a whole block"
        adapter = sequence.request.adapter
        self._executor.open(request_id, hit.blocks, hit.tail, hit.tail_tokens, sequence.pictures, adapter)
        reused = hit.tokens
        read = max(0, reused - hot) if restored is not None else 0
        sequence.span.prefill(reused, read)
        if sequence.cached is None:
            sequence.cached = reused
            counters = self._delivery.counters
            counters.prompt_tokens += len(sequence.tokens)
            counters.cached_tokens += reused
            counters.hot_tokens += reused - read
            counters.prefix_hits += reused > 0
            counters.prefix_misses += reused == 0
            self._delivery.tell(
                sequence,
                SequenceUpdate(request_id, [], cached_tokens=reused, disk_tokens=read, queued_s=sequence.queued_s),
            )
        self._scheduler.reused(request_id, reused)
        if reused == scheduled.prompt:
            self._start_decoding(sequence)

    # Chunks.

    def _next_chunks(self, budget: int, step_budget: int) -> list[PrefillChunk]:
        """Returns chunks of different sequences, of at most `budget` tokens together; they run in one call."""
        chunks: list[PrefillChunk] = []
        while (chunk := self._scheduler.next_chunk(budget, step_budget)) is not None:
            if any(chunk.request_id == other.request_id for other in chunks):
                break
            self._scheduler.prefilled(chunk)
            chunks.append(chunk)
            budget -= chunk.stop - chunk.start
        return chunks

    def _compute(self, chunks: list[PrefillChunk]) -> None:
        sequences = self._delivery.sequences
        parts = [(chunk.request_id, sequences[chunk.request_id].given(chunk.start, chunk.stop)) for chunk in chunks]
        # Updates that are ready now must not wait for this prefill.
        self._delivery.flush()
        try:
            for chunk in chunks:
                self._pictures.require(sequences[chunk.request_id], chunk.start, chunk.stop)
            self._executor.time_next(self.pace.note)
            self._executor.prefill(parts)
        except Exception:
            if len(chunks) > 1:
                logger.exception("a prefill of %d sequences failed; they run again one by one", len(chunks))
            for chunk, part in zip(chunks, parts, strict=True):
                self._delivery.attempt(chunk.request_id, self._compute_alone, chunk, part)
            return
        self._delivery.counters.computed_tokens += sum(len(tokens) for _, tokens in parts)
        for chunk in chunks:
            self._delivery.attempt(chunk.request_id, self._computed, chunk)

    def _compute_alone(self, chunk: PrefillChunk, part: tuple[str, list[int]]) -> None:
        if self._executor.length(chunk.request_id) < chunk.stop:
            self._pictures.require(self._delivery.sequences[chunk.request_id], chunk.start, chunk.stop)
            self._executor.prefill([part])
            self._delivery.counters.computed_tokens += len(part[1])
        self._computed(chunk)

    def _computed(self, chunk: PrefillChunk) -> None:
        sequence = self._delivery.sequences[chunk.request_id]
        self._keeping.after_chunk(sequence, chunk.stop)
        scheduled = self._scheduler.sequence(chunk.request_id)
        if scheduled is None:
            return
        if chunk.stop == scheduled.pause:
            self._keeping.at_pause(sequence, chunk.stop)
        if scheduled.done == scheduled.prompt:
            self._keeping.after_prompt(sequence, chunk.stop)
            self._start_decoding(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        request = sequence.request
        self._pictures.drop_embeddings(sequence)
        sequence.span.decode()
        if not request.sampling.max_tokens:
            # Nothing that reads from the device follows.
            self._executor.wait_for_prefill()
            self._delivery.finish(sequence, SequenceUpdate(sequence.id, [], "length", prefill_s=sequence.placed_s))
            return
        drawn = request.generated + sequence.emitted
        self._executor.join(sequence.id, sequence.given(), request.sampling, drawn, sequence.grammar)
