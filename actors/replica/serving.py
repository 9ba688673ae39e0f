"""The engine's thread of a replica: loads the model, serves it in plain mode during its self-test, and then in the best
way that the self-test found."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import mlx.core as mx

from ...cluster.config.config import Drafting, Model, Scheduling
from ...cluster.config.nodes import Node
from ...cluster.config.timing import Timing
from ...cluster.devices.energy import node_meter
from ...cluster.environment import default_home
from ...cluster.errors import ModelLoadError, SatchelError
from ...cluster.incidents import note_incident, note_incident_aside
from ...cluster.processes import keep_from_collection
from ..protocol import registry
from ..protocol.replica_messages import SequenceUpdate
from ..supervision.stall import limit_s
from ..supervision.watchdog import ENGINE, Watchdog
from .device import blas
from .device.device import on_cuda, on_gpu
from .device.device_errors import DeviceFailed
from .execution.followers import Followers
from .execution.loaded_model import LoadedModel
from .loading import models
from .loading.draft_model import load_draft_model
from .loading.warming import compile_ahead
from .loading.warming.warm_up import WarmUp, meet_prompts
from .loop.engine import Engine
from .memory.disk_tier import DiskTier
from .memory.other_parts import disk_tier_of
from .memory.replica_memory import ReplicaMemory
from .plain_mode import PlainMode
from .proving.pieces import Pieces
from .reports import EngineReports
from .selftest.self_test import Proven, prove

logger = logging.getLogger(__name__)

COMPILES_TIMES = 4.0
"""The watchdog's limit is multiplied by this on a GPU, where kernels are compiled at the first use of a shape."""


class Shell(Protocol):
    """The part of a replica's actor that `Serving` uses: what callers see of the engine."""

    @property
    def engine(self) -> Engine | None:
        """The engine that serves the model now; None if it is not served."""

    @property
    def is_plain(self) -> bool:
        """Whether the model is served in plain mode."""
        ...

    @property
    def watchdog(self) -> Watchdog: ...

    def take_up(self, proven: Proven, engine: Engine, disk: DiskTier | None, *, plain: bool) -> None:
        """Replaces the engine that serves the model. `plain`: in plain mode, until the self-test has ended."""

    def refuse(self, error: SatchelError) -> None:
        """Notes that the model cannot be served."""

    def coming(self) -> list[str]:
        """Returns the sequences that the engine does not know yet."""
        ...

    def note_progress(self, what: str, fraction: float | None) -> None:
        """Notes which step of loading or of the self-test runs now."""

    def note_memory(self, memory: ReplicaMemory) -> None:
        """Notes the replica's part of the node's memory."""

    def send(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        """Delivers sequences' updates, by consumer."""


class Serving:
    """Loads and serves a model. Used on the engine's thread, except for the threads that it starts.

    Args:
        name: the replica's id.
        shell: what callers see of the engine.
    """

    def __init__(
        self, name: str, model: Model, scheduling: Scheduling, node: Node, timing: Timing, shell: Shell
    ) -> None:
        self._name, self._model, self._scheduling = name, model, scheduling
        self._node, self._timing, self._shell = node, timing, shell
        self._reports: EngineReports | None = None
        self._followers: Followers | None = None

    def run(self) -> None:
        """Loads the model and serves it for as long as the process lives; returns if it cannot be loaded."""
        compile_ahead.begin_here(self._model.dtype)
        try:
            with ReplicaMemory(
                default_home().memory_claims,
                self._name,
                self._node,
                self._scheduling,
                comes_and_goes=self._model.load == "request",
            ) as memory:
                self._shell.note_memory(memory)
                proven, memory_bytes = self._ready(memory)
        except SatchelError as error:
            self._refuse(error)
            return
        except (Exception, DeviceFailed) as error:
            logger.exception("loading %s failed", self._model.source)
            self._refuse(ModelLoadError(f"{self._model.source} cannot be loaded: {error}"))
            return
        loaded = proven.loaded
        if loaded.way.is_fallback:
            note_incident(default_home(), "slower", f"{self._model.name} decodes {loaded.way.describe()}")
        if blas.chosen().is_fallback:
            note_incident(default_home(), "slower", f"{self._model.name} multiplies {loaded.multiplying}")
        self._run(self.begin(proven, memory, memory_bytes, self._warm_up(loaded), plain=False))

    def _ready(self, memory: ReplicaMemory) -> tuple[Proven, int]:
        """Loads the model, and serves it in plain mode during its self-test.

        Returns:
            The model, and the bytes that it has for KV and pictures.
        """

        def begin(plain: LoadedModel) -> Engine:
            return self.begin(Proven(plain, together=False), memory, memory.settle(plain))

        plain_mode = PlainMode(self._model.plain_after_s, begin, lambda: os._exit(1))
        proven = self._with_draft_model(self._prove(memory.make_way, plain_mode), memory, plain_mode.pieces)
        return proven, memory.settle(proven.loaded, proven.kv_beside_bytes)

    def _with_draft_model(self, proven: Proven, memory: ReplicaMemory, pieces: Pieces) -> Proven:
        """Returns the model with the one that drafts for it, if the config names one, and if it can."""
        drafts = self._model.drafts
        if not isinstance(drafts, Drafting):
            return proven
        try:
            return self._drafted_by(drafts, proven, memory, pieces)
        except SatchelError as error:
            logger.warning("%s is drafted without a model: %s", self._model.name, error.message)
            proven = replace(proven, notes=[*proven.notes, f"it is drafted without a model: {error.message}"])
        # Behind the handler nothing refers to what was loaded.
        mx.clear_cache()
        return proven

    def _drafted_by(self, drafts: Drafting, proven: Proven, memory: ReplicaMemory, pieces: Pieces) -> Proven:
        """Raises `SatchelError` if the model cannot draft, or if there is no room for it."""
        draft_model = load_draft_model(
            drafts.model,
            proven.loaded,
            dtype=self._model.dtype,
            weights=self._model.weights,
            progress=self._shell.note_progress,
            claim=memory.make_way_beside,
            exact=drafts.exact,
            pieces=pieces,
        )
        proven = replace(proven, draft_model=draft_model)
        memory.settle(proven.loaded, proven.kv_beside_bytes)
        return proven

    def _warm_up(self, loaded: LoadedModel) -> WarmUp | None:
        """Warms up what the first requests need. Returns what an idle engine goes on with; None for nothing."""
        if not on_cuda():
            return None
        meet_prompts(loaded)
        return WarmUp(loaded, self._scheduling.prefill_chunk_tokens)

    def _disk(self, loaded: LoadedModel) -> DiskTier | None:
        """Returns what writes and reads a model's KV; None if it cannot be kept."""
        if not loaded.spec.reusable:
            return None
        return disk_tier_of(loaded, self._node.name, None, self._scheduling, self._timing)

    def _bearable(self, share_bytes: int) -> int:
        """Returns how much of this process's part of the memory the model may use, in bytes."""
        return share_bytes

    def _prove(self, claim: Callable[[int], None], plain_mode: PlainMode) -> Proven:
        """Loads the model and runs its self-test. Raises `SatchelError`."""
        model, home, progress = self._model, default_home(), self._shell.note_progress
        loaded = models.load(
            model.source,
            dtype=model.dtype,
            adapter=model.adapter,
            adapters=model.adapters,
            weights=model.weights,
            kv=model.kv,
            numerics=model.numerics,
            digests=home.digests_file,
            trials=home.trials_file,
            trust_remote_code=model.trust_remote_code,
            context_tokens_max=model.context_tokens_max,
            progress=progress,
            claim=claim,
            # The warm-up runs later, while there are no requests.
            warm=False,
            served=plain_mode.offer if self._may_be_plain else lambda plain, known: None,
            pieces=plain_mode.pieces,
        )
        return prove(loaded, model, progress, home.trials_file, plain_mode.pieces)

    @property
    def _may_be_plain(self) -> bool:
        """Whether plain mode may be used. Not with `reproducible` numerics, whose answers must be the same at every
        start, and not for models that ship with Satchel on a CPU: these need no self-test there and load at once."""
        tested = self._model.source.startswith("embedded:") and not on_gpu()
        return self._model.numerics == "fast" and not tested

    def begin(
        self,
        proven: Proven,
        memory: ReplicaMemory,
        memory_bytes: int,
        further: WarmUp | None = None,
        *,
        plain: bool = True,
    ) -> Engine:
        """Makes an engine that serves a model, in place of the former engine. No sequence may be in computation."""
        loaded, before, drafts = proven.loaded, self._shell.engine, self._model.drafts
        disk = self._disk(loaded)
        engine = Engine(
            loaded,
            replace(proven.scheduling(self._scheduling), kv_bytes_max=memory.sequences_bytes_max()),
            memory_bytes,
            self._shell.send,
            disk,
            self._timing,
            further,
            lambda why: note_incident_aside(default_home(), "device", f"{self._model.name}: {why}"),
            before,
            trust_remote_code=self._model.trust_remote_code,
            drafts=drafts != "off",
            exact_drafts=drafts.exact if isinstance(drafts, Drafting) else drafts == "exact",
            draft_model=proven.draft_model,
            followers=self._followers,
        )
        if not plain:
            # The plain engine is soon replaced, and its first answers need not wait for it.
            keep_from_collection()
        self._shell.take_up(proven, engine, disk, plain=plain)
        if before is None or self._reports is None:
            self._watch(engine, disk, memory)
        else:
            before.hand_over()
            self._reports.follow(engine, disk)
        return engine

    def _watch(self, engine: Engine, disk: DiskTier | None, memory: ReplicaMemory) -> None:
        """Starts the threads that tell the engine its memory, the router the load, and the watchdog whether steps
        make progress."""
        shell, watchdog = self._shell, self._shell.watchdog
        floor_s = self._scheduling.stuck_s * (COMPILES_TIMES if on_gpu() else 1.0)

        def serving() -> Engine:
            return shell.engine or engine

        def is_slow() -> bool:
            return watchdog.is_slow(ENGINE)

        def workspace_bytes() -> int:
            return serving().executor.workspace_bytes

        def resize(share_bytes: int, *sizes: int) -> None:
            now = serving()
            now.call(partial(now.room.resize, self._bearable(share_bytes), *sizes))

        threading.Thread(target=memory.watch, args=(workspace_bytes, resize), name="memory", daemon=True).start()

        def most_s() -> float:
            # A piece of the self-test may take longer than a step, such as encoding a picture on a CPU.
            return limit_s(floor_s, None if shell.is_plain else serving().pace.usual_s)

        watchdog.watch(ENGINE, lambda do: serving().call(do), most_s)
        names = self._name, self._model.name, self._node.name
        self._reports = EngineReports(*names, engine, disk, self._timing, is_slow, shell.coming, node_meter())
        threading.Thread(target=self._reports.reporter.run, name="reporter", daemon=True).start()
        registry.note_served_later(self._name)

    def _run(self, engine: Engine) -> None:
        try:
            engine.run()
        except BaseException:
            # The process is useless without its engine: Ray starts another.
            logger.exception("the engine stopped")
            os._exit(1)

    def _refuse(self, error: SatchelError) -> None:
        """Stops serving the model, or never begins: it cannot be loaded, or its answers would be wrong."""
        self._shell.refuse(error)
        if (engine := self._shell.engine) is None:
            return
        # It was served in plain mode until now.
        note_incident(default_home(), "unfit", f"{self._model.name} is not served any more: {error.message}")
        engine.refuse(error)
        self._run(engine)
