"""Converts messages to the form that chat templates take.

Plain functions on plain data; large inputs belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...cluster.errors import InvalidRequest
from ..media.sources import AudioSource, MediaSource, VideoSource
from .history import Message, called_with

_CONTINUED = ("partial", "prefix")
"""The fields that mark a message as the beginning of the answer."""


def sources_in(messages: Sequence[Message]) -> list[MediaSource]:
    """Returns the pictures, videos and audio of messages, in order, except those of assistants, which `with_shown`
    refuses."""
    sources: list[MediaSource] = []
    for message in messages:
        if message["role"] != "assistant" and not isinstance(message["content"], str):
            sources += (part for part in message["content"] if isinstance(part, MediaSource))
    return sources


def with_shown(
    messages: Sequence[Message],
    media: Iterator[list[dict[str, str]]] | None,
    blind: str = "",
    no_audio: str = "",
    *,
    takes_audio: bool = False,
) -> list[Message]:
    """Returns the messages with their media as a chat template takes them.

    Args:
        media: for each picture or video, in order, the parts that the template gets. None if the model supports no
            media.
        blind: why a vision model is served without media; empty for others.
        no_audio: why a model with an encoder of audio does not support it; empty for others.
        takes_audio: whether the model supports audio.

    Raises:
        InvalidRequest: the model supports no media, or an assistant's message has some; `param` is the place.
    """
    shown: list[Message] = []
    for index, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            taken = None if message["role"] == "assistant" else media
            parts: list[Any] = []
            for place, part in enumerate(content):
                if isinstance(part, dict) and part["type"] == "text":
                    parts.append(part)
                elif taken is None or (_is_audio(part) and not takes_audio):
                    # A source knows where the caller wrote it; messages may be split and joined before they come here.
                    known = part.where if isinstance(part, MediaSource) else ""
                    where = known or f"messages[{index}].content[{place}]"
                    is_elsewhere = media is not None and (takes_audio or not _is_audio(part))
                    raise _refused(part, where, is_elsewhere, blind, no_audio)
                else:
                    parts += next(taken)
            message: Message = {**message, "content": parts}
        shown.append(message)
    return shown


def _refused(part: Any, where: str, is_elsewhere: bool, blind: str, no_audio: str) -> InvalidRequest:
    """Returns the error for a medium.

    Args:
        is_elsewhere: whether the model supports it, but not in an assistant's message.
    """
    if is_elsewhere:
        media = "audio is" if _is_audio(part) else "pictures and videos are"
        why = f"{media} only allowed in system, developer, user and tool messages"
    elif _is_audio(part):
        return no_audio_error(where, no_audio or blind)
    else:
        is_video = isinstance(part, VideoSource) or (isinstance(part, dict) and part["type"] == "video")
        why = f"this model does not support {'video' if is_video else 'images'}{blind and f': {blind}'}"
    return InvalidRequest(f"{where}: {why}", param=where)


def _is_audio(part: Any) -> bool:
    return isinstance(part, AudioSource) or (isinstance(part, dict) and part["type"] == "audio_url")


def no_audio_error(where: str, reason: str) -> InvalidRequest:
    """Returns the error for audio that a model does not support; `reason` may be empty."""
    return InvalidRequest(f"{where}: this model does not support audio{reason and f': {reason}'}", param=where)


def with_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of calls as mappings, which templates print in the model's own form.
    Arguments that are not a mapping stay text."""
    return [
        {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages for templates that accept a system message only at the beginning: later system messages
    become user messages. User messages that then follow each other are joined, because many of these templates want
    alternating roles."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and shown:
            message = {**message, "role": "user"}
        if message["role"] == "user" and shown and shown[-1]["role"] == "user":
            shown[-1] = {**shown[-1], "content": _joined(shown[-1]["content"], message["content"])}
        else:
            shown.append(message)
    return shown


def _joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _parsed(call: Any) -> dict[str, Any]:
    parsed = called_with(call["function"]["arguments"])
    return {**call, "function": {**call["function"], "arguments": parsed}} if isinstance(parsed, dict) else call


def with_system(words: str | None, messages: Sequence[Message]) -> list[Message]:
    """Returns messages with `words` as their system message. If they have one already, `words` go in front of its text,
    because few templates accept two system messages."""
    said = list(messages)
    if not words:
        return said
    if said and said[0]["role"] == "system" and isinstance(first := said[0]["content"], str):
        words = f"{words}\n\n{first}"
        del said[0]
    return [{"role": "system", "content": words}, *said]


def mark_of_last(messages: Any, where: str) -> str | None:
    """Returns the place of the field that marks the last of raw messages as one to be continued, None if it has none.

    Raises:
        InvalidRequest: the field is not a boolean.
    """
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return None
    for name in _CONTINUED:
        place = f"{where}[{len(messages) - 1}].{name}"
        if not isinstance(mark := last.get(name), bool | None):
            raise InvalidRequest(f"{place} must be a boolean", param=place)
        if mark:
            return place
    return None
