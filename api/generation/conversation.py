"""Checks messages, tools and prompts of a request, and converts them to the form that chat templates take.

Errors name the place as a caller would write it, such as `messages[2].content[0].type`. Plain functions on plain data;
large inputs belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...cluster.errors import InvalidRequest, quoted
from ..media.prompt import referred
from ..media.sources import PictureSource, VideoSource, media_part
from .history import called_with

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "file": "files",
    "input_file": "files",
}
_NAME_CHARACTERS_MAX = 128
_LABEL_CHARACTERS_MAX = 1024

Seen = Iterator[list[dict[str, str]]]


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)


def _required_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "must be a string")
    return value


def _label(value: Any, where: str) -> str:
    if len(label := _required_string(value, where)) > _LABEL_CHARACTERS_MAX:
        raise _wrong(where, f"has more than {_LABEL_CHARACTERS_MAX} characters")
    return label


def _content(value: Any, where: str, role: str, media: Seen | None) -> str | list[dict[str, str]]:
    """Returns the text of a string or of a list of text parts, joined without a separator; with pictures, the parts as
    templates take them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "must be a string or a list of parts")
    parts: list[dict[str, str]] = []
    shown = None if role == "assistant" else media
    for index, part in enumerate(value):
        here = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _wrong(here, "must be an object with a type")
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            parts.append({"type": "text", "text": _required_string(part.get("text"), f"{here}.text")})
        elif shown is not None and (referred(part) is not None or media_part(part, here) is not None):
            parts += next(shown)
        elif isinstance(kind, str) and kind in _MEDIA:
            if media is not None and _MEDIA[kind] in ("images", "video"):
                raise InvalidRequest(
                    f"{here}: pictures and videos go into system, developer, user and tool messages only", param=here
                )
            raise InvalidRequest(f"{here}: this model takes no {_MEDIA[kind]}", param=here)
        else:
            raise _wrong(f"{here}.type", f"is {quoted(kind)}; known is 'text'")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _arguments(value: Any, where: str) -> Any:
    text = _required_string(value, where)
    parsed = called_with(text)
    # Templates print a mapping in the model's own form; anything else is passed as written.
    return parsed if isinstance(parsed, dict) else text


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong(where, "must be a list")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        here = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise _wrong(here, "must be an object")
        if call.get("type", "function") != "function":
            raise _wrong(f"{here}.type", "must be 'function'")
        function = call.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{here}.function", "must be an object")
        name = _required_string(function.get("name"), f"{here}.function.name")
        arguments = _arguments(function.get("arguments", ""), f"{here}.function.arguments")
        entry: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if call.get("id") is not None:
            entry["id"] = _label(call["id"], f"{here}.id")
        calls.append(entry)
    return calls


def _message(message: Any, where: str, media: Seen | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, "must be an object with role and content")
    given = message.get("role")
    if not isinstance(given, str) or given not in _ROLES:
        raise _wrong(f"{where}.role", f"is {quoted(given)}; known are {', '.join(_ROLES)}")
    role = _ROLES[given]
    out: dict[str, Any] = {"role": role}
    if role == "assistant" and message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "assistant" and message.get("reasoning_content") is not None:
        out["reasoning_content"] = _required_string(message["reasoning_content"], f"{where}.reasoning_content")
    content = message.get("content")
    if content is None and "tool_calls" in out:
        content = ""
    if content is None:
        allowed = " (only an assistant message with tool_calls may do without)" if role == "assistant" else ""
        raise _wrong(f"{where}.content", f"is missing{allowed}")
    out["content"] = _content(content, f"{where}.content", role, media)
    if message.get("name") is not None:
        out["name"] = _label(message["name"], f"{where}.name")
    if role == "tool" and message.get("tool_call_id") is not None:
        out["tool_call_id"] = _label(message["tool_call_id"], f"{where}.tool_call_id")
    return out


def check_messages(messages: Any, media: Seen | None = None) -> list[dict[str, Any]]:
    """Returns the messages as a chat template takes them: text content, `developer` as `system`, arguments as mappings.

    Args:
        media: for each picture or video, in order, the parts that the template is given; a message with media has a
            list of parts as its content. None if the model takes no media.

    Raises:
        InvalidRequest: a message is malformed; `param` is the place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", "must be a list")
    if not messages:
        raise _wrong("messages", "is empty")
    return [_message(message, f"messages[{index}]", media) for index, message in enumerate(messages)]


def sources_in(messages: Any) -> list[PictureSource | VideoSource]:
    """Returns the pictures and videos of unchecked messages, in order, without those of assistants, which
    `check_messages` refuses.

    Raises:
        InvalidRequest: one of them is of no known form.
    """
    sources: list[PictureSource | VideoSource] = []
    for index, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        if not isinstance(message, dict) or message.get("role") == "assistant":
            continue
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            source = media_part(part, f"messages[{index}].content[{place}]") if isinstance(part, dict) else None
            if source is not None:
                sources.append(source)
    return sources


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Checks the tools and returns them as given.

    Raises:
        InvalidRequest: a tool is malformed; `param` is the place.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise _wrong("tools", "must be a list")
    for index, tool in enumerate(tools):
        here = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise _wrong(here, "must be an object")
        if tool.get("type") != "function":
            raise _wrong(f"{here}.type", "must be 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{here}.function", "must be an object")
        name = _required_string(function.get("name"), f"{here}.function.name")
        if not 1 <= len(name) <= _NAME_CHARACTERS_MAX:
            raise _wrong(f"{here}.function.name", f"must have 1 to {_NAME_CHARACTERS_MAX} characters")
        if function.get("description") is not None:
            _required_string(function["description"], f"{here}.function.description")
        if function.get("parameters") is not None and not isinstance(function["parameters"], dict):
            raise _wrong(f"{here}.function.parameters", "must be an object (a JSON schema)")
    return list(tools)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_prompts(prompt: Any, *, prompts_max: int) -> list[str | list[int]]:
    """Returns the prompts of a completion: from one text, a list of texts, one list of token ids, or a list of such
    lists.

    Raises:
        InvalidRequest: it is none of these, or has more than `prompts_max` entries; `param` is the place.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong("prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not prompt:
        raise _wrong("prompt", "is empty")
    if _is_token(prompt[0]):
        return [_tokens(prompt, "prompt")]
    if len(prompt) > prompts_max:
        raise _wrong("prompt", f"has {len(prompt)} entries; at most {prompts_max} go into one request")
    kind = type(prompt[0])
    if kind is not str and kind is not list:
        raise _wrong("prompt[0]", "must be a string, a token id or a list of token ids")
    for index, entry in enumerate(prompt):
        if type(entry) is not kind:
            raise _wrong(f"prompt[{index}]", "is of another kind than the first entry")
    if kind is str:
        return list(prompt)
    return [_tokens(entry, f"prompt[{index}]") for index, entry in enumerate(prompt)]


def _tokens(values: list[Any], where: str) -> list[int]:
    for index, value in enumerate(values):
        if not _is_token(value):
            raise _wrong(f"{where}[{index}]", "must be a token id")
    return values


def check_vocabulary(tokens: list[int], vocabulary_size: int, where: str) -> None:
    """Checks token ids.

    Raises:
        InvalidRequest: the model does not have one of them.
    """
    if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary_size):
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < vocabulary_size)
        raise _wrong(f"{where}[{index}]", f"is {tokens[index]}; the model has token ids 0 to {vocabulary_size - 1}")
