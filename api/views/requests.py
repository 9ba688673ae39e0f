"""Running requests as clients see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..pipeline.running import RunningSequence


def running_views(sequences: Iterable[RunningSequence], *, tenants: bool) -> list[dict[str, Any]]:
    """Returns the sequences, one entry for each choice of a request.

    Args:
        tenants: whether each says whose it is.
    """
    return [_view(each) | ({"tenant": each.tenant} if tenants else {}) for each in sequences]


def _view(sequence: RunningSequence) -> dict[str, Any]:
    stream = sequence.stream
    usage, (replica, node) = stream.usage, stream.where
    return {
        "id": sequence.id,
        "object": "request",
        "request_id": sequence.request_id,
        "agent": sequence.agent or None,
        "model": stream.model.info.name,
        "replica": replica,
        "node": node or None,
        "why": stream.why,
        "begun": round(sequence.begun, 3),
        "prompt_tokens": stream.prompt_tokens,
        "cached_tokens": stream.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "answers": stream.first_event_at is not None,
    }
