"""What a replica says of its model and of itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ...cluster.config.config import Model
from ...cluster.errors import ModelLoadError
from ..model_files.weights import WeightFile, bytes_in_memory, read_weight_files
from ..protocol.replica_messages import AdapterInfo, ModelInfo, ReplicaStats, StageInfo

if TYPE_CHECKING:
    from .loop.engine import Engine
    from .memory.disk_tier import DiskTier
    from .memory.replica_memory import ReplicaMemory

logger = logging.getLogger(__name__)


class Proving(TypedDict):
    """What the self-test does now, since when it has run, and how the layers are divided."""

    proving: str
    proving_since: float
    stages: list[StageInfo]


def model_info(replica: str, node: str, model: Model, engine: Engine, proving: Proving, notes: list[str]) -> ModelInfo:
    """Describes a loaded model.

    Args:
        replica, node: their names.
        notes: what is not served as requested.
    """
    loaded = engine.loaded
    return ModelInfo(
        replica=replica,
        node=node,
        name=model.name,
        model_id=loaded.model_id,
        files_id=loaded.identity.files_id,
        files=dict(loaded.identity.files),
        computing=dict(loaded.identity.computing),
        folder=str(loaded.folder),
        trust_remote_code=model.trust_remote_code,
        context_tokens=loaded.context_tokens,
        vocabulary_size=loaded.vocabulary_size,
        dtype=loaded.dtype,
        weights=loaded.weights,
        kv=loaded.kv,
        kv_why=loaded.kv_why,
        layers=loaded.spec.describe(),
        created=int((loaded.folder / "config.json").stat().st_mtime),
        pid=os.getpid(),
        **loaded.media,
        embedding=loaded.embedding,
        joins=loaded.part[1] if loaded.part is not None else 0,
        notes=[*notes, *([failure] if (failure := engine.executor.drafts.failure) else [])],
        adapters=[AdapterInfo(each.name, each.digest, dict(each.files), each.rank) for each in loaded.adapters.all],
        **proving,
    )


def replica_stats(
    replica: str,
    node: str,
    model: str,
    engine: Engine,
    proving: Proving,
    disk: DiskTier | None,
    memory: ReplicaMemory | None,
    *,
    answers: bool,
) -> ReplicaStats:
    """Returns a replica's current figures.

    Args:
        replica, node, model: their names.
        disk: None if nothing is kept on disk.
        memory: the replica's part of the node's, if known.
        answers: as in `ReplicaStats`.
    """
    counters = engine.counters
    return ReplicaStats(
        replica=replica,
        model=model,
        node=node,
        model_id=engine.loaded.model_id.hex(),
        computing=dict(engine.loaded.identity.computing),
        decoding=engine.loaded.way.describe(),
        multiplying=engine.loaded.multiplying,
        folder=str(engine.loaded.folder),
        weights_bytes=stored_bytes(engine.loaded.folder),
        idle_s=engine.idle_s,
        adapters=[adapter.name for adapter in engine.loaded.adapters.all],
        **proving,
        answers=answers,
        running=engine.scheduler.running,
        waiting=engine.waiting,
        requests_total=counters.requests,
        prompt_tokens_total=counters.prompt_tokens,
        cached_tokens_total=counters.cached_tokens,
        generated_tokens_total=counters.generated_tokens,
        embedded_tokens_total=counters.embedded_tokens,
        prepared_tokens_total=engine.prefixes.prepared_tokens,
        prepared_tokens_used_total=engine.prefixes.used_tokens,
        prepared_tokens_wasted_total=engine.prefixes.wasted_tokens,
        prefix_blocks=engine.prefixes.blocks,
        prefix_bytes=engine.prefixes.nbytes,
        prefix_hits_total=counters.prefix_hits,
        prefix_misses_total=counters.prefix_misses,
        hot_tokens_total=counters.hot_tokens,
        preemptions_total=counters.preemptions,
        drafts_total=engine.executor.drafts.count,
        drafted_tokens_total=engine.executor.drafts.drafted,
        accepted_tokens_total=engine.executor.drafts.right,
        model_drafted_tokens_total=engine.executor.drafts.drafted_by_model,
        model_accepted_tokens_total=engine.executor.drafts.right_by_model,
        failed_checks_total=engine.failed_checks,
        device_failures_total=counters.device_failures,
        prefill_token_j=engine.energy.prefill_token_j,
        decode_token_j=engine.energy.decode_token_j,
        vision_cache_hits_total=engine.pictures.embeddings.hits,
        vision_encodes_total=engine.pictures.embeddings.encodes,
        vision_bytes=engine.pictures.embeddings.nbytes,
        claimed_bytes=memory.claimed_bytes if memory is not None else 0,
        claimable_bytes=memory.bytes_max if memory is not None else 0,
        has_kv=True,
        **engine.room.usage,
        **_disk_stats(engine, disk),
    )


@cache
def stored_bytes(folder: Path, read: Callable[[Path], list[WeightFile]] = read_weight_files) -> int:
    """Returns the bytes of a model's weights as stored, 0 if unknown.

    Args:
        read: returns the headers of the weight files in `folder`.
    """
    try:
        return bytes_in_memory(read(folder), None)
    except ModelLoadError as error:
        logger.warning("the size of the weights is not known: %s", error.message)
        return 0


def _disk_stats(engine: Engine, disk: DiskTier | None) -> dict[str, int]:
    if disk is None:
        return {}
    counters = disk.counters
    return {
        "unwritten_bytes": engine.keeping.unwritten_bytes,
        "written_blocks_total": counters.written_blocks,
        "written_bytes_total": counters.written_bytes,
        "unwritten_turns_total": counters.unwritten_turns,
        "restored_tokens_total": counters.restored_tokens,
        "blocks_corrupt_total": counters.corrupt_blocks,
        "split_requests_total": counters.followed_sequences,
        "split_fallbacks_total": counters.lost_prefills,
    }
