"""Pictures, videos and audio of messages: as sources, independent of the protocol, and as models get them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...cluster.errors import InvalidRequest

_DETAILS = {"low": "low", "high": "high", "original": "high"}
_SCHEMES = ("http://", "https://", "data:", "file://")


@dataclass(frozen=True)
class Picture:
    """A picture as a model is shown it.

    Attributes:
        pixels: `(height, width, 3) uint8`, RGB; empty if only the hash is known.
        hash: `picture_hash` of these pixels.
        seconds: when it is shown in its video; 0 for a single picture.
    """

    width: int
    height: int
    pixels: bytes = field(repr=False)
    hash: bytes
    seconds: float = 0.0


@dataclass(frozen=True)
class Audio:
    """Audio as a model gets it.

    Attributes:
        samples: one channel, float32 little-endian; empty if only the hash is known.
        rate: samples a second.
        hash: `audio_hash` of these samples.
        known_count: the number of samples, if there are none; else 0.
    """

    samples: bytes = field(repr=False)
    rate: int
    hash: bytes
    known_count: int = 0

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.samples) // 4 or self.known_count


@dataclass(frozen=True)
class PictureSource:
    """One picture of a message.

    Attributes:
        where: its position, such as `messages[2].content[0]`, for errors.
        url: `http://`, `https://`, `data:`, `file://` or an absolute path.
        detail: `auto`, `low` or `high`.
        pixels_min, pixels_max: the picture's own limits.
        url_where: the position of its URL, such as `messages[2].content[0].image_url.url`, for errors.
        earlier: whether it belongs to an earlier message, though it is in the user's newest one here, because some
            protocols join messages.
    """

    where: str
    url: str = field(repr=False)
    detail: str = "auto"
    pixels_min: int | None = None
    pixels_max: int | None = None
    url_where: str = field(default="", compare=False)
    earlier: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class VideoSource:
    """One video of a message: a file by its `url`, or its `frames` in order.

    `fps` is the rate at which a file is sampled, or the rate of a list's frames. At most `frames_max` frames are used,
    evenly spaced. `earlier` is as in `PictureSource`.
    """

    where: str
    url: str | None = field(repr=False)
    frames: tuple[PictureSource, ...] = ()
    fps: float | None = None
    frames_max: int | None = None
    pixels_min: int | None = None
    pixels_max: int | None = None
    url_where: str = field(default="", compare=False)
    earlier: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class AudioSource:
    """Audio of a message: a file by its `url`. `form` is what the caller calls its format, "" for nothing. The other
    attributes are as in `PictureSource`."""

    where: str
    url: str = field(repr=False)
    form: str = ""
    url_where: str = field(default="", compare=False)
    earlier: bool = field(default=False, compare=False)


MediaSource = PictureSource | VideoSource | AudioSource


def detail_of(word: str | None) -> str:
    """Returns a picture's detail; for an unknown word, the default."""
    return _DETAILS.get(word or "", "auto")


def check_urls(source: MediaSource) -> None:
    """Checks the URL of a source, or of its frames.

    Raises:
        InvalidRequest: it has no known scheme; `param` is its position.
    """
    url = source.url or ""
    if isinstance(source, VideoSource) and source.url is None:
        for frame in source.frames:
            check_urls(frame)
    elif not url.startswith("/") and not url[:8].lower().startswith(_SCHEMES):
        raise InvalidRequest(
            f"{source.url_where} must be an http, https, data or file URL, or an absolute path", param=source.url_where
        )
