"""Conversations of the Responses API: bodies in, objects out. What was said in one is an agent's transcript."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from cachetools import LRUCache
from pydantic import Field

from ...cluster.config import Endpoint
from ..generation.bodies import RequestBody, check_counts
from ..generation.identity import identify
from .items import Input, InputItems

_KNOWN_MAX = 10_000
_NAME_CHARACTERS_MAX = 64
_VALUE_CHARACTERS_MAX = 512

Notes = Annotated[
    dict[
        Annotated[str, Field(max_length=_NAME_CHARACTERS_MAX)], Annotated[str, Field(max_length=_VALUE_CHARACTERS_MAX)]
    ],
    Field(max_length=16),
]


class ConversationBody(RequestBody):
    """The body that makes a conversation, or changes its `metadata`. Only a new one takes `items`; `model` reads them,
    the default one without a name."""

    items: Input = Field(default_factory=InputItems)
    metadata: Notes | None = None
    model: str | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(items := fields.get("items"), list):
            contents = [item.get("content") for item in items if isinstance(item, dict)]
            check_counts(items, sum(len(each) for each in contents if isinstance(each, list)), limits, "items")


def conversation_agent(id: str) -> str:
    """Returns the agent whose transcript a conversation is."""
    return identify([], conversation=id).agent


def new_conversation(metadata: dict[str, str] | None) -> dict[str, Any]:
    return conversation_object(f"conv_{secrets.token_hex(24)}", int(time.time()), metadata)


def conversation_object(id: str, created: int, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    return {"id": id, "object": "conversation", "created_at": created, "metadata": metadata or {}}


class KnownConversations:
    """The conversations of all tenants that were made lately, with their metadata. For one event loop."""

    def __init__(self) -> None:
        self._known: LRUCache[tuple[str, str], dict[str, Any]] = LRUCache(_KNOWN_MAX)

    def get(self, tenant: str, id: str) -> dict[str, Any] | None:
        return self._known.get((tenant, id))

    def keep(self, tenant: str, conversation: dict[str, Any]) -> None:
        self._known[tenant, conversation["id"]] = conversation

    def delete(self, tenant: str, id: str) -> bool:
        """Returns whether it was known."""
        return self._known.pop((tenant, id), None) is not None
