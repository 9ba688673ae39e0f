"""Reads an uploaded form (`multipart/form-data`) with one file, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...cluster.errors import InvalidRequest, RequestTooLarge
from ..http.forms import FORM, FormParts, name_of

_FIELD_MAX = 4096
_FIELDS_MAX = 20


class Upload(FormParts):
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
        InvalidRequest: its boundary is malformed.
        RequestTooLarge: from `add`: the file or another part is too large.
    """

    def __init__(self, content_type: str, take: Callable[[bytes], object], bytes_max: int) -> None:
        super().__init__(content_type, f"send the file as a form ({FORM}) with `file` and `purpose`")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._take, self._left = take, bytes_max
        self._name, self._text, self._in_file = "", bytearray(), False

    def finish(self) -> None:
        """Ends the form. Raises `InvalidRequest` if it is not complete, or without a file."""
        super().finish()
        if self.filename is None:
            raise InvalidRequest("the form has no file", param="file")

    def _part_begins(self, headers: Mapping[bytes, bytes]) -> None:
        self._text = bytearray()
        self._name, options = name_of(headers)
        self._in_file = self._name == "file"
        if self._in_file and self.filename is not None:
            raise InvalidRequest("the form has two files", param="file")
        if self._in_file:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file.jsonl"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._text += data[start:end]
            if len(self._text) > _FIELD_MAX:
                raise RequestTooLarge(f"the form's field {self._name[:100]!r} is too long")
            return
        self._left -= end - start
        if self._left < 0:
            raise RequestTooLarge("the file is larger than endpoint.file_bytes_max")
        self._take(data[start:end])

    def _part_ends(self) -> None:
        if self._in_file:
            return
        self.fields[self._name] = self._text.decode("utf-8", "replace")
        if len(self.fields) > _FIELDS_MAX:
            raise InvalidRequest("the form has too many fields")
