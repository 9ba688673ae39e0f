"""OpenAI's transcripts on the way out: whole, or as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....cluster.errors import SatchelError
from ...pipeline.streams import Answer, Finished, TextStream, Usage
from ...requests.remembered import Remembered
from ...text.answers.sequence_text import TextDelta
from ...tools.answer_pieces import CallArguments, CallBegun, ToolCall
from .answers import failed_event


def transcript_body(answer: Answer) -> dict[str, Any]:
    """Returns a whole transcript."""
    return {"text": answer.text.strip(), "usage": _usage(answer.usage)}


class TranscriptEvents:
    """The events of a streamed transcript: `transcript.text.delta`, then one `transcript.text.done`."""

    idle = b": ping\n\n"

    def __init__(self, streams: Sequence[TextStream]) -> None:
        self._said: list[str] = []

    def start(self, streams: Sequence[TextStream]) -> bytes:
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        # A transcript begins with its first word, whatever the model writes before it.
        text = delta.text if self._said else delta.text.lstrip()
        if not text:
            return b""
        self._said.append(text)
        return _event({"type": "transcript.text.delta", "delta": text})

    def reasoning(self, index: int, text: str) -> bytes:
        return b""

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        return b""

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        return b""

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        return b""

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        return b""

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        return b""

    def end(self, total: Usage) -> bytes:
        text = "".join(self._said).rstrip()
        return _event({"type": "transcript.text.done", "text": text, "usage": _usage(total)})

    def failed(self, error: SatchelError, request_id: str) -> bytes:
        return failed_event(error, request_id)


def _usage(usage: Usage) -> dict[str, Any]:
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": total,
    }


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode("ascii")
