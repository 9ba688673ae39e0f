"""Documents, files, search results and found tools that clients send, as text for the model.

Errors name the place as a caller would write it. Large inputs belong in a worker thread.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from .request_body import string_of, wrong

_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml")
_FILES = ("file", "input_file")


def words_of(part: Mapping[str, Any], where: str) -> str | None:
    """Returns a part of content as text; None if it is of another kind, or its content is not text.

    Raises:
        InvalidRequest: it is malformed; `param` is the place.
    """
    kind = part.get("type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    return None if read is None else read(part, where)


def cannot_be_read(part: Mapping[str, Any]) -> str:
    """Returns the text that replaces a document or file that cannot be shown as text."""
    inner = part.get("file")
    named = inner if isinstance(inner, Mapping) else part
    name = next((name for key in ("filename", "title") if isinstance(name := named.get(key), str) and name), "")
    return f"[The file {name} cannot be shown here.]" if name else "[A file cannot be shown here.]"


def _document(part: Mapping[str, Any], where: str) -> str | None:
    """Anthropic's: text, blocks of text, or a file, which can be read only if it has text."""
    source, place = part.get("source"), f"{where}.source"
    if not isinstance(source, Mapping):
        raise wrong(place, "must be an object with a type")
    kind = source.get("type")
    if kind == "text":
        text: str | None = string_of(source, "data", place)
    elif kind == "content":
        text = _texts(source.get("content"), f"{place}.content")
    elif kind == "base64":
        data, media_type = string_of(source, "data", place), source.get("media_type")
        text = _decoded(f"{media_type};base64", data)
    else:
        text = None
    if text is None:
        return None
    about = [_optional(part, name, where) for name in ("title", "context")]
    return _headed("Document", about[0], about[1], text)


def _search_result(part: Mapping[str, Any], where: str) -> str:
    title, source = string_of(part, "title", where), string_of(part, "source", where)
    text = _texts(part.get("content"), f"{where}.content")
    return _headed("Search result", title, source, text or "")


def _tool_reference(part: Mapping[str, Any], where: str) -> str:
    return f"Tool found: {string_of(part, 'tool_name', where)}"


def _file(part: Mapping[str, Any], where: str) -> str | None:
    """OpenAI's: in chats its fields are in an object."""
    if part.get("type") == "file":
        part, where = part.get("file", {}), f"{where}.file"
        if not isinstance(part, Mapping):
            raise wrong(where, "must be an object")
    if (data := _optional(part, "file_data", where)) and data.startswith("data:"):
        head, _, body = data.removeprefix("data:").partition(",")
        if (text := _decoded(head, body)) is not None:
            return _headed("File", _optional(part, "filename", where), "", text)
    return None


def _optional(part: Mapping[str, Any], name: str, where: str) -> str:
    return "" if part.get(name) is None else string_of(part, name, where)


def _headed(what: str, title: str, about: str, text: str) -> str:
    head = f"{what} {title}" if title else what
    return f"{head} ({about}):\n{text}" if about else f"{head}:\n{text}"


def _texts(content: Any, where: str) -> str | None:
    """Returns text, or blocks of text as lines; None if a block is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of blocks")
    texts: list[str] = []
    for index, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise wrong(f"{where}[{index}]", "must be an object with a type")
        if block.get("type") != "text":
            return None
        texts.append(string_of(block, "text", f"{where}[{index}]"))
    return "\n".join(texts)


def _decoded(head: str, data: str) -> str | None:
    """Returns the text of a data URL with this head; None if it is not text."""
    media_type, *more = (piece.strip().lower() for piece in head.split(";"))
    if not (media_type.startswith("text/") or media_type in _TEXT_TYPES):
        return None
    try:
        # Base64 may be broken into lines.
        raw = base64.b64decode("".join(data.split()), validate=True) if "base64" in more else unquote_to_bytes(data)
        return raw.decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], str | None]] = {
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    **dict.fromkeys(_FILES, _file),
}
