"""The engine's input: its inbox of commands, admission of requests, and the check of its tables while it is idle.

Other threads send commands, which the engine handles between two steps.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ....cluster.errors import (
    ComputesOtherwise,
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    SatchelError,
    Unavailable,
)
from ...protocol.replica_messages import GenerateRequest, PooledTexts, PoolingRequest
from ..device.device_errors import DeviceFailed
from ..execution.executor import BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..execution.media.language_inputs import ImageEmbeddings
from ..memory.restores import Reading
from ..memory.sequence_memory import Restored, Sequence, SequenceMemory
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import ScheduledSequence
from .delivery import Delivery
from .encode_queue import PictureQueue

logger = logging.getLogger(__name__)

IDLE_S = 2.0
"""How long an engine must be idle before it checks its tables."""


@dataclass(frozen=True)
class Submit:
    """Queues a request. `reply` gets None if it is accepted, else the refusal. `known` and `embeddings` as for
    `Engine.submit`."""

    sequence: Sequence
    reply: Callable[[SatchelError | None], None]
    known: int
    embeddings: dict[int, ImageEmbeddings]


@dataclass(frozen=True)
class Pool:
    """Queues a request for vectors. `reply` gets them, or the refusal, or why it failed."""

    request: PoolingRequest
    reply: Callable[[PooledTexts | SatchelError], None]


@dataclass(frozen=True)
class ReadBack:
    """Delivers what was read back for a sequence; None if nothing was."""

    reading: Reading
    restored: Restored | None


@dataclass(frozen=True)
class Abort:
    """Aborts requests of either kind; unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class RunOnEngine:
    """Runs `action` on the engine's thread between two steps."""

    action: Callable[[], None]


Command = Submit | Pool | ReadBack | Abort | RunOnEngine


class Inbox:
    """The engine's queue of commands, with one reader. It needs no limit: only the commands of one step wait here. The
    scheduler's own queue has the limit, which is checked when a request is taken from here."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Queues a command. May be called from any thread."""
        self._queue.put(command)

    def wake(self) -> None:
        """Makes `wait` return."""
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def take(self) -> Iterator[Command]:
        """Yields all commands that are queued now."""
        # Nobody else takes any.
        while not self._queue.empty():
            command = self._queue.get_nowait()
            if command is not None:
                yield command

    def wait(self, timeout_s: float) -> Command | None:
        """Waits for the next command; None after `timeout_s` without one, or after `wake`."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Intake:
    """Accepts or refuses requests. Only `close` may be called from other threads than the engine's."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        memory: SequenceMemory,
        pictures: PictureQueue,
        delivery: Delivery,
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._memory = memory
        self._pictures = pictures
        self._delivery = delivery
        self._closed: SatchelError | None = None

    def close(self, refusal: SatchelError) -> None:
        """Refuses new requests from now on."""
        self._closed = refusal

    @property
    def closed(self) -> SatchelError | None:
        """Why all requests are refused; None if they are not."""
        return self._closed

    def accept(self, submitted: Submit) -> SatchelError | None:
        """Makes a sequence of the request. It is queued, or waits for its pictures.

        Returns:
            The refusal; None if the sequence is accepted.
        """
        sequence = submitted.sequence
        request, tokens = sequence.request, sequence.tokens
        if (refused := self._refusal(sequence)) is not None:
            return refused
        self._memory.limit(request)
        # The last prompt token is the first decode step's input, unless nothing is to be generated.
        max_tokens = min(request.sampling.max_tokens, self._loaded.context_tokens - len(tokens))
        known = max(submitted.known, self._memory.known(sequence))
        scheduled = ScheduledSequence(
            request_id=request.request_id,
            prompt=len(tokens) - (max_tokens > 0),
            max_tokens=max_tokens,
            priority=request.priority,
            deadline=time.monotonic() + request.deadline_s,
            tenant=request.tenant,
            flow=request.flow,
            keys=self._memory.keys(sequence),
            twin=self._memory.twin(sequence),
            known=known,
            pause=self._memory.pause(request),
        )
        prefixes = self._memory.prefixes
        try:
            pictured = known
            if request.media and not prefixes.is_plain:
                pictured = prefixes.reusable_tokens(request.root_id, sequence.ids, tokens)
            ready = self._pictures.begin(sequence, scheduled, pictured, submitted.embeddings)
        except DeviceFailed:
            self._pictures.leave(request.request_id)
            raise
        except (SatchelError, ValueError, IndexError, RuntimeError) as error:
            self._pictures.leave(request.request_id)
            if isinstance(error, SatchelError):
                return error
            return InvalidRequest(f"the pictures do not fit the prompt: {error}", param="messages")
        self._delivery.begin(sequence)
        if ready:
            self._scheduler.add(scheduled)
        return None

    def _refusal(self, sequence: Sequence) -> SatchelError | None:
        request = sequence.request
        if self._closed is not None:
            return self._closed
        if not self._loaded.computes(request):
            # Its KV would be stored under the block ids of another model.
            return ComputesOtherwise("the request was made for a model that computes differently")
        if request.request_id in self._delivery.sequences:
            return Unavailable(f"request {request.request_id} has not left yet")
        refused = self._pictures.refusal(request.media, sequence.tokens)
        return refused or self._no_room(request, sequence.given())

    def _no_room(self, request: GenerateRequest, tokens: list[int]) -> SatchelError | None:
        """Returns the refusal if the tokens are invalid, or the model or the queue has no room for them."""
        context, scheduler = self._loaded.context_tokens, self._scheduler
        if not tokens or max(tokens) >= self._loaded.vocabulary_size or min(tokens) < 0:
            return InvalidRequest("the prompt is empty or has token ids outside the vocabulary", param="prompt")
        if len(tokens) >= context:
            return ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens; the model's context is {context} tokens with the answer"
            )
        draws = request.sampling.max_tokens > 0
        reason = scheduler.refusal(len(tokens) - draws, len(self._pictures), request.tenant, request.flow)
        if reason == "too_long":
            most = max(0, scheduler.limits.prompt_tokens_max + draws)
            return ContextLengthExceeded(f"the prompt has {len(tokens)} tokens; memory holds {most} on this machine")
        if reason == "full":
            return QueueFull(f"the queue is full ({scheduler.limits.queue_requests_max} requests wait)")
        if reason == "full_for_it":
            return QueueFull("the queue is full for this caller: the rest of it is reserved for others")
        return None


class IdleCheck:
    """A check of all tables, once per idle period. Wrong tables would give wrong answers, but empty ones only cost
    time. So everything is cleared if a check fails.

    Args:
        busy: whether a command waits; asked every few thousand entries, and then the check stops.

    Attributes:
        failures: how often a check failed.
    """

    def __init__(
        self, scheduler: Scheduler, executor: BatchExecutor, memory: SequenceMemory, busy: Callable[[], bool]
    ) -> None:
        self.failures = 0
        self._scheduler = scheduler
        self._executor = executor
        self._memory = memory
        self._busy = busy
        self._idle_since_s: float | None = None
        self._counted = False

    def note_work(self) -> None:
        """Ends the idle period."""
        self._idle_since_s, self._counted = None, False

    def idle_s(self, now_s: float) -> float:
        """Returns for how long there has been no work. The time starts at the first call of `rest`."""
        return 0.0 if self._idle_since_s is None else now_s - self._idle_since_s

    def rest(self, now_s: float) -> None:
        """Checks the tables after `IDLE_S` without a request, and clears them if the check fails."""
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if self._counted or now_s - self._idle_since_s < IDLE_S:
            return
        self._counted = True
        try:
            self._scheduler.check()
            self._executor.check()
            if self._scheduler.running or self._scheduler.waiting:
                raise AssertionError(
                    f"{self._scheduler.running + self._scheduler.waiting} sequences belong to no request"
                )
            for _ in self._memory.recount():
                if self._busy():
                    break
        except Exception:
            # If a table is broken, any exception may be raised.
            logger.exception("the replica's tables are wrong; it clears the KV that it keeps in memory")
            self.failures += 1
            self._memory.reset()
            self._scheduler.reset()
            self._executor.clear_batch()
