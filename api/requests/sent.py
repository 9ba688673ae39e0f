"""Messages that the model is shown in another form than the client sent: with the answer's schema behind them, or with
calls as the model itself wrote them. The transcript keeps that form, so later prompts begin with the same tokens as
earlier ones.

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
    """Returns messages with the forms in which a transcript says they were shown; `kept` has them by place."""
    return [cast(Message, {**message, **kept.get(index, {})}) for index, message in enumerate(messages)]


def kept_of(messages: Sequence[Message]) -> dict[int, dict[str, str]]:
    """Returns the forms in which a transcript's messages were shown, by their places."""
    found: dict[int, dict[str, str]] = {}
    for index, message in enumerate(messages):
        found[index] = {key: str(message.get(key)) for key in _KEPT if key in message}
    return {index: kept for index, kept in found.items() if kept}


def without_kept(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a transcript's messages in plain OpenAI form, without what says how they were shown."""
    return [{key: value for key, value in message.items() if key not in _KEPT} for message in messages]


def with_schema(messages: Sequence[Message], form: AnswerForm) -> list[Message]:
    """Returns messages with the schema behind the newest one, unless a message already has it."""
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
    """Returns messages in the form in which the model is shown them.

    Args:
        written: whether calls are shown as the model wrote them. If not, the template writes them.
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
