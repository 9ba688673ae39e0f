"""Conversations of the Responses API: bodies in, objects out. The items of a conversation are an agent's transcript."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from cachetools import LRUCache
from pydantic import Field, PlainValidator, WithJsonSchema

from ....cluster.config.config import Endpoint
from ...requests.agent_identity import identify
from ...requests.history import Message
from ...requests.request_body import RequestBody, check_counts
from .items import InputItems, read_input

_KNOWN_MAX = 10_000
_NAME_CHARACTERS_MAX = 64
_VALUE_CHARACTERS_MAX = 512

Notes = Annotated[
    dict[
        Annotated[str, Field(max_length=_NAME_CHARACTERS_MAX)], Annotated[str, Field(max_length=_VALUE_CHARACTERS_MAX)]
    ],
    Field(max_length=16),
]


Items = Annotated[
    InputItems,
    PlainValidator(lambda value: read_input(value, "items")),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]


class ConversationBody(RequestBody):
    """The body that makes a conversation, or changes its `metadata`. Only a new conversation takes `items`; `model`
    prefills them, by default the default model."""

    items: Items = Field(default_factory=InputItems)
    metadata: Notes | None = None
    model: str | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(items := fields.get("items"), list):
            contents = [item.get("content") for item in items if isinstance(item, dict)]
            check_counts(items, sum(len(each) for each in contents if isinstance(each, list)), limits, "items")

    @property
    def left_out(self) -> list[str]:
        """As in other bodies. Tools are left out too: a transcript has none, so each request brings its own."""
        return [*self.items.left_out, *(["additional_tools"] if self.items.tools else [])]


def conversation_agent(id: str) -> str:
    """Returns the agent whose transcript is the conversation."""
    return identify([], conversation=id).agent


def new_conversation(metadata: dict[str, str] | None) -> dict[str, Any]:
    return conversation_object(f"conv_{secrets.token_hex(24)}", int(time.time()), metadata)


def conversation_object(id: str, created: int, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    return {"id": id, "object": "conversation", "created_at": created, "metadata": metadata or {}}


def transcript_items(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns a transcript as items. It has only references to pictures, which are left out."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], _text(message["content"])
        if role == "tool":
            call = message.get("tool_call_id", "")
            items.append({"type": "function_call_output", "call_id": call, "output": text})
            continue
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        calls = message.get("tool_calls", [])
        if text or not calls:
            items.append({"type": "message", "role": role, "content": text})
        for call in calls:
            items.append({"type": "function_call", "call_id": call.get("id", ""), **call["function"]})
    return items


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")


class KnownConversations:
    """The recently made conversations of all tenants, with their metadata. For one event loop."""

    def __init__(self) -> None:
        self._known: LRUCache[tuple[str, str], dict[str, Any]] = LRUCache(_KNOWN_MAX)

    def get(self, tenant: str, id: str) -> dict[str, Any] | None:
        return self._known.get((tenant, id))

    def keep(self, tenant: str, conversation: dict[str, Any]) -> None:
        self._known[tenant, conversation["id"]] = conversation

    def delete(self, tenant: str, id: str) -> bool:
        """Deletes a conversation. Returns whether it was known."""
        return self._known.pop((tenant, id), None) is not None
