"""Stored responses, which later requests can continue: kept in memory, and found in their agent's transcript after a
restart.

A chain of responses is a line of an agent's memory. It belongs to the agent that sent the first request. If that
request named no agent, the chain is an agent of its own, `response:ROOT`. A response's id has that root, the number of
messages before the answer, and their digest. That is enough to find its place in a transcript after this process has
ended.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from ...requests.history import Message
from .event_log import EventLog

_ID = re.compile(r"(resp_([0-9a-f]{16})([0-9a-f]{6})([0-9a-f]{12})[0-9a-f]{8})([0-9a-f]{6})(?:_([\w-]+))?", re.ASCII)
_RANDOM_BYTES = 7
_SIGN_DIGITS = 6
_VALUE_BYTES = 64
_MESSAGE_BYTES = 256
_ITEMS_MAX = 100_000
_MESSAGES_MAX = 0xFFFFFF
_DELETED_MAX = 10_000


@dataclass(frozen=True)
class ResponseId:
    """The contents of a response's id.

    Attributes:
        root: the root of its chain.
        messages: how many messages come before the answer, without instructions.
        digest: the digest of these messages.
    """

    root: str
    messages: int
    digest: str

    @property
    def agent(self) -> str:
        """The agent of the chain, if its first request named none."""
        return f"response:{self.root}"

    def found_in(self, transcript: Sequence[Message]) -> list[Message] | None:
        """Returns the messages up to and including the answer, without instructions; None if the transcript does not
        have them, or has pictures, of which it has only hashes."""
        # If the transcript has instructions, they are those of its last turn.
        for skipped in (0, 1) if transcript and transcript[0]["role"] == "system" else (0,):
            said = list(transcript[skipped:][: self.messages + 1])
            if len(said) <= self.messages or said[-1]["role"] != "assistant" or _digest(said[:-1]) != self.digest:
                continue
            return said if only_text(said) else None
        return None


def only_text(messages: Sequence[Message]) -> bool:
    """Returns whether messages have no pictures, nor the references to pictures that transcripts have."""
    return all(isinstance(message["content"], str) for message in messages)


def new_response_id(messages: Sequence[Message], *, root: str = "") -> str:
    """Returns an id for the response to `messages`, which have no instructions among them. Takes milliseconds for
    megabytes.

    Args:
        root: the root of the chain that it continues, "" for a new chain.
    """
    count = min(len(messages), _MESSAGES_MAX)
    return f"resp_{root or secrets.token_hex(8)}{count:06x}{_digest(messages)}{secrets.token_hex(_RANDOM_BYTES)}"


def background_id(id: str, tenant: str, model: str) -> str:
    """Marks a new response's id as that of a background response for a tenant, by a model. So a process that knows
    nothing else of the response can tell its client that it was lost. (One of 17 million other ids looks the same by
    chance.)
    """
    begin, name = id[:-_SIGN_DIGITS], base64.urlsafe_b64encode(model.encode()).decode().rstrip("=")
    return f"{begin}{_sign(begin, name, tenant)}_{name}"


def background_model(id: str, tenant: str) -> str | None:
    """Returns the model of a background response of the tenant; None if the id is not that of one."""
    if (found := _ID.fullmatch(id)) is None or (name := found[6]) is None or found[5] != _sign(found[1], name, tenant):
        return None
    try:
        return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _sign(begin: str, name: str, tenant: str) -> str:
    return hashlib.sha256(f"background {tenant} {begin} {name}".encode()).hexdigest()[:_SIGN_DIGITS]


def read_response_id(id: str) -> ResponseId | None:
    """Parses an id; None if it was not made here."""
    if (found := _ID.fullmatch(id)) is None:
        return None
    return ResponseId(found[2], int(found[3], 16), found[4])


def _digest(messages: Sequence[Message]) -> str:
    """Returns the digest of roles and texts. It ignores what the store or a client may write differently: calls, names,
    pictures."""
    hasher = hashlib.sha256()
    for message in messages:
        content = message["content"] if isinstance(message["content"], str) else None
        hasher.update(json.dumps([message["role"], content]).encode("ascii") + b"\n")
    return hasher.hexdigest()[:12]


@dataclass(frozen=True)
class KeptResponse:
    """A response that later requests can continue.

    Attributes:
        shown: the response object that its client got.
        items: its input, as the client sent it.
        messages: all messages up to and including its answer, without instructions; None if it was appended to a
            transcript, which has them.
        agent: the agent whose memory it is in, "" for none.
        log: its events, if it was made in the background.
        tools: lists of tools among the items of its chain, each with its place. A response that continues it may call
            them.
    """

    shown: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[Message] | None
    agent: str
    log: EventLog | None = None
    tools: Sequence[tuple[Any, str]] = ()

    @property
    def nbytes(self) -> int:
        """Roughly its size in bytes. Responses of a chain share messages, which count for each of them."""
        said = sum(_MESSAGE_BYTES + _size(message["content"]) for message in self.messages or ())
        tools = sum(_weight(given) for given, _ in self.tools)
        return _weight(self.shown) + _weight(self.items) + said + tools + (0 if self.log is None else self.log.nbytes)


def _size(content: str | list[Any]) -> int:
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") if isinstance(part, dict) else getattr(part, "url", None) for part in content)
    return sum(len(text) for text in texts if isinstance(text, str))


def _weight(value: Any) -> int:
    """Returns roughly how many bytes a JSON value takes. Not recursive, because bodies may be nested deeply."""
    total, left = 0, [value]
    while left:
        value = left.pop()
        total += _VALUE_BYTES
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return total


class ResponseChains:
    """The stored responses of all tenants; the least recently used are evicted first. For one event loop.

    Args:
        bytes_max: the limit on all of them together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._kept: LRUCache[tuple[str, str], tuple[KeptResponse, int]] = LRUCache(
            bytes_max, getsizeof=lambda it: it[1]
        )
        # The response of each item id. Ids of evicted responses stay, but they are few and lead nowhere.
        self._items: LRUCache[tuple[str, str], str] = LRUCache(_ITEMS_MAX)
        self._deleted: LRUCache[tuple[str, str], bool] = LRUCache(_DELETED_MAX)

    def get(self, tenant: str, id: str) -> KeptResponse | None:
        found = self._kept.get((tenant, id))
        return None if found is None else found[0]

    def keep(self, tenant: str, id: str, kept: KeptResponse) -> None:
        """Stores a response, unless it alone is over the limit."""
        if (size := kept.nbytes) > self._kept.maxsize:
            return
        self._kept[tenant, id] = kept, size
        for item in [*kept.items, *kept.shown["output"]]:
            if isinstance(item_id := item.get("id"), str):
                self._items[tenant, item_id] = id

    def item(self, tenant: str, id: str) -> dict[str, Any] | None:
        """Returns an item of a stored response's input or output."""
        kept = self.get(tenant, self._items.get((tenant, id), ""))
        if kept is None:
            return None
        return next((item for item in [*kept.shown["output"], *kept.items] if item.get("id") == id), None)

    def delete(self, tenant: str, id: str) -> KeptResponse | None:
        """Deletes a response, so that it is not found in a transcript either. Returns it, None if it was not stored."""
        self._deleted[tenant, id] = True
        found = self._kept.pop((tenant, id), None)
        return None if found is None else found[0]

    def deleted(self, tenant: str, id: str) -> bool:
        return (tenant, id) in self._deleted

    def others(self, tenant: str, agent: str) -> bool:
        """Returns whether further responses of an agent are stored."""
        return any(key[0] == tenant and kept.agent == agent for key, (kept, _) in self._kept.items())
