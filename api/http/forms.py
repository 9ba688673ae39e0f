"""Reads a form (`multipart/form-data`) with small fields and files, all in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


@dataclass
class Form:
    """The parts of a form: texts by name, and contents of files by name, in their order."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def parse_form(content_type: str, data: bytes | bytearray) -> Form:
    """Returns the parts of a form. A part with a file name, or of a media type other than text, is a file.

    Raises:
        UnsupportedMediaType: it is no form.
        InvalidRequest: it is malformed, has too many parts, or a text is too long.
    """
    kind, options = parse_options_header(content_type)
    if kind != FORM.encode() or not options.get(b"boundary"):
        raise UnsupportedMediaType(f"send a form ({FORM})")
    parts = _Parts()
    try:
        parser = MultipartParser(options[b"boundary"], parts.callbacks)
        parser.write(bytes(data))
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the form is malformed: {error}") from error
    if not parts.ended:
        raise InvalidRequest("the form is cut off")
    return parts.form


class _Parts:
    """Collects the parts as they are parsed."""

    def __init__(self) -> None:
        self.form, self.ended = Form(), False
        self._count = 0
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._name, self._is_file, self._data = "", False, bytearray()
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._end_form,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > PARTS_MAX:
            raise InvalidRequest(f"the form has more than {PARTS_MAX} parts")
        self._headers, self._header, self._value, self._data = {}, b"", b"", bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        kind, _ = parse_options_header(self._headers.get(b"content-type", b"text/plain"))
        named = b"filename" in options or _ENCODED_NAME.search(disposition) is not None
        self._is_file = named or not kind.startswith(b"text/")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if not self._is_file and len(self._data) > FIELD_BYTES_MAX:
            raise InvalidRequest(f"{self._name[:100]}: has more than {FIELD_BYTES_MAX} bytes", param=self._name[:100])

    def _end_form(self) -> None:
        self.ended = True

    def _end(self) -> None:
        if self._is_file:
            self.form.files.setdefault(self._name, []).append(bytes(self._data))
            return
        try:
            self.form.fields[self._name] = self._data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(f"{self._name[:100]}: is not UTF-8", param=self._name[:100]) from None
