"""The engine's thread of a replica whose model makes images: loads the model and serves it."""

from __future__ import annotations

import logging
import os
import platform
import threading
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ....cluster.config.config import Model, Scheduling
from ....cluster.config.nodes import Node
from ....cluster.config.timing import Timing
from ....cluster.environment import default_home
from ....cluster.errors import ModelLoadError, SatchelError
from ...model_files.identity.digests import check_unchanged, digest_files
from ...model_files.identity.model_identity import ModelIdentity
from ...model_files.image_folders import image_files, read_component_files
from ...model_files.source import resolve
from ...model_files.weights import bytes_in_memory
from ...protocol import registry
from ...protocol.replica_messages import ImageUpdate
from ...supervision.stall import limit_s
from ...supervision.watchdog import ENGINE, Watchdog
from ..device import blas
from ..device.device import device_kind, device_name
from ..memory.replica_memory import ReplicaMemory
from ..proving.findings import version_of
from .engine import GIVEN_BYTES_MAX, ImageEngine
from .pipeline import ImagePipeline
from .reports import ImageReports

logger = logging.getLogger(__name__)

STUCK_TIMES = 20.0
"""The watchdog's limit is multiplied by this: text encoder and decoder compute at once, between a large image's
steps."""


GIVEN_PART = 8
"""The images that are edited take at most this part of the memory that is left beside the weights (an eighth)."""


class ImageShell(Protocol):
    """The part of a replica's actor that `ImageServing` uses."""

    @property
    def watchdog(self) -> Watchdog: ...

    def take_up_images(self, engine: ImageEngine, folder: Path) -> None:
        """Notes what serves the model."""

    def refuse(self, error: SatchelError) -> None:
        """Notes that the model cannot be served."""

    def note_progress(self, what: str, fraction: float | None) -> None:
        """Notes which step of loading runs now."""

    def note_memory(self, memory: ReplicaMemory) -> None:
        """Notes the replica's part of the node's memory."""

    def send_image(self, request_id: str, update: ImageUpdate) -> None:
        """Delivers how far an image is."""


class ImageServing:
    """Loads and serves a model that makes images; as `serving.Serving`, without self-test, KV and plain mode."""

    def __init__(
        self, name: str, model: Model, scheduling: Scheduling, node: Node, timing: Timing, shell: ImageShell
    ) -> None:
        self._name, self._model, self._scheduling = name, model, scheduling
        self._node, self._timing, self._shell = node, timing, shell

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
        self._shell.take_up_images(engine, folder)
        self._watch(engine, memory)
        try:
            engine.run()
        except BaseException:
            # The process is useless without its engine: Ray starts another.
            logger.exception("the engine stopped")
            os._exit(1)

    def _load(self, memory: ReplicaMemory) -> tuple[ImageEngine, Path]:
        """Raises `SatchelError`."""
        # Before any library takes OpenBLAS for itself.
        blas.chosen()
        model, progress = self._model, self._shell.note_progress
        if wrong := _not_for_images(model):
            raise ModelLoadError(f"{model.source} makes images: {wrong} is not supported for it")
        folder = resolve(model.source, progress)
        progress(f"loading {model.source}", None)
        memory.make_way(bytes_in_memory(read_component_files(folder), None))
        paths = image_files(folder)
        what = f"checking the files of {model.source}"
        digested = digest_files(paths, default_home().digests_file, lambda fraction: progress(what, fraction))
        mx.reset_peak_memory()
        pipeline = ImagePipeline.load(folder, model.source)
        check_unchanged(digested, paths)
        weights = mx.get_active_memory()
        temporary = max(0, mx.get_peak_memory() - weights)
        given = min(GIVEN_BYTES_MAX, memory.share_bytes() // GIVEN_PART) if pipeline.info.edits else 0
        share = memory.settle_weights(weights, temporary + given) - given
        identity = ModelIdentity({name: each.digest.hex() for name, each in digested.items()}, _computing())
        waiting_max, send = self._scheduling.queue_requests_max, self._shell.send_image
        engine = ImageEngine(pipeline, identity, waiting_max, share, send, memory.grow, given_bytes_max=given)
        engine.temporary_bytes = temporary
        return engine, folder

    def _watch(self, engine: ImageEngine, memory: ReplicaMemory) -> None:
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
        reports = ImageReports(*names, engine, self._timing, lambda: watchdog.is_slow(ENGINE))
        threading.Thread(target=reports.reporter.run, name="reporter", daemon=True).start()
        registry.note_served_later(self._name)


def _not_for_images(model: Model) -> str:
    """Returns the key of a model's config that cannot hold for one that makes images, "" for none."""
    set_keys = {"adapter": model.adapter, "adapters": model.adapters, "split": model.split}
    set_keys |= {"dtype": model.dtype != "auto", "trust_remote_code": model.trust_remote_code}
    return next((key for key, is_set in set_keys.items() if is_set), "")


def _computing() -> dict[str, str]:
    """Returns how this process computes, as settings by name."""
    name = f"{device_name()} {platform.machine()}"
    return {"device": f"{device_kind()}, {name}"} | {each: version_of(each) for each in ("mlx", "mlx-vlm")}
