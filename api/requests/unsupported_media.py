"""Unsupported ("unseen") media: pictures, videos and audio that a model does not take, or that cannot be read. In tool
results and earlier messages a text replaces them, so the conversation can go on. In the user's newest message they
stay, and are refused.

Plain functions on plain data; large inputs belong in a worker thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from cachetools import LRUCache

from ..media.sources import AudioSource, MediaSource, PictureSource, VideoSource, check_urls
from .history import Message
from .left_out import LeftOut, newest_said

WORDS = {
    "image": "[An image is not shown here: this model cannot see images.]",
    "video": "[A video is not shown here: this model cannot see videos.]",
    "audio": "[Audio is not played here: this model cannot hear audio.]",
}
"""The same text in every turn, so that a prompt begins with the same tokens as the one before."""

UNREAD = {
    "image": "[An image is not shown here: its file cannot be read.]",
    "video": "[A video is not shown here: its file cannot be read.]",
    "audio": "[Audio is not played here: its file cannot be read.]",
}

_REFUSED_MAX = 4096


def without_unseen(
    messages: Sequence[Message], left_out: LeftOut, kinds: Collection[str] = tuple(WORDS)
) -> list[Message]:
    """Returns messages without media that a model does not support, except in the user's newest message and in
    assistants' messages.

    Args:
        left_out: gets the kinds of the removed media.
        kinds: those that the model does not support: `image`, `video`, `audio`.
    """
    newest = newest_said([message["role"] for message in messages])
    words = {kind: WORDS[kind] for kind in kinds}
    told: list[Message] = []
    for index, message in enumerate(messages):
        content = message["content"]
        if message["role"] != "assistant" and not isinstance(content, str):
            parts = [part if index == newest and not _is_earlier(part) else _told(part, words) for part in content]
            message: Message = {**message, "content": _in_words(parts, left_out)}
        told.append(message)
    return told


def media_in(messages: Sequence[Message], *, spares: bool) -> list[tuple[MediaSource, bool]]:
    """Returns the pictures, videos and audio of messages, in order, without those of assistants; with each, whether it
    may be left out. It may if `spares` is set and it is not in the user's newest message.

    Raises:
        InvalidRequest: one that may not be left out has a URL with no known scheme.
    """
    newest = newest_said([message["role"] for message in messages])
    found: list[tuple[MediaSource, bool]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and not isinstance(message["content"], str):
            sources = [part for part in message["content"] if isinstance(part, MediaSource)]
            found += [(source, spares and (index != newest or source.earlier)) for source in sources]
    for source, spared in found:
        if not spared:
            check_urls(source)
    return found


def without_unread(messages: Sequence[Message], unread: Collection[int], left_out: LeftOut) -> list[Message]:
    """Returns messages without those of their media that could not be read.

    Args:
        unread: their indexes in the order of `media_in`.
        left_out: as for `without_unseen`.
    """
    count = 0
    told: list[Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] != "assistant" and not isinstance(content, str):
            parts: list[Any] = []
            for part in content:
                is_medium = isinstance(part, MediaSource)
                parts.append(_told(part, UNREAD) if is_medium and count in unread else part)
                count += is_medium
            message: Message = {**message, "content": _in_words(parts, left_out)}
        told.append(message)
    return told


def without_refused(
    messages: Sequence[Message], refuses: Callable[[Any], bool], left_out: LeftOut
) -> Sequence[Message]:
    """Returns messages of a transcript without the media that a model's processor refuses.

    Args:
        refuses: whether it refuses a part of a message.
        left_out: as for `without_unseen`.
    """
    told: list[Message] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str) and True in (refused := [refuses(part) for part in content]):
            parts = [_told(part, UNREAD) if bad else part for part, bad in zip(content, refused, strict=True)]
            message: Message = {**message, "content": _in_words(parts, left_out)}
        told.append(message)
    return told


class _Words:
    """The text in the place of a medium, by its kind."""

    def __init__(self, kind: str, said: str) -> None:
        self.kind = kind
        self.said = said


def _told(part: Any, words: Mapping[str, str]) -> Any:
    return _Words(kind, words[kind]) if (kind := _kind(part)) in words else part


def _in_words(parts: Sequence[Any], left_out: LeftOut) -> str | list[Any]:
    """Returns content with these texts on lines of their own; a single text if no medium is left."""
    said: list[Any] = [""]
    own_line = False
    for part in parts:
        kind = ""
        if isinstance(part, _Words):
            kind, text = part.kind, part.said
            left_out.add(kind)
        elif _kind(part):
            said += [part, ""]
            own_line = False
            continue
        else:
            text = part["text"]
        breaks = (own_line or bool(kind)) and said[-1] and text and not said[-1].endswith("\n")
        said[-1] += f"\n{text}" if breaks and not text.startswith("\n") else text
        own_line = bool(kind) or (own_line and not text)
    if len(said) == 1:
        return said[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in said if part != ""]


def _kind(part: Any) -> str:
    """Returns the kind of medium that a part is; "" for text."""
    if isinstance(part, MediaSource):
        return {PictureSource: "image", VideoSource: "video", AudioSource: "audio"}[type(part)]
    # The forms that media have in transcripts.
    return {"image": "image", "image_url": "image", "video": "video", "audio_url": "audio"}.get(part["type"], "")


def _is_earlier(part: Any) -> bool:
    return isinstance(part, MediaSource) and part.earlier


class RefusedMessages:
    """Remembers messages that were refused for their media. Some clients send such a message again, with the user's
    next text appended to it. Then its media count as earlier ones and are left out, because otherwise the conversation
    could never go on. Thread-safe."""

    def __init__(self) -> None:
        self._known: LRUCache[bytes, tuple[int, bytes]] = LRUCache(_REFUSED_MAX)
        self._lock = Lock()

    def marked(self, messages: Sequence[Message], scope: str) -> Sequence[Message]:
        """Returns a conversation in which the media of a refused message are marked as earlier. Remembers the newest
        message if it has other media.

        Args:
            scope: which callers' conversations may be confused: messages are only remembered within it.
        """
        at = newest_said([message["role"] for message in messages])
        if at < 0 or isinstance(parts := messages[at]["content"], str):
            return messages
        said, ends = _written(parts)
        if not ends:
            return messages
        known = next((count for count in range(len(ends), 0, -1) if self._was_refused(said, ends[count - 1], scope)), 0)
        if known < len(ends):
            with self._lock:
                self._known[_digest(scope, said[: ends[-1]])] = len(said), _digest(scope, said)
        marked = [*messages]
        marked[at] = {**messages[at], "content": _with_earlier(parts, known)}
        return marked

    def _was_refused(self, said: str, end: int, scope: str) -> bool:
        """Returns whether a message whose last medium ends at `end` was refused before, and has more text behind it
        now."""
        with self._lock:
            length, digest = self._known.get(_digest(scope, said[:end]), (0, b""))
        # The new text is another part, or was joined to the last one.
        return 0 < length < len(said) and said[length] in "\n\0" and _digest(scope, said[:length]) == digest


def _written(parts: Sequence[Any]) -> tuple[str, list[int]]:
    """Returns content as text, and where each medium ends in it."""
    said, ends = "", list[int]()
    for part in parts:
        if _kind(part) and not isinstance(part, dict):
            said += f"\0{hashlib.sha256(repr(_urls(part)).encode('utf-8', 'surrogatepass')).hexdigest()}"
            ends.append(len(said))
        else:
            said += f"\0{part.get('text', '')}"
    return said, ends


def _urls(source: MediaSource) -> list[str | None]:
    frames = source.frames if isinstance(source, VideoSource) else ()
    return [source.url, *(frame.url for frame in frames)]


def _with_earlier(parts: Sequence[Any], count: int) -> list[Any]:
    marked: list[Any] = []
    for part in parts:
        if isinstance(part, MediaSource) and count:
            part, count = replace(part, earlier=True), count - 1
        marked.append(part)
    return marked


def _digest(scope: str, said: str) -> bytes:
    return hashlib.sha256(f"{scope}\0{said}".encode("utf-8", "surrogatepass")).digest()
