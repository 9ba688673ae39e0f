"""Updates of one sequence put together. Pure."""

from __future__ import annotations

from dataclasses import replace

from .replica_messages import SequenceUpdate


def merged(before: SequenceUpdate, update: SequenceUpdate) -> SequenceUpdate:
    """Returns one update that says what two successive ones of a sequence say."""
    return replace(
        update,
        tokens=before.tokens + update.tokens,
        cached_tokens=before.cached_tokens if update.cached_tokens is None else update.cached_tokens,
        disk_tokens=before.disk_tokens if update.cached_tokens is None else update.disk_tokens,
        queued_s=before.queued_s if update.queued_s is None else update.queued_s,
        prefill_s=before.prefill_s if update.prefill_s is None else update.prefill_s,
        # Logprobs have one entry per token, or are missing; an update without tokens has no entry either way.
        logprobs=(before.logprobs or []) + (update.logprobs or []) if before.logprobs or update.logprobs else None,
    )
