"""Anthropic's wire format on the way in: messages, blocks of content and tools.

Blocks become the neutral messages: results of tools become messages of their own, and blocks of text lines of one text.
`cache_control` and other hints beside a block's own fields change nothing, so that they may move from turn to turn.
Errors name the place as a caller would write it, such as `messages[2].content[0].source.data`. Large inputs belong in a
worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from ...cluster.errors import InvalidRequest, quoted
from ..generation.bodies import label_of, string_of, wrong
from ..generation.history import Message, MessageCall
from ..media.sources import PictureSource

BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block begins so. It differs in every conversation and says nothing to a model, so it is
left out; with it no two conversations would share a prefix."""

_ROLES = ("user", "assistant", "system")
_TOOL_NAME_CHARACTERS_MAX = 128
_PICTURE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_UNSUPPORTED = {
    "document": "documents are",
    "search_result": "search results are",
    "container_upload": "uploads to containers are",
    "server_tool_use": "tools of Anthropic's servers are",
    "tool_reference": "references to tools are",
}
_ERROR_BEGINS = ("error", "<tool_use_error>")


def read_system(value: Any) -> str:
    """Returns the system prompt of a string or of blocks of text, without Claude Code's billing header.

    Raises:
        InvalidRequest: it is neither; `param` is the place.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong("system", "must be a string or a list of text blocks")
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(value)]
    if texts and texts[0].startswith(BILLING):
        del texts[0]
    return "\n\n".join(texts)


def read_messages(value: Any) -> list[Message]:
    """Checks and converts messages in Anthropic's form. Those of one role that follow each other are joined.

    Raises:
        InvalidRequest: a message is malformed or has what is not supported; `param` is the place.
    """
    if not isinstance(value, list):
        raise wrong("messages", "must be a list")
    if not value:
        raise wrong("messages", "is empty")
    turns: list[_Turn] = []
    for index, given in enumerate(value):
        role, blocks = _blocks(given, f"messages[{index}]")
        if turns and turns[-1].role == role:
            turns[-1].blocks += blocks
        else:
            turns.append(_Turn(role, blocks))
    reader = _Reader()
    return [message for turn in turns for message in reader.read(turn)]


@dataclass
class _Turn:
    """What one side says until the other answers: its blocks, each with its place."""

    role: str
    blocks: list[tuple[Any, str]] = field(default_factory=list)


def _blocks(given: Any, where: str) -> tuple[str, list[tuple[Any, str]]]:
    if not isinstance(given, dict):
        raise wrong(where, "must be an object with role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"is {quoted(role)}; known are {', '.join(_ROLES)}")
    if content is None and role == "assistant":
        return role, []
    if isinstance(content, str):
        return role, [({"type": "text", "text": content}, f"{where}.content")]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "must be a string or a list of blocks")
    return role, [(block, f"{where}.content[{index}]") for index, block in enumerate(content)]


class _Reader:
    """Converts turns in order; remembers the names of the tools that were called, which results do not repeat."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def read(self, turn: _Turn) -> Iterator[Message]:
        if turn.role == "assistant":
            yield self._assistant(turn.blocks)
            return
        results, said = [], []
        for block, where in turn.blocks:
            if turn.role == "user" and _kind(block, where) == "tool_result":
                results.append(self._result(block, where))
            else:
                said.append((block, where))
        # Results answer the calls before them, so nothing may come between.
        yield from results
        if said or not results:
            content = _content(said, pictures=turn.role == "user")
            yield (
                {"role": "user", "content": content} if turn.role == "user" else {"role": "system", "content": content}
            )

    def _assistant(self, blocks: Sequence[tuple[Any, str]]) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[MessageCall] = []
        for block, where in blocks:
            kind = _kind(block, where)
            if kind == "text":
                texts.append(_text(block, where))
            elif kind == "thinking":
                thoughts.append(string_of(block, "thinking", where))
            elif kind == "tool_use":
                calls.append(self._call(block, where))
            elif kind != "redacted_thinking":
                raise _refused(kind, where, "text, thinking, redacted_thinking and tool_use")
        # An answer's blocks of text are what it said between its calls, so they have no separator.
        message: Message = {"role": "assistant", "content": "".join(texts)}
        if thought := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: dict[str, Any], where: str) -> MessageCall:
        id, name = label_of(block, "id", where), label_of(block, "name", where)
        given = block.get("input")
        if not isinstance(given, dict):
            raise wrong(f"{where}.input", "must be an object")
        self._names[id] = name
        arguments = json.dumps(given, ensure_ascii=False)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: dict[str, Any], where: str) -> Message:
        id = label_of(block, "tool_use_id", where)
        failed, given = block.get("is_error"), block.get("content")
        if not isinstance(failed, bool | None):
            raise wrong(f"{where}.is_error", "must be a boolean")
        if given is None or isinstance(given, str):
            content: str | list[Any] = given or ""
        elif isinstance(given, list):
            inside = [(part, f"{where}.content[{index}]") for index, part in enumerate(given)]
            content = _content(inside, pictures=True)
        else:
            raise wrong(f"{where}.content", "must be a string or a list of blocks")
        message: Message = {"role": "tool", "content": _as_error(content) if failed else content, "tool_call_id": id}
        if id in self._names:
            message["name"] = self._names[id]
        return message


def _as_error(content: str | list[Any]) -> str | list[Any]:
    """Returns a result that says that it is an error, which templates have no field for."""
    if not isinstance(content, str):
        return [{"type": "text", "text": "Error:"}, *content]
    if content.lower().startswith(_ERROR_BEGINS):
        return content
    return f"Error: {content}" if content else "Error"


def _content(blocks: Sequence[tuple[Any, str]], *, pictures: bool) -> str | list[Any]:
    """Returns the text of text blocks, a line for each; with pictures, the parts."""
    parts: list[Any] = []
    for block, where in blocks:
        kind = _kind(block, where)
        if kind == "text":
            text = _text(block, where)
            if parts and isinstance(parts[-1], str):
                parts[-1] += f"\n{text}"
            else:
                parts.append(text)
        elif kind == "image" and pictures:
            parts.append(_picture(block, where))
        else:
            raise _refused(kind, where, "text, image and tool_result" if pictures else "text")
    if not any(isinstance(part, PictureSource) for part in parts):
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _picture(block: dict[str, Any], where: str) -> PictureSource:
    source, place = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        said = "files are not supported" if kind == "file" else "must be an object of type base64 or url"
        raise wrong(place, said)
    if kind == "url":
        return PictureSource(where, string_of(source, "url", place), url_where=f"{place}.url")
    media_type = source.get("media_type")
    if media_type not in _PICTURE_TYPES:
        raise wrong(f"{place}.media_type", f"is {quoted(media_type)}; known are {', '.join(_PICTURE_TYPES)}")
    data = string_of(source, "data", place)
    return PictureSource(where, f"data:{media_type};base64,{data}", url_where=f"{place}.data")


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, dict):
        raise wrong(where, "must be an object with a type")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", f"is {quoted(kind)}; known are text, image, tool_use and tool_result")
    return kind


def _text(block: Any, where: str) -> str:
    if (kind := _kind(block, where)) != "text":
        raise _refused(kind, where, "text")
    return string_of(block, "text", where)


def _refused(kind: str, where: str, known: str) -> InvalidRequest:
    if kind in _UNSUPPORTED:
        return InvalidRequest(f"{where}: {_UNSUPPORTED[kind]} not supported", param=where)
    return wrong(f"{where}.type", f"is {quoted(kind)}; possible here are {known}")


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request.

    Attributes:
        tools: those that the client runs and describes, as chat templates take them.
        places: where each one's schema stands in the body.
        left_out: types of the others, which Anthropic runs or describes, each once.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_tools(value: Any) -> ToolSet:
    """Checks and converts tools.

    Raises:
        InvalidRequest: one is malformed; `param` is the place.
    """
    if value is None:
        return ToolSet()
    if not isinstance(value, list):
        raise wrong("tools", "must be a list")
    found, left_out = ToolSet(), dict[str, None]()
    for index, given in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(given, dict):
            raise wrong(where, "must be an object")
        kind = given.get("type")
        if not isinstance(kind, str | None) or kind == "":
            raise wrong(f"{where}.type", "must be a string")
        if kind in (None, "custom"):
            found.tools.append(_tool(given, where))
            found.places.append(f"{where}.input_schema")
        else:
            left_out[kind] = None
    found.left_out.extend(left_out)
    return found


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Only what describes the tool to a model is taken over: a hint that moves must not change the prompt."""
    name, schema, strict = string_of(given, "name", where), given.get("input_schema"), given.get("strict")
    if not 0 < len(name) <= _TOOL_NAME_CHARACTERS_MAX:
        raise wrong(f"{where}.name", f"must have 1 to {_TOOL_NAME_CHARACTERS_MAX} characters")
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema", "must be an object")
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "must be a boolean")
    function: dict[str, Any] = {"name": name}
    if given.get("description") is not None:
        function["description"] = string_of(given, "description", where)
    return {"type": "function", "function": {**function, "parameters": schema, **({"strict": True} if strict else {})}}


_BLOCKS = {"type": "array", "items": {"type": "object"}}
SystemText = Annotated[str, PlainValidator(read_system), WithJsonSchema({"anyOf": [{"type": "string"}, _BLOCKS]})]
Messages = Annotated[list[Any], PlainValidator(read_messages), WithJsonSchema(_BLOCKS)]
Tools = Annotated[ToolSet, PlainValidator(read_tools), WithJsonSchema(_BLOCKS)]
