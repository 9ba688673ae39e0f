"""What comes to an engine: commands in their order, requests that are taken in or refused, and what it does while
nothing comes.

Other threads want something of the engine's by commands, which it takes between two steps. With nothing to do it counts
again: a wrong table would give wrong answers; an empty one costs work only, so what does not add up is thrown away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...cluster.config import Scheduling
from ...cluster.errors import (
    ContextLengthExceeded,
    Draining,
    InvalidRequest,
    QueueFull,
    SatchelError,
    Unavailable,
)
from ..protocol.messages import GenerateRequest
from .delivery import Delivery
from .encode_queue import PictureQueue
from .execution.executor import BatchExecutor
from .execution.models import LoadedModel
from .execution.vision import Features
from .kv.caches import ModelCacheSpec
from .scheduling.scheduler import Limits, ScheduledRow, Scheduler
from .tiers.memory import Restored, RowMemory, Sequence
from .tiers.restores import Reading

logger = logging.getLogger(__name__)

IDLE_S = 2.0
"""How long nothing must have been asked before an engine counts again."""


@dataclass(frozen=True)
class Submit:
    """Queue a request. `reply` gets None once it is accepted, or why not; the disk has about its first `known` tokens,
    and `features` were read back for its pictures."""

    request: GenerateRequest
    reply: Callable[[SatchelError | None], None]
    known: int = 0
    features: dict[int, Features] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadBack:
    """What a row was waiting for; None for nothing."""

    reading: Reading
    restored: Restored | None


@dataclass(frozen=True)
class Abort:
    """Take requests out; unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Run `action` on the engine's thread, where all state is consistent."""

    action: Callable[[], None]


Command = Submit | ReadBack | Abort | Call


class Inbox:
    """Commands for one reader. Without a limit of its own: requests are refused when they are taken, by the scheduler's
    queue, so all that may wait here is what arrives during one step."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wake(self) -> None:
        """Let `wait` return."""
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def take(self) -> Iterator[Command]:
        """All that is there now."""
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                yield command

    def wait(self, timeout_s: float) -> Command | None:
        """The next command; None after `timeout_s` without one, or after `wake`."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None


def limits_of(spec: ModelCacheSpec, scheduling: Scheduling, kv_bytes_max: int) -> Limits:
    """What fits. Windows, states and open blocks are counted for every place, the rest is for tokens."""
    rows_max = scheduling.rows_max
    if spec.bytes_per_row:
        rows_max = max(1, min(rows_max, kv_bytes_max // 2 // spec.bytes_per_row))
    chunk = scheduling.prefill_chunk_tokens
    return Limits(
        rows_max=rows_max,
        queue_requests_max=scheduling.queue_requests_max,
        prefill_chunk_tokens=min(chunk, spec.snapshot_tokens) if spec.recurrent else chunk,
        prefill_rows_max=scheduling.prefill_rows_max,
        kv_tokens_max=max(1, (kv_bytes_max - rows_max * spec.bytes_per_row) // spec.bytes_per_token),
    )


class Intake:
    """Takes requests in, or says why not. For the engine's thread, but for `drain`."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        memory: RowMemory,
        pictures: PictureQueue,
        delivery: Delivery,
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._memory = memory
        self._pictures = pictures
        self._delivery = delivery
        self._draining = threading.Event()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining.set()

    def accept(self, submitted: Submit) -> SatchelError | None:
        """A row for the request, in the scheduler's queue or waiting for its pictures; or why there is none."""
        request = submitted.request
        tokens = list(request.prompt)
        refused = self._refusal(request, tokens)
        if refused is not None:
            return refused
        self._memory.limit(request)
        # The last token is the first to draw from; where none is drawn it is like the others.
        max_tokens = min(request.sampling.max_tokens, self._loaded.context_tokens - len(tokens))
        sequence = Sequence(request, tokens, list(request.block_ids))
        known = max(submitted.known, self._memory.known(sequence))
        row = ScheduledRow(
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
        )
        prefixes = self._memory.prefixes
        try:
            pictured = known
            if request.media and not prefixes.is_plain:
                pictured = prefixes.reusable_tokens(request.root_id, sequence.ids, tokens)
            ready = self._pictures.begin(sequence, row, pictured, submitted.features)
        except (SatchelError, ValueError, IndexError, RuntimeError) as error:
            self._pictures.leave(request.request_id)
            if isinstance(error, SatchelError):
                return error
            return InvalidRequest(f"the pictures do not fit the prompt: {error}", param="messages")
        self._delivery.begin(sequence)
        if ready:
            self._scheduler.add(row)
        return None

    def _refusal(self, request: GenerateRequest, tokens: list[int]) -> SatchelError | None:
        if self._draining.is_set():
            return Draining("the replica is shutting down")
        if request.request_id in self._delivery.rows:
            return Unavailable(f"request {request.request_id} has not left yet")
        refused = self._pictures.refusal(request.media, tokens)
        return refused or self._no_room(request, Sequence(request, tokens, []).given())

    def _no_room(self, request: GenerateRequest, tokens: list[int]) -> SatchelError | None:
        """Whether the model and the queue have room for `tokens`: the prompt and what it has said already."""
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
            most = scheduler.limits.kv_tokens_max
            return ContextLengthExceeded(f"the prompt has {len(tokens)} tokens; memory holds {most} on this machine")
        if reason == "full":
            return QueueFull(f"the queue is full ({scheduler.limits.queue_requests_max} requests wait)")
        if reason == "full_for_it":
            return QueueFull("the queue is full for this caller: what is left of it is for others")
        return None


class IdleCheck:
    """Counts once in every time without requests.

    Args:
        busy: asked every few thousand entries; counting is given up where somebody wants something.

    Attributes:
        failures: how often something did not add up.
    """

    def __init__(
        self, scheduler: Scheduler, executor: BatchExecutor, memory: RowMemory, busy: Callable[[], bool]
    ) -> None:
        self.failures = 0
        self._scheduler = scheduler
        self._executor = executor
        self._memory = memory
        self._busy = busy
        self._idle_since_s: float | None = None
        self._counted = False

    def note_work(self) -> None:
        """Somebody wants something."""
        self._idle_since_s, self._counted = None, False

    def rest(self, now_s: float) -> None:
        """Called while there is no request. Counts when it is time to; where something does not add up, everything is
        forgotten."""
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if self._counted or now_s - self._idle_since_s < IDLE_S:
            return
        self._counted = True
        try:
            self._scheduler.check()
            if self._scheduler.running or self._scheduler.waiting:
                raise AssertionError(f"{self._scheduler.running + self._scheduler.waiting} rows are nobody's")
            for _ in self._memory.recount():
                if self._busy():
                    break
        except Exception:
            # Whatever it is: in a broken table anything may fail.
            logger.exception("the replica's tables are wrong; it forgets what rows left in memory")
            self.failures += 1
            self._memory.reset()
            self._scheduler.reset()
            self._executor.clear_batch()
