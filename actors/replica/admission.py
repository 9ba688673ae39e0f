"""What a replica takes on: the scheduler's limits from memory in bytes, and which prompts it refuses."""

from __future__ import annotations

from collections.abc import Sequence

from ...cluster.config import Scheduling
from ...cluster.errors import ContextLengthExceeded, InvalidRequest, QueueFull, SatchelError
from ..messages import GenerateRequest
from .kv_cache import ModelCacheSpec
from .models import LoadedModel
from .scheduler import Limits, Scheduler


def limits_of(spec: ModelCacheSpec, scheduling: Scheduling, kv_bytes_max: int) -> Limits:
    """What fits. Windows, states and open blocks are counted for every place, the rest is for tokens."""
    rows_max = scheduling.rows_max
    if spec.bytes_per_row:
        rows_max = max(1, min(rows_max, kv_bytes_max // 2 // spec.bytes_per_row))
    chunk = scheduling.prefill_chunk_tokens
    return Limits(
        rows_max=rows_max,
        queue_requests_max=scheduling.queue_requests_max,
        prefill_chunk_tokens=min(chunk, spec.snapshot_tokens) if spec.recurrent else chunk,
        prefill_rows_max=scheduling.prefill_rows_max,
        kv_tokens_max=max(1, (kv_bytes_max - rows_max * spec.bytes_per_row) // spec.bytes_per_token),
    )


def refusal(
    request: GenerateRequest, tokens: Sequence[int], loaded: LoadedModel, scheduler: Scheduler, coming: int
) -> SatchelError | None:
    """Why a request is refused, None where it is not; `tokens` are its prompt and what it has said already, and
    `coming` rows wait for their pictures."""
    context = loaded.context_tokens
    if not tokens or max(tokens) >= loaded.vocabulary_size or min(tokens) < 0:
        return InvalidRequest("the prompt is empty or has token ids outside the vocabulary", param="prompt")
    if len(tokens) >= context:
        return ContextLengthExceeded(
            f"the prompt has {len(tokens)} tokens; the model's context is {context} tokens with the answer"
        )
    draws = request.sampling.max_tokens > 0
    reason = scheduler.refusal(len(tokens) - draws, coming, request.tenant, request.flow)
    if reason == "too_long":
        most = scheduler.limits.kv_tokens_max
        return ContextLengthExceeded(f"the prompt has {len(tokens)} tokens; memory holds {most} on this machine")
    if reason == "full":
        return QueueFull(f"the queue is full ({scheduler.limits.queue_requests_max} requests wait)")
    if reason == "full_for_it":
        return QueueFull("the queue is full for this caller: what is left of it is for others")
    return None
