"""Messages and transcripts: the message of an answer, and whether one conversation continues another.

Plain functions on plain data; long transcripts belong in a worker thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NotRequired, TypedDict

from ..text.json_slices import TooManyValues, check_values
from ..text.lone_surrogates import with_whole_characters
from ..tools.answer_pieces import ToolCall

_ARGUMENTS_VALUES_MAX = 25_000


class MessageCall(TypedDict):
    """A call of a tool. `function` has its `name`, and its `arguments` as text, usually JSON."""

    id: NotRequired[str]
    type: Literal["function"]
    function: dict[str, str]


class Message(TypedDict):
    """A message, independent of the protocol in which it came. In a transcript it is JSON in OpenAI's form.

    `content` is text or, with media, a list of parts: text as `{"type": "text", "text": ...}`, a `PictureSource` or a
    `VideoSource`; in a transcript, what `media.prompt.with_references` writes. `told` is text that the prompt had
    behind the content. `written` is an answer's content and calls as the model wrote them, if its template writes them
    differently. See `sent`.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Any]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]
    reasoning_content: NotRequired[str]
    told: NotRequired[str]
    written: NotRequired[str]


def called_with(arguments: str) -> Any:
    """Parses a call's arguments as JSON; returns the text itself if it is not JSON or has too many values to parse.
    Models sometimes write half of a surrogate pair; it becomes the replacement character."""
    with suppress(ValueError, RecursionError, TooManyValues):
        check_values([arguments], _ARGUMENTS_VALUES_MAX)
        return json.loads(with_whole_characters(arguments))
    return arguments


def answer_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    """Returns an answer as the assistant's message that a client would send back."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


class History:
    """A transcript's length and digest, enough to tell whether another one begins with it.

    It ignores what clients may drop or change when they send an answer back: reasoning, the calls' ids, the formatting
    of arguments.

    Attributes:
        kept: how its messages were shown to the model, as `sent.kept_of` returns it.
    """

    def __init__(self, messages: Sequence[Message], kept: Mapping[int, Mapping[str, str]] | None = None) -> None:
        self.length = len(messages)
        self.digest = _digest(messages)
        self.kept = dict(kept or {})
        # What was shown behind a message tells apart conversations that begin alike.
        self._known_at = {place: place + (messages[place]["role"] != "assistant") for place in self.kept}
        self._digests = digests(messages, self.known_at)

    @property
    def known_at(self) -> Collection[int]:
        """The places whose digests `kept_in` compares with those of another conversation."""
        return set(self._known_at.values())

    def begins(self, messages: Sequence[Message]) -> bool:
        """Returns whether `messages` begin with this transcript and are longer. False for an empty one."""
        return 0 < self.length < len(messages) and _digest(messages[: self.length]) == self.digest

    def kept_in(self, known: Mapping[int, bytes]) -> dict[int, Mapping[str, str]]:
        """Returns how those messages were shown that another conversation has too; `known` are its `digests`."""
        own = self._digests
        same = {place for place, at in self._known_at.items() if at in own and known.get(at) == own[at]}
        return {place: kept for place, kept in self.kept.items() if place in same}


def digests(messages: Sequence[Message], places: Collection[int]) -> dict[int, bytes]:
    """Returns the digest of a conversation up to and including the message at each of these places; places past its end
    are left out."""
    hasher, found = hashlib.sha256(), dict[int, bytes]()
    for place, message in enumerate(messages[: max(places, default=-1) + 1]):
        _add(hasher, message)
        if place in places:
            found[place] = hasher.digest()
    return found


def _digest(messages: Sequence[Message]) -> bytes:
    hasher = hashlib.sha256()
    for message in messages:
        _add(hasher, message)
    return hasher.digest()


def _add(hasher: Any, message: Message) -> None:
    called = [call["function"] for call in message.get("tool_calls", ())]
    calls = [[function["name"], called_with(function["arguments"])] for function in called]
    line = json.dumps([message["role"], message["content"], calls], sort_keys=True)
    hasher.update(line.encode("ascii") + b"\n")
