"""The recorded sessions of a coding agent (`claude_code_agents.jsonl.gz`): their requests, without the texts.

A prompt is known by the ids of its blocks of `TRACE_BLOCK` tokens, which are those of its session only.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE_BLOCK = 64


def coding_sessions(trace: Path) -> Iterator[dict[str, Any]]:
    """Yields the sessions."""
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def own_requests(session: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a session's requests without those of its subagents."""
    return [request for request in session["requests"] if not request.get("sub")]


def blocks_of(request: dict[str, Any]) -> list[int]:
    """Returns the ids of a prompt's blocks."""
    return [block for first, last in request["blocks"] for block in range(first, last + 1)]
