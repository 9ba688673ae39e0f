"""The replica's step loop: one thread that owns the model, the scheduler and the prefix cache.

Other threads only put commands into the inbox and get results through callbacks, so nothing here is locked. Each turn
of the loop: take commands, let the scheduler say who leaves, prefill within the step's budget, decode once, and hand
all new tokens out in one call a step; first tokens before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...cluster.config import Scheduling
from ...cluster.errors import (
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    SatchelError,
    Unavailable,
)
from ..messages import GenerateRequest, RowUpdate
from .admission import limits_of, refusal
from .disk_tier import DiskTier, Prompt
from .executor import BatchExecutor, Ready
from .feature_tier import FeatureTier
from .idle import IdleCheck
from .inbox import Abort, Call, Command, Inbox, ReadBack, Submit
from .memory import Restored, RowMemory, Sequence
from .models import LoadedModel
from .pace import PrefillPace
from .picture_queue import PictureQueue
from .restores import Restores
from .scheduler import Chunk, Row, Scheduler
from .turns import Turns
from .vision import Features

logger = logging.getLogger(__name__)


class Outbox(Protocol):
    def __call__(self, updates: dict[str, list[RowUpdate]]) -> None:
        """Take one step's updates by consumer. Called on the engine's thread; must not block."""


@dataclass
class Counters:
    """Totals since the engine started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0


class Engine:
    """Runs one loaded model. Start it with `run` on the thread that loaded the model.

    Args:
        loaded: the model; its arrays belong to the calling thread.
        outbox: where tokens go, once a step.
        kv_bytes_max: memory for the decoding batch.
        disk: where what agents' rows leave is written; None for nowhere.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduling: Scheduling,
        kv_bytes_max: int,
        outbox: Outbox,
        disk: DiskTier | None = None,
    ) -> None:
        self.loaded = loaded
        self.limits = limits_of(loaded.spec, scheduling, kv_bytes_max)
        self.scheduler = Scheduler(self.limits)
        self.pace = PrefillPace(self.limits.prefill_chunk_tokens, scheduling.prefill_pause_s)
        self.executor = BatchExecutor(loaded)
        self.memory = RowMemory(loaded.spec, self.executor, scheduling.prefix_bytes_max, writes=disk is not None)
        self.prefixes = self.memory.prefixes
        self._inbox = Inbox()
        self.pictures = PictureQueue(
            loaded.vision,
            scheduling.vision_bytes_max,
            FeatureTier(disk) if disk is not None else None,
            self._inbox.wake,
        )
        self.counters = Counters()
        self._disk = disk
        self._turns = Turns(self.memory, disk, self.call)
        self.restores = Restores(disk, lambda reading, restored: self._inbox.put(ReadBack(reading, restored)))
        self._sequences: dict[str, Sequence] = {}
        self._idle = IdleCheck(self.memory, lambda: not self._inbox.empty)
        self._outbox = outbox
        self._out: dict[str, list[RowUpdate]] = defaultdict(list)
        self._draining = threading.Event()
        self._stopped = threading.Event()

    # Called from any thread.

    def look_up(self, request: GenerateRequest) -> tuple[int, dict[int, Features]]:
        """About how many of a prompt's first tokens memory and disk have, and what the disk has of its pictures; for
        `submit`. Fetches from another node what is to come from there. Blocks."""
        if self._disk is None:
            return 0, {}
        hot = self.prefixes.peek(request.root_id, request.block_ids, request.prompt)
        if request.pull_from and request.pull_tokens > hot:
            self._disk.pull(request)
        if not request.media:
            # A row's KV is read back when it has a place.
            return max(hot, min(request.remembered_tokens, len(request.prompt) - 1)), {}
        known = self._disk.look(Prompt.of(request), hot)
        # Windows and snapshots may end what can be reused sooner, and pictures before that are needed again then.
        return known, self.pictures.read_back(request, known if self.prefixes.is_plain else 0)

    def submit(
        self,
        request: GenerateRequest,
        reply: Callable[[SatchelError | None], None],
        known: int = 0,
        features: dict[int, Features] | None = None,
    ) -> None:
        """Queue a request. `reply` gets None once it is accepted, or why not; it is called on the engine's thread.

        Args:
            known: about how many of its prompt's first tokens the disk has.
            features: what was read back for its pictures, by their indexes.
        """
        self._inbox.put(Submit(request, reply, known, features or {}))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Take requests out before the next step. Unknown ids are ignored."""
        self._inbox.put(Abort(request_ids))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread between two steps, where all state is consistent."""
        self._inbox.put(Call(action))

    @property
    def failed_checks(self) -> int:
        """How often its tables did not add up, and what rows left was forgotten."""
        return self._idle.failures

    def changes(self, *, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Ids of blocks and features that have come to memory and gone from it since the last call; with `whole` all
        that are there instead of those that have come. On the engine's thread."""
        (blocks, gone), (features, lost) = self.prefixes.drain_events(), self.pictures.features.changes.take()
        if whole:
            blocks, features = self.prefixes.block_ids(), self.pictures.features.ids()
        return [*blocks, *features], [*gone, *lost]

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn, or for their pictures."""
        return self.scheduler.waiting + len(self.pictures)

    @property
    def pending_tokens(self) -> int:
        """What is still to be prefilled of all requests."""
        return self.scheduler.pending_tokens + self.pictures.pending_tokens

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
                self._keep(request_id)
                self._let_go(request_id)
                self._end(request_id, "error", Draining("the server is shutting down"))

        self.call(end)

    def stop(self) -> None:
        """End `run` after the current step."""
        self._stopped.set()
        self._inbox.wake()

    # The engine's thread.

    def run(self) -> None:
        while not self._stopped.is_set():
            busy = self.turn()
            if not busy:
                self._wait()

    def turn(self) -> bool:
        """One turn of the loop. Returns False when there was nothing to do."""
        moved = False
        self._turns.hand_over()
        self._take_commands()
        for row in self.pictures.step(self._attempt):
            self.scheduler.add(row)
            moved = True
        now = time.monotonic()
        plan = self.scheduler.plan(now)
        for request_id in [*plan.expired, *self.pictures.expired(now)]:
            self._keep(request_id)
            self._end(request_id, "error", DeadlineExceeded("the request's deadline has passed"))
        for request_id in plan.cut:
            self._keep(request_id, ended=True)
            self._end(request_id, "length")
        for request_id in plan.preempted:
            self._attempt(request_id, self._send_back, request_id)
        for request_id in self.restores.overdue():
            self._attempt(request_id, self._open, request_id)
        prefilled = self._prefill()
        decoded = self._decode()
        self._flush()
        return bool(prefilled or decoded or moved or plan.expired or plan.cut or plan.preempted)

    def _wait(self) -> None:
        """Sleep until a command comes; while rows wait for their deadline, at most a little."""
        if self._sequences:
            self._idle.note_work()
        elif not self._idle.look(self.scheduler, time.monotonic()):
            self.scheduler = Scheduler(self.limits)
            self.executor.clear_batch()
        command = self._inbox.wait(0.05 if self._sequences else 0.5)
        if command is not None:
            self._handle(command)

    def _take_commands(self) -> None:
        for command in self._inbox.take():
            self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._idle.note_work()
                command.reply(self._accept(command))
            case Abort():
                for request_id in command.request_ids:
                    if request_id in self._sequences:
                        self._keep(request_id)
                        self._let_go(request_id)
                        self._end(request_id, "abort")
            case ReadBack():
                request_id = command.reading.prompt.request_id
                if self.restores.end(command.reading):
                    self._attempt(request_id, self._open, request_id, command.restored)
            case Call():
                command.action()

    def _accept(self, submitted: Submit) -> SatchelError | None:
        request = submitted.request
        tokens = list(request.prompt)
        refused = self._refusal(request, tokens)
        if refused is not None:
            return refused
        self.memory.limit(request)
        # The last token is the first to draw from; where none is drawn it is like the others.
        max_tokens = min(request.sampling.max_tokens, self.loaded.context_tokens - len(tokens))
        sequence = Sequence(request, tokens, list(request.block_ids))
        known = max(submitted.known, self.memory.known(sequence))
        row = Row(
            request_id=request.request_id,
            prompt=len(tokens) - (max_tokens > 0),
            max_tokens=max_tokens,
            priority=request.priority,
            deadline=time.monotonic() + request.deadline_s,
            tenant=request.tenant,
            flow=request.flow,
            keys=self.memory.keys(sequence),
            twin=self.memory.twin(sequence),
            known=known,
        )
        try:
            pictured = known
            if request.media and not self.prefixes.is_plain:
                pictured = self.prefixes.reusable(request.root_id, sequence.ids, tokens)
            ready = self.pictures.begin(sequence, row, pictured, submitted.features)
        except (SatchelError, ValueError, IndexError, RuntimeError) as error:
            self.pictures.leave(request.request_id)
            if isinstance(error, SatchelError):
                return error
            return InvalidRequest(f"the pictures do not fit the prompt: {error}", param="messages")
        self._sequences[request.request_id] = sequence
        if ready:
            self.scheduler.add(row)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(tokens)
        return None

    def _refusal(self, request: GenerateRequest, tokens: list[int]) -> SatchelError | None:
        if self._draining.is_set():
            return Draining("the replica is shutting down")
        if request.request_id in self._sequences:
            return Unavailable(f"request {request.request_id} has not left yet")
        refused = self.pictures.refusal(request.media, tokens)
        given = Sequence(request, tokens, []).given()
        return refused or refusal(request, given, self.loaded, self.scheduler, len(self.pictures))

    def _prefill(self) -> bool:
        step_budget = budget = self.pace.budget(bool(self.scheduler.decoding()))
        worked = False
        while budget > 0:
            while not self._turns.behind and (admitted := self.scheduler.admit()) is not None:
                worked = True
                self._attempt(admitted, self._admit, admitted)
            chunks = self._next_chunks(budget, step_budget)
            if not chunks:
                break
            worked = True
            budget -= sum(chunk.stop - chunk.start for chunk in chunks)
            self._compute(chunks)
        return worked

    def _next_chunks(self, budget: int, step_budget: int) -> list[Chunk]:
        """Chunks of different rows, of at most `budget` tokens together; those of short prompts run as one."""
        chunks: list[Chunk] = []
        while (chunk := self.scheduler.next_chunk(budget, step_budget)) is not None:
            if any(chunk.request_id == other.request_id for other in chunks):
                break
            self.scheduler.prefilled(chunk)
            chunks.append(chunk)
            budget -= chunk.stop - chunk.start
        return chunks

    def _attempt(self, request_id: str, action: Callable[..., None], *arguments: Any) -> None:
        """Do what concerns one row only; if it raises, that row ends and no other."""
        try:
            action(*arguments)
        except Exception as error:
            if not isinstance(error, SatchelError):
                logger.exception("request %s failed", request_id)
                error = GenerationFailed(f"generation failed: {type(error).__name__}")
            self._keep(request_id)
            self._let_go(request_id)
            self._end(request_id, "error", error)

    def _let_go(self, request_id: str) -> None:
        if self.scheduler.row(request_id) is not None:
            self.scheduler.finish(request_id)

    def _admit(self, request_id: str) -> None:
        """Open a row that has a place, once what the disk has of it is read back."""
        sequence = self._sequences[request_id]
        hot = self.memory.peek(sequence)
        if self.restores.asks(sequence, hot, plain=self.prefixes.is_plain):
            # Others may want the room meanwhile.
            self.memory.pin(sequence, hot)
            self.scheduler.restores(request_id, hot)
            self.restores.begin(sequence, hot, self.pace.tokens_per_s)
        else:
            self._open(request_id)

    def _open(self, request_id: str, restored: Restored | None = None) -> None:
        sequence = self._sequences[request_id]
        row = self.scheduler.row(request_id)
        assert row is not None
        if restored is not None:
            self._remember(self.memory.put_back, sequence, restored)
        hit = self.memory.find(sequence, row.prompt)
        slabs = self.memory.slabs(hit, restored)
        self.executor.open(request_id, slabs, hit.tail, hit.tail_tokens, sequence.pictures)
        reused = hit.tokens
        if sequence.cached is None:
            sequence.cached = reused
            self.counters.cached_tokens += reused
            self.counters.prefix_hits += reused > 0
            self.counters.prefix_misses += reused == 0
            self._emit(sequence, RowUpdate(request_id, [], cached_tokens=reused))
        self.scheduler.reused(request_id, reused)
        if reused == row.prompt:
            self._start_decoding(sequence)

    def _compute(self, chunks: list[Chunk]) -> None:
        work = [
            (chunk.request_id, self._sequences[chunk.request_id].given(chunk.start, chunk.stop)) for chunk in chunks
        ]
        started = time.perf_counter()
        try:
            for chunk in chunks:
                self.pictures.require(self._sequences[chunk.request_id], chunk.start, chunk.stop)
            self.executor.prefill(work)
        except Exception:
            if len(chunks) > 1:
                logger.exception("a prefill of %d rows failed; they run again one by one", len(chunks))
            for chunk, part in zip(chunks, work, strict=True):
                self._attempt(chunk.request_id, self._compute_alone, chunk, part)
            return
        self.pace.note(sum(len(tokens) for _, tokens in work), time.perf_counter() - started)
        for chunk in chunks:
            self._attempt(chunk.request_id, self._computed, chunk)

    def _compute_alone(self, chunk: Chunk, part: tuple[str, list[int]]) -> None:
        if self.executor.length(chunk.request_id) < chunk.stop:
            self.pictures.require(self._sequences[chunk.request_id], chunk.start, chunk.stop)
            self.executor.prefill([part])
        self._computed(chunk)

    def _computed(self, chunk: Chunk) -> None:
        sequence = self._sequences[chunk.request_id]
        if sequence.request.reusable:
            self._remember(self.memory.keep_blocks, sequence, chunk.stop)
            self._remember(self._turns.note_blocks, sequence)
        row = self.scheduler.row(chunk.request_id)
        if row is not None and row.done == row.prompt:
            if sequence.request.choices > 1:
                self._remember(self.memory.keep_tail, sequence, chunk.stop)
            elif sequence.request.agent and sequence.request.reusable:
                self._remember(self.memory.keep_prompt_end, sequence, chunk.stop)
            self._start_decoding(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        request = sequence.request
        self.pictures.prefilled(sequence)
        if not request.sampling.max_tokens:
            self._finish(sequence, RowUpdate(sequence.id, [], "length"))
            return
        self.executor.join(sequence.id, sequence.given(), request.sampling, request.generated + sequence.emitted)

    def _decode(self) -> bool:
        decoding = self.scheduler.decoding()
        if not decoding:
            return False
        for request_id in decoding:
            if self.memory.fills_prompt(self._sequences[request_id]):
                self._remember(self.memory.keep_prompt_tail, self._sequences[request_id])
        started = time.perf_counter()
        try:
            told = self._begin_answers()
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
        self.pace.note_step(time.perf_counter() - started)
        self.counters.steps += 1
        for drawn in ready:
            if drawn.row_id not in told:
                self._take_token(drawn)
        return True

    def _begin_answers(self) -> set[str]:
        """Tell first tokens before the next step is made ready. Returns whose; rows that they end wait for it."""
        told: set[str] = set()
        for drawn in self.executor.first():
            sequence = self._sequences[drawn.row_id]
            update = self._update_of(sequence, drawn)
            if drawn.sound and update.finish is None:
                self._count(sequence, drawn)
                self._emit(sequence, update)
                told.add(drawn.row_id)
        if told:
            self._flush()
        return told

    def _take_token(self, drawn: Ready) -> None:
        request_id = drawn.row_id
        sequence = self._sequences[request_id]
        if not drawn.sound:
            self.scheduler.finish(request_id)
            self._end(request_id, "error", GenerationFailed("the model's output is not a number"))
            return
        update = self._update_of(sequence, drawn)
        self._count(sequence, drawn)
        if update.finish is None:
            self._emit(sequence, update)
            return
        self._finish(sequence, update)

    def _update_of(self, sequence: Sequence, drawn: Ready) -> RowUpdate:
        """What there is to tell of a row's next token."""
        row, sampling, token = self.scheduler.row(drawn.row_id), sequence.request.sampling, drawn.token
        assert row is not None
        stopped = (token in self.loaded.eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids
        finish = "stop" if stopped else "length" if row.generated + 1 >= row.max_tokens else None
        logprobs = None if drawn.logprobs is None else [drawn.logprobs]
        return RowUpdate(drawn.row_id, [token], finish, logprobs=logprobs)

    def _count(self, sequence: Sequence, drawn: Ready) -> None:
        self.scheduler.decoded(drawn.row_id)
        sequence.tokens.append(drawn.token)
        sequence.emitted += 1
        self.counters.generated_tokens += 1

    def _send_back(self, request_id: str) -> None:
        """A row that has lost its place keeps its KV. The token that it has drawn last is told first: so it goes on
        just where its KV ends, which is the only place where recurrent layers can."""
        sequence = self._sequences[request_id]
        drawn = self.executor.drawn(request_id)
        if drawn is not None:
            self._take_token(drawn)
            if request_id not in self._sequences:
                return
        self._keep(request_id, returns=True)
        self.memory.leave(sequence)
        self.restores.leave(request_id)
        self.executor.leave([request_id])

    def _finish(self, sequence: Sequence, last: RowUpdate) -> None:
        """The row has said all."""
        self._keep(sequence.id, ended=True)
        self.scheduler.finish(sequence.id)
        self._leave(sequence.id, last)

    def _keep(self, request_id: str, *, ended: bool = False, returns: bool = False) -> None:
        """Keep all KV of a row that is about to leave; nothing where it has none, or nobody would find it.

        Args:
            ended: whether it has said all, and was not taken out.
            returns: whether it goes back to the queue.
        """
        sequence = self._sequences[request_id]
        if (sequence.request.reusable or returns) and self.executor.holds(request_id):
            self._remember(self.memory.keep_all, sequence)
            self._remember(self._turns.note, sequence, ended)

    def _remember(self, store: Callable[..., None], sequence: Sequence, *arguments: Any) -> None:
        """Keep KV for later. Memory only saves work, so a failure of it fails no request."""
        try:
            store(sequence, *arguments)
        except Exception:
            logger.exception("the KV of request %s is not kept", sequence.id)

    def _end(self, request_id: str, finish: str, error: SatchelError | None = None) -> None:
        """The end without a token of a row that the scheduler has let go."""
        self._leave(request_id, RowUpdate(request_id, [], finish, error=error.to_wire() if error else None))

    def _leave(self, request_id: str, last: RowUpdate) -> None:
        sequence = self._sequences.pop(request_id)
        self.pictures.leave(request_id)
        self.restores.leave(request_id)
        self.memory.leave(sequence)
        self.executor.leave([request_id])
        self._emit(sequence, last)

    def _emit(self, sequence: Sequence, update: RowUpdate) -> None:
        self._out[sequence.request.consumer].append(update)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, defaultdict(list)
            self._outbox(out)
