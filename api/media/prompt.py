"""Pictures, videos and audio in a prompt: from the template's placeholders to the processor's text, and to media token
ids.

A rendered conversation has the template's placeholder for each picture. The processor's text for a picture of that size
replaces it and is tokenized with the rest. Then each token that stands for the picture is replaced by bits of the
picture's key (`protocol.media_ids`), so that prompts with different pictures have different tokens.
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

from ...actors.model_files.media.audio_processor import AudioProcessor
from ...actors.model_files.media.media_layouts import MediaLayout, SpanLayout
from ...actors.model_files.media.processors import PictureProcessor
from ...actors.protocol.media_ids import media_key, media_tokens
from ...actors.protocol.replica_messages import MediaSpan
from ...cluster.errors import InvalidRequest
from .sources import Audio, Picture

REFERENCE = "picture:"
"""Transcripts name pictures by such URLs. Callers cannot use them, so a hash gives no access to others' pictures."""

AUDIO_REFERENCE = "audio:"
"""Transcripts name audio by such URLs, in the same way."""

RESIZED_BYTES_MAX = 64 << 20

_REFERENCE = re.compile(rf"{REFERENCE}([0-9a-f]{{64}})/(\d{{1,9}})x(\d{{1,9}})(?:@(\d{{1,9}}\.\d{{1,6}}))?")


_AUDIO_REFERENCE = re.compile(rf"{AUDIO_REFERENCE}([0-9a-f]{{64}})/(\d{{1,9}})@(\d{{1,6}})")


@dataclass(frozen=True)
class Medium:
    """A picture of a message, the frames of a video, or audio."""

    frames: Sequence[Picture]
    video: bool = False
    audio: Audio | None = None

    @classmethod
    def of(cls, loaded: Sequence[Picture | Audio], *, video: bool) -> Medium:
        """Returns the medium that was loaded from one source."""
        frames = [each for each in loaded if isinstance(each, Picture)]
        return cls(frames, video, next((each for each in loaded if isinstance(each, Audio)), None))

    @property
    def part(self) -> dict[str, str]:
        """Returns its content part for the chat template."""
        if self.audio is not None:
            return {"type": "audio"}
        return {"type": "video" if self.video else "image"}

    def placeholder(self, processor: PictureProcessor) -> str:
        """Returns what the chat template writes for it; "" if the model does not support it."""
        if self.audio is not None:
            return processor.audio.placeholder if processor.audio is not None else ""
        return processor.video_placeholder if self.video else processor.placeholder

    def shown(self, processor: PictureProcessor) -> list[Medium]:
        """Returns what the model is shown: itself, or the frames as single pictures if the model does not support
        videos."""
        if self.video and not processor.video_placeholder:
            return [Medium([frame]) for frame in self.frames]
        return [self]


@dataclass(frozen=True)
class Span:
    """The media of one span of a prompt: a picture, frames that are encoded together, in `size` (width, height), or
    audio."""

    layout: SpanLayout
    frames: Sequence[Picture]
    size: tuple[int, int]
    video: bool
    audio: Audio | None = None

    @property
    def key(self) -> bytes:
        """Names the encoder's input."""
        if self.audio is not None:
            return media_key([self.audio.hash])
        return media_key([frame.hash for frame in self.frames], b"%dx%d" % self.size if self.video else b"")

    def contents(self) -> list[bytes]:
        """Returns the pixels or samples, as in `MediaSpan.pixels`."""
        if self.audio is not None:
            return [self.audio.samples] if self.audio.samples else []
        return [_resized.pixels(frame, self.size) for frame in self.frames if frame.pixels]


@dataclass(frozen=True)
class MediaPrompt:
    """A rendered conversation with the processor's texts, and its spans of media, in order."""

    text: str
    spans: list[Span]


def place(processor: PictureProcessor, rendered: str, media: Sequence[Medium]) -> MediaPrompt:
    """Writes the processor's texts of `media` (from `Medium.shown`) into a rendered conversation. New sizes are slow.

    Raises:
        InvalidRequest: a text of the conversation contains a placeholder, or the processor refuses a size.
    """
    marks = [mark for mark in processor.placeholders if mark]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", rendered)
    if parts[1::2] != [medium.placeholder(processor) for medium in media]:
        mark = next((mark for mark in parts[1::2] if mark), processor.placeholder)
        what = f"{mark!r}, the placeholder of {_kind_of(mark, processor)}"
        raise InvalidRequest(f"messages: a text contains {what}", param="messages")
    spans: list[Span] = []
    for index, medium in enumerate(media):
        parts[2 * index + 1] = _lay(processor, medium, spans)
    return MediaPrompt("".join(parts), spans)


def _kind_of(mark: str, processor: PictureProcessor) -> str:
    if processor.audio is not None and mark == processor.audio.placeholder:
        return "audio"
    return "a picture" if mark == processor.placeholder else "a video"


def _lay(processor: PictureProcessor, medium: Medium, spans: list[Span]) -> str:
    """Appends the medium's spans to `spans`, and returns its text."""
    if medium.audio is not None:
        return _lay_audio(processor, medium.audio, spans)
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


def _lay_audio(processor: PictureProcessor, audio: Audio, spans: list[Span]) -> str:
    if processor.audio is None:
        raise InvalidRequest("messages: this model does not support audio", param="messages")
    try:
        laid = _layout_of(processor.audio, audio)
    except ValueError as error:
        seconds = audio.count / audio.rate
        raise InvalidRequest(f"messages: audio of {seconds:.3g} s {error}", param="messages") from error
    spans.append(Span(laid.span, (), (0, 0), False, audio))
    return laid.text


def _layout_of(processor: AudioProcessor, audio: Audio) -> MediaLayout:
    # A transcript may name audio that another model got at another rate.
    return processor.layout(round(audio.count * processor.rate / audio.rate))


@contextmanager
def _refusing(medium: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"messages: the processor does not support a {medium}", param="messages") from error


def with_media_tokens(
    processor: PictureProcessor, tokens: Sequence[int], placed: MediaPrompt
) -> tuple[list[int], list[MediaSpan]]:
    """Returns the prompt with media token ids in place of its image tokens, and the position of each medium.

    Raises:
        InvalidRequest: a text contains an image token.
    """
    prompt, media, at = list(tokens), list[MediaSpan](), 0
    for span in placed.spans:
        at = _find(tokens, span.layout.tokens, at)
        key, count, is_audio = span.key, len(span.layout.places), span.audio is not None
        ids = iter(media_tokens(key, count, video=span.video, audio=is_audio))
        for index in sorted(span.layout.places):
            prompt[at + index] = next(ids)
        media.append(
            MediaSpan(
                start=at,
                tokens=list(span.layout.tokens),
                key=key,
                grid=list(span.layout.grid),
                width=span.size[0],
                height=span.size[1],
                pixels=span.contents(),
                video=span.video,
                audio_rate=span.audio.rate if span.audio is not None else 0,
            )
        )
        at += len(span.layout.tokens)
    if not processor.tokens_of_media.isdisjoint(prompt):
        raise InvalidRequest("messages: a text contains the token of a picture, a video or audio", param="messages")
    return prompt, media


class Resized:
    """A cache of pictures in the sizes that encoders need, because a video is sent again at every turn. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._kept: LRUCache[tuple[bytes, tuple[int, int]], bytes] = LRUCache(bytes_max, getsizeof=len)
        self._lock = Lock()

    def pixels(self, picture: Picture, size: tuple[int, int]) -> bytes:
        """Returns `(height, width, 3) uint8` RGB bytes for `size` (width, height); empty without pixels."""
        if not picture.pixels or size == (picture.width, picture.height):
            return picture.pixels
        key = (picture.hash, size)
        with self._lock:
            if (cached := self._kept.get(key)) is not None:
                return cached
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
        # Bicubic, like video processors.
        resized = image.resize(size, Image.Resampling.BICUBIC).tobytes()
        # A result larger than the whole cache is computed each time.
        with self._lock, suppress(ValueError):
            self._kept[key] = resized
        return resized


_resized = Resized(RESIZED_BYTES_MAX)


def _find(tokens: Sequence[int], span: Sequence[int], start: int) -> int:
    wanted, first = list(span), span[0]
    for at in range(start, len(tokens) - len(wanted) + 1):
        if tokens[at] == first and list(tokens[at : at + len(wanted)]) == wanted:
            return at
    raise InvalidRequest(
        "messages: the tokens of a picture, a video or audio are missing in the prompt", param="messages"
    )


def with_references(messages: Sequence[Any], media: Sequence[Medium]) -> list[Any]:
    """Returns messages in the templates' form with each medium named by its references, as transcripts store them."""
    left = iter(media)
    return [
        {**message, "content": [_named(part, left) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _named(part: dict[str, str], media: Iterator[Medium]) -> dict[str, Any]:
    if part["type"] not in ("image", "video", "audio"):
        return part
    medium = next(media)
    if (audio := medium.audio) is not None:
        return {
            "type": "audio_url",
            "audio_url": {"url": f"{AUDIO_REFERENCE}{audio.hash.hex()}/{audio.count}@{audio.rate}"},
        }
    if medium.video:
        return {"type": "video", "video": [f"{_url(frame)}@{frame.seconds:.6f}" for frame in medium.frames]}
    return {"type": "image_url", "image_url": {"url": _url(medium.frames[0])}}


def _url(picture: Picture) -> str:
    return f"{REFERENCE}{picture.hash.hex()}/{picture.width}x{picture.height}"


def referred(part: Any) -> Medium | None:
    """Returns the medium that a part of a transcript names, without pixels; None for any other part."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith(REFERENCE):
            picture = _picture(url)
            return Medium([picture]) if picture is not None else None
        case {"type": "audio_url", "audio_url": {"url": str(url)}}:
            match = _AUDIO_REFERENCE.fullmatch(url)
            if match is None or not int(match[3]):
                return None
            return Medium((), audio=Audio(b"", int(match[3]), bytes.fromhex(match[1]), int(match[2])))
        case {"type": "video", "video": [*urls]}:
            frames = [frame for url in urls if isinstance(url, str) and (frame := _picture(url)) is not None]
            return Medium(frames, True) if frames and len(frames) == len(urls) else None
    return None


def is_refused(processor: PictureProcessor, part: Any) -> bool:
    """Returns whether a part of a transcript is audio whose length the model's processor refuses; another model may
    have taken it. New lengths are slow."""
    medium = referred(part)
    if medium is None or medium.audio is None or processor.audio is None:
        return False
    try:
        _layout_of(processor.audio, medium.audio)
    except ValueError:
        return True
    return False


def _picture(url: str) -> Picture | None:
    match = _REFERENCE.fullmatch(url)
    if match is None:
        return None
    return Picture(int(match[2]), int(match[3]), b"", bytes.fromhex(match[1]), float(match[4] or 0.0))


def media_said(messages: Sequence[Any]) -> list[Medium]:
    """Returns the media of a transcript, in order."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [medium for part in parts if (medium := referred(part)) is not None]


def pictures_said(messages: Sequence[Any]) -> list[Picture]:
    """Returns the pictures of a transcript without pixels, each once, in the order of first use. A video counts as its
    frames."""
    frames = (frame for medium in media_said(messages) for frame in medium.frames)
    return list({frame.hash: frame for frame in frames}.values())
