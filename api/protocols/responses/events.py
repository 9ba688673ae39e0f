"""The Responses API's event stream: items of reasoning, text and calls that are added, grow and are done, one after the
other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ....cluster.errors import GenerationFailed, SatchelError
from ...pipeline.streams import WAITING, Answer, Finished, TextStream, Usage
from ...requests.history import Message, answer_message
from ...requests.remembered import Remembered
from ...text.answers.sequence_text import TextDelta
from ...tools.answer_pieces import CallArguments, CallBegun, ToolCall
from .answers import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    ResponseObject,
    logprobs_body,
    new_id,
    text_part,
    thought_part,
)
from .bodies import ResponseBody
from .tools import INPUT, TOOL_SEARCH, OfferedTools

_LOST = "the answer is lost: the endpoint restarted before it was complete, or had stored it only in memory"

Ended = Callable[[dict[str, Any], Message], None]
"""A function that is called with a response that has ended, and its answer as one message."""


class ResponseEvents:
    """The server-sent events of one streamed response. JSON escapes keep them ASCII, so they contain no line separator.

    Args:
        response: the response object, which is filled.
        tools: the tools as the client knows them.
        ended: called before the last event is sent; not called if the answer fails.
        number: the number of the first event.
    """

    def __init__(self, response: ResponseObject, tools: OfferedTools, ended: Ended, number: int = 0) -> None:
        self._response = response
        self._tools = tools
        self._ended = ended
        self._number = number
        self._created = self._begun = False
        self._item: _OpenItem | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self.last: dict[str, Any] = {}
        """The response, once it has ended."""

    @property
    def idle(self) -> bytes:
        return WAITING

    def queued(self) -> bytes:
        """Returns the first event of a background response."""
        self._created, response = True, self._response.shown(QUEUED)
        return self._event("response.created", response=response) + self._event("response.queued", response=response)

    def start(self, streams: Sequence[TextStream]) -> bytes:
        self._response.truncated_messages = streams[0].truncated_messages if streams else 0
        self._begun, response = True, self._response.shown(IN_PROGRESS)
        created = b"" if self._created else self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def text(self, index: int, delta: TextDelta) -> bytes:
        if not delta.text and not delta.logprobs:
            return b""
        self._texts.append(delta.text)
        sent, logprobs = self._open_message(), logprobs_body(delta.logprobs)
        assert self._item is not None
        self._item.logprobs += logprobs
        return sent + self._delta("response.output_text.delta", delta.text, content_index=0, logprobs=logprobs)

    def reasoning(self, index: int, text: str) -> bytes:
        self._thoughts.append(text)
        sent = b""
        if self._item is None or self._item.kind != "reasoning":
            sent = self._add("reasoning", "rs", summary=[], content=[])
            sent += self._part("response.content_part.added", thought_part(""))
        return sent + self._delta("response.reasoning_text.delta", text, content_index=0)

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        begun = self.call_begun(index, CallBegun(call.index, call.id, call.name))
        more = self.call_arguments(index, CallArguments(call.index, call.arguments)) if call.arguments else b""
        return begun + more + self.call_ended(index, call)

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        tool = self._tools.called(call.name)
        named = {"call_id": call.id, "name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}
        if tool.kind == "custom":
            return self._add("custom_tool_call", "ctc", **named, input="")
        if tool.kind == TOOL_SEARCH:
            return self._add("tool_search_call", "tsc", call_id=call.id, execution="client", arguments={})
        return self._add("function_call", "fc", **named, arguments="")

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        assert self._item is not None
        if self._item.kind in ("custom_tool_call", "tool_search_call"):
            # A tool's free text is inside a JSON object that is not complete yet.
            self._item.texts.append(more.text)
            return b""
        return self._delta("response.function_call_arguments.delta", more.text)

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        self._calls.append(call)
        assert self._item is not None
        # A model may write free text without the JSON around it.
        whole = call.given is not None or (self._item.kind == "custom_tool_call" and not call.cut)
        return self._close(COMPLETED if whole else INCOMPLETE)

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        status = INCOMPLETE if finished.reason == "length" else COMPLETED
        sent = self._close(status)
        if status == COMPLETED and all(item["type"] == "reasoning" for item in self._response.output):
            # An empty message, because clients expect one.
            sent += self._open_message() + self._close()
        self.last = self._response.shown(status, usage=finished.usage, remembered=remembered)
        self._ended(self.last, answer_message("".join(self._texts), "".join(self._thoughts), self._calls))
        return sent + self._event(f"response.{status}", response=self.last)

    def end(self, total: Usage) -> bytes:
        return b""

    def failed(self, error: SatchelError, request_id: str) -> bytes:
        self.last = self._response.shown(FAILED, error=error)
        return self._event("response.failed", response=self.last)

    def cancelled(self) -> bytes:
        """Returns the last event of a response that its client cancelled. Clients know no event for that, so it is the
        one of an incomplete response."""
        closed = self._close(INCOMPLETE)
        self.last = self._response.shown(CANCELLED)
        return closed + self._event("response.incomplete", response=self.last)

    def completed(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Ends the response with the items so far. Returns it, and its last event, which gets this number."""
        self._close()
        self._number, self.last = number, self._response.shown(COMPLETED)
        return self.last, self._event("response.completed", response=self.last)

    @property
    def now(self) -> dict[str, Any]:
        """The response so far."""
        return self.last or self._response.shown(IN_PROGRESS if self._begun else QUEUED)

    def _open_message(self) -> bytes:
        """Opens a message, unless one is open."""
        if self._item is not None and self._item.kind == "message":
            return b""
        added = self._add("message", "msg", role="assistant", content=[])
        return added + self._part("response.content_part.added", text_part("", []))

    def _add(self, kind: str, prefix: str, **fields: Any) -> bytes:
        closed = self._close()
        item = {"id": new_id(prefix), "type": kind, "status": IN_PROGRESS, **fields}
        self._item = _OpenItem(kind, item)
        return closed + self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: str = COMPLETED) -> bytes:
        if (item := self._item) is None:
            return b""
        text, sent = "".join(item.texts), b""
        fields: dict[str, Any] = {"status": status}
        if item.kind == "message":
            part = text_part(text, item.logprobs)
            sent = self._grown("response.output_text.done", text=text, content_index=0, logprobs=item.logprobs)
            sent += self._part("response.content_part.done", part)
            fields["content"] = [part]
        elif item.kind == "reasoning":
            sent = self._grown("response.reasoning_text.done", text=text, content_index=0)
            sent += self._part("response.content_part.done", thought_part(text))
            fields |= {"content": [thought_part(text)], **self._response.sealed(text)}
        elif item.kind == "function_call":
            fields["arguments"] = text
            sent = self._grown("response.function_call_arguments.done", arguments=text, name=item.body["name"])
        elif item.kind == "tool_search_call":
            arguments = _object(text)
            fields |= {"arguments": arguments or {}, "status": INCOMPLETE if arguments is None else status}
        else:
            fields["input"] = given = _free_text(text)
            sent = self._delta("response.custom_tool_call_input.delta", given) if given else b""
            sent += self._grown("response.custom_tool_call_input.done", input=given)
        done = {**item.body, **fields}
        sent += self._event("response.output_item.done", output_index=self._index, item=done)
        self._response.output.append(done)
        self._item = None
        return sent

    @property
    def _index(self) -> int:
        """The index of the open item."""
        return len(self._response.output)

    def _delta(self, kind: str, delta: str, **fields: Any) -> bytes:
        assert self._item is not None
        self._item.texts.append(delta)
        return self._grown(kind, delta=delta, **fields)

    def _grown(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item.body["id"], output_index=self._index, **fields)

    def _part(self, kind: str, part: dict[str, Any]) -> bytes:
        return self._grown(kind, content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields}, separators=(",", ":"))
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode("ascii")


class _OpenItem:
    """An item that grows: as it was added, and the pieces since then."""

    def __init__(self, kind: str, body: dict[str, Any]) -> None:
        self.kind = kind
        self.body = body
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []


def whole(events: ResponseEvents, answer: Answer, stream: TextStream) -> dict[str, Any]:
    """Returns the response for an answer that is not streamed, made by the same events."""
    events.start([stream])
    if answer.reasoning:
        events.reasoning(0, answer.reasoning)
    if answer.text or answer.logprobs:
        events.text(0, TextDelta(answer.text, answer.logprobs))
    for call in answer.tool_calls:
        events.tool_call(0, call)
    events.finish(0, Finished(answer.reason, answer.usage, answer.stop_string), stream.remembered)
    return events.last


def recovered(id: str, model: str, answer: Message | None, number: int) -> tuple[dict[str, Any], bytes]:
    """Returns a background response of an earlier process, and its last event. Nothing else is known of its request.

    Args:
        model: the model of the request.
        answer: the answer in its agent's transcript; None if it is not there, and the response failed.
        number: the number of the event.
    """
    body = ResponseBody(background=True)
    response = ResponseObject(id, body, model, created_s=0)
    events = ResponseEvents(response, body.tools, lambda shown, message: None, number)
    if answer is None:
        event = events.failed(GenerationFailed(_LOST), "")
        return events.last, event
    if thought := answer.get("reasoning_content"):
        events.reasoning(0, thought)
    if answer["content"]:
        events.text(0, TextDelta(str(answer["content"])))
    for index, call in enumerate(answer.get("tool_calls", ())):
        function = call["function"]
        events.tool_call(0, ToolCall(index, call.get("id", ""), function["name"], function["arguments"]))
    return events.completed(number)


def _object(text: str) -> dict[str, Any] | None:
    """Parses a JSON object, None if the text is not one."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _free_text(arguments: str) -> str:
    """Returns the free text in the arguments of a function that stands for a tool with free text. If the arguments are
    not of that form, or were cut, returns them as they are."""
    text = (_object(arguments) or {}).get(INPUT)
    return text if isinstance(text, str) else arguments
