"""The Responses API on the way in: items of input, and the neutral messages that they become.

An answer is several items: reasoning, text, calls. Those of one answer become one message again, as the model wrote it.
Ids and states of items change nothing. Errors name the place as a caller would write it, such as
`input[2].content[0].image_url`. Large inputs belong in a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from ...cluster.errors import InvalidRequest, quoted
from ..generation.bodies import label_of, string_of, wrong
from ..generation.history import Message, MessageCall
from ..media.sources import PictureSource
from .thoughts import opened
from .tools import INPUT, flat_name

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_UNSUPPORTED = {"input_file": "files are", "input_audio": "audio is", "computer_screenshot": "screenshots are"}
# What OpenAI's servers ran or wrote for themselves. Clients send it back with the rest; a model here cannot use it.
_THEIRS = (
    "web_search_call",
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "code_interpreter_call",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "context_compaction",
    "ghost_snapshot",
    "additional_tools",
)
_KNOWN = "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output"


@dataclass(frozen=True)
class SpokenPart:
    """A part of an answer, or the id of an item that is kept here; `where` is its place."""

    kind: Literal["text", "thought", "call", "reference"]
    where: str
    text: str = ""
    call: MessageCall | None = None


@dataclass(frozen=True)
class InputItems:
    """The input of a request: as it was `given`, a list in any case; its `parts`, whole messages and parts of answers;
    and the types of what is `left_out`, each once."""

    given: list[dict[str, Any]] = field(default_factory=list)
    # `Message | SpokenPart`, of which pydantic need not know.
    parts: list[Any] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_input(value: Any, name: str = "input") -> InputItems:
    """Checks and converts the input, a string or a list of items. `name` is the field that has it.

    Raises:
        InvalidRequest: an item is malformed or has what is not supported; `param` is the place.
    """
    if value is None:
        return InputItems()
    if isinstance(value, str):
        said: Message = {"role": "user", "content": value}
        return InputItems([{"type": "message", "role": "user", "content": value}], [said])
    if not isinstance(value, list):
        raise wrong(name, "must be a string or a list of items")
    parts: list[Message | SpokenPart] = []
    left_out: dict[str, None] = {}
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(item, dict):
            raise wrong(where, "must be an object with a type")
        kind = item.get("type", "message" if "role" in item else None)
        if kind is None and isinstance(item.get("id"), str):
            kind = "item_reference"
        if kind in _THEIRS:
            left_out[kind] = None
        elif (read := _READERS.get(kind) if isinstance(kind, str) else None) is not None:
            parts += read(item, where)
        else:
            raise wrong(f"{where}.type", f"is {quoted(kind)}; known are {_KNOWN}")
    return InputItems(value, parts, list(left_out))


def messages_of(
    parts: Sequence[Message | SpokenPart],
    look_up: Callable[[str], dict[str, Any] | None] = lambda id: None,
    earlier: Sequence[Message] = (),
) -> list[Message]:
    """Returns the messages of an input.

    Args:
        look_up: returns the kept item with this id, None if there is none.
        earlier: what was said before, which has the names of tools that results answer.

    Raises:
        InvalidRequest: it refers to an item that is not kept.
    """
    writer = _Writer(earlier)
    for part in parts:
        if isinstance(part, SpokenPart) and part.kind == "reference":
            if (item := look_up(part.text)) is None:
                raise InvalidRequest(f"{part.where}: there is no item {quoted(part.text)} here", param=part.where)
            for inner in read_input([item]).parts:
                writer.add(inner)
        else:
            writer.add(part)
    return writer.messages


class _Writer:
    """Joins the parts of an answer to a message; results get the names of their calls, which they do not repeat."""

    def __init__(self, earlier: Sequence[Message]) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}
        for message in earlier:
            for call in message.get("tool_calls", ()):
                self._names[call.get("id", "")] = call["function"]["name"]
        self._turn: Message | None = None
        self._last = ""

    def add(self, part: Message | SpokenPart) -> None:
        if not isinstance(part, SpokenPart):
            self._turn = None
            message: Message = {**part}
            if (name := self._names.get(message.get("tool_call_id", ""))) is not None:
                message["name"] = name
            self.messages.append(message)
            return
        turn = self._turn
        # An answer begins with its reasoning.
        if turn is None or (part.kind == "thought" and self._last != "thought"):
            turn = self._turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
            self._last = ""
        if part.kind == "thought":
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), part.text)))
        elif part.kind == "text":
            # Texts between calls are one text of one answer; those side by side were two.
            joint = "\n\n" if self._last == "text" else ""
            turn["content"] = f"{turn['content']}{joint}{part.text}"
        elif part.call is not None:
            turn.setdefault("tool_calls", []).append(part.call)
            self._names[part.call.get("id", "")] = part.call["function"]["name"]
        self._last = part.kind


def _message(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"is {quoted(role)}; known are {', '.join(_ROLES)}")
    place = f"{where}.content"
    if role == "assistant":
        text = _content("" if item.get("content") is None else item["content"], place, pictures=False, joint="")
        assert isinstance(text, str)
        return [SpokenPart("text", where, text)]
    content = _content(item.get("content"), place, pictures=role == "user")
    return [{"role": "user", "content": content} if role == "user" else {"role": "system", "content": content}]


def _content(value: Any, where: str, *, pictures: bool, joint: str = "\n") -> str | list[Any]:
    """Returns the text of parts of text, or with pictures the parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "must be a string or a list of parts")
    parts: list[Any] = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise wrong(place, "must be an object with a type")
        if kind in _TEXTS or kind == "refusal":
            text = string_of(part, "refusal" if kind == "refusal" else "text", place)
            if parts and isinstance(parts[-1], str):
                parts[-1] += f"{joint}{text}"
            else:
                parts.append(text)
        elif kind == "input_image" and pictures:
            parts.append(_picture(part, place))
        elif kind in _UNSUPPORTED:
            raise InvalidRequest(f"{place}: {_UNSUPPORTED[kind]} not supported", param=place)
        else:
            known = (
                "input_text, output_text, refusal and input_image" if pictures else "input_text, output_text, refusal"
            )
            raise wrong(f"{place}.type", f"is {quoted(kind)}; possible here are {known}")
    if not any(isinstance(part, PictureSource) for part in parts):
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _picture(part: dict[str, Any], where: str) -> PictureSource:
    if part.get("file_id") is not None:
        raise InvalidRequest(f"{where}.file_id: files are not supported", param=f"{where}.file_id")
    given, place = part.get("image_url"), f"{where}.image_url"
    # As in chat completions, which some clients mean.
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise wrong(place, "must be a URL")
    return PictureSource(where, url, url_where=place)


def _reasoning(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    """What the model thought, if it is told; encrypted by others it is left out."""
    sealed, text = item.get("encrypted_content"), ""
    if not isinstance(sealed, str | None):
        raise wrong(f"{where}.encrypted_content", "must be a string")
    if item.get("content") is not None:
        content = _content(item["content"], f"{where}.content", pictures=False)
        assert isinstance(content, str)
        text = content
    if item.get("summary") is not None:
        # Checked, and not used: a summary is not what the model wrote.
        _content(item["summary"], f"{where}.summary", pictures=False)
    text = text or (opened(sealed) if sealed else "")
    return [SpokenPart("thought", where, text)] if text else []


def _function_call(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    return [_call(item, where, string_of(item, "arguments", where))]


def _custom_call(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    given = string_of(item, "input", where)
    return [_call(item, where, json.dumps({INPUT: given}, ensure_ascii=False))]


def _call(item: dict[str, Any], where: str, arguments: str) -> SpokenPart:
    id, name, namespace = label_of(item, "call_id", where), label_of(item, "name", where), item.get("namespace")
    if not isinstance(namespace, str | None):
        raise wrong(f"{where}.namespace", "must be a string")
    function = {"name": flat_name(namespace or "", name), "arguments": arguments}
    return SpokenPart("call", where, call={"id": id, "type": "function", "function": function})


def _output(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    id, given = label_of(item, "call_id", where), item.get("output", {})
    content = _content("" if given is None else given, f"{where}.output", pictures=True)
    return [{"role": "tool", "content": content, "tool_call_id": id}]


def _reference(item: dict[str, Any], where: str) -> list[Message | SpokenPart]:
    return [SpokenPart("reference", where, label_of(item, "id", where))]


_READERS: Mapping[str, Callable[[dict[str, Any], str], list[Message | SpokenPart]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "item_reference": _reference,
}


Input = Annotated[
    InputItems,
    # Alone it would be given pydantic's information as a name.
    PlainValidator(lambda value: read_input(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
