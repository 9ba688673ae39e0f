"""The Responses API on the way in: input items, and their conversion to messages that are independent of the protocol.

An answer is several items: reasoning, text, calls. They become one message again, as the model wrote it. Ids and states
of items are ignored. Errors name the place as a caller would write it, such as `input[2].content[0].image_url`. Large
inputs belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from ....cluster.errors import InvalidRequest, quoted
from ...requests.history import Message
from ...requests.left_out import LeftOut, newest_said
from ...requests.request_body import label_of, string_of, wrong
from .content import read_content, read_text
from .thoughts import opened
from .tool_items import Parts, SpokenPart, read_tool_item

_ROLES = ("user", "assistant", "system", "developer")
_TOOLS = ("additional_tools", "tool_search_output")
"""Items that add tools, which the model may call from then on."""
_ASIDE = ("additional_tools", "item_reference", "configuration_update", "compaction_trigger", "ghost_snapshot")
"""Items that are not messages: the user's message before one is still the newest."""


@dataclass(frozen=True)
class InputItems:
    """The input of a request: `given` is the list of items as sent; `parts` are whole messages and parts of answers;
    `left_out` has the types of what was left out, each once; `tools` are lists of tools among the items, each with its
    place."""

    given: list[dict[str, Any]] = field(default_factory=list)
    # In fact `Message | SpokenPart`; `Any` keeps pydantic from checking it.
    parts: list[Any] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tools: list[tuple[Any, str]] = field(default_factory=list)


def read_input(value: Any, name: str = "input") -> InputItems:
    """Checks and converts the input, a string or a list of items. `name` is the field that has it. Items of unknown
    types are left out, and so are unknown parts, except in the user's newest message, where they are an error.

    Raises:
        InvalidRequest: an item is malformed or has unsupported content; `param` is the place.
    """
    if value is None:
        return InputItems()
    if isinstance(value, str):
        said: Message = {"role": "user", "content": value}
        return InputItems([{"type": "message", "role": "user", "content": value}], [said])
    if not isinstance(value, list):
        raise wrong(name, "must be a string or a list of items")
    kinds = [_kind(item, f"{name}[{index}]") for index, item in enumerate(value)]
    newest = _newest(value, kinds)
    parts, left_out, tools = Parts(), LeftOut(), list[tuple[Any, str]]()
    for index, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        where = f"{name}[{index}]"
        if kind in _TOOLS:
            tools.append((item.get("tools"), f"{where}.tools"))
        if kind == "message":
            parts += _message(item, where, None if index == newest else left_out)
        elif (reader := _READERS.get(kind)) is not None:
            parts += reader(item, where, left_out)
        elif (read := read_tool_item({**item, "type": kind}, where, left_out)) is not None:
            parts += read
        elif kind != "additional_tools":
            left_out.add(kind)
    return InputItems(value, parts, left_out.names, tools)


def _kind(item: Any, where: str) -> str:
    """Returns the type of an item; messages and references may have none."""
    if not isinstance(item, dict):
        raise wrong(where, "must be an object with a type")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if isinstance(item.get("id"), str) else None
    if not isinstance(kind, str) or not kind:
        raise wrong(f"{where}.type", f"is {quoted(kind)}, and must be the name of a type")
    return kind


def _newest(items: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> int:
    """Returns the index of the user message to be answered, -1 if there is none."""
    roles = [
        item.get("role") if kind == "message" else None if kind in _ASIDE else "assistant"
        for item, kind in zip(items, kinds, strict=True)
    ]
    return newest_said(roles)


def messages_of(
    parts: Sequence[Message | SpokenPart],
    look_up: Callable[[str], dict[str, Any] | None] = lambda id: None,
    earlier: Sequence[Message] = (),
) -> list[Message]:
    """Returns the messages of an input.

    Args:
        look_up: returns the stored item with this id, None if there is none.
        earlier: the messages before, which have the names of the called tools.

    Raises:
        InvalidRequest: it refers to an item that is not stored.
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
    """Joins the parts of an answer into a message, and gives results the names of their calls."""

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
        # Reasoning begins a new answer.
        if turn is None or (part.kind == "thought" and self._last != "thought"):
            turn = self._turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
            self._last = ""
        if part.kind == "thought":
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), part.text)))
        elif part.kind == "text":
            # Texts between calls belong to one text of an answer; adjacent texts are separate answers.
            joint = "\n\n" if self._last == "text" else ""
            turn["content"] = f"{turn['content']}{joint}{part.text}"
        elif part.call is not None:
            turn.setdefault("tool_calls", []).append(part.call)
            self._names[part.call.get("id", "")] = part.call["function"]["name"]
        self._last = part.kind


def _message(item: Mapping[str, Any], where: str, left_out: LeftOut | None) -> Parts:
    """Reads a message. If `left_out` is None, unsupported content is an error."""
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"is {quoted(role)}; known are {', '.join(_ROLES)}")
    given, place = item.get("content"), f"{where}.content"
    if role == "assistant":
        return [SpokenPart("text", where, read_text("" if given is None else given, place, left_out, joint=""))]
    if role == "user":
        return [{"role": "user", "content": read_content(given, place, left_out, pictures=True)}]
    # System messages apply to every turn, so unsupported content in them is always an error.
    return [{"role": "system", "content": read_text(given, place, None)}]


def _agent_message(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    """Reads a message from one of Codex's agents to another. The model that reads it gets it as a user message."""
    given = item.get("content")
    text = read_text("" if given is None else given, f"{where}.content", left_out)
    names = [_optional(item, name, where) for name in ("author", "recipient")]
    if not text:
        left_out.add("agent_message")
        return []
    head = "".join(f" {word} {name}" for word, name in zip(("from", "to"), names, strict=True) if name)
    return [{"role": "user", "content": f"Message{head}:\n{text}" if head else text}]


def _agent_reasoning(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    text = _optional(item, "text", where)
    return [SpokenPart("thought", where, text)] if text else []


def _optional(item: Mapping[str, Any], name: str, where: str) -> str:
    return "" if item.get(name) is None else string_of(item, name, where)


def _reasoning(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    """Reads reasoning, if it is readable. If another server encrypted it, it is left out."""
    sealed, text = item.get("encrypted_content"), ""
    if not isinstance(sealed, str | None):
        raise wrong(f"{where}.encrypted_content", "must be a string")
    if item.get("content") is not None:
        text = read_text(item["content"], f"{where}.content", left_out)
    if item.get("summary") is not None:
        # Checked but not used, because a summary is not what the model wrote.
        read_text(item["summary"], f"{where}.summary", left_out)
    text = text or (opened(sealed) if sealed else "")
    return [SpokenPart("thought", where, text)] if text else []


def _reference(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    return [SpokenPart("reference", where, label_of(item, "id", where))]


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, LeftOut], Parts]] = {
    "agent_message": _agent_message,
    "agent_reasoning": _agent_reasoning,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


Input = Annotated[
    InputItems,
    # Wrapped, because pydantic would pass its validation info as the parameter `name`.
    PlainValidator(lambda value: read_input(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
