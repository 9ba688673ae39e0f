"""Pictures and videos in messages, as callers write them and as models are shown them; checks of their form. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...cluster.errors import InvalidRequest

_SCHEMES = ("http://", "https://", "data:", "file://")
_DETAILS = ("auto", "low", "high")
_PICTURE_KEYS = {"image_url": ("image_url",), "input_image": ("image_url",), "image": ("image", "url", "image_url")}
_VIDEO_KEYS = {"video_url": ("video_url",), "video": ("video", "url", "video_url")}
_PICTURE_OPTIONS = ("detail", "min_pixels", "max_pixels")
_VIDEO_OPTIONS = ("fps", "max_frames", "min_pixels", "max_pixels")
# `cache_control` is a hint for other servers and changes no answer; text parts may have it too.
_BESIDE = ("type", "cache_control")
_NUMBER_MAX = 10**9


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
class PictureSource:
    """One picture of a message.

    Attributes:
        where: its position, such as `messages[2].content[0]`, for errors.
        url: `http://`, `https://`, `data:`, `file://` or an absolute path.
        detail: `auto`, `low` or `high`.
        pixels_min, pixels_max: the part's own `min_pixels` and `max_pixels`.
    """

    where: str
    url: str = field(repr=False)
    detail: str = "auto"
    pixels_min: int | None = None
    pixels_max: int | None = None


@dataclass(frozen=True)
class VideoSource:
    """One video of a message: a file by its `url`, or its `frames` in order.

    `fps` is the rate at which a file is sampled, or the rate of a list's frames. At most `frames_max` frames are used,
    evenly spaced.
    """

    where: str
    url: str | None = field(repr=False)
    frames: tuple[PictureSource, ...] = ()
    fps: float | None = None
    frames_max: int | None = None
    pixels_min: int | None = None
    pixels_max: int | None = None


def media_part(part: dict[str, Any], where: str) -> PictureSource | VideoSource | None:
    """Returns the picture or video in a part of a message's content; None if its type is another one.

    Raises:
        InvalidRequest: its form is wrong, or it has an unknown option; `param` is the position.
    """
    kind = part.get("type")
    if not isinstance(kind, str):
        return None
    if kind in _PICTURE_KEYS:
        return _picture(part, _PICTURE_KEYS[kind], where)
    if kind in _VIDEO_KEYS:
        return _video(part, _VIDEO_KEYS[kind], where)
    return None


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)


def _named(
    part: dict[str, Any], keys: tuple[str, ...], options: tuple[str, ...], where: str, *, ignored: tuple[str, ...] = ()
) -> tuple[Any, dict[str, Any], str]:
    """Returns the value of the first of `keys` in the part, the part's options, and the position of the value.

    OpenAI wraps a URL and its options into an object, which may also have the `ignored` keys. Other servers put both
    beside the type.
    """
    key = next((key for key in keys if part.get(key) is not None), None)
    if key is None:
        raise _wrong(f"{where}.{keys[0]}", "is missing")
    _check_known(part, (*_BESIDE, *keys), options, where)
    value = part[key]
    if not isinstance(value, dict):
        return value, part, f"{where}.{key}"
    _check_known(value, ("url", *ignored), options, f"{where}.{key}")
    return value.get("url"), {**part, **value}, f"{where}.{key}.url"


def _check_known(given: dict[str, Any], keys: tuple[str, ...], options: tuple[str, ...], where: str) -> None:
    """Raises for unknown keys. Clients write null for fields that they leave out."""
    for key, value in given.items():
        if value is not None and key not in keys and key not in options:
            raise _wrong(f"{where}.{key}", f"is not supported; possible are {', '.join(options)}")


def _picture(part: dict[str, Any], keys: tuple[str, ...], where: str) -> PictureSource:
    # Some clients give a picture's MIME type as `format`. It is ignored, because the file's bytes tell its format.
    value, options, place = _named(part, keys, _PICTURE_OPTIONS, where, ignored=("format",))
    url = _address(value, place)
    detail = options.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise _wrong(f"{where}.detail", f"must be one of {', '.join(_DETAILS)}")
    pixels_min, pixels_max = _pixels(options, where)
    return PictureSource(where, url, detail or "auto", pixels_min, pixels_max)


def _video(part: dict[str, Any], keys: tuple[str, ...], where: str) -> VideoSource:
    value, options, place = _named(part, keys, _VIDEO_OPTIONS, where)
    fps = _number(options, "fps", where)
    frames_max = _count(options, "max_frames", where)
    pixels_min, pixels_max = _pixels(options, where)
    if isinstance(value, list):
        if not value:
            raise _wrong(place, "has no frames")
        frames = tuple(_frame(frame, f"{place}[{index}]", pixels_min, pixels_max) for index, frame in enumerate(value))
        return VideoSource(where, None, frames, fps, frames_max, pixels_min, pixels_max)
    return VideoSource(where, _address(value, place), (), fps, frames_max, pixels_min, pixels_max)


def _frame(value: Any, where: str, pixels_min: int | None, pixels_max: int | None) -> PictureSource:
    """Returns a frame of a list: a URL, or a part as for a picture."""
    if not isinstance(value, dict):
        return PictureSource(where, _address(value, where), "auto", pixels_min, pixels_max)
    return _picture({"min_pixels": pixels_min, "max_pixels": pixels_max, **value}, ("image_url", "image", "url"), where)


def _address(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(where, "must be a URL")
    if value.startswith("/") or value[:8].lower().startswith(_SCHEMES):
        return value
    raise _wrong(where, "must be an http, https, data or file URL, or an absolute path")


def _pixels(options: dict[str, Any], where: str) -> tuple[int | None, int | None]:
    least, most = _count(options, "min_pixels", where), _count(options, "max_pixels", where)
    if least is not None and most is not None and least > most:
        raise _wrong(f"{where}.min_pixels", "is more than max_pixels")
    return least, most


def _count(options: dict[str, Any], name: str, where: str) -> int | None:
    value = options.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= _NUMBER_MAX):
        raise _wrong(f"{where}.{name}", f"must be a whole number from 1 to {_NUMBER_MAX}")
    return value


def _number(options: dict[str, Any], name: str, where: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0.001 <= value <= 1000:
        raise _wrong(f"{where}.{name}", "must be a number from 0.001 to 1000")
    return float(value)
