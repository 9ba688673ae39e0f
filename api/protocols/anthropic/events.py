"""Anthropic's event stream: blocks of thinking, text and calls that open, grow and close one after the other. A call
that was cut is not closed, because clients run a call when it closes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....cluster.errors import SatchelError
from ...http.error_shapes import AnthropicErrors
from ...pipeline.streams import Finished, TextStream, Usage
from ...requests.remembered import Remembered
from ...text.answers.sequence_text import TextDelta
from ...tools.answer_pieces import CallArguments, CallBegun, ToolCall
from .answers import (
    SIGNATURE,
    call_id,
    envelope,
    memory_field,
    stop_body,
    usage_body,
)


class MessageEvents:
    """The server-sent events of one streamed message. JSON escapes keep them ASCII, so they contain no line separator.

    Args:
        model: its name in the request.
        max_tokens: the limit in the request.
        edits: whether the client asked for context edits.
    """

    def __init__(self, model: str, max_tokens: int, *, edits: bool) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._edits = edits
        self._index = -1
        self._open = ""

    @property
    def idle(self) -> bytes:
        return _event("ping", {})

    def start(self, streams: Sequence[TextStream]) -> bytes:
        """Begins the message. It says how many of the prompt's tokens were cached, unless prefill has not ended; the
        last event always says it."""
        stream = streams[0]
        usage = Usage(stream.prompt_tokens, 0, stream.cached_tokens)
        return _event("message_start", {"message": envelope(self._model, usage, edits=self._edits)}) + self.idle

    def text(self, index: int, delta: TextDelta) -> bytes:
        if not delta.text:
            return b""
        return self._switch("text", {"text": ""}) + self._delta("text_delta", {"text": delta.text})

    def reasoning(self, index: int, text: str) -> bytes:
        begun = self._switch("thinking", {"thinking": "", "signature": ""})
        return begun + self._delta("thinking_delta", {"thinking": text})

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        begun = self.call_begun(index, CallBegun(call.index, call.id, call.name))
        return begun + self.call_arguments(index, CallArguments(call.index, call.arguments)) + self._close()

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        return self._close() + self._switch("tool_use", {"id": call_id(call.id), "name": call.name, "input": {}})

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        return self._delta("input_json_delta", {"partial_json": more.text})

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        if call.given is None:
            self._open = ""
        return self._close()

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        usage = finished.usage
        stop = stop_body(finished.reason, finished.stop_string, usage.completion_tokens, self._max_tokens)
        body = {"delta": stop, "usage": usage_body(usage), **memory_field(remembered)}
        return self._close() + _event("message_delta", body)

    def end(self, total: Usage) -> bytes:
        return _event("message_stop", {})

    def failed(self, error: SatchelError, request_id: str) -> bytes:
        return failed_event(error, request_id)

    def _switch(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Opens a block of this kind, unless one is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        return closed + _event("content_block_start", {"index": self._index, "content_block": {"type": kind, **empty}})

    def _delta(self, kind: str, more: dict[str, str]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": {"type": kind, **more}})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta("signature_delta", {"signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._index})


def _event(kind: str, body: dict[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **body}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode("ascii")


def failed_event(error: SatchelError, request_id: str) -> bytes:
    """Returns the last event of a stream that failed."""
    _, body = AnthropicErrors().body(error, request_id)
    return _event("error", {name: value for name, value in body.items() if name != "type"})
