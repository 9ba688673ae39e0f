"""The replica's step loop: one thread that owns the model, the scheduler and the prefix cache.

Other threads only put commands into the inbox and get results through callbacks, so nothing here is locked. A step
handles commands, removes the sequences that the scheduler names, prefills within the step's budget (`prefill.py`) or
embeds texts within it (`embed.py`), decodes once (`decode.py`), and delivers all new tokens in one call
(`delivery.py`). First tokens are delivered earlier, before the decode step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ....cluster.config.config import Scheduling
from ....cluster.config.timing import USUAL, Timing
from ....cluster.errors import (
    ComputesOtherwise,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    ReplicaLeaves,
    SatchelError,
    Unavailable,
)
from ....cluster.telemetry.context import span
from ...protocol.replica_messages import GenerateRequest, PoolingRequest
from ..device.device import on_gpu
from ..device.device_errors import DeviceFailed, on_device
from ..energy_pace import EnergyPace
from ..execution.draft_model.model_drafts import DraftModel
from ..execution.executor import BatchExecutor
from ..execution.followers import Followers
from ..execution.loaded_model import LoadedModel
from ..execution.media.language_inputs import ImageEmbeddings
from ..execution.sampling.grammar import Grammars, SequenceGrammar
from ..loading.warming.warm_up import WarmUp
from ..memory.disk_tier import DiskTier, Prompt
from ..memory.embedding_tier import EmbeddingTier
from ..memory.keeping import Keeping
from ..memory.restores import NotWaiting, Restores
from ..memory.room import MemoryRoom, limits_of
from ..memory.sequence_memory import Sequence, SequenceMemory
from ..memory.sequence_span import sequence_span
from ..scheduling.prefill_budget import CPU_CHUNK_TOKENS, PrefillPace
from ..scheduling.scheduler import Scheduler
from .bring_back import BringBack
from .decode import DecodeLoop
from .delivery import Delivery, Outbox
from .embed import EmbedLoop, Reply
from .encode_queue import PictureQueue
from .intake import Abort, Command, IdleCheck, Inbox, Intake, Pool, ReadBack, RunOnEngine, Submit
from .prefill import PrefillLoop
from .prepare import PrepareLoop
from .recovery import Recovery

T = TypeVar("T")

PINNED_SHARE = 0.25
"""Share of the memory that KV may have that waits for a slow disk. Beyond it no sequence begins."""

QUIET_S = 1.0
"""The warm-up continues after this long without a request. A request that comes during it waits for one step of it."""


class Engine:
    """One loaded model with its scheduler and KV. Start it with `run` on the thread that loaded the model.

    Args:
        loaded: the model; its arrays belong to the calling thread.
        outbox: where tokens go, once a step.
        memory_bytes_max: memory for all that it holds, without the model and the temporary memory of a step.
        disk: writes the KV of agents' sequences; None if nothing is written.
        timing: how long a sequence waits until its KV is read back.
        warm_up: runs while there are no requests; None for nothing.
        tell: called with a device error's text.
        follows: the engine that this one replaces, with its callers; see `hand_over`.
        trust_remote_code: whether code in the model's folder may run, where its tokenizer is read.
        drafts, exact_drafts, draft_model, followers: as for `BatchExecutor`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduling: Scheduling,
        memory_bytes_max: int,
        outbox: Outbox,
        disk: DiskTier | None = None,
        timing: Timing = USUAL,
        warm_up: WarmUp | None = None,
        tell: Callable[[str], object] = lambda why: None,
        follows: Engine | None = None,
        *,
        trust_remote_code: bool = False,
        drafts: bool = False,
        exact_drafts: bool = False,
        draft_model: DraftModel | None = None,
        followers: Followers | None = None,
    ) -> None:
        self.loaded = loaded
        self._grammars = Grammars(loaded, trusted=trust_remote_code)
        self._warm_up = warm_up
        limits = limits_of(loaded, scheduling, memory_bytes_max)
        chunk = limits.prefill_chunk_tokens
        if not on_gpu() and loaded.piece_tokens is None:
            chunk = min(chunk, CPU_CHUNK_TOKENS)
        self.pace = PrefillPace(chunk, scheduling.prefill_pause_s)
        self.energy = EnergyPace()
        self.scheduler = scheduler = Scheduler(limits)
        self.executor = executor = BatchExecutor(
            loaded, drafts=drafts, exact_drafts=exact_drafts, draft_model=draft_model, followers=followers
        )
        self.memory = memory = SequenceMemory(
            loaded.spec, executor, scheduling.prefix_bytes_max, writes=disk is not None
        )
        self.prefixes = memory.prefixes
        self._inbox = Inbox() if follows is None else follows._inbox
        self.pictures = pictures = PictureQueue(
            loaded.vision,
            memory_bytes_max if scheduling.vision_bytes_max is None else scheduling.vision_bytes_max,
            EmbeddingTier(disk) if disk is not None else None,
            self._inbox.wake,
        )
        self.restores = Restores(
            disk,
            lambda reading, restored: self._inbox.put(ReadBack(reading, restored)),
            lambda records: self.called(lambda: executor.adopt(records)),
            timing.block_lease_s,
        )
        self.keeping = keeping = Keeping(
            memory, executor, disk, self.call, lambda: self.room.budget.bytes_max * PINNED_SHARE
        )
        self.prepare = PrepareLoop(loaded, executor, memory, self.pace)
        self.bring_back = BringBack(memory, keeping, self.restores, self.pace)
        note_end = self.bring_back.note_end if disk is not None and scheduling.prepare_while_idle else lambda _: None
        self.delivery = delivery = Delivery(
            scheduler, executor, memory, keeping, pictures, self.restores, loaded.eos_token_ids, outbox, note_end
        )
        if follows is not None:
            delivery.counters = follows.counters
        self.counters = delivery.counters
        self.embed = embed = EmbedLoop(loaded, limits.queue_requests_max, self.pace, delivery.counters)
        self.room = MemoryRoom(
            loaded,
            scheduling,
            memory_bytes_max,
            scheduler,
            executor,
            memory,
            pictures,
            lambda: 0 if disk is None else disk.waiting_bytes,
            lambda: embed.held_bytes,
        )
        self.prefill = PrefillLoop(
            scheduler, executor, memory, keeping, pictures, self.restores, self.pace, delivery, self.room.fit
        )
        self.decode = DecodeLoop(scheduler, executor, keeping, self.pace, delivery)
        self._recovery = Recovery(scheduler, executor, memory, keeping, pictures, self.restores, embed, delivery, tell)
        self._embeds_next = False
        self._disk = disk
        self._intake = Intake(loaded, scheduler, memory, pictures, delivery)
        self._idle = IdleCheck(scheduler, executor, memory, lambda: not self._inbox.empty)
        self._stopped = threading.Event()

    # Called from any thread.

    def look_up(self, request: GenerateRequest) -> tuple[int, dict[int, ImageEmbeddings]]:
        """Looks a prompt up in memory and on disk before `submit`, and pulls its blocks from another node if the
        request says so. Blocks.

        Returns:
            About how many of the prompt's first tokens have KV, and the image embeddings that the disk has, by the
            pictures' indexes.
        """
        if self._disk is None:
            return 0, {}
        hot = self.prefixes.peek(request.root_id, request.block_ids, request.prompt)
        if request.pull_from and request.pull_tokens > hot and not request.pull_wait_s:
            self._disk.pull(request)
        if not request.media:
            # The KV itself is read back once the sequence is admitted.
            return max(hot, min(request.remembered_tokens, len(request.prompt) - 1)), {}
        known = self._disk.look(Prompt.of(request), hot)
        # With window or recurrent layers less may be reusable, and then earlier pictures are needed too.
        return known, self.pictures.read_back(request, known if self.prefixes.is_plain else 0)

    def grammar_of(self, request: GenerateRequest) -> SequenceGrammar | None:
        """Compiles a request's grammar before `submit`; None if it has none. Takes up to seconds.

        Raises:
            InvalidRequest: it does not compile.
            ModelLoadError: the model's tokenizer does not load.
        """
        text = request.sampling.grammar
        done = request.prompt[len(request.prompt) - request.generated :]
        return self._grammars.sequence(text, done) if text else None

    def submit(
        self,
        request: GenerateRequest,
        reply: Callable[[SatchelError | None], None],
        known: int = 0,
        embeddings: dict[int, ImageEmbeddings] | None = None,
        grammar: SequenceGrammar | None = None,
    ) -> None:
        """Queues a request. `reply` gets None if it is accepted, else the refusal; it is called on the engine's thread.

        Args:
            known: about how many of the prompt's first tokens have KV in memory or on disk.
            embeddings: image embeddings read back from disk, by the pictures' indexes.
            grammar: what `grammar_of` returned.
        """
        traced = sequence_span(request, span())
        sequence = Sequence(request, list(request.prompt), list(request.block_ids), grammar=grammar, span=traced)
        self._inbox.put(Submit(sequence, reply, known, embeddings or {}))

    def pool(self, request: PoolingRequest, reply: Reply) -> None:
        """Queues a request for vectors. `reply` gets them, or the refusal, or why it failed; it is called on the
        engine's thread."""
        self._inbox.put(Pool(request, reply))

    def prepare_prompt(self, request: GenerateRequest) -> None:
        """Has a prompt prefilled while there is no other work, instead of the former one of its agent."""
        self.call(lambda: self.prepare.add(request))

    def forget_prepared(self, agent: str) -> int:
        """Drops what was prepared for an agent, and does not read its KV back. Returns the freed bytes. Call it on the
        engine's thread."""
        self.bring_back.forget(agent)
        return self.prepare.forget(agent)

    def clear_cache(self) -> int:
        """Drops everything that is cached in memory, and what would bring it back while the engine has nothing else to
        do. Returns the freed bytes. Call it on the engine's thread."""
        self.bring_back.clear()
        self.prepare.clear()
        held = self.prefixes.nbytes
        self.prefixes.clear()
        return held + self.pictures.embeddings.clear()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Aborts requests of either kind before the next step. Unknown ids are ignored."""
        self._inbox.put(Abort(request_ids))

    def call(self, action: Callable[[], None]) -> None:
        """Runs `action` on the engine's thread between two steps, when all state is consistent."""
        self._inbox.put(RunOnEngine(action))

    def called(self, action: Callable[[], T]) -> Future[T]:
        """As `call`; the future gets what `action` returns or raises."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)
            except DeviceFailed:
                # The sequence for which it was read is computed anew.
                done.set_exception(NotWaiting())
                raise

        self.call(run)
        return done

    @property
    def failed_checks(self) -> int:
        """How often a check found inconsistent tables and cleared the cached KV."""
        return self._idle.failures

    def changes(self, *, whole: bool) -> tuple[list[bytes], list[bytes]]:
        """Returns the ids of blocks and image embeddings added to memory and removed from it since the last call. Call
        it on the engine's thread.

        Args:
            whole: return all ids in memory instead of the added ones.
        """
        (blocks, gone), (embeddings, lost) = self.prefixes.drain_events(), self.pictures.embeddings.changes.take()
        if whole:
            blocks, embeddings = self.prefixes.block_ids(), self.pictures.embeddings.ids()
        return [*blocks, *embeddings], [*gone, *lost]

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, waiting for their pictures, or for vectors."""
        return self.scheduler.waiting + len(self.pictures) + len(self.embed.queue)

    @property
    def idle_s(self) -> float:
        """For how long there has been no work."""
        return self._idle.idle_s(time.monotonic())

    @property
    def pending_tokens(self) -> int:
        """Tokens still to prefill or to embed, over all requests."""
        return self.scheduler.pending_tokens + self.pictures.pending_tokens + self.embed.queue.pending_tokens

    @property
    def active(self) -> list[str]:
        """Ids of all requests that are queued or running."""
        return [*self.delivery.sequences, *self.embed.queue.request_ids]

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""
        self._intake.close(Draining("the replica is shutting down"))

    def refuse(self, why: SatchelError) -> None:
        """Refuses all requests from now on, and ends the accepted ones."""
        self._intake.close(why)
        self._end_waiting(why)

    def end_all(self, *, leaves: bool = False) -> None:
        """Ends every request with an error that says the server is shutting down, or that the node `leaves`."""

        def end() -> None:
            why = ReplicaLeaves("the node is leaving") if leaves else Draining("the server is shutting down")
            self._end_waiting(why)

        self.call(end)

    def stop(self) -> None:
        """Ends `run` after the current step."""
        self._stopped.set()
        self._inbox.wake()

    # The engine's thread.

    def run(self) -> None:
        """Runs steps until `stop`."""
        while not self._stopped.is_set():
            if not self.step():
                self.wait()

    def serve(self) -> None:
        """Serves waiting requests until no sequence holds a place. Returns at once if no request waits. If others wait
        when a sequence has ended, it also returns, so that the caller can do a piece of its own work first."""
        while not self._stopped.is_set() and (self.delivery.sequences or self.embed.queue or not self._inbox.empty):
            if not self.step() and self.delivery.sequences:
                self.wait()
            if not self.scheduler.running:
                return

    def hand_over(self) -> None:
        """Ends all requests that wait here; their callers ask the engine that replaces this one. No sequence may hold a
        place. Commands that come from now on go to that engine."""
        self._end_waiting(ComputesOtherwise("the request was made for a model that computes differently"))

    def _end_waiting(self, why: SatchelError) -> None:
        for request_id in [*self.delivery.sequences]:
            self.delivery.end(request_id, "error", why)
        for request_id in self.embed.queue.request_ids:
            self.embed.end(request_id, why)
        self.delivery.flush()

    def step(self) -> bool:
        """Runs one step of the loop. Returns False if there was nothing to do.

        Raises:
            DeviceFailed: as `Recovery.begin_anew`.
        """
        try:
            return self._step()
        except DeviceFailed as error:
            self._begin_anew(error)
            return True

    def wait(self) -> None:
        """Waits for a command and handles it. Waits only briefly if there are sequences, because their deadlines may
        pass.

        Raises:
            DeviceFailed: as `step`.
        """
        try:
            self._wait()
        except DeviceFailed as error:
            self._begin_anew(error)

    def _begin_anew(self, error: DeviceFailed) -> None:
        """Raises as `Recovery.begin_anew`."""
        self._recovery.begin_anew(error)
        # What is being read back is in blocks that are no longer the pool's. What only saves time must not end the
        # process if the device always fails at it.
        self.bring_back.end()
        self.prepare.clear()

    @property
    def _done(self) -> int:
        """A count that grows with every result that was read from the device and delivered."""
        return self.delivery.told + self.counters.embedded_tokens

    def _step(self) -> bool:
        moved, delivery, done = False, self.delivery, self._done
        self.keeping.hand_over(computing=bool(self.delivery.sequences))
        self._take_commands()
        if delivery.sequences or self.embed.queue:
            self.prepare.pause()
            self.bring_back.pause()
        for sequence in self.pictures.step(delivery.attempt):
            self.scheduler.add(sequence)
            moved = True
        self.room.fit()
        now = time.monotonic()
        plan = self.scheduler.plan(now)
        for request_id in [*plan.expired, *self.pictures.expired(now)]:
            delivery.end(request_id, "error", DeadlineExceeded("the request's deadline has passed"))
        for request_id in plan.cut:
            if delivery.sequences[request_id].emitted:
                delivery.end(request_id, "length", ended=True)
            else:
                # There is less memory now than when it was accepted.
                most = self.scheduler.limits.prompt_tokens_max
                delivery.end(request_id, "error", ContextLengthExceeded(f"memory holds {most} tokens on this machine"))
        delivery.check()
        self.counters.preemptions += len(plan.preempted)
        for request_id in plan.preempted:
            delivery.attempt(request_id, self.decode.send_back, request_id)
        if plan.expired or plan.cut or plan.preempted:
            self.room.fit()
        self.prefill.open_overdue()
        computed = self._prefill_or_embed()
        decoded = self.decode.step()
        delivery.flush()
        if self.keeping.added:
            # Room for the KV that sequences left in memory, and for the copies for the disk, which the next step makes.
            self.keeping.added = False
            self.room.fit()
        if self._done > done:
            self._recovery.note_sound()
        return bool(computed or decoded or moved or plan.expired or plan.cut or plan.preempted)

    def _prefill_or_embed(self) -> bool:
        """Prefills or embeds; takes turns if there is work for both. Returns False if there was nothing to do."""
        prefilled = not (self._embeds_next and self.embed.queue) and self.prefill.step()
        self._embeds_next = prefilled
        if not prefilled and self.embed.queue:
            # Otherwise each would be measured with a part of the other.
            self.executor.wait_for_prefill()
        return prefilled or self.embed.step(decoding=bool(self.scheduler.decoding()))

    def _wait(self) -> None:
        self.executor.wait_for_prefill()
        has_sequences, now = bool(self.delivery.sequences), time.monotonic()
        if has_sequences:
            self._idle.note_work()
        elif self._prepare_further():
            return
        else:
            self._idle.rest(now)
            if self._warm_up is not None and self._idle.idle_s(now) >= QUIET_S:
                self._warm_further(self._warm_up)
                return
        command = self._inbox.wait(0.05 if has_sequences else 0.5)
        if command is not None:
            self._handle(command)

    def _prepare_further(self) -> bool:
        """Prefills a chunk of a prompt that may come. Returns False if there is none; then evicted KV may be read
        back."""
        if self._intake.closed is not None:
            self.prepare.clear()
            return False
        if self.prepare:
            self._idle.note_work()
            self.room.fit()
            if self.prepare.step():
                return True
        if self.bring_back.begin():
            self._idle.note_work()
        return False

    def _warm_further(self, warm_up: WarmUp) -> None:
        """Runs a step of the warm-up. If it fails, the warm-up ends: it only saves time."""
        self._warm_up = None
        with on_device():
            self._warm_up = warm_up if warm_up.step() else None

    def _take_commands(self) -> None:
        for command in self._inbox.take():
            self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._idle.note_work()
                self._submit(command)
            case Pool():
                self._idle.note_work()
                if self._intake.closed is not None:
                    command.reply(self._intake.closed)
                else:
                    self.embed.accept(command.request, command.reply, self.room.budget.bytes_max)
            case Abort():
                for request_id in command.request_ids:
                    if request_id in self.delivery.sequences:
                        self.delivery.end(request_id, "abort")
                    self.embed.end(request_id, Unavailable("the request was taken back"))
            case ReadBack():
                if not self.bring_back.take(command.reading, command.restored):
                    self.prefill.open_restored(command.reading, command.restored)
            case RunOnEngine():
                command.action()
        self.delivery.check()

    def _submit(self, command: Submit) -> None:
        try:
            refusal = self._intake.accept(command)
        except DeviceFailed:
            refusal = Unavailable("the device failed; ask again", retry_after_s=1.0)
            command.sequence.span.refuse(refusal)
            command.reply(refusal)
            raise
        if refusal is not None:
            command.sequence.span.refuse(refusal)
        command.reply(refusal)
