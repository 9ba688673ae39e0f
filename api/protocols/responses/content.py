"""The Responses API on the way in: the parts of an item's content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....cluster.errors import InvalidRequest, quoted
from ...media.sources import AudioSource, PictureSource, detail_of
from ...requests.documents import cannot_be_read, words_of
from ...requests.left_out import LeftOut
from ...requests.request_body import string_of, wrong
from ..openai.messages import input_audio

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_UNSUPPORTED = {
    "input_file": "files other than text are",
    "computer_screenshot": "screenshots are",
    "document": "documents other than text are",
}


def read_content(
    value: Any, where: str, left_out: LeftOut | None, *, pictures: bool = False, joint: str = "\n"
) -> str | list[Any]:
    """Returns the text of text parts; with pictures or audio, a list of parts.

    Args:
        left_out: gets the types of unsupported parts; None refuses them.
        pictures: whether pictures and audio are allowed.
        joint: the separator between two texts.

    Raises:
        InvalidRequest: a part is malformed or unsupported; `param` is the place.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "must be a string or a list of parts")
    parts: list[Any] = []
    for index, part in enumerate(value):
        read = _part(part, f"{where}[{index}]", left_out, pictures=pictures)
        if isinstance(read, str) and parts and isinstance(parts[-1], str):
            parts[-1] += f"{joint}{read}"
        elif read is not None:
            parts.append(read)
    if not any(isinstance(part, PictureSource | AudioSource) for part in parts):
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def read_text(value: Any, where: str, left_out: LeftOut | None, *, joint: str = "\n") -> str:
    """As `read_content`, without pictures."""
    text = read_content(value, where, left_out, joint=joint)
    assert isinstance(text, str)
    return text


def _part(
    part: Any, where: str, left_out: LeftOut | None, *, pictures: bool
) -> str | PictureSource | AudioSource | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise wrong(where, "must be an object with a type")
    if kind in _TEXTS or kind == "refusal":
        return string_of(part, "refusal" if kind == "refusal" else "text", where)
    if kind == "input_image" and pictures:
        return _picture(part, where)
    if kind == "input_audio" and pictures:
        return input_audio(part, where)
    if (words := words_of(part, where)) is not None:
        return words
    if left_out is not None:
        left_out.add(kind)
        return cannot_be_read(part) if kind in _UNSUPPORTED else None
    if kind in _UNSUPPORTED:
        raise InvalidRequest(f"{where}: {_UNSUPPORTED[kind]} not supported", param=where)
    known: Sequence[str] = (
        "input_text",
        "output_text",
        "refusal",
        *(("input_image", "input_audio") if pictures else ()),
    )
    raise wrong(f"{where}.type", f"is {quoted(kind)}; possible here are {', '.join(known)}")


def _picture(part: dict[str, Any], where: str) -> PictureSource:
    if part.get("file_id") is not None:
        raise InvalidRequest(f"{where}.file_id: files are not supported", param=f"{where}.file_id")
    given, place = part.get("image_url"), f"{where}.image_url"
    # Some clients send the form of chat completions.
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise wrong(place, "must be a URL")
    detail = given.get("detail") if isinstance(given, dict) else part.get("detail")
    if not isinstance(detail, str | None):
        raise wrong(f"{where}.detail", "must be a string")
    return PictureSource(where, url, detail_of(detail), url_where=place)
