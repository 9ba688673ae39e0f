"""What a replica that does jobs says of its model and of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....cluster.config.config import Model
from ...protocol.replica_messages import EmbeddingInfo, ModelInfo, ReplicaStats

if TYPE_CHECKING:
    from ..memory.replica_memory import ReplicaMemory
    from .engine import JobEngine


def job_model_info(replica: str, node: str, model: Model, engine: JobEngine[Any], folder: Path) -> ModelInfo:
    """Describes a loaded model that does jobs.

    Args:
        replica, node: their names.
        folder: the model's.
    """
    identity = engine.identity
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
        created=engine.created,
        pid=os.getpid(),
        embedding=EmbeddingInfo(refusal=f"it {engine.does}"),
        **engine.described,
    )


def job_stats(
    replica: str,
    node: str,
    model: str,
    engine: JobEngine[Any],
    folder: Path,
    memory: ReplicaMemory | None,
    *,
    answers: bool,
) -> ReplicaStats:
    """Returns the current figures of a replica that does jobs. The arguments are as for `replica_stats`."""
    queue, counters = engine.queue, engine.counters
    return ReplicaStats(
        replica=replica,
        model=model,
        node=node,
        model_id=engine.identity.model_id.hex(),
        computing=dict(engine.identity.computing),
        folder=str(folder),
        weights_bytes=engine.weights_bytes,
        idle_s=engine.idle_s,
        answers=answers,
        running=queue.running,
        waiting=max(0, queue.waiting),
        requests_total=counters.requests,
        device_failures_total=counters.device_failures,
        claimed_bytes=memory.claimed_bytes if memory is not None else 0,
        claimable_bytes=memory.bytes_max if memory is not None else 0,
        has_kv=False,
        **engine.totals,
    )
