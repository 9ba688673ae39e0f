"""What a replica that makes images says of its model and of itself."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ....cluster.config.config import Model
from ...model_files.image_folders import image_files, read_component_files
from ...protocol.replica_messages import EmbeddingInfo, ModelInfo, ReplicaStats
from ..describing import stored_bytes

if TYPE_CHECKING:
    from ..memory.replica_memory import ReplicaMemory
    from .engine import ImageEngine

NO_TEXT = "it makes images"


def image_model_info(replica: str, node: str, model: Model, engine: ImageEngine, folder: Path) -> ModelInfo:
    """Describes a loaded model that makes images.

    Args:
        replica, node: their names.
        folder: the model's.
    """
    identity, info = engine.identity, engine.pipeline.info
    return ModelInfo(
        replica=replica,
        node=node,
        name=model.name,
        model_id=identity.model_id,
        files_id=identity.files_id,
        files=dict(identity.files),
        computing=dict(identity.computing),
        folder=str(folder),
        trust_remote_code=False,
        context_tokens=0,
        vocabulary_size=0,
        dtype="",
        weights="stored",
        kv="",
        layers=f"makes images ({info.family})",
        created=_created(folder),
        pid=os.getpid(),
        embedding=EmbeddingInfo(refusal=NO_TEXT),
        images=info,
    )


def image_stats(
    replica: str,
    node: str,
    model: str,
    engine: ImageEngine,
    folder: Path,
    memory: ReplicaMemory | None,
    *,
    answers: bool,
) -> ReplicaStats:
    """Returns the current figures of a replica that makes images. The arguments are as for `replica_stats`."""
    queue, counters = engine.queue, engine.counters
    return ReplicaStats(
        replica=replica,
        model=model,
        node=node,
        model_id=engine.identity.model_id.hex(),
        computing=dict(engine.identity.computing),
        folder=str(folder),
        weights_bytes=stored_bytes(folder, read_component_files),
        idle_s=engine.idle_s,
        answers=answers,
        running=queue.running,
        waiting=max(0, queue.waiting),
        requests_total=counters.requests,
        images_total=counters.images,
        image_steps_total=counters.steps,
        device_failures_total=counters.device_failures,
        claimed_bytes=memory.claimed_bytes if memory is not None else 0,
        claimable_bytes=memory.bytes_max if memory is not None else 0,
        has_kv=False,
    )


@cache
def _created(folder: Path) -> int:
    """Returns when the model's oldest file was written, Unix time."""
    return int(min(path.stat().st_mtime for path in image_files(folder).values()))
