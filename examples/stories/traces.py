"""Recorded conversations of agents, as requests to replay: who asks, and what is new in the prompt. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .endpoint import Message, assistant, system, user

USERS = ("human", "user")
"""Who writes and is not asked."""


class TraceError(ValueError):
    """A line that is not what the format says."""


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a recording.

    Args:
        agent: who asks, by its number in the conversation.
        opens: whether its prompt begins anew; else it goes on behind this agent's last prompt and reply.
        new: the messages that the prompt has more.
        reply: what was answered then; "" where nothing was.
    """

    agent: int
    opens: bool
    new: tuple[Message, ...]
    reply: str


@dataclass(frozen=True)
class RecordedConversation:
    """The requests of a recording in their order."""

    name: str
    requests: tuple[RecordedRequest, ...]


def whowhen(record: dict[str, Any]) -> RecordedConversation:
    """A conversation of several agents: each message is a request of the agent that wrote it, whose prompt is all that
    was said before, its own messages as the assistant's and the others' as the user's."""
    messages, systems = record["messages"], record.get("system") or {}
    names = list(dict.fromkeys(message["agent"] for message in messages))
    waiting = {name: [system(str(systems[name]))] if systems.get(name) else [] for name in names}
    begun, requests = set[str](), list[RecordedRequest]()
    for message in messages:
        name, content = message["agent"], str(message["content"])
        asked = name.lower() not in USERS and (name in begun or bool(waiting[name]))
        if asked:
            requests.append(RecordedRequest(names.index(name), name not in begun, tuple(waiting[name]), content))
            begun.add(name)
            waiting[name] = []
        for other in names:
            if other != name:
                waiting[other].append(user(f"{name}: {content}"))
            elif not asked:
                waiting[name].append(assistant(content))
    return RecordedConversation(str(record["id"]), tuple(requests))


def agent_text(record: dict[str, Any]) -> RecordedConversation:
    """The calls of one agent as text. A prompt that begins with the one before goes on behind its reply, which such
    recordings leave out of the prompts; any other is a prompt of its own."""
    requests, before = list[RecordedRequest](), ""
    for call in sorted(record["calls"], key=lambda call: call["timestamp"]):
        text, reply = str(call["input"]), str(call["output"] or "")
        grows = bool(before) and len(text) > len(before) and text.startswith(before)
        new = text[len(before) :] if grows else text
        requests.append(RecordedRequest(0, not grows, (user(new),), reply))
        before = text
    return RecordedConversation(str(record["id"]), tuple(requests))


def read(path: Path, most: int) -> Iterator[RecordedConversation]:
    """The first `most` conversations of a file in either format, gzipped where its name ends in `.gz`.

    Raises:
        TraceError: a line is no JSON, or has neither form.
        OSError: the file cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in _numbered(lines, most):
            try:
                record = json.loads(line)
                yield _form(record)(record)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise TraceError(f"{path.name}, line {number}: {error or type(error).__name__}") from error


def _numbered(lines: Iterable[str], most: int) -> Iterator[tuple[int, str]]:
    found = 0
    for number, line in enumerate(lines, 1):
        if found == most:
            return
        if line.strip():
            found += 1
            yield number, line


def _form(record: Any) -> Callable[[dict[str, Any]], RecordedConversation]:
    if isinstance(record, dict) and "calls" in record:
        return agent_text
    if isinstance(record, dict) and "messages" in record:
        return whowhen
    raise TypeError("neither `calls` nor `messages`")
