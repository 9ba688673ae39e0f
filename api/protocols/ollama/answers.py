"""Ollama's wire format on the way out: whole answers, with their token counts and durations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ...pipeline.embedding import Embeddings
from ...pipeline.streams import Answer, TextStream, Usage
from ...requests.remembered import Remembered
from ...text.answers.logprobs import ShownToken, chat_logprobs
from ...tools.answer_pieces import ToolCall
from ..openai.embedding_answers import numbers_json

Part = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]
"""Returns the fields for a text, reasoning and calls, as one of the two routes shows them."""


def message_part(text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """Returns a part of an answer as `/api/chat` shows it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    # A call that was cut is left out: its arguments are incomplete, and clients would run it.
    if whole := [(call, given) for call in calls if (given := call.given) is not None]:
        message["tool_calls"] = [_call_body(call, given) for call, given in whole]
    return {"message": message}


def response_part(text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """Returns a part of an answer as `/api/generate` shows it, which has no calls."""
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def _call_body(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def answer_body(model: str, part: dict[str, Any], done: str = "") -> dict[str, Any]:
    """Returns a part of an answer.

    Args:
        model: its name in the request. done: why the answer ended, "" if it goes on.
    """
    body = {"model": model, "created_at": date(time.time()), **part, "done": bool(done)}
    return {**body, "done_reason": done} if done else body


def whole_body(model: str, part: Part, answer: Answer, stream: TextStream, arrived: float) -> dict[str, Any]:
    """Returns a whole answer.

    Args:
        stream: the stream that the answer came from.
        arrived: when the request did, by `time.perf_counter`.
    """
    shown = part(answer.text, answer.reasoning, answer.tool_calls)
    body = answer_body(model, shown, done_reason(answer.reason)) | logprobs_field(answer.logprobs)
    return body | taken(answer.usage, stream, arrived) | memory_field(stream.remembered)


def done_reason(reason: str) -> str:
    """Returns why an answer ended, `stop` or `length`; `reason` is as in `streams.Finished`."""
    return "length" if reason == "length" else "stop"


def taken(usage: Usage, stream: TextStream, arrived: float) -> dict[str, int]:
    """Returns an answer's token counts, and durations in nanoseconds. The time to the first token, waiting included, is
    the prompt's. The load duration is 0, because models are already loaded."""
    now = time.perf_counter()
    began = now if stream.first_event_at is None else stream.first_event_at
    return {
        "total_duration": _nanoseconds(now - arrived),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_cached_count": usage.cached_tokens,
        "prompt_eval_duration": _nanoseconds(began - arrived),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(now - began),
    }


def embed_json(model: str, made: Embeddings | None, arrived: float) -> bytes:
    """Returns the answer of `/api/embed`. Formatting many embeddings takes a second: call it in a worker thread.

    Args:
        model: as the client called it.
        made: None for no texts.
        arrived: when the request did, by `time.perf_counter`.
    """
    vectors = "" if made is None else ",".join(map(numbers_json, made.vectors))
    took = {"total_duration": _nanoseconds(time.perf_counter() - arrived), "load_duration": 0}
    counts = {**took, "prompt_eval_count": 0 if made is None else made.tokens}
    rest = json.dumps(counts, separators=(",", ":"))
    return f'{{"model":{json.dumps(model)},"embeddings":[{vectors}],{rest[1:]}'.encode()


def embeddings_json(made: Embeddings | None) -> bytes:
    """Returns the answer of `/api/embeddings`; None for no text."""
    return f'{{"embedding":{"[]" if made is None else numbers_json(made.vectors[0])}}}'.encode()


def logprobs_field(tokens: Sequence[ShownToken] | None) -> dict[str, Any]:
    """Returns the field `logprobs`, or {} if there are none."""
    return {"logprobs": chat_logprobs(list(tokens))["content"]} if tokens else {}


def memory_field(remembered: Remembered | None) -> dict[str, Any]:
    """Returns the field `satchel`, or {} if nothing is missing in the agent's memory."""
    body = None if remembered is None else remembered.body
    return {} if body is None else {"satchel": body}


def date(seconds: float) -> str:
    """Formats Unix time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
