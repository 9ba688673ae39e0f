"""The replica's step loop: one thread that owns the model, the scheduler and the prefix cache.

Other threads only put commands into the inbox and get results through callbacks, so nothing here is locked. Each turn
of the loop: take commands, let the scheduler say who leaves, prefill within the step's budget, decode once, and hand
all new tokens out in one call a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...cluster.config import Scheduling
from ...cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    SatchelError,
)
from ..kv_store.blocks import BLOCK_TOKENS, block_ids
from ..messages import GenerateRequest, RowUpdate
from .executor import BatchExecutor
from .kv_cache import slab_bytes
from .models import LoadedModel
from .prefix import PrefixCache
from .scheduler import Chunk, Limits, Row, Scheduler

logger = logging.getLogger(__name__)

Argument = TypeVar("Argument")

RATE_SMOOTHING = 0.2
RATE_TOKENS_MIN = 64
"""Shorter chunks measure the cost of a call, not of a token."""


class Outbox(Protocol):
    def __call__(self, updates: dict[str, list[RowUpdate]]) -> None:
        """Take one step's updates by consumer. Called on the engine's thread; must not block."""


@dataclass
class Counters:
    """Totals since the engine started, and the measured prefill rate."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prefill_tokens_per_s: float = 0.0


@dataclass
class _Sequence:
    """A request with its tokens so far. `stored` counts the whole blocks already in the prefix cache."""

    request: GenerateRequest
    tokens: list[int]
    ids: list[bytes]
    emitted: int = 0
    stored: int = 0
    cached: int | None = None

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True)
class _Submit:
    request: GenerateRequest
    reply: Callable[[SatchelError | None], None]


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    action: Callable[[], None]


class Engine:
    """Runs one loaded model. Start it with `run` on the thread that loaded the model.

    Args:
        loaded: the model; its arrays belong to the calling thread.
        outbox: where tokens go, once a step.
        kv_bytes_max: memory for the decoding batch.
    """

    def __init__(self, loaded: LoadedModel, scheduling: Scheduling, kv_bytes_max: int, outbox: Outbox) -> None:
        self.loaded = loaded
        self.limits = Limits(
            rows_max=scheduling.rows_max,
            queue_requests_max=scheduling.queue_requests_max,
            prefill_chunk_tokens=scheduling.prefill_chunk_tokens,
            kv_tokens_max=max(1, kv_bytes_max // loaded.spec.bytes_per_token),
        )
        self.scheduler = Scheduler(self.limits)
        self.prefixes: PrefixCache = PrefixCache(scheduling.prefix_bytes_max)
        self.executor = BatchExecutor(loaded)
        self.counters = Counters()
        self.beat = time.monotonic()
        self._sequences: dict[str, _Sequence] = {}
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Call | None] = queue.SimpleQueue()
        self._outbox = outbox
        self._out: dict[str, list[RowUpdate]] = defaultdict(list)
        self._draining = threading.Event()
        self._stopped = threading.Event()

    # Called from any thread.

    def submit(self, request: GenerateRequest, reply: Callable[[SatchelError | None], None]) -> None:
        """Queue a request. `reply` gets None once it is accepted, or why not; it is called on the engine's thread."""
        self._inbox.put(_Submit(request, reply))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Take requests out before the next step. Unknown ids are ignored."""
        self._inbox.put(_Abort(request_ids))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread between two steps, where all state is consistent."""
        self._inbox.put(_Call(action))

    @property
    def active(self) -> list[str]:
        """Ids of the requests that are queued or running."""
        return list(self._sequences)

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining.set()

    def end_all(self) -> None:
        """End every row with an error that says the replica is shutting down."""

        def end() -> None:
            for request_id in list(self._sequences):
                self.scheduler.finish(request_id)
                self._end(request_id, "error", Draining("the server is shutting down"))

        self.call(end)

    def stop(self) -> None:
        """End `run` after the current step."""
        self._stopped.set()
        self._inbox.put(None)

    # The engine's thread.

    def run(self) -> None:
        while not self._stopped.is_set():
            self.beat = time.monotonic()
            busy = self.turn()
            if not busy:
                self._wait()

    def turn(self) -> bool:
        """One turn of the loop. Returns False when there was nothing to do."""
        self._take_commands()
        plan = self.scheduler.plan(time.monotonic())
        for request_id in plan.expired:
            self._end(request_id, "error", DeadlineExceeded("the request's deadline has passed"))
        for request_id in plan.cut:
            self._end(request_id, "length")
        self.executor.leave(plan.preempted)
        prefilled = self._prefill()
        decoded = self._decode()
        self._flush()
        return bool(prefilled or decoded or plan.expired or plan.cut or plan.preempted)

    def _wait(self) -> None:
        """Sleep until a command comes; while rows wait for their deadline, at most a little."""
        try:
            command = self._inbox.get(timeout=0.05 if self._sequences else 0.5)
        except queue.Empty:
            return
        self._handle(command)

    def _take_commands(self) -> None:
        while True:
            try:
                self._handle(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _handle(self, command: _Submit | _Abort | _Call | None) -> None:
        if isinstance(command, _Submit):
            refusal = self._accept(command.request)
            command.reply(refusal)
        elif isinstance(command, _Abort):
            for request_id in command.request_ids:
                if request_id in self._sequences:
                    self.scheduler.finish(request_id)
                    self._end(request_id, "abort")
        elif isinstance(command, _Call):
            command.action()

    def _accept(self, request: GenerateRequest) -> SatchelError | None:
        tokens = list(request.prompt)
        refusal = self._refusal(request, tokens)
        if refusal is not None:
            return refusal
        room = self.loaded.context_tokens - len(tokens)
        row = Row(
            request_id=request.request_id,
            prompt=len(tokens) - 1,
            max_tokens=min(request.sampling.max_tokens, room),
            priority=request.priority,
            deadline=time.monotonic() + request.deadline_s,
        )
        self.scheduler.add(row)
        self._sequences[request.request_id] = _Sequence(request, tokens, list(request.block_ids))
        self.counters.requests += 1
        self.counters.prompt_tokens += len(tokens)
        return None

    def _refusal(self, request: GenerateRequest, tokens: list[int]) -> SatchelError | None:
        context = self.loaded.context_tokens
        if self._draining.is_set():
            return Draining("the replica is shutting down")
        if request.request_id in self._sequences:
            return InvalidRequest(f"request {request.request_id} is already running")
        if not tokens or max(tokens) >= self.loaded.vocabulary_size or min(tokens) < 0:
            return InvalidRequest("the prompt is empty or has token ids outside the vocabulary", param="prompt")
        if len(tokens) >= context:
            return ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens; the model's context is {context} tokens with the answer"
            )
        reason = self.scheduler.refusal(len(tokens) - 1)
        if reason == "too_long":
            most = self.limits.kv_tokens_max
            return ContextLengthExceeded(f"the prompt has {len(tokens)} tokens; memory holds {most} on this machine")
        if reason == "full":
            return QueueFull(f"the queue is full ({self.limits.queue_requests_max} requests wait)")
        return None

    def _prefill(self) -> bool:
        budget = self.limits.prefill_chunk_tokens
        worked = False
        while budget > 0:
            admitted = self.scheduler.admit()
            if admitted is not None:
                worked = True
                self._attempt(admitted, self._open, admitted)
            chunk = self.scheduler.next_chunk(budget)
            if chunk is None and admitted is None:
                break
            if chunk is not None:
                worked = True
                budget -= chunk.stop - chunk.start
                self._attempt(chunk.request_id, self._compute, chunk)
        return worked

    def _attempt(self, request_id: str, action: Callable[[Argument], None], argument: Argument) -> None:
        """Do what concerns one row only; if it raises, that row ends and no other."""
        try:
            action(argument)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if self.scheduler.row(request_id) is not None:
                self.scheduler.finish(request_id)
            self._end(request_id, "error", GenerationFailed(f"generation failed: {type(error).__name__}"))

    def _open(self, request_id: str) -> None:
        sequence = self._sequences[request_id]
        row = self.scheduler.row(request_id)
        assert row is not None
        blocks, tail, tail_tokens, reused = [], None, 0, 0
        if self.loaded.spec.reusable:
            hit = self.prefixes.match(sequence.request.root_id, sequence.ids, sequence.tokens, row.prompt)
            blocks, tail, tail_tokens, reused = hit.blocks, hit.tail, hit.tail_tokens, hit.tokens
        self.executor.open(request_id, blocks, tail, tail_tokens)
        sequence.stored = len(blocks)
        if sequence.cached is None:
            sequence.cached = reused
            self.counters.cached_tokens += reused
            self._emit(sequence, RowUpdate(request_id, [], cached_tokens=reused))
        self.scheduler.reused(request_id, reused)
        if reused == row.prompt:
            self._start_decoding(sequence)

    def _compute(self, chunk: Chunk) -> None:
        sequence = self._sequences[chunk.request_id]
        started = time.perf_counter()
        self.executor.prefill(chunk.request_id, sequence.tokens[chunk.start : chunk.stop])
        self._note_rate(chunk.stop - chunk.start, time.perf_counter() - started)
        self.scheduler.prefilled(chunk)
        self._remember(self._store_blocks, sequence, chunk.stop)
        row = self.scheduler.row(chunk.request_id)
        if row is not None and row.done == row.prompt:
            self._start_decoding(sequence)

    def _note_rate(self, tokens: int, seconds: float) -> None:
        if tokens < RATE_TOKENS_MIN:
            return
        rate = tokens / max(1e-9, seconds)
        old = self.counters.prefill_tokens_per_s
        self.counters.prefill_tokens_per_s = rate if old == 0 else old + RATE_SMOOTHING * (rate - old)

    def _start_decoding(self, sequence: _Sequence) -> None:
        request = sequence.request
        drawn = request.generated + sequence.emitted
        try:
            self.executor.join(sequence.id, sequence.tokens[-1], request.sampling, drawn)
        except Exception:
            # The batch may be half changed: its rows begin again, and this one ends.
            self.executor.clear_batch()
            self.scheduler.requeue_running(but=sequence.id)
            raise

    def _decode(self) -> bool:
        if not self.scheduler.decoding():
            return False
        try:
            ready = self.executor.step()
        except Exception:
            logger.exception(
                "a decode step of %d rows failed; its rows run again alone", len(self.scheduler.decoding())
            )
            self.executor.clear_batch()
            for request_id in self.scheduler.batch_failed():
                self.scheduler.finish(request_id)
                self._end(request_id, "error", GenerationFailed("generation failed in the model"))
            return True
        self.counters.steps += 1
        for request_id, token in ready:
            self._take_token(request_id, token)
        return True

    def _take_token(self, request_id: str, token: int) -> None:
        sequence = self._sequences[request_id]
        row = self.scheduler.row(request_id)
        assert row is not None
        self.scheduler.decoded(request_id)
        sequence.tokens.append(token)
        sequence.emitted += 1
        self.counters.generated_tokens += 1
        sampling = sequence.request.sampling
        stopped = token in self.loaded.eos_token_ids and not sampling.ignore_eos
        if not stopped and row.generated < row.max_tokens:
            self._emit(sequence, RowUpdate(request_id, [token]))
            return
        self._remember(self._store_all, sequence)
        self.scheduler.finish(request_id)
        self._end(request_id, "stop" if stopped else "length", last=[token])

    def _remember(self, store: Callable[..., None], sequence: _Sequence, *arguments: int) -> None:
        """Keep KV for later. Memory only saves work, so a failure of it fails no request."""
        try:
            store(sequence, *arguments)
        except Exception:
            logger.exception("the KV of request %s is not kept", sequence.id)

    def _end(
        self, request_id: str, finish: str, error: SatchelError | None = None, last: list[int] | None = None
    ) -> None:
        """The last update of a row that the scheduler has let go."""
        sequence = self._sequences.pop(request_id)
        self.executor.leave([request_id])
        self._emit(sequence, RowUpdate(request_id, last or [], finish, error=error.to_wire() if error else None))

    def _store_blocks(self, sequence: _Sequence, computed: int) -> None:
        """Keep the whole blocks among the first `computed` tokens; the row's caches hold at least those."""
        if not self.loaded.spec.reusable:
            return
        first, last = sequence.stored, min(computed // BLOCK_TOKENS, len(sequence.ids))
        if last <= first:
            return
        spans = [(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for index in range(first, last)]
        wanted = [span for span in spans if sequence.ids[span[0] // BLOCK_TOKENS] not in self.prefixes]
        slabs = self.executor.cut(sequence.id, wanted)
        new = [
            (start // BLOCK_TOKENS, sequence.tokens[start:stop], slab, slab_bytes(slab))
            for (start, stop), slab in zip(wanted, slabs, strict=True)
        ]
        self.prefixes.put_blocks(sequence.ids[:last], new)
        sequence.stored = last

    def _store_all(self, sequence: _Sequence) -> None:
        """Keep a finished row: its answer's whole blocks and the open tail.

        The last token's KV belongs to the step in flight; `cut` waits for it.
        """
        if not self.loaded.spec.reusable:
            return
        root, tokens = sequence.request.root_id, sequence.tokens
        sequence.ids = block_ids(root, tokens)
        self._store_blocks(sequence, len(tokens))
        start = len(sequence.ids) * BLOCK_TOKENS
        if start < len(tokens):
            (slab,) = self.executor.cut(sequence.id, [(start, len(tokens))])
            self.prefixes.put_tail(root, sequence.ids, tokens[start:], slab, slab_bytes(slab))

    def _emit(self, sequence: _Sequence, update: RowUpdate) -> None:
        self._out[sequence.request.consumer].append(update)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, defaultdict(list)
            self._outbox(out)
