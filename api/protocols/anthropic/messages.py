"""Anthropic's wire format on the way in: messages, blocks of content and tools.

Blocks become messages that are independent of the protocol: tool results become separate messages, and text blocks
become lines of one text. `cache_control` and other hints are ignored, so they may move from turn to turn without
changing the prompt. Unsupported content is an error in the user's newest message. In older messages it is left out, so
that the conversation can go on. Errors name the place as a caller would write it, such as
`messages[2].content[0].source.data`. Large inputs belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from ....cluster.errors import InvalidRequest, quoted
from ...media.sources import PictureSource
from ...requests.documents import cannot_be_read, words_of
from ...requests.history import Message, MessageCall
from ...requests.left_out import LeftOut, MessageList, newest_said
from ...requests.request_body import arguments_text, label_of, string_of, wrong
from .server_tools import RESULTS, USES, result_text, used_name

BILLING = "x-anthropic-billing-header:"
"""The beginning of Claude Code's first system block. The block differs in every conversation and is useless to a model.
It is left out, because with it no two conversations would share a prefix."""

_ROLES = ("user", "assistant", "system")
_TOOL_NAME_CHARACTERS_MAX = 128
_PICTURE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_UNREAD = {"document": "only text documents are supported", "container_upload": "containers are not supported"}
_ELSEWHERE = ("image", "tool_result")
"""Blocks that an assistant's message cannot have."""
_ERROR_BEGINS = ("error", "<tool_use_error>")
_SUMMARY = "Summary of the conversation so far:\n\n"


def read_system(value: Any) -> str:
    """Returns the system prompt from a string or text blocks, without Claude Code's billing header.

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


def read_messages(value: Any) -> MessageList:
    """Checks and converts messages in Anthropic's form. Consecutive messages of one role are joined. The summary of a
    compaction replaces everything before it.

    Raises:
        InvalidRequest: a message is malformed or has unsupported content; `param` is the place.
    """
    if not isinstance(value, list):
        raise wrong("messages", "must be a list")
    if not value:
        raise wrong("messages", "is empty")
    speakers = [_speaker(given) for given in value]
    newest = newest_said(speakers)
    # The last message may be the beginning of the answer.
    asked = newest_said(speakers[:-1]) if speakers[-1] == "assistant" else newest
    turns: list[_Turn] = []
    for index, given in enumerate(value):
        role, blocks = _blocks(given, f"messages[{index}]", newest=index == newest, earlier=index != asked)
        if turns and turns[-1].role == role:
            turns[-1].blocks += blocks
        else:
            turns.append(_Turn(role, blocks))
    reader, said = _Reader(), list[Message]()
    for turn in turns:
        messages = list(reader.read(turn))
        if reader.compacted:
            said, reader.compacted = [], False
        said += messages
    return MessageList(said, reader.left_out, reader.tools)


def _speaker(given: Any) -> Any:
    """Returns the role of a message; "tool" for a user message with tool results. What such a message has beside them,
    such as a file that was read, comes from the agent program, so no person can leave it out."""
    if not isinstance(given, dict):
        return None
    content = given.get("content")
    blocks = content if isinstance(content, list) else ()
    if given.get("role") == "user" and any(isinstance(it, dict) and it.get("type") == "tool_result" for it in blocks):
        return "tool"
    return given.get("role")


@dataclass(frozen=True)
class _Block:
    """A block of content and its place. `newest` says that it is in the user's newest message, in which unsupported
    content is an error. `earlier` says that its media come before the message that is answered, so they may be left
    out."""

    given: Any
    where: str
    newest: bool = False
    earlier: bool = True

    @property
    def kind(self) -> str:
        return _kind(self.given, self.where)


@dataclass
class _Turn:
    """Consecutive messages of one role."""

    role: str
    blocks: list[_Block] = field(default_factory=list)


def _blocks(given: Any, where: str, *, newest: bool, earlier: bool) -> tuple[str, list[_Block]]:
    if not isinstance(given, dict):
        raise wrong(where, "must be an object with role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"is {quoted(role)}; known are {', '.join(_ROLES)}")
    if content is None and role == "assistant":
        return role, []
    if isinstance(content, str):
        return role, [_Block({"type": "text", "text": content}, f"{where}.content")]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "must be a string or a list of blocks")
    return role, [_Block(block, f"{where}.content[{index}]", newest, earlier) for index, block in enumerate(content)]


class _Reader:
    """Converts turns in order. Remembers the names of called tools, because results do not have them.

    Attributes:
        left_out: the types of blocks that were left out.
        tools: definitions of tools in blocks, with their places.
        compacted: whether the latest turn begins with a summary of everything before it.
    """

    def __init__(self) -> None:
        self.left_out = LeftOut()
        self.tools: list[tuple[Any, str]] = []
        self.compacted = False
        self._names: dict[str, str] = {}

    def read(self, turn: _Turn) -> Iterator[Message]:
        if turn.role == "assistant":
            yield from self._assistant(turn.blocks)
            return
        results, said = [], []
        for block in turn.blocks:
            if turn.role == "user" and block.kind == "tool_result":
                results.append(self._result(block.given, block.where))
            elif not self._takes_tool(block):
                said.append(block)
        # Results must follow their calls directly.
        yield from results
        if said or not results:
            content = self._content(said, user=turn.role == "user")
            yield (
                {"role": "user", "content": content} if turn.role == "user" else {"role": "system", "content": content}
            )

    def _takes_tool(self, block: _Block) -> bool:
        """Returns whether a block changes the tools. A block that removes a tool is left out."""
        if block.kind not in ("tool_addition", "tool_removal"):
            return False
        tool = block.given.get("tool")
        if not isinstance(tool, dict):
            raise wrong(f"{block.where}.tool", "must be an object with a type")
        if block.kind == "tool_addition" and tool.get("type") == "tool_definition":
            self.tools.append((tool.get("definition"), f"{block.where}.tool.definition"))
        elif not (block.kind == "tool_addition" and tool.get("type") == "tool_reference"):
            # A tool that is only named is already in `tools`, which are all shown.
            self.left_out.add(block.kind)
        return True

    def _assistant(self, blocks: Sequence[_Block]) -> list[Message]:
        """Returns an answer. If it called tools of servers, it becomes several messages, with the results between
        them."""
        answered = {block.given.get("tool_use_id") for block in blocks if block.kind in RESULTS}
        messages: list[Message] = []
        open_uses = set[str]()
        spoken = _Spoken()
        for block in blocks:
            kind, given, where = block.kind, block.given, block.where
            if kind == "text":
                spoken.texts.append(_text(given, where))
            elif kind == "thinking":
                spoken.thoughts.append(string_of(given, "thinking", where))
            elif kind == "tool_use" or (kind in USES and label_of(given, "id", where) in answered):
                name = label_of(given, "name", where) if kind == "tool_use" else used_name(given, where)
                spoken.calls.append(self._call(given, name, where))
                open_uses.add(given["id"])
            elif kind in _ELSEWHERE:
                raise _refused(kind, where, "text, thinking, redacted_thinking and tool_use")
            elif kind in RESULTS and given.get("tool_use_id") in open_uses:
                if not spoken.empty:
                    messages.append(spoken.message)
                    spoken = _Spoken()
                id = given["tool_use_id"]
                said: Message = {"role": "tool", "content": result_text(given, where), "tool_call_id": id}
                messages.append({**said, "name": self._names[id]})
            elif kind == "compaction" and given.get("content") is not None:
                summary: Message = {"role": "user", "content": _SUMMARY + string_of(given, "content", where)}
                messages, spoken, self.compacted = [summary], _Spoken(), True
            elif (words := words_of(given, where)) is not None:
                spoken.texts.append(words)
            elif kind != "redacted_thinking" and not self._takes_tool(block):
                self.left_out.add(kind)
        return [*messages, spoken.message] if not (messages and spoken.empty) else messages

    def _call(self, block: dict[str, Any], name: str, where: str) -> MessageCall:
        id = label_of(block, "id", where)
        self._names[id] = name
        arguments = arguments_text(block.get("input"), f"{where}.input")
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: dict[str, Any], where: str) -> Message:
        id = label_of(block, "tool_use_id", where)
        failed, given = block.get("is_error"), block.get("content")
        if not isinstance(failed, bool | None):
            raise wrong(f"{where}.is_error", "must be a boolean")
        if given is None or isinstance(given, str):
            content: str | list[Any] = given or ""
        elif isinstance(given, list):
            content = self._content([_Block(part, f"{where}.content[{index}]") for index, part in enumerate(given)])
        else:
            raise wrong(f"{where}.content", "must be a string or a list of blocks")
        message: Message = {"role": "tool", "content": _as_error(content) if failed else content, "tool_call_id": id}
        if id in self._names:
            message["name"] = self._names[id]
        return message

    def _content(self, blocks: Sequence[_Block], *, user: bool = True) -> str | list[Any]:
        """Returns the text of text blocks, a line for each; with pictures, a list of parts. System messages have no
        pictures."""
        parts: list[Any] = []
        for block in blocks:
            kind, given, where = block.kind, block.given, block.where
            if kind == "image" and user:
                # The newest message may have been joined to other user messages.
                parts.append(replace(_picture(given, where), earlier=block.earlier))
                continue
            text = _text(given, where) if kind == "text" else words_of(given, where)
            if text is None:
                if block.newest or not user:
                    raise _refused(kind, where, "text, image, document and tool_result" if user else "text")
                self.left_out.add(kind)
                if kind not in _UNREAD:
                    continue
                text = cannot_be_read(given)
            if parts and isinstance(parts[-1], str):
                parts[-1] += f"\n{text}"
            else:
                parts.append(text)
        if not any(isinstance(part, PictureSource) for part in parts):
            return parts[0] if parts else ""
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


@dataclass
class _Spoken:
    """The content of one assistant's message."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[MessageCall] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.texts or self.thoughts or self.calls)

    @property
    def message(self) -> Message:
        # An answer's text blocks are the texts between its calls, so they are joined without a separator.
        message: Message = {"role": "assistant", "content": "".join(self.texts)}
        if thought := "\n".join(filter(None, self.thoughts)):
            message["reasoning_content"] = thought
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _as_error(content: str | list[Any]) -> str | list[Any]:
    """Returns a result whose text says that it is an error, because templates have no field for that."""
    if not isinstance(content, str):
        return [{"type": "text", "text": "Error:"}, *content]
    if content.lower().startswith(_ERROR_BEGINS):
        return content
    return f"Error: {content}" if content else "Error"


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
    if kind in _UNREAD:
        return InvalidRequest(f"{where}: {_UNREAD[kind]}", param=where)
    return wrong(f"{where}.type", f"is {quoted(kind)}; possible here are {known}")


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request.

    Attributes:
        tools: the tools that the client runs and describes, as chat templates take them.
        places: the place of each one's schema in the body.
        left_out: the types of the other tools, which Anthropic runs or describes, each once.
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
    return with_tools(ToolSet(), [(given, f"tools[{index}]") for index, given in enumerate(value)])


def with_tools(tools: ToolSet, more: Sequence[tuple[Any, str]]) -> ToolSet:
    """Returns tools and more of them, each with its place. Raises as `read_tools`."""
    found, left_out = ToolSet([*tools.tools], [*tools.places]), dict.fromkeys(tools.left_out)
    for given, where in more:
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
    """Returns only the fields that describe the tool to a model, because hints that move must not change the prompt."""
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
Messages = Annotated[MessageList, PlainValidator(read_messages), WithJsonSchema(_BLOCKS)]
Tools = Annotated[ToolSet, PlainValidator(read_tools), WithJsonSchema(_BLOCKS)]
