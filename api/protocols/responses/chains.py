"""Responses that can be gone on with: kept in memory, and found again in their agent's transcript after a restart.

A chain of responses is a line of an agent's memory. The agent is the one that sent the first request; a chain that
nobody's name is on is an agent of its own, `response:ROOT`. A response's id has that root, and how much of the
transcript belongs to it, with a digest: enough to know the place again in a transcript that outlived this process.
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
    """What a response's id says.

    Attributes:
        root: of its chain.
        messages: how many were said before the answer, instructions not counted.
        digest: of these messages.
    """

    root: str
    messages: int
    digest: str

    @property
    def agent(self) -> str:
        """The agent of a chain that nobody's name is on."""
        return f"response:{self.root}"

    def found_in(self, transcript: Sequence[Message]) -> list[Message] | None:
        """Returns what was said up to the answer, without instructions; None if the transcript is another one, or has
        pictures, which are only known there by their hashes."""
        # The instructions, if the transcript has any, are those of its last turn.
        for skipped in (0, 1) if transcript and transcript[0]["role"] == "system" else (0,):
            said = list(transcript[skipped:][: self.messages + 1])
            if len(said) <= self.messages or said[-1]["role"] != "assistant" or _digest(said[:-1]) != self.digest:
                continue
            return said if only_text(said) else None
        return None


def only_text(messages: Sequence[Message]) -> bool:
    """Returns whether messages have no pictures, nor what stands for them in transcripts."""
    return all(isinstance(message["content"], str) for message in messages)


def new_response_id(messages: Sequence[Message], *, root: str = "") -> str:
    """Returns an id for the response to `messages`, which have no instructions among them. Takes milliseconds for
    megabytes.

    Args:
        root: of the chain that it goes on with, "" for a new one.
    """
    count = min(len(messages), _MESSAGES_MAX)
    return f"resp_{root or secrets.token_hex(8)}{count:06x}{_digest(messages)}{secrets.token_hex(_RANDOM_BYTES)}"


def background_id(id: str, tenant: str, model: str) -> str:
    """Returns a new response's id as one that is made in the background for a tenant, by a model. So its client can be
    told that it was lost, by a process that knows nothing else of it. (One of another 17 million ids looks the same.)
    """
    begin, name = id[:-_SIGN_DIGITS], base64.urlsafe_b64encode(model.encode()).decode().rstrip("=")
    return f"{begin}{_sign(begin, name, tenant)}_{name}"


def background_model(id: str, tenant: str) -> str | None:
    """Returns the model of a response that was made in the background for the tenant; None if the id says nothing of
    the kind."""
    if (found := _ID.fullmatch(id)) is None or (name := found[6]) is None or found[5] != _sign(found[1], name, tenant):
        return None
    try:
        return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _sign(begin: str, name: str, tenant: str) -> str:
    return hashlib.sha256(f"background {tenant} {begin} {name}".encode()).hexdigest()[:_SIGN_DIGITS]


def read_response_id(id: str) -> ResponseId | None:
    """Returns what an id says; None if it is none of ours."""
    if (found := _ID.fullmatch(id)) is None:
        return None
    return ResponseId(found[2], int(found[3], 16), found[4])


def _digest(messages: Sequence[Message]) -> str:
    """Of roles and texts. What the store or a client may write otherwise does not count: calls, names, pictures."""
    hasher = hashlib.sha256()
    for message in messages:
        content = message["content"] if isinstance(message["content"], str) else None
        hasher.update(json.dumps([message["role"], content]).encode("ascii") + b"\n")
    return hasher.hexdigest()[:12]


@dataclass(frozen=True)
class KeptResponse:
    """A response that can be gone on with.

    Attributes:
        shown: as its client saw it.
        items: its input, as the client wrote it.
        messages: all that was said up to its answer, without instructions; None if it was appended to a transcript,
            and only that has the rest.
        agent: whose memory it is in, "" for nobody's.
        log: its events, if it was made in the background.
        tools: lists of tools among the items of its chain, each with its place. A response that goes on with it may
            call them.
    """

    shown: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[Message] | None
    agent: str
    log: EventLog | None = None
    tools: Sequence[tuple[Any, str]] = ()

    @property
    def nbytes(self) -> int:
        """About how much it holds. Responses of a chain share messages, which count for each of them."""
        said = sum(_MESSAGE_BYTES + _size(message["content"]) for message in self.messages or ())
        tools = sum(_weight(given) for given, _ in self.tools)
        return _weight(self.shown) + _weight(self.items) + said + tools + (0 if self.log is None else self.log.nbytes)


def _size(content: str | list[Any]) -> int:
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") if isinstance(part, dict) else getattr(part, "url", None) for part in content)
    return sum(len(text) for text in texts if isinstance(text, str))


def _weight(value: Any) -> int:
    """About how many bytes JSON holds. Not recursive: bodies may be nested deeply."""
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
    """The responses of all tenants, the least recently used dropped first. For one event loop.

    Args:
        bytes_max: of all together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._kept: LRUCache[tuple[str, str], tuple[KeptResponse, int]] = LRUCache(
            bytes_max, getsizeof=lambda it: it[1]
        )
        # Item ids, and the responses that have them. Those of dropped responses lead nowhere, and are few.
        self._items: LRUCache[tuple[str, str], str] = LRUCache(_ITEMS_MAX)
        self._deleted: LRUCache[tuple[str, str], bool] = LRUCache(_DELETED_MAX)

    def get(self, tenant: str, id: str) -> KeptResponse | None:
        found = self._kept.get((tenant, id))
        return None if found is None else found[0]

    def keep(self, tenant: str, id: str, kept: KeptResponse) -> None:
        """Keeps a response, unless it alone is more than all may be."""
        if (size := kept.nbytes) > self._kept.maxsize:
            return
        self._kept[tenant, id] = kept, size
        for item in [*kept.items, *kept.shown["output"]]:
            if isinstance(item_id := item.get("id"), str):
                self._items[tenant, item_id] = id

    def item(self, tenant: str, id: str) -> dict[str, Any] | None:
        """Returns an item of a kept response, its input's or its output's."""
        kept = self.get(tenant, self._items.get((tenant, id), ""))
        if kept is None:
            return None
        return next((item for item in [*kept.shown["output"], *kept.items] if item.get("id") == id), None)

    def delete(self, tenant: str, id: str) -> KeptResponse | None:
        """Drops a response, which is not to be found again in any way. Returns it, None if it is not kept."""
        self._deleted[tenant, id] = True
        found = self._kept.pop((tenant, id), None)
        return None if found is None else found[0]

    def deleted(self, tenant: str, id: str) -> bool:
        return (tenant, id) in self._deleted

    def others(self, tenant: str, agent: str) -> bool:
        """Returns whether further responses of an agent are kept."""
        return any(key[0] == tenant and kept.agent == agent for key, (kept, _) in self._kept.items())
