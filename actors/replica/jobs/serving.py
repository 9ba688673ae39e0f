"""The engine's thread of a replica whose model does jobs: loads the model and serves it."""

from __future__ import annotations

import logging
import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from ....cluster.config.config import Model, Scheduling
from ....cluster.config.nodes import Node
from ....cluster.config.timing import Timing
from ....cluster.environment import default_home
from ....cluster.errors import ModelLoadError, SatchelError
from ...model_files.identity.digests import digests_meanwhile
from ...model_files.identity.model_identity import ModelIdentity
from ...model_files.source import resolve
from ...model_files.weights import WeightFile, bytes_in_memory
from ...protocol import registry
from ...supervision.stall import limit_s
from ...supervision.watchdog import ENGINE, Watchdog
from ..device import blas
from ..device.device import device_kind, device_name
from ..memory.replica_memory import ReplicaMemory
from ..proving.findings import version_of
from .engine import GIVEN_BYTES_MAX, JobEngine
from .reports import JobReports

logger = logging.getLogger(__name__)

STUCK_TIMES = 20.0
"""The watchdog's limit is multiplied by this: encoders and decoders compute at once, between a job's steps."""

GIVEN_PART = 8
"""What requests bring takes at most this part of the memory that is left beside the weights (an eighth)."""


class JobShell(Protocol):
    """The part of a replica's actor that `JobServing` uses."""

    @property
    def watchdog(self) -> Watchdog: ...

    def take_up_jobs(self, engine: JobEngine[Any], folder: Path) -> None:
        """Notes what serves the model."""

    def refuse(self, error: SatchelError) -> None:
        """Notes that the model cannot be served."""

    def note_progress(self, what: str, fraction: float | None) -> None:
        """Notes which step of loading runs now."""

    def note_memory(self, memory: ReplicaMemory) -> None:
        """Notes the replica's part of the node's memory."""

    def send_job(self, request_id: str, update: Any) -> None:
        """Delivers how far a job is."""


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        makes: makes its engine. Its arguments are those of `JobEngine`.
        brings: whether requests bring anything that takes memory.
    """

    makes: Callable[..., JobEngine[Any]]
    brings: bool


class JobServing(ABC):
    """Loads and serves a model that does jobs; as `serving.Serving`, without KV and plain mode."""

    library: ClassVar[str]
    """What computes, besides MLX: its version is part of the model's id."""
    does: ClassVar[str]

    def __init__(
        self, name: str, model: Model, scheduling: Scheduling, node: Node, timing: Timing, shell: JobShell
    ) -> None:
        self._name, self._model, self._scheduling = name, model, scheduling
        self._node, self._timing, self._shell = node, timing, shell

    @abstractmethod
    def files_of(self, folder: Path) -> tuple[dict[str, Path], list[WeightFile]]:
        """Returns the files that identify a model, by name, and the headers of its weights.

        Raises:
            ModelLoadError: there are none, or one is damaged.
        """

    @abstractmethod
    def load(self, folder: Path, source: str) -> Loaded:
        """Loads a model, and tries it. Raises `ModelLoadError`."""

    def find(self, source: str) -> Path:
        """Returns the folder of a model, after its download if need be. Raises `ModelLoadError`."""
        return resolve(source, self._shell.note_progress)

    def run(self) -> None:
        """Loads the model and serves it for as long as the process lives; returns if it cannot be loaded."""
        try:
            with ReplicaMemory(
                default_home().memory_claims,
                self._name,
                self._node,
                self._scheduling,
                comes_and_goes=self._model.load == "request",
                kv=False,
            ) as memory:
                self._shell.note_memory(memory)
                engine, folder = self._load(memory)
        except SatchelError as error:
            self._shell.refuse(error)
            return
        except Exception as error:
            logger.exception("loading %s failed", self._model.source)
            self._shell.refuse(ModelLoadError(f"{self._model.source} cannot be loaded: {error}"))
            return
        self._shell.take_up_jobs(engine, folder)
        self._watch(engine, memory)
        try:
            engine.run()
        except BaseException:
            # The process is useless without its engine: Ray starts another.
            logger.exception("the engine stopped")
            os._exit(1)

    def _load(self, memory: ReplicaMemory) -> tuple[JobEngine[Any], Path]:
        """Raises `SatchelError`."""
        # Before any library takes OpenBLAS for itself.
        blas.chosen()
        model, progress = self._model, self._shell.note_progress
        if wrong := _not_for_jobs(model):
            raise ModelLoadError(f"{model.source} {self.does}: {wrong} is not supported for it")
        folder = self.find(model.source)
        progress(f"loading {model.source}", None)
        paths, weight_files = self.files_of(folder)
        memory.make_way(bytes_in_memory(weight_files, None))
        what = f"checking the files of {model.source}"
        mx.reset_peak_memory()
        with digests_meanwhile(paths, default_home().digests_file, lambda part: progress(what, part)) as digests_of:
            loaded = self.load(folder, model.source)
            digested = digests_of()
        weights = mx.get_active_memory()
        temporary = max(0, mx.get_peak_memory() - weights)
        given = min(GIVEN_BYTES_MAX, memory.share_bytes() // GIVEN_PART) if loaded.brings else 0
        share = memory.settle_weights(weights, temporary + given) - given
        identity = ModelIdentity({name: each.digest.hex() for name, each in digested.items()}, self._computing())
        waiting_max, send = self._scheduling.queue_requests_max, self._shell.send_job
        engine = loaded.makes(identity, waiting_max, share, send, memory.grow, given_bytes_max=given)
        engine.temporary_bytes = temporary
        engine.weights_bytes = bytes_in_memory(weight_files, None)
        engine.created = int(min(path.stat().st_mtime for path in paths.values()))
        return engine, folder

    def _watch(self, engine: JobEngine[Any], memory: ReplicaMemory) -> None:
        """Starts the threads that tell the engine its memory, the router the load, and the watchdog whether steps make
        progress."""
        watchdog = self._shell.watchdog

        def resize(share_bytes: int, *sizes: int) -> None:
            engine.memory_bytes = share_bytes + memory.workspace_bytes - engine.given_bytes_max

        watched = (lambda: engine.needed_bytes), resize
        threading.Thread(target=memory.watch, args=watched, name="memory", daemon=True).start()
        floor_s = STUCK_TIMES * self._scheduling.stuck_s
        watchdog.watch(ENGINE, engine.call, lambda: limit_s(floor_s, engine.pace.step_s or 0.0))
        names = self._name, self._model.name, self._node.name
        reports = JobReports(*names, engine, self._timing, lambda: watchdog.is_slow(ENGINE))
        threading.Thread(target=reports.reporter.run, name="reporter", daemon=True).start()
        registry.note_served_later(self._name)

    def _computing(self) -> dict[str, str]:
        """Returns how this process computes, as settings by name."""
        name = f"{device_name()} {platform.machine()}"
        return {"device": f"{device_kind()}, {name}"} | {each: version_of(each) for each in ("mlx", self.library)}


def _not_for_jobs(model: Model) -> str:
    """Returns the key of a model's config that cannot hold for one that does jobs, "" for none."""
    set_keys = {"adapter": model.adapter, "adapters": model.adapters, "split": model.split}
    set_keys |= {"dtype": model.dtype != "auto", "trust_remote_code": model.trust_remote_code}
    return next((key for key, is_set in set_keys.items() if is_set), "")
