"""Delivers sequences' tokens: updates by consumer, sent together once a step.

The last update of a sequence says that it ended. So sequences end here: their KV is cached, and everything else that
they hold is released.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ....cluster.errors import GenerationFailed, SatchelError
from ....cluster.telemetry.context import working_for
from ...protocol.replica_messages import SequenceUpdate, request_of
from ..device.device_errors import DeviceFailed
from ..execution.executor import BatchExecutor
from ..execution.sampling.ready import Ready
from ..memory.keeping import Keeping
from ..memory.restores import Restores
from ..memory.sequence_memory import Sequence, SequenceMemory
from ..scheduling.scheduler import Scheduler
from .encode_queue import PictureQueue

logger = logging.getLogger(__name__)


class Outbox(Protocol):
    def __call__(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        """Takes one step's updates by consumer. Called on the engine's thread; must not block."""


@dataclass
class Counters:
    """Totals since the engine started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hot_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    embedded_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    device_failures: int = 0


class Delivery:
    """The accepted sequences, their updates and their ends. Used on the engine's thread.

    Args:
        end_tokens: the model's end-of-sequence tokens.
        outbox: receives the updates, once a step.
        on_finish: gets each sequence that is complete.

    Attributes:
        sequences: sequences that were accepted and have not ended, by request id.
        told: tokens that were delivered, and sequences that were completed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: BatchExecutor,
        memory: SequenceMemory,
        keeping: Keeping,
        pictures: PictureQueue,
        restores: Restores,
        end_tokens: frozenset[int],
        outbox: Outbox,
        on_finish: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.counters = Counters()
        self._scheduler = scheduler
        self._executor = executor
        self._memory = memory
        self._keeping = keeping
        self._pictures = pictures
        self._restores = restores
        self._end_tokens = end_tokens
        self._outbox = outbox
        self._on_finish = on_finish
        self._out: dict[str, list[SequenceUpdate]] = defaultdict(list)
        self._failed: DeviceFailed | None = None
        self.told = 0

    def begin(self, sequence: Sequence) -> None:
        """Adds an accepted sequence."""
        self.sequences[sequence.id] = sequence
        self.counters.requests += 1

    # Tokens.

    def tell_next(self, drawn: Ready) -> None:
        """Delivers a sequence's next token, and ends the sequence if it is the last."""
        if drawn.failure:
            self.fail(drawn.sequence_id, drawn.failure)
            return
        sequence = self.sequences[drawn.sequence_id]
        update = self._update_of(sequence, drawn)
        self._note_drawn(sequence, drawn)
        if update.finish is None:
            self.tell(sequence, update)
        else:
            self.finish(sequence, update)

    def tell_first(self, drawn: Ready) -> bool:
        """Delivers a first token before the step that returns it again. Returns False, and does nothing, if the token
        ends its sequence: that waits for the step."""
        sequence = self.sequences[drawn.sequence_id]
        update = self._update_of(sequence, drawn)
        if drawn.failure or update.finish is not None:
            return False
        self._note_drawn(sequence, drawn)
        self.tell(sequence, update)
        return True

    def _update_of(self, sequence: Sequence, drawn: Ready) -> SequenceUpdate:
        """Returns the update of a sequence's next token."""
        scheduled, sampling, token = self._scheduler.sequence(drawn.sequence_id), sequence.request.sampling, drawn.token
        assert scheduled is not None
        # A grammar allows an end token only at its end, after which nothing could follow.
        ends = token in self._end_tokens and (not sampling.ignore_eos or bool(sampling.grammar))
        stopped = ends or token in sampling.stop_token_ids
        finish = "stop" if stopped else "length" if scheduled.generated + 1 >= scheduled.max_tokens else None
        logprobs = None if drawn.logprobs is None else [drawn.logprobs]
        prefill_s = None if sequence.emitted else sequence.placed_s
        return SequenceUpdate(drawn.sequence_id, [token], finish, logprobs=logprobs, prefill_s=prefill_s)

    def _note_drawn(self, sequence: Sequence, drawn: Ready) -> None:
        self._scheduler.decoded(drawn.sequence_id)
        sequence.tokens.append(drawn.token)
        sequence.emitted += 1
        sequence.span.note_token()
        self.counters.generated_tokens += 1
        self.told += 1

    def tell(self, sequence: Sequence, update: SequenceUpdate) -> None:
        """Queues an update for the next `flush`."""
        self._out[sequence.request.consumer].append(update)

    def flush(self) -> None:
        """Hands out all queued updates, if there are any."""
        if self._out:
            out, self._out = self._out, defaultdict(list)
            self._outbox(out)

    # Ends.

    def finish(self, sequence: Sequence, last: SequenceUpdate) -> None:
        """Ends a sequence that is complete, and keeps its KV."""
        self._keep(sequence, ended=True)
        self._on_finish(sequence)
        self._scheduler.finish(sequence.id)
        self._leave(sequence.id, last)
        self.told += 1

    def end(self, request_id: str, finish: str, error: SatchelError | None = None, *, ended: bool = False) -> None:
        """Ends a sequence without a further token, and keeps its KV. The scheduler may have dropped it already.

        Args:
            ended: whether the answer is complete, not aborted.
        """
        self._keep(self.sequences[request_id], ended=ended)
        if self._scheduler.sequence(request_id) is not None:
            self._scheduler.finish(request_id)
        self._leave(request_id, SequenceUpdate(request_id, [], finish, error=error.to_wire() if error else None))

    def _keep(self, sequence: Sequence, *, ended: bool) -> None:
        """Caches a sequence's KV. If the device has failed, the sequence ends anyway, and `check` raises the error
        later: the tokens that were delivered are right, and other sequences that end in this step must end too."""
        if self._failed is None:
            try:
                self._keeping.keep(sequence, ended=ended)
            except DeviceFailed as error:
                self._failed = error

    def check(self) -> None:
        """Call this before anything else is read from the device.

        Raises:
            DeviceFailed: the device failed while sequences ended.
        """
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def fail(self, request_id: str, why: str) -> None:
        """Ends a sequence with an error and drops its KV, which cannot be used."""
        self._scheduler.finish(request_id)
        self._leave(request_id, SequenceUpdate(request_id, [], "error", error=GenerationFailed(why).to_wire()))

    def attempt(self, request_id: str, action: Callable[..., None], *arguments: Any) -> None:
        """Runs an action on one sequence; if it raises, only that sequence ends."""
        try:
            action(*arguments)
        except Exception as error:
            if not isinstance(error, SatchelError):
                with working_for(request_of(request_id)):
                    logger.exception("request %s failed", request_id)
                error = GenerationFailed(f"generation failed: {type(error).__name__}")
            self.end(request_id, "error", error)

    def _leave(self, request_id: str, last: SequenceUpdate) -> None:
        sequence = self.sequences.pop(request_id)
        self._pictures.leave(request_id)
        self.vacate(sequence)
        sequence.span.leave(last)
        self.tell(sequence, last)

    def vacate(self, sequence: Sequence) -> None:
        """Releases what a sequence holds in memory and in the executor. A preempted sequence comes back later."""
        self._restores.leave(sequence.id)
        self._memory.leave(sequence)
        self._executor.leave([sequence.id])
