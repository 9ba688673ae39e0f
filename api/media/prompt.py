"""Pictures in a prompt: from the template's placeholders to what the model's processor writes, and to words.

A rendered conversation has the template's placeholder where a picture stands. It is replaced by the processor's text
for a picture of that size, which is tokenized with the rest; then each token that stands for a picture becomes a word
of its key (`kv_store.media`), so that prompts with other pictures are other prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from cachetools import LRUCache
from PIL import Image

from ...actors.model_files.processors import Layout, PictureProcessor
from ...actors.protocol.media_ids import media_key, words_of
from ...actors.protocol.messages import Media
from ...cluster.errors import InvalidRequest
from .sources import Picture

REFERENCE = "picture:"
"""Transcripts name pictures by such URLs. Callers' are fetched, so nobody sees by a hash what others have sent."""

RESIZED_BYTES_MAX = 64 << 20

_REFERENCE = re.compile(rf"{REFERENCE}([0-9a-f]{{64}})/(\d{{1,9}})x(\d{{1,9}})(?:@(\d{{1,9}}\.\d{{1,6}}))?")


@dataclass(frozen=True)
class Medium:
    """A picture, or the frames of a video, as it stands in a message."""

    frames: Sequence[Picture]
    video: bool = False

    @property
    def part(self) -> dict[str, str]:
        """What a template is given for it, as it is shown."""
        return {"type": "video" if self.video else "image"}

    def shown(self, processor: PictureProcessor) -> list[Medium]:
        """As the model is shown it: a video's frames are pictures where it knows no videos."""
        if self.video and not processor.video_placeholder:
            return [Medium([frame]) for frame in self.frames]
        return [self]


@dataclass(frozen=True)
class Span:
    """What one span of a prompt stands for: a picture, or frames that are encoded together, as large as `size`."""

    layout: Layout
    frames: Sequence[Picture]
    size: tuple[int, int]
    video: bool


@dataclass(frozen=True)
class Placed:
    """A rendered conversation with its pictures' texts, and what each span of it stands for."""

    text: str
    spans: list[Span]


def place(processor: PictureProcessor, rendered: str, media: Sequence[Medium]) -> Placed:
    """Write the texts of media, as they are shown, into a rendered conversation. Sizes that are new take a while.

    Raises:
        InvalidRequest: the conversation says itself what stands for a picture, or the processor refuses a size.
    """
    marks = [mark for mark in (processor.placeholder, processor.video_placeholder) if mark]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", rendered)
    wanted = [processor.video_placeholder if medium.video else processor.placeholder for medium in media]
    if parts[1::2] != wanted:
        raise InvalidRequest(
            f"messages: a text says {processor.placeholder!r} itself, which stands for a picture", param="messages"
        )
    spans: list[Span] = []
    for index, medium in enumerate(media):
        parts[2 * index + 1] = _lay(processor, medium, spans)
    return Placed("".join(parts), spans)


def _lay(processor: PictureProcessor, medium: Medium, spans: list[Span]) -> str:
    """Append the medium's spans; its text."""
    first = medium.frames[0]
    if not medium.video:
        with _refusing(f"picture of {first.width} x {first.height} pixels"):
            laid = processor.layout(first.width, first.height)
        spans.append(Span(laid.span, medium.frames, (first.width, first.height), False))
        return laid.text
    with _refusing(f"video of {len(medium.frames)} frames of {first.width} x {first.height} pixels"):
        video = processor.video_layout(first.width, first.height, [frame.seconds for frame in medium.frames])
    frames = list(medium.frames)
    frames += frames[-1:] * (len(video.spans) * video.frames - len(frames))
    for index, span in enumerate(video.spans):
        group = frames[index * video.frames : (index + 1) * video.frames]
        spans.append(Span(span, group, (video.width, video.height), True))
    return video.text


@contextmanager
def _refusing(medium: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"messages: the model's processor takes no {medium}", param="messages") from error


def with_words(processor: PictureProcessor, tokens: Sequence[int], placed: Placed) -> tuple[list[int], list[Media]]:
    """The prompt with words for its pictures' tokens, and where each picture is.

    Raises:
        InvalidRequest: other tokens stand for pictures too.
    """
    prompt, media, at = list(tokens), list[Media](), 0
    for span in placed.spans:
        at = _find(tokens, span.layout.tokens, at)
        key = media_key([frame.hash for frame in span.frames], b"%dx%d" % span.size if span.video else b"")
        words = iter(words_of(key, len(span.layout.places), video=span.video))
        for index in sorted(span.layout.places):
            prompt[at + index] = next(words)
        media.append(
            Media(
                start=at,
                tokens=list(span.layout.tokens),
                key=key,
                grid=list(span.layout.grid),
                width=span.size[0],
                height=span.size[1],
                pixels=[_resized.pixels(frame, span.size) for frame in span.frames if frame.pixels],
                video=span.video,
            )
        )
        at += len(span.layout.tokens)
    if processor.token in prompt or processor.video_token in prompt:
        raise InvalidRequest("messages: a text has a token that stands for a picture", param="messages")
    return prompt, media


class Resized:
    """Pictures in the sizes that encoders take, the last ones of them: a clip is shown again at every turn.

    Thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self._kept: LRUCache[tuple[bytes, tuple[int, int]], bytes] = LRUCache(bytes_max, getsizeof=len)
        self._lock = Lock()

    def pixels(self, picture: Picture, size: tuple[int, int]) -> bytes:
        """RGB of that (width, height); empty where the picture comes without pixels."""
        if not picture.pixels or size == (picture.width, picture.height):
            return picture.pixels
        key = (picture.hash, size)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                return found
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
        # As video processors do it.
        made = image.resize(size, Image.Resampling.BICUBIC).tobytes()
        # One that is larger than all that is kept is made each time.
        with self._lock, suppress(ValueError):
            self._kept[key] = made
        return made


_resized = Resized(RESIZED_BYTES_MAX)


def _find(tokens: Sequence[int], span: Sequence[int], start: int) -> int:
    wanted, first = list(span), span[0]
    for at in range(start, len(tokens) - len(wanted) + 1):
        if tokens[at] == first and list(tokens[at : at + len(wanted)]) == wanted:
            return at
    raise InvalidRequest("messages: a picture's tokens are not where they should be", param="messages")


def with_references(messages: Sequence[dict[str, Any]], media: Sequence[Medium]) -> list[dict[str, Any]]:
    """Messages in the templates' form, in which each medium, as it is shown, is named: as transcripts have them."""
    left = iter(media)
    return [
        {**message, "content": [_named(part, left) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _named(part: dict[str, str], media: Iterator[Medium]) -> dict[str, Any]:
    if part["type"] not in ("image", "video"):
        return part
    medium = next(media)
    if medium.video:
        return {"type": "video", "video": [f"{_url(frame)}@{frame.seconds:.6f}" for frame in medium.frames]}
    return {"type": "image_url", "image_url": {"url": _url(medium.frames[0])}}


def _url(picture: Picture) -> str:
    return f"{REFERENCE}{picture.hash.hex()}/{picture.width}x{picture.height}"


def referred(part: Any) -> Medium | None:
    """What a part of a transcript names, without its pixels; None for any other part."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith(REFERENCE):
            picture = _picture(url)
            return Medium([picture]) if picture is not None else None
        case {"type": "video", "video": [*urls]}:
            frames = [frame for url in urls if isinstance(url, str) and (frame := _picture(url)) is not None]
            return Medium(frames, True) if frames and len(frames) == len(urls) else None
    return None


def _picture(url: str) -> Picture | None:
    found = _REFERENCE.fullmatch(url)
    if found is None:
        return None
    return Picture(int(found[2]), int(found[3]), b"", bytes.fromhex(found[1]), float(found[4] or 0.0))


def media_said(messages: Sequence[Any]) -> list[Medium]:
    """The media of a transcript, in order."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [medium for part in parts if (medium := referred(part)) is not None]


def pictures_said(messages: Sequence[Any]) -> list[Picture]:
    """The pictures of a transcript without their pixels, in the order of first use, each once. A video is its frames,
    whether the model was shown them as one or as pictures."""
    frames = (frame for medium in media_said(messages) for frame in medium.frames)
    return list({frame.hash: frame for frame in frames}.values())
