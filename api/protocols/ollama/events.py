"""Ollama's streams: a JSON object a line, the last one with `done`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....cluster.errors import SatchelError
from ...http.error_shapes import OllamaErrors
from ...pipeline.streams import Finished, TextStream, Usage
from ...requests.remembered import Remembered
from ...text.answers.sequence_text import TextDelta
from ...tools.answer_pieces import CallArguments, CallBegun, ToolCall
from .answers import Part, answer_body, done_reason, logprobs_field, memory_field, taken

LINES = {"Content-Type": "application/x-ndjson"}


class AnswerLines:
    """The lines of one streamed answer. JSON escapes keep them ASCII, so they contain no line separator. A call is in
    one line, because its arguments are an object.

    Args:
        model: its name in the request.
        part: how the route shows an answer.
        arrived: when the request did, by `time.perf_counter`.
    """

    def __init__(self, model: str, part: Part, arrived: float) -> None:
        self._model = model
        self._part = part
        self._arrived = arrived

    @property
    def idle(self) -> bytes:
        # A space before the next object, not an empty line: clients parse every line as an object.
        return waiting("")

    def start(self, streams: Sequence[TextStream]) -> bytes:
        self._stream = streams[0]
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        return self._more(self._part(delta.text, "", ()), logprobs_field(delta.logprobs))

    def reasoning(self, index: int, text: str) -> bytes:
        return self._more(self._part("", text, ()))

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        return self._more(self._part("", "", (call,)))

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        return b""

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        return b""

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        return self.tool_call(index, call)

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        body = answer_body(self._model, self._part("", "", ()), done_reason(finished.reason))
        return _line(body | taken(finished.usage, self._stream, self._arrived) | memory_field(remembered))

    def end(self, total: Usage) -> bytes:
        return b""

    def failed(self, error: SatchelError, request_id: str) -> bytes:
        return failed_line(error, request_id)

    def _more(self, part: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        return _line(answer_body(self._model, part) | (beside or {}))


def failed_line(error: SatchelError, request_id: str) -> bytes:
    """Returns the last line of a stream that failed."""
    return _line(OllamaErrors().body(error, request_id)[1])


def waiting(progress: str) -> bytes:
    """Returns what keeps a stream alive while its model is being loaded. Clients read every line as a part of the
    answer, so the progress has no place there."""
    return b" "


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"
