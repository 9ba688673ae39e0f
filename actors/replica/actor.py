"""The replica actor: one model in one process. A thin shell: Ray outside, `Engine` inside.

Six threads: the engine's (all MLX work), the reporter's (reports to the router), the disk's (what rows leave), one that
looks whether the replica is still wanted, one that looks whether the engine moves, and Ray's event loop (calls).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ...cluster.config import Model, Scheduling
from ...cluster.environment import default_home
from ...cluster.errors import ModelLoadError, NoReplica, SatchelError, Unavailable
from ...cluster.nodes import Node
from .. import registry
from ..handles import actor_handle, replica_actor_name
from ..kv_store.codec import unpack_tokens
from ..messages import Frame, GenerateRequest, RowUpdate, decode, encode
from ..restarts import pause_s
from ..stall import limit_s
from ..watchdog import Watchdog
from .consumers import Consumers
from .node_store import NodeStore, kv_bytes_max

if TYPE_CHECKING:
    from .disk_tier import DiskTier
    from .engine import Engine
    from .vision import Features

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long the engine's thread may keep the interpreter from the others. With Python's own 5 ms a call to this actor,
which changes threads several times, takes ten times as long while the engine works."""

ENGINE = "engine"
COMPILES_TIMES = 4.0
"""So much longer may a step take on a device that makes its kernels when a shape is met for the first time."""

SERVED_S = 30.0
"""A replica that ends sooner after its model was loaded has ended at once, and the next one waits."""


@dataclass
class _Loading:
    what: str = "starting"
    fraction: float | None = None
    error: SatchelError | None = None


class ReplicaActor:
    """Serves one model. Named `replica:<name>` in the cluster's namespace.

    It lives as long as its model is served (see `registry`), or somebody loads or unloads it, which shows in calls of
    `progress` or `stats`: so a driver that is killed in the middle of either leaves nothing behind.

    Args:
        name: the replica's id, unique in the cluster.
        node: where it runs.
        neighbours: how many replicas share the node's memory, this one among them.
    """

    unwanted_s = 30.0
    """How long nobody may have asked about a replica whose model is not served before it ends."""

    unwanted_poll_s = 5.0

    def __init__(self, name: str, model: Model, scheduling: Scheduling, node: Node, neighbours: int) -> None:
        self._name = name
        self._model = model
        self._scheduling = scheduling
        self._node = node.name
        self._kv_bytes_max = kv_bytes_max(node, scheduling, neighbours)
        sys.setswitchinterval(SWITCH_S)
        self._loading = _Loading()
        self._engine: Engine | None = None
        self._disk: DiskTier | None = None
        self._looking: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumers: Consumers | None = None
        self._asked = True
        self._watchdog = Watchdog(replica_actor_name(name))
        self._watchdog.start()
        threading.Thread(target=self._run_engine, name="engine", daemon=True).start()
        threading.Thread(target=self._end_when_unwanted, name="wanted", daemon=True).start()

    # Documented methods, for `cluster.replicas()`.

    async def progress(self) -> dict[str, Any]:
        """What the replica is doing until it is ready: `what`, `fraction` (or None), `ready`, `error` (or None)."""
        self._asked = True
        error = self._loading.error
        return {
            "what": self._loading.what,
            "fraction": self._loading.fraction,
            "ready": self._engine is not None,
            "error": error.to_wire() if error else None,
        }

    async def info(self) -> dict[str, Any] | None:
        """The loaded model: name, model_id, files_id, what both are made of (`files` and `computing`), folder,
        context_tokens, vocabulary_size, dtype, created. None before."""
        if self._engine is None:
            return None
        loaded = self._engine.loaded
        return {
            "replica": self._name,
            "node": self._node,
            "name": self._model.name,
            "model_id": loaded.model_id,
            "files_id": loaded.identity.files_id,
            "files": dict(loaded.identity.files),
            "computing": dict(loaded.identity.computing),
            "folder": str(loaded.folder),
            "trust_remote_code": self._model.trust_remote_code,
            "context_tokens": loaded.context_tokens,
            "vocabulary_size": loaded.vocabulary_size,
            "dtype": loaded.dtype,
            "weights": loaded.weights,
            "kv": loaded.kv,
            "layers": loaded.spec.describe(),
            "created": int((loaded.folder / "config.json").stat().st_mtime),
            "pid": os.getpid(),
        }

    async def stats(self) -> dict[str, Any]:
        """Live numbers: running and waiting rows, token totals, prefix memory."""
        self._asked = True
        engine = self._engine
        if engine is None:
            return {"replica": self._name, "model": self._model.name, "answers": False}
        counters = engine.counters
        return {
            "replica": self._name,
            "model": self._model.name,
            "node": self._node,
            "model_id": engine.loaded.model_id.hex(),
            "computing": dict(engine.loaded.identity.computing),
            "answers": not self._watchdog.is_slow(ENGINE),
            "running": engine.scheduler.running,
            "waiting": engine.waiting,
            "requests_total": counters.requests,
            "prompt_tokens_total": counters.prompt_tokens,
            "cached_tokens_total": counters.cached_tokens,
            "generated_tokens_total": counters.generated_tokens,
            "prefix_blocks": engine.prefixes.blocks,
            "prefix_bytes": engine.prefixes.nbytes,
            "prefix_hits_total": counters.prefix_hits,
            "prefix_misses_total": counters.prefix_misses,
            "failed_checks_total": engine.failed_checks,
            "vision_cache_hits_total": engine.pictures.features.hits,
            "vision_encodes_total": engine.pictures.features.encodes,
            "vision_bytes": engine.pictures.features.nbytes,
            **self._disk_stats(),
        }

    def _disk_stats(self) -> dict[str, int]:
        if self._disk is None:
            return {}
        counters = self._disk.counters
        return {
            "unwritten_bytes": self._disk.waiting_bytes,
            "written_blocks_total": counters.written_blocks,
            "written_bytes_total": counters.written_bytes,
            "unwritten_turns_total": counters.unwritten_turns,
            "restored_tokens_total": counters.restored_tokens,
            "blocks_corrupt_total": counters.corrupt_blocks,
        }

    async def submit(self, request: bytes) -> dict[str, Any] | None:
        """Queue a `GenerateRequest`. Returns None once it is accepted, else the refusal on the wire."""
        message = decode(GenerateRequest, request)
        if self._engine is None:
            return NoReplica(f"{self._model.name} is still loading").to_wire()
        if message.model_id not in (b"", self._engine.loaded.model_id):
            # Its KV would be kept under the names of another's.
            return Unavailable(f"{self._name} computes otherwise than the request was made for").to_wire()
        loop = asyncio.get_running_loop()
        rows = self._known().rows(message.consumer)
        if message.request_id in rows:
            return Unavailable(f"request {message.request_id} has not left yet").to_wire()
        rows.add(message.request_id)
        known, features = await self._look_up(message)
        if message.request_id not in rows:
            return Unavailable(f"request {message.request_id} was taken out").to_wire()
        answer: asyncio.Future[SatchelError | None] = loop.create_future()

        def reply(refusal: SatchelError | None) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(refusal))

        self._engine.submit(message, reply, known, features)
        refusal = await answer
        if refusal is None:
            return None
        rows.discard(message.request_id)
        return refusal.to_wire()

    async def next_frame(self, consumer: str, number: int) -> bytes | None:
        """A `Frame` with the new tokens of the consumer's rows, of an engine step or of several. An empty one after a
        while without any, None when the consumer is gone: as `Consumers.next_frame`."""
        updates = await self._known().next_frame(consumer, number)
        return None if updates is None else encode(Frame(updates))

    async def _look_up(self, request: GenerateRequest) -> tuple[int, dict[int, Features]]:
        """About how much of the prompt is known here, and what the disk has of its pictures."""
        if self._disk is None or self._engine is None or not (request.agent or request.block_ids):
            return 0, {}
        if not request.pull_from and not request.media:
            # The disk is not asked, so no other thread is needed.
            return self._engine.look_up(request)
        self._looking.add(request.request_id)
        try:
            return await asyncio.to_thread(self._engine.look_up, request)
        finally:
            self._looking.discard(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        """Take rows out of the queue or the batch, within one step. Unknown ids are ignored."""
        # Those that are still being looked up are not known to the engine.
        self._known().forget_rows(self._looking.intersection(request_ids))
        if self._engine is not None:
            self._engine.abort(tuple(request_ids))

    async def release(self, root: bytes, block_ids: list[bytes], first: bytes, features: list[bytes]) -> int:
        """Let go of blocks in memory, of the tails after them, of those that `first` (packed tokens) begins with, and
        of pictures' features; what is on the disk stays. Returns the bytes."""
        tokens = unpack_tokens(first)

        def drop(engine: Engine) -> int:
            return engine.prefixes.drop(root, block_ids, tokens) + engine.pictures.features.drop(features)

        return await self._on_engine(drop)

    async def held(self, root: bytes, block_ids: list[bytes], first: bytes) -> int:
        """How many of these blocks are in memory, up to the first that is not; of what is shorter, how many tails."""
        tokens = unpack_tokens(first)

        def count(engine: Engine) -> int:
            return engine.prefixes.leading(block_ids) if block_ids else len(engine.prefixes.ends(root, tokens))

        return await self._on_engine(count)

    async def clear_cache(self) -> int:
        """Let go of everything that is kept in memory for later. Returns the bytes."""

        def clear(engine: Engine) -> int:
            held = engine.prefixes.nbytes
            engine.prefixes.clear()
            return held + engine.pictures.features.clear()

        return await self._on_engine(clear)

    async def _on_engine(self, action: Callable[[Engine], int]) -> int:
        """Run `action` between two steps; 0 where there is no engine yet."""
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

    async def drain(self, end_rows: bool = False) -> None:
        """Refuse new rows from now on; running ones finish, or with `end_rows` end with an error that says so."""
        # Who drains a replica ends it next.
        self._watchdog.leave()
        if self._engine is not None:
            self._engine.drain()
            if end_rows:
                self._engine.end_all()

    def _deliver(self, updates: dict[str, list[RowUpdate]]) -> None:
        self._known().deliver(updates)

    def _known(self) -> Consumers:
        """Made on the event loop, which begins after this object."""
        if self._consumers is None:
            self._loop = asyncio.get_running_loop()
            self._watchdog.watch("event loop", self._loop.call_soon_threadsafe)
            self._consumers = Consumers(self.abort)
        return self._consumers

    # The engine's thread.

    def _run_engine(self) -> None:
        self._pause()
        try:
            # Here, so that whoever starts this actor need not import MLX, and the event loop answers meanwhile.
            from . import models
            from .device import on_gpu
            from .disk_tier import DiskTier
            from .engine import Engine
            from .engine_reports import EngineReports

            loaded = models.load(
                self._model.source,
                dtype=self._model.dtype,
                adapter=self._model.adapter,
                weights=self._model.weights,
                kv=self._model.kv,
                numerics=self._model.numerics,
                kernels=default_home().kernels_file,
                digests=default_home().digests_file,
                trust_remote_code=self._model.trust_remote_code,
                context_tokens_max=self._model.context_tokens_max,
                progress=self._note_progress,
            )
        except SatchelError as error:
            self._loading.error = error
            return
        except Exception as error:
            logger.exception("loading %s failed", self._model.source)
            self._loading.error = ModelLoadError(f"{self._model.source} cannot be loaded: {error}")
            return
        if loaded.spec.reusable:
            store, unwritten_bytes_max = NodeStore(self._node), self._scheduling.unwritten_bytes_max
            self._disk = DiskTier(loaded.spec, loaded.model_id, store, unwritten_bytes_max)
        self._engine = engine = Engine(loaded, self._scheduling, self._kv_bytes_max, self._send, self._disk)
        floor_s = self._scheduling.stuck_s * (COMPILES_TIMES if on_gpu() else 1.0)
        self._watchdog.watch(ENGINE, engine.call, lambda: limit_s(floor_s, engine.pace.usual_s))

        def is_slow() -> bool:
            return self._watchdog.is_slow(ENGINE)

        reports = EngineReports(self._name, self._model.name, self._node, engine, self._disk, is_slow)
        threading.Thread(target=reports.reporter.run, name="reporter", daemon=True).start()
        served = threading.Timer(SERVED_S, self._note_served)
        served.daemon = True
        served.start()
        try:
            engine.run()
        except BaseException:
            # Without its engine this process is of no use: Ray starts another.
            logger.exception("the engine stopped")
            os._exit(1)

    def _pause(self) -> None:
        """Wait, where processes of this replica have ended at once: longer every time, as one that crashes while it
        loads would else keep its machine busy with nothing else."""
        try:
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
            ended = registry.note_start(self._name, again=again)
        except Exception as error:
            logger.warning("the control store does not answer: %s", error)
            return
        wait_s = pause_s(ended)
        if wait_s:
            what = f"waiting for {wait_s:g} s, after it has ended {ended} times soon after its start"
            logger.warning("%s: %s", self._name, what)
            self._note_progress(what, None)
            time.sleep(wait_s)

    def _note_served(self) -> None:
        try:
            registry.note_served(self._name)
        except Exception as error:
            logger.warning("the control store does not answer: %s", error)

    def _note_progress(self, what: str, fraction: float | None) -> None:
        self._loading.what, self._loading.fraction = what, fraction

    def _send(self, updates: dict[str, list[RowUpdate]]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, updates)

    # The thread that looks whether the replica is wanted.

    def _end_when_unwanted(self) -> None:
        idle_s = 0.0
        while idle_s < self.unwanted_s:
            # By the polls and not by the clock: a process that stood still has heard nobody ask meanwhile.
            time.sleep(self.unwanted_poll_s)
            asked, self._asked = self._asked, False
            try:
                idle_s = 0.0 if asked or registry.holds(self._model) else idle_s + self.unwanted_poll_s
            except Exception as error:
                # Whatever it is: this thread must live, or the process never ends.
                logger.warning("the control store does not answer: %s", error)
        logger.warning("%s is not served and nobody asks about %s: it ends", self._model.name, self._name)
        try:
            ray.kill(actor_handle(replica_actor_name(self._name)), no_restart=True)
        except (RayError, ValueError):
            os._exit(0)
