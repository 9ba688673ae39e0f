"""Reads forms (`multipart/form-data`): piece by piece, or with small fields and files, all in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...cluster.errors import InvalidRequest, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM = "multipart/form-data"
PARTS_MAX = 100
FIELD_BYTES_MAX = 256 * 2**10

_ENCODED_NAME = re.compile(rb";\s*filename\*\s*=", re.IGNORECASE)
"""A file's name with its encoding (RFC 8187), which the parser leaves out."""

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_DECIMAL = re.compile(r"-?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?")
_SWITCHES = MappingProxyType({"true": True, "false": False, "1": True, "0": False})


@dataclass
class Form:
    """The parts of a form: texts by name, the last of each, and contents of files by name, in their order. `lists` has
    all texts."""

    fields: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


class FormParts:
    """Reads the parts of a form as they arrive; subclasses take them.

    Args:
        content_type: the request's header.
        refusal: the message if it is no form.

    Raises:
        UnsupportedMediaType: it is no form.
        InvalidRequest: its boundary is malformed.
    """

    def __init__(self, content_type: str, refusal: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != FORM.encode() or not options.get(b"boundary"):
            raise UnsupportedMediaType(refusal)
        self._ended = False
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._header_end,
            "on_headers_finished": lambda: self._part_begins(self._headers),
            "on_part_data": self._on_data,
            "on_part_end": self._part_ends,
            "on_end": self._end,
        }
        with _malformed("malformed"):
            self._parser = MultipartParser(options[b"boundary"], callbacks)

    def add(self, piece: bytes) -> None:
        """Takes a piece of the body. Raises `InvalidRequest` if the form is malformed, and what subclasses raise."""
        with _malformed("malformed"):
            self._parser.write(piece)

    def finish(self) -> None:
        """Ends the form. Raises `InvalidRequest` if its last line is missing."""
        with _malformed("cut off"):
            self._parser.finalize()
        if not self._ended:
            raise InvalidRequest("the form is cut off")

    def _part_begins(self, headers: Mapping[bytes, bytes]) -> None:
        """Takes a part's headers, by their names in small letters."""
        raise NotImplementedError

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        """Takes `data[start:end]` of the part."""
        raise NotImplementedError

    def _part_ends(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        self._headers, self._header, self._value = {}, b"", b""

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end(self) -> None:
        self._ended = True


@contextmanager
def _malformed(what: str) -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise InvalidRequest(f"the form is {what}: {error}") from error


def name_of(headers: Mapping[bytes, bytes]) -> tuple[str, dict[bytes, bytes]]:
    """Returns the name of a part with these headers, and all options of its disposition."""
    _, options = parse_options_header(headers.get(b"content-disposition", b""))
    return options.get(b"name", b"").decode("utf-8", "replace"), options


def parse_form(content_type: str, data: bytes | bytearray) -> Form:
    """Returns the parts of a form. A part with a file name, or of a media type other than text, is a file.

    Raises:
        UnsupportedMediaType: it is no form.
        InvalidRequest: it is malformed, has too many parts, or a text is too long.
    """
    parts = _InMemory(content_type, f"send a form ({FORM})")
    parts.add(bytes(data))
    parts.finish()
    return parts.form


def value_of(text: str, kind: type) -> Any:
    """Returns the value of a kind (`int`, `float` or `bool`) that a form's text stands for. What stands for none stays
    text, which is then refused."""
    if kind is bool:
        return _SWITCHES.get(text.lower(), text)
    written = {int: _INTEGER, float: _DECIMAL}.get(kind)
    return text if written is None or not written.fullmatch(text) else kind(text)


class _InMemory(FormParts):
    """Collects the parts."""

    def __init__(self, content_type: str, refusal: str) -> None:
        super().__init__(content_type, refusal)
        self.form = Form()
        self._count = 0
        self._name, self._is_file, self._data = "", False, bytearray()

    def _part_begins(self, headers: Mapping[bytes, bytes]) -> None:
        self._count += 1
        if self._count > PARTS_MAX:
            raise InvalidRequest(f"the form has more than {PARTS_MAX} parts")
        self._name, options = name_of(headers)
        kind, _ = parse_options_header(headers.get(b"content-type", b"text/plain"))
        named = b"filename" in options or _ENCODED_NAME.search(headers.get(b"content-disposition", b"")) is not None
        self._is_file, self._data = named or not kind.startswith(b"text/"), bytearray()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if not self._is_file and len(self._data) > FIELD_BYTES_MAX:
            raise InvalidRequest(f"{self._name[:100]}: has more than {FIELD_BYTES_MAX} bytes", param=self._name[:100])

    def _part_ends(self) -> None:
        if self._is_file:
            self.form.files.setdefault(self._name, []).append(bytes(self._data))
            return
        try:
            text = self._data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(f"{self._name[:100]}: is not UTF-8", param=self._name[:100]) from None
        self.form.fields[self._name] = text
        self.form.lists.setdefault(self._name, []).append(text)
