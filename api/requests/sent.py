"""How messages are shown to the model where that is not as a client sends them: with the schema of the answer, or with
calls as the model itself wrote them. A transcript keeps it, so that later prompts begin as earlier ones did.

Plain functions on plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..text.answers.grammars import AnswerForm
from .history import Message

_SCHEMA_TOLD = "\n\nAnswer with JSON of this schema, and nothing else:\n"
_OBJECT_TOLD = "\n\nAnswer with a JSON object, and nothing else."
_KEPT = ("told", "written")


def with_kept(messages: Sequence[Message], kept: Mapping[int, Mapping[str, str]]) -> list[Message]:
    """Returns messages with what a transcript keeps of how they were shown, by their places."""
    return [cast(Message, {**message, **kept.get(index, {})}) for index, message in enumerate(messages)]


def kept_of(messages: Sequence[Message]) -> dict[int, dict[str, str]]:
    """Returns what a transcript keeps of how its messages were shown, by their places."""
    found: dict[int, dict[str, str]] = {}
    for index, message in enumerate(messages):
        found[index] = {key: str(message.get(key)) for key in _KEPT if key in message}
    return {index: kept for index, kept in found.items() if kept}


def without_kept(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a transcript's messages in OpenAI's form alone."""
    return [{key: value for key, value in message.items() if key not in _KEPT} for message in messages]


def with_schema(messages: Sequence[Message], form: AnswerForm) -> list[Message]:
    """Returns messages of which the newest tells of the schema, unless one of them tells of it already."""
    said = list(messages)
    schema = form.value if isinstance(form.value, Mapping) else {}
    bare = not schema.keys() - {"type"}
    texts = [_text(message) for message in said]
    if bare:
        known = any("json" in text.lower() for text in texts)
    else:
        wanted = _bare(json.dumps(schema.get("properties") or schema, ensure_ascii=False))
        known = any(wanted in _bare(text) for text in texts)
    at = next((at for at in reversed(range(len(said))) if said[at]["role"] != "assistant"), None)
    if known or at is None:
        return said
    told = _OBJECT_TOLD if bare else f"{_SCHEMA_TOLD}{json.dumps(schema, ensure_ascii=False)}"
    said[at] = cast(Message, {**said[at], "told": told})
    return said


def as_shown(messages: Sequence[Message], *, written: bool = True) -> list[Message]:
    """Returns messages as the model is shown them.

    Args:
        written: whether calls are shown as the model wrote them; else as its template writes them.
    """
    return [_shown(message, written=written) for message in messages]


def _shown(message: Message, *, written: bool) -> Message:
    if "told" not in message and "written" not in message:
        return message
    shown: dict[str, Any] = {key: value for key, value in message.items() if key not in _KEPT}
    if told := message.get("told"):
        content = message["content"]
        shown["content"] = content + told if isinstance(content, str) else [*content, {"type": "text", "text": told}]
    if written and "written" in message:
        shown["content"] = message["written"]
        shown.pop("tool_calls", None)
    return cast(Message, shown)


def _text(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")
    return content + message.get("told", "")


def _bare(text: str) -> str:
    return "".join(text.split())
