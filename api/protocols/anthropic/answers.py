"""Anthropic's wire format on the way out: whole messages and usage."""

from __future__ import annotations

import secrets
from typing import Any

from ...pipeline.streams import Answer, Usage
from ...requests.remembered import Remembered

SIGNATURE = "c2F0Y2hlbA=="
"""The signature of every thinking block. Clients send it back unread, and it is not checked here."""


def message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def call_id(id: str) -> str:
    """Returns a call's id with Anthropic's prefix."""
    return f"toolu_{id.removeprefix('call_')}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Returns token counts. Of the prompt's tokens, `input_tokens` were computed and `cache_read_input_tokens` were
    cached. Caching costs nothing, so `cache_creation_input_tokens` is 0."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def stop_body(reason: str, stop_string: str | None, output_tokens: int, max_tokens: int) -> dict[str, str | None]:
    """Returns why an answer ended.

    Args:
        reason, stop_string: as in `streams.Finished`.
        output_tokens: how many tokens the answer has.
        max_tokens: the limit in the request. An answer that was cut with fewer tokens had no more room in the context.
    """
    if reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    if reason != "length":
        return {"stop_reason": "end_turn", "stop_sequence": None}
    full = output_tokens < max_tokens
    return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}


def envelope(model: str, usage: Usage, *, edits: bool) -> dict[str, Any]:
    """Returns a message that has not ended, without content.

    Args:
        model: its name in the request.
        edits: whether the request asked for context edits; none are made here.
    """
    return {
        "id": message_id(),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
        **({"context_management": {"applied_edits": []}} if edits else {}),
    }


def message_body(
    model: str, answer: Answer, max_tokens: int, *, edits: bool = False, remembered: Remembered | None = None
) -> dict[str, Any]:
    """Returns a whole message; `satchel` reports what is missing in its agent's memory."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        # A call that was cut is left out: its input is incomplete, and clients would run it.
        if (given := call.given) is not None:
            content.append({"type": "tool_use", "id": call_id(call.id), "name": call.name, "input": given})
    stop = stop_body(answer.reason, answer.stop_string, answer.usage.completion_tokens, max_tokens)
    return {**envelope(model, answer.usage, edits=edits), "content": content, **stop, **memory_field(remembered)}


def memory_field(remembered: Remembered | None) -> dict[str, Any]:
    """Returns the field `satchel`, or {} if there is nothing to report."""
    body = None if remembered is None else remembered.body
    return {} if body is None else {"satchel": body}
