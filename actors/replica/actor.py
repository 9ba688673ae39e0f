"""The replica actor: one model in one process. A thin shell: Ray outside, `Engine` inside.

Seven threads: the engine (all MLX work), the reporter (reports to the router), the disk writer, one that watches the
node's memory, one that checks whether the model is still wanted, the watchdog, and Ray's event loop (calls).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ...cluster.config.config import Logs, Model, Scheduling, Traces
from ...cluster.config.nodes import Node
from ...cluster.config.stages import GroupPlan
from ...cluster.config.timing import Timing
from ...cluster.errors import (
    ComputesOtherwise,
    GenerationFailed,
    InvalidRequest,
    ModelLoadError,
    NoReplica,
    OtherVersion,
    SatchelError,
    Unavailable,
)
from ...cluster.telemetry.process import begin_telemetry
from ..model_files.source import COMPONENTS, found_here, resolve
from ..patches import without_torch
from ..protocol import registry
from ..protocol.clients import ReplicaClient
from ..protocol.entries import unpack_tokens
from ..protocol.names import replica_actor_name
from ..protocol.replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    KVSelection,
    ModelInfo,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    SequenceUpdate,
    StageInfo,
)
from ..protocol.speech_messages import SpeechRequest, SpeechUpdate
from ..rpc.client import actor_handle, is_restarted
from ..rpc.codec import encode_error
from ..rpc.local import Answers, LocalAddress, LocalServer
from ..rpc.shell import SWITCH_S, answers
from ..supervision.stall import pause_s
from ..supervision.watchdog import ENGINE, Watchdog
from .describing import Proving, model_info, replica_stats
from .jobs.describing import job_model_info, job_stats
from .jobs.host import JobHost
from .loop.consumers import Consumers

if TYPE_CHECKING:
    from .execution.media.language_inputs import ImageEmbeddings
    from .execution.sampling.grammar import SequenceGrammar
    from .group.followers import Followers
    from .jobs.engine import JobEngine
    from .loop.engine import Engine
    from .memory.disk_tier import DiskTier
    from .memory.replica_memory import ReplicaMemory
    from .selftest.self_test import Proven

logger = logging.getLogger(__name__)

PROVEN_LATER_S = 5.0
"""When a client should retry a request that plain mode does not support."""

UNWANTED_POLLS = 6
"""How often the thread checks, within `unwanted_s`, whether the replica is still wanted."""


@dataclass
class _LoadProgress:
    what: str = "starting"
    fraction: float | None = None
    error: SatchelError | None = None


class ReplicaActor:
    """The actor that serves one model. Named `replica:<name>` in the cluster's namespace.

    It is called through `ReplicaClient`, which documents its methods.

    It ends itself if it has no entry in the `registry` and nobody calls `progress` or `stats`, as a driver or the pool
    does while it loads or unloads the model. So if that process is killed, no replica is left behind.

    Args:
        name: the replica's id, unique in the cluster.
        node: where it runs.
        plan: the stages of a divided model; None if its layers are all here.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        scheduling: Scheduling,
        node: Node,
        timing: Timing,
        logs: Logs | None = None,
        traces: Traces | None = None,
        plan: GroupPlan | None = None,
    ) -> None:
        self._logs, self._traces = logs or Logs(), traces or Traces()
        self._timing, self._plan = timing, plan
        self._name = name
        self._model = model
        self._scheduling = scheduling
        self._node, self._of_node = node.name, node
        sys.setswitchinterval(SWITCH_S)
        self._loading = _LoadProgress()
        self._engine: Engine | None = None
        self._plain_since = 0.0
        self._jobs = JobHost(timing)
        self._draining = False
        self._proven: Proven | None = None
        self._disk: DiskTier | None = None
        self._memory: ReplicaMemory | None = None
        self._looking: set[str] = set()
        self._following: set[str] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self._consumers: Consumers | None = None
        # Also `abort`: through Ray it could overtake a long prompt, which would then be computed for nobody.
        self._near = LocalServer(self, "next_frame", "submit", "abort", ahead={"next_frame": self._send_ahead})
        self._asked = True
        self._watchdog = Watchdog(replica_actor_name(name), poll_s=timing.heartbeat_s)
        self._watchdog.start()
        threading.Thread(target=self._run_engine, name="engine", daemon=True).start()
        threading.Thread(target=self._end_when_unwanted, name="wanted", daemon=True).start()

    @answers(ReplicaClient.progress)
    async def progress(self) -> ReplicaProgress:
        self._asked = True
        if self._loading.error is not None:
            raise self._loading.error
        ready = self._engine is not None or self._jobs.engine is not None
        return ReplicaProgress(self._loading.what, self._loading.fraction, ready)

    @answers(ReplicaClient.info)
    async def info(self) -> ModelInfo | None:
        if (jobs := self._jobs.engine) is not None:
            return job_model_info(self._name, self._node, self._model, jobs, self._jobs.folder)
        if self._engine is None:
            return None
        notes = list(self._proven.notes) if self._proven is not None else []
        return model_info(self._name, self._node, self._model, self._engine, self._proving(), notes)

    def _proving(self) -> Proving:
        """What the self-test does now, since when it has run, and how the layers are divided."""
        since = self._plain_since
        stages = [StageInfo(*stage[:3]) for stage in self._plan.stages] if self._plan is not None else []
        return {"proving": self._loading.what if since else "", "proving_since": since, "stages": stages}

    @answers(ReplicaClient.stats)
    async def stats(self) -> ReplicaStats:
        self._asked = True
        names, answers = (self._name, self._node, self._model.name), not self._watchdog.is_slow(ENGINE)
        if (jobs := self._jobs.engine) is not None:
            return job_stats(*names, jobs, self._jobs.folder, self._memory, answers=answers)
        if self._engine is None:
            return ReplicaStats(self._name, self._model.name, answers=False)
        return replica_stats(*names, self._engine, self._proving(), self._disk, self._memory, answers=answers)

    @answers(ReplicaClient.submit)
    async def submit(self, request: GenerateRequest) -> None:
        if self._engine is None:
            raise self._no_text()
        if not self._engine.loaded.computes(request):
            # Its KV would be stored under the block ids of another model.
            raise ComputesOtherwise(f"the request was made for a model that computes differently from {self._name}")
        if (request.media or request.adapter) and self._plain_since:
            what = "pictures, videos and audio" if request.media else "adapters"
            raise Unavailable(
                f"the self-test of {self._model.name} has not ended: {what} are not supported yet",
                retry_after_s=PROVEN_LATER_S,
            )
        loop = asyncio.get_running_loop()
        sequences = self._known().sequences(request.consumer)
        if request.request_id in sequences:
            raise Unavailable(f"request {request.request_id} has not left yet")
        sequences.add(request.request_id)
        try:
            grammar = await self._grammar_of(request)
            if request.pull_wait_s:
                # The client learns now that it is accepted. If it is refused later, the sequence ends with that error.
                waiting = loop.create_task(self._submit_later(request, grammar))
                self._waiting.add(waiting)
                waiting.add_done_callback(self._waiting.discard)
                return
            await self._submit(self._engine, request, grammar)
        except asyncio.CancelledError:
            # The caller is cut off, and places the sequence again.
            sequences.discard(request.request_id)
            self._engine.abort((request.request_id,))
            raise

    async def _submit(self, engine: Engine, request: GenerateRequest, grammar: SequenceGrammar | None) -> None:
        """Looks a request's prompt up and submits it to the engine. Raises `SatchelError` if it is refused."""
        loop, sequences = asyncio.get_running_loop(), self._known().sequences(request.consumer)
        known, embeddings = await self._look_up(request)
        if request.request_id not in sequences:
            raise Unavailable(f"request {request.request_id} was taken out")
        answer: asyncio.Future[SatchelError | None] = loop.create_future()

        def reply(refusal: SatchelError | None) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(refusal))

        engine.submit(request, reply, known, embeddings, grammar)
        refusal = await answer
        if refusal is not None:
            sequences.discard(request.request_id)
            raise refusal

    async def _submit_later(self, request: GenerateRequest, grammar: SequenceGrammar | None) -> None:
        """Submits a request once its KV has arrived from another node, or will not arrive."""
        began, engine = time.monotonic(), self._engine
        assert engine is not None
        try:
            if await self._follow(request):
                request = replace(request, remembered_tokens=request.pull_tokens)
            left_s = max(0.1, request.deadline_s - (time.monotonic() - began))
            if request.request_id in self._known().sequences(request.consumer):
                await self._submit(engine, replace(request, deadline_s=left_s), grammar)
        except Exception as error:
            if not isinstance(error, SatchelError):
                logger.exception("request %s could not be submitted", request.request_id)
                error = GenerationFailed(f"{self._name} could not take the request")
            update = SequenceUpdate(request.request_id, [], "error", error=error.to_wire())
            self._deliver({request.consumer: [update]})

    @answers(ReplicaClient.prepare)
    async def prepare(self, request: GenerateRequest) -> None:
        if self._engine is not None and not self._plain_since and self._scheduling.prepare_while_idle:
            self._engine.prepare_prompt(request)

    @answers(ReplicaClient.pool)
    async def pool(self, request: PoolingRequest) -> PooledTexts:
        """If the call is cancelled, the texts are aborted."""
        engine = self._engine
        if engine is None:
            raise self._no_text()
        if self._plain_since:
            raise Unavailable(
                f"the self-test of {self._model.name} has not ended: embeddings are not supported yet",
                retry_after_s=PROVEN_LATER_S,
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[PooledTexts | SatchelError] = loop.create_future()

        def reply(result: PooledTexts | SatchelError) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

        engine.pool(request, reply)
        try:
            result = await answer
        except asyncio.CancelledError:
            engine.abort((request.request_id,))
            raise
        if isinstance(result, SatchelError):
            raise result
        return result

    def _no_text(self) -> SatchelError:
        """Returns why no engine takes texts."""
        if (jobs := self._jobs.engine) is not None:
            return InvalidRequest(f"the model {self._model.name!r} {jobs.does}, and no text", param="model")
        return NoReplica(f"{self._model.name} is still loading")

    @answers(ReplicaClient.make_image)
    async def make_image(self, request: ImageRequest) -> None:
        await self._queue_job(request, "makes no images")

    @answers(ReplicaClient.next_image)
    async def next_image(self, request_id: str, number: int) -> ImageUpdate | None:
        return await self._jobs.next_update(request_id, number)

    @answers(ReplicaClient.do_speech)
    async def do_speech(self, request: SpeechRequest) -> None:
        await self._queue_job(request, "does nothing with speech")

    @answers(ReplicaClient.next_speech)
    async def next_speech(self, request_id: str, number: int) -> SpeechUpdate | None:
        return await self._jobs.next_update(request_id, number)

    async def _queue_job(self, request: ImageRequest | SpeechRequest, does_not: str) -> None:
        self._known()
        if (engine := self._jobs.engine) is not None:
            return await self._jobs.queue(engine, request)
        if self._engine is None:
            raise NoReplica(f"{self._model.name} is still loading")
        raise InvalidRequest(f"the model {self._model.name!r} {does_not}", param="model")

    @answers(ReplicaClient.next_frame)
    async def next_frame(self, consumer: str, number: int) -> list[SequenceUpdate] | None:
        return await self._known().next_frame(consumer, number)

    def _send_ahead(self, call: bytes, frames: Answers) -> None:
        """Answers `next_frame` for the frame that is asked for, and for the next ones."""
        try:
            consumer, number = ReplicaClient.next_frame.asked(call)
        except (TypeError, ValueError) as error:
            frames.send(encode_error(OtherVersion(str(error))))
        else:
            self._known().send_ahead(consumer, number, frames)

    @answers(ReplicaClient.local_address)
    async def local_address(self) -> LocalAddress:
        return await self._near.address()

    async def _grammar_of(self, request: GenerateRequest) -> SequenceGrammar | None:
        """As `Engine.grammar_of`, without blocking the event loop."""
        if not request.sampling.grammar or self._engine is None:
            return None
        self._looking.add(request.request_id)
        try:
            return await asyncio.to_thread(self._engine.grammar_of, request)
        except SatchelError:
            self._known().sequences(request.consumer).discard(request.request_id)
            raise
        finally:
            self._looking.discard(request.request_id)

    async def _look_up(self, request: GenerateRequest) -> tuple[int, dict[int, ImageEmbeddings]]:
        """As `Engine.look_up`, without blocking the event loop."""
        if self._disk is None or self._engine is None or not (request.agent or request.block_ids):
            return 0, {}
        if not (request.pull_from and not request.pull_wait_s) and not request.media:
            # This look-up does not read the disk, so it needs no other thread.
            return self._engine.look_up(request)
        self._looking.add(request.request_id)
        try:
            return await asyncio.to_thread(self._engine.look_up, request)
        finally:
            self._looking.discard(request.request_id)

    async def _follow(self, request: GenerateRequest) -> bool:
        """Waits for KV that another node computes for the request, until it is here or `go_on` is called. Returns
        whether all of it is here."""
        name = request.request_id
        if self._disk is None:
            return False
        sequences = self._known().sequences(request.consumer)
        self._looking.add(name)
        self._following.add(name)
        try:
            wait_s = min(request.pull_wait_s, request.deadline_s)
            came = await self._disk.follow(request, wait_s, lambda: name in self._following and name in sequences)
            self._disk.counters.lost_prefills += not came and name in sequences
            return came
        finally:
            self._following.discard(name)
            self._looking.discard(name)

    @answers(ReplicaClient.go_on)
    async def go_on(self, request_ids: Sequence[str]) -> None:
        self._following.difference_update(request_ids)

    @answers(ReplicaClient.abort)
    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._take_out(request_ids)

    async def _take_out(self, request_ids: Sequence[str]) -> None:
        # The engine does not know sequences that are still being looked up.
        self._known().forget_sequences(self._looking.intersection(request_ids))
        if self._engine is not None:
            self._engine.abort(tuple(request_ids))
        self._jobs.abort(tuple(request_ids))

    @answers(ReplicaClient.release)
    async def release(self, kept: KVSelection) -> int:
        tokens = unpack_tokens(kept.first)

        def drop(engine: Engine) -> int:
            embeddings, prefixes = engine.pictures.embeddings, engine.prefixes
            prepared = engine.forget_prepared(kept.agent) if kept.agent else 0
            return prefixes.drop(kept.root, kept.block_ids, tokens) + embeddings.drop(kept.embeddings) + prepared

        return await self._on_engine(drop)

    @answers(ReplicaClient.held)
    async def held(self, kept: KVSelection) -> int:
        tokens = unpack_tokens(kept.first)

        def count(engine: Engine) -> int:
            if kept.block_ids:
                return engine.prefixes.leading(kept.block_ids)
            return len(engine.prefixes.ends(kept.root, tokens))

        return await self._on_engine(count)

    @answers(ReplicaClient.clear_cache)
    async def clear_cache(self) -> int:
        return await self._on_engine(lambda engine: engine.clear_cache())

    async def _on_engine(self, action: Callable[[Engine], int]) -> int:
        """Runs `action` between two steps; 0 if there is no engine yet."""
        engine = self._engine
        if engine is None:
            return 0
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def run() -> None:
            result = action(engine)
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(result))

        engine.call(run)
        return await done

    @answers(ReplicaClient.drain)
    async def drain(self, *, end_sequences: bool = False, leaves: bool = False) -> None:
        # The caller ends this process next.
        self._watchdog.leave()
        self._draining = True
        for engine in filter(None, (self._engine, self._jobs.engine)):
            engine.drain()
            if end_sequences:
                engine.end_all(leaves=leaves)

    def _deliver(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        self._known().deliver(updates)

    def _known(self) -> Consumers:
        """Returns the consumers, created at the first call because the event loop starts after this object."""
        if self._consumers is None:
            self._watchdog.watch("event loop", asyncio.get_running_loop().call_soon_threadsafe)
            self._consumers = Consumers(self._take_out, self._timing)
        return self._consumers

    # The engine's thread.

    def _run_engine(self) -> None:
        begin_telemetry(replica_actor_name(self._name), self._logs, self._traces)
        self._pause()
        how = self._name, self._model, self._scheduling, self._of_node, self._timing, _Shell(self)
        followers: Followers | None = None
        try:
            followers = self._followers()
            began = time.monotonic()
            folder = self._folder()
            found_s = time.monotonic() - began
            without_torch()
            # Imported here, so that callers need not import MLX and the event loop answers meanwhile.
            from .serving_of import serving_of

            serving = serving_of(how, self._plan, self._logs, self._traces, folder, followers)
        except Exception as error:
            logger.exception("the replica's libraries cannot be loaded")
            if followers is not None:
                followers.end()
            self._loading.error = ModelLoadError(f"{self._model.source} cannot be loaded: {error}")
            return
        imported_s = time.monotonic() - began - found_s
        logger.info("%s: folder found in %.1f s, libraries imported in %.1f s", self._name, found_s, imported_s)
        serving.run()

    def _followers(self) -> Followers | None:
        """Starts the followers of a divided model: they load their stages while this process imports libraries."""
        if self._plan is None:
            return None
        from .group.followers import Followers

        how = self._model, self._scheduling, self._timing, self._logs, self._traces
        return Followers(self._name, self._plan, *how, self._note_progress)

    def _folder(self) -> Path | None:
        """Returns the model's folder, after its download if need be; None if it cannot be found, which is reported
        where the model is loaded."""
        source = self._model.source
        try:
            here = found_here(source)
            if here is None or (here / COMPONENTS).is_file():
                return resolve(source, self._note_progress, code=self._model.trust_remote_code)
            return here
        except ModelLoadError:
            return None

    def _take_up(self, proven: Proven, engine: Engine, disk: DiskTier | None, *, plain: bool) -> None:
        if self._draining:
            engine.drain()
        # Another thread may read these now. Whoever sees the former engine must see that the self-test has not ended.
        if plain:
            self._plain_since = time.time()
        self._proven, self._disk, self._engine = proven, disk, engine
        if not plain:
            self._plain_since = 0.0

    def _take_up_jobs(self, engine: JobEngine[Any], folder: Path) -> None:
        if self._draining:
            engine.drain()
        self._jobs.take_up(engine, folder)

    def _note_progress(self, what: str, fraction: float | None) -> None:
        if what != self._loading.what:
            logger.info("%s: %s", self._name, what)
        self._loading.what, self._loading.fraction = what, fraction

    def _send(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        # Sequences come from consumers, so there are some.
        if self._consumers is not None:
            self._consumers.deliver(updates)

    def _pause(self) -> None:
        """Waits if earlier processes of this replica ended soon after their start, longer every time: a replica that
        crashes while it loads would otherwise keep its machine busy."""
        try:
            ended = registry.note_start(self._name, again=is_restarted())
        except Exception as error:
            logger.warning("the control store does not answer: %s", error)
            return
        wait_s = pause_s(ended)
        if wait_s:
            reason = f"waiting for {wait_s:g} s, after it has ended {ended} times soon after its start"
            logger.warning("%s: %s", self._name, reason)
            self._note_progress(reason, None)
            time.sleep(wait_s)

    # The thread that checks whether the replica is still wanted.

    def _end_when_unwanted(self) -> None:
        idle_s, poll_s = 0.0, self._timing.unwanted_s / UNWANTED_POLLS
        while idle_s < self._timing.unwanted_s:
            # Polls are counted, not time: a process that was suspended could not be asked during that time.
            time.sleep(poll_s)
            asked, self._asked = self._asked, False
            try:
                idle_s = 0.0 if asked or registry.places(self._name) else idle_s + poll_s
            except Exception as error:
                # This thread must survive any error, or the process never ends.
                logger.warning("the control store does not answer: %s", error)
        logger.warning("%s has no entry and nobody asks about it: it ends", self._name)
        try:
            ray.kill(actor_handle(replica_actor_name(self._name)), no_restart=True)
        except (RayError, ValueError):
            os._exit(0)


class _Shell:
    """The actor's `Shell` for `Serving`, in a class of its own so that Ray cannot call it."""

    def __init__(self, actor: ReplicaActor) -> None:
        self._actor = actor

    @property
    def engine(self) -> Engine | None:
        return self._actor._engine

    @property
    def is_plain(self) -> bool:
        return bool(self._actor._plain_since)

    @property
    def watchdog(self) -> Watchdog:
        return self._actor._watchdog

    def take_up(self, proven: Proven, engine: Engine, disk: DiskTier | None, *, plain: bool) -> None:
        self._actor._take_up(proven, engine, disk, plain=plain)

    def refuse(self, error: SatchelError) -> None:
        self._actor._loading.error, self._actor._plain_since = error, 0.0

    def coming(self) -> list[str]:
        return list(self._actor._looking)

    def note_progress(self, what: str, fraction: float | None) -> None:
        self._actor._note_progress(what, fraction)

    def note_memory(self, memory: ReplicaMemory) -> None:
        self._actor._memory = memory

    def send(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        self._actor._send(updates)

    def take_up_jobs(self, engine: JobEngine[Any], folder: Path) -> None:
        self._actor._take_up_jobs(engine, folder)

    def send_job(self, request_id: str, update: Any) -> None:
        self._actor._jobs.send(request_id, update)
