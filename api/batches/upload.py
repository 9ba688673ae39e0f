"""Reads an uploaded form (`multipart/form-data`) with one file, piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...cluster.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType

_FIELD_MAX = 4096
_FIELDS_MAX = 20


class Upload:
    """The parts of a form as they arrive.

    Args:
        content_type: the request's header.
        take: called with each piece of the file.
        bytes_max: of the file.

    Attributes:
        fields: the texts of the other parts, by name.
        filename: what the caller calls the file; None if there was none.

    Raises:
        UnsupportedMediaType: it is no form with files.
    """

    def __init__(self, content_type: str, take: Callable[[bytes], object], bytes_max: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise UnsupportedMediaType("send the file as a form (multipart/form-data) with `file` and `purpose`")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._take, self._left = take, bytes_max
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._name, self._text, self._in_file = "", bytearray(), False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
            },
        )

    def add(self, piece: bytes) -> None:
        """Takes a piece of the body.

        Raises:
            InvalidRequest: the form is malformed.
            RequestTooLarge: the file or another part is too large.
        """
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise InvalidRequest(f"the form is malformed: {error}") from error

    def finish(self) -> None:
        """Ends the form. Raises `InvalidRequest` if it is not complete, or without a file."""
        try:
            self._parser.finalize()
        except MultipartParseError as error:
            raise InvalidRequest(f"the form is cut off: {error}") from error
        if self.filename is None:
            raise InvalidRequest("the form has no file", param="file")

    def _begin(self) -> None:
        self._headers, self._header, self._value, self._text = {}, b"", b"", bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == "file"
        if self._in_file and self.filename is not None:
            raise InvalidRequest("the form has two files", param="file")
        if self._in_file:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._text += data[start:end]
            if len(self._text) > _FIELD_MAX:
                raise RequestTooLarge(f"the form's field {self._name[:100]!r} is too long")
            return
        self._left -= end - start
        if self._left < 0:
            raise RequestTooLarge("the file is larger than endpoint.file_bytes_max")
        self._take(data[start:end])

    def _end(self) -> None:
        if self._in_file:
            return
        self.fields[self._name] = self._text.decode("utf-8", "replace")
        if len(self.fields) > _FIELDS_MAX:
            raise InvalidRequest("the form has too many fields")
