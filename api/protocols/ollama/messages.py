"""Ollama's wire format on the way in: messages, and the tools that they call.

Errors name the place as a caller would write it, such as `messages[2].images[0]`. Large inputs belong in a worker
thread.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from ....cluster.errors import quoted
from ...media.sources import PictureSource
from ...requests.history import Message, MessageCall
from ...requests.request_body import LABEL_CHARACTERS_MAX, label_of, string_of, wrong
from ..openai.messages import ToolBody

_ROLES = ("system", "user", "assistant", "tool")


def read_messages(value: Any) -> list[Message]:
    """Checks and converts messages in Ollama's form; None is an empty list.

    Raises:
        InvalidRequest: a message is malformed; `param` is the place.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong("messages", "must be a list")
    return [_message(given, f"messages[{index}]") for index, given in enumerate(value)]


def read_images(value: Any, where: str) -> list[PictureSource]:
    """Checks and converts the list of images at a place; None is an empty list.

    Raises:
        InvalidRequest: it is not a list of base64 texts.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(where, "must be a list of base64 texts")
    return [_picture(given, f"{where}[{index}]") for index, given in enumerate(value)]


def content_of(text: str, pictures: list[PictureSource]) -> str | list[Any]:
    """Returns a message's content, with pictures before the text, as Ollama shows them to a model."""
    if not pictures:
        return text
    return [*pictures, {"type": "text", "text": text}] if text else list(pictures)


def _picture(given: Any, where: str) -> PictureSource:
    if not isinstance(given, str) or not given or given.startswith("data:"):
        raise wrong(where, "must be a picture's file in base64, without 'data:' before it")
    # The MIME type does not matter, because the file's bytes tell its format.
    return PictureSource(where, f"data:image/png;base64,{given}", url_where=where)


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise wrong(where, "must be an object with role and content")
    given = {name: value for name, value in given.items() if value is not None}
    role = given.get("role")
    role = role.lower() if isinstance(role, str) else role
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"is {quoted(role)}; known are {', '.join(_ROLES)}")
    text = string_of(given, "content", where) if "content" in given else ""
    message: Message = {"role": role, "content": content_of(text, read_images(given.get("images"), f"{where}.images"))}
    thinking = string_of(given, "thinking", where) if "thinking" in given else ""
    calls = _calls(given.get("tool_calls", []), f"{where}.tool_calls")
    name, id = (_label(given, field, where) for field in ("tool_name", "tool_call_id"))
    if role == "assistant":
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
    elif calls:
        raise wrong(f"{where}.tool_calls", "only an assistant's message can have them")
    elif role == "tool":
        if name:
            message["name"] = name
        if id:
            message["tool_call_id"] = id
    return message


def _label(given: dict[str, Any], field: str, where: str) -> str:
    label = string_of(given, field, where) if field in given else ""
    if len(label) > LABEL_CHARACTERS_MAX:
        raise wrong(f"{where}.{field}", f"must have at most {LABEL_CHARACTERS_MAX} characters")
    return label


def _calls(given: Any, where: str) -> list[MessageCall]:
    if not isinstance(given, list):
        raise wrong(where, "must be a list")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(given)]


def _call(given: Any, where: str) -> MessageCall:
    function, place = given.get("function") if isinstance(given, dict) else None, f"{where}.function"
    if not isinstance(given, dict) or not isinstance(function, dict):
        raise wrong(place, "must be an object with name and arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | None):
        raise wrong(f"{place}.arguments", "must be an object")
    name = label_of(function, "name", place)
    written = json.dumps(arguments or {}, ensure_ascii=False)
    call: MessageCall = {"type": "function", "function": {"name": name, "arguments": written}}
    if id := _label({} if given.get("id") is None else given, "id", where):
        call["id"] = id
    return call


def _typed(tools: Any) -> Any:
    """Returns the tools with their type. Ollama has only one type, so clients leave it out."""
    if not isinstance(tools, list):
        return tools
    return [{"type": "function", **tool} if isinstance(tool, dict) else tool for tool in tools]


_OBJECTS = WithJsonSchema({"type": "array", "items": {"type": "object"}})
OllamaMessages = Annotated[list[Any], PlainValidator(read_messages), _OBJECTS]
OllamaImages = Annotated[
    list[PictureSource],
    PlainValidator(partial(read_images, where="images")),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]
OllamaTools = Annotated[list[ToolBody], BeforeValidator(_typed), _OBJECTS]
