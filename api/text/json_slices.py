"""Parses JSON of any size without holding the interpreter lock for long: first measured, then parsed in small pieces.

A parser in C holds the interpreter lock until it ends. Here it gets one piece at a time, so the event loop waits for
milliseconds at most. A text's cost depends on its number of values and their nesting. Both are checked before anything
is allocated for them. Pure; large texts belong in a worker thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json

DEPTH_MAX = 200
"""The deepest nesting that the parser accepts in one piece, and so in the whole text."""

_SCAN_BYTES = 256 * 2**10
_PIECE_BYTES = 2**20
_PIECE_MARKS = 8192
_CUT_BYTES = 64
_MARKS = b"{}[],:"
_QUOTE, _BACKSLASH = b'"\\'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST, _COMMA, _COLON = _MARKS
_KINDS = bytes(byte if byte in _MARKS + b'"\\' else 0 for byte in range(256))
_SPACES = b" \t\r\n"

# One written character of a string; the two escapes of a surrogate pair stay together.
_WRITTEN = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4})?|\\u[0-9a-fA-F]{4}|\\[^u]|[^\\][\x80-\xbf]*", re.DOTALL
)


class TooManyValues(Exception):
    """More values and keys than were allowed."""


class TooDeep(Exception):
    """Nested deeper than was allowed."""


@dataclass(frozen=True)
class Outline:
    """The structure of a JSON text: its marks. A mark is a bracket, comma or colon outside of strings.

    Attributes:
        at: `(marks,) int64`: their byte offsets.
        kind: `(marks,) uint8`: the bytes themselves.
        depth: `(marks,) int64`: how many containers are open after each.
        values: how many marks are not closing brackets, which is about the number of values and keys.
    """

    at: np.ndarray
    kind: np.ndarray
    depth: np.ndarray
    values: int


def outline(data: bytes | bytearray, values_max: int, depth_max: int | None = DEPTH_MAX) -> Outline:
    """Returns the outline of `data`. Takes about 10 ns per byte, in steps of less than a millisecond.

    Raises:
        TooManyValues, TooDeep: it exceeds a limit. Raised before more memory than for `values_max` is allocated.
        ValueError: strings or containers do not end.
    """
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    depth = values = 0
    escaped = inside = False
    for start in range(0, len(data), _SCAN_BYTES):
        piece = data[start : start + _SCAN_BYTES]
        classes = np.frombuffer(piece.translate(_KINDS), np.uint8)
        offsets = np.flatnonzero(classes)
        kinds = classes[offsets]
        quotes, escaped = _quotes(offsets, kinds, escaped, len(piece))
        is_mark = (kinds != _QUOTE) & (kinds != _BACKSLASH)
        at, kind = offsets[is_mark], kinds[is_mark]
        outside = (np.searchsorted(quotes, at) + inside) & 1 == 0
        at, kind = at[outside], kind[outside]
        inside ^= bool(len(quotes) & 1)
        opens = (kind == _OPEN_OBJECT) | (kind == _OPEN_LIST)
        closes = (kind == _CLOSE_OBJECT) | (kind == _CLOSE_LIST)
        depths = depth + np.cumsum(opens.astype(np.int64) - closes)
        if len(depths):
            if depth_max is not None and depths.max() > depth_max:
                raise TooDeep
            if depths.min() < 0:
                raise ValueError("a closing bracket has no opening one")
            depth = int(depths[-1])
        values += len(kind) - int(np.count_nonzero(closes))
        if values > values_max:
            raise TooManyValues
        parts.append((at + start, kind, depths))
    if inside or depth:
        raise ValueError("it ends within a string, a list or an object")
    whole = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 3
    return Outline(whole[0], whole[1], whole[2], values)


def _quotes(places: np.ndarray, kinds: np.ndarray, escaped: bool, size: int) -> tuple[np.ndarray, bool]:
    """Returns where strings begin and end in a piece, `(quotes,) int64`, and whether the next piece begins escaped.

    Args:
        places: `(n,) int64`: offsets of marks, quotes and backslashes.
        kinds: `(n,) uint8`: the bytes there.
        escaped: whether the piece's first byte is escaped.
        size: of the piece in bytes.
    """
    slashes = places[kinds == _BACKSLASH]
    behind = np.zeros(0, np.int64)
    if escaped and len(slashes) and slashes[0] == 0:
        slashes = slashes[1:]
    elif escaped:
        behind = np.zeros(1, np.int64)
    if len(slashes):
        ends = np.append(np.flatnonzero(np.diff(slashes) != 1), len(slashes) - 1)
        lengths = np.diff(ends, prepend=-1)
        behind = np.append(behind, slashes[ends[lengths & 1 == 1]] + 1)
    quotes = places[kinds == _QUOTE]
    if len(behind):
        quotes = quotes[~np.isin(quotes, behind, assume_unique=True)]
    return quotes, bool(len(behind)) and int(behind[-1]) == size


def check_values(texts: Sequence[str], values_max: int) -> None:
    """Checks that texts which may be JSON have at most `values_max` values together, before they are parsed.

    Raises:
        TooManyValues: they have more.
    """
    # An upper bound, because it includes marks in strings. It is enough for most texts.
    if sum(text.count(mark) for text in texts for mark in "{[,:") <= values_max:
        return
    left = values_max
    for text in texts:
        with suppress(ValueError):
            left -= outline(text.encode("utf-8", "replace"), max(left, 0), None).values


def parse(data: bytes | bytearray, values_max: int) -> tuple[Any, int]:
    """Parses JSON. Returns the value, and about how many values and keys it has.

    Refuses NaN, unpaired surrogates and integers of more than 4,300 digits. The last of equal keys wins.

    Raises:
        TooManyValues, TooDeep: it has too many values, or is nested too deeply.
        ValueError: it is not JSON.
    """
    marks = outline(data, values_max)
    if len(data) <= _PIECE_BYTES and len(marks.at) <= _PIECE_MARKS:
        return from_json(data, allow_inf_nan=False), marks.values
    return _SlicedParser(data, marks).element(-1, len(marks.at), 0, len(data)), marks.values


class _SlicedParser:
    """A parser that uses an outline, at most `_PIECE_BYTES` and `_PIECE_MARKS` at a time. Marks are passed by index."""

    def __init__(self, data: bytes | bytearray, marks: Outline) -> None:
        self._data = data
        self._at, self._kind, self._depth = marks.at, marks.kind, marks.depth

    def element(self, before: int, behind: int, start: int, end: int) -> Any:
        """Returns the only value between two marks (exclusive), in bytes `start` to `end`."""
        first, last = before + 1, behind - 1
        if last < first:
            return self._scalar(start, end)
        opening, closing = int(self._at[first]), int(self._at[last])
        if (
            bytes((self._kind[first], self._kind[last])) not in (b"{}", b"[]")
            or self._closing(first) != last
            or self._data[start:opening].strip(_SPACES)
            or self._data[closing + 1 : end].strip(_SPACES)
        ):
            raise self._malformed(start)
        if closing - opening < _PIECE_BYTES and last - first < _PIECE_MARKS:
            return self._parsed(b"", opening, closing + 1, b"")
        return self._container(first, last)

    def _closing(self, opening: int) -> int:
        """Returns the mark that closes the container opened by `opening`."""
        below = self._depth[opening + 1 :] < self._depth[opening]
        return opening + 1 + int(below.argmax())

    def _container(self, opening: int, closing: int) -> Any:
        is_object = self._kind[opening] == _OPEN_OBJECT
        if closing == opening + 1 and not self._data[self._at[opening] + 1 : self._at[closing]].strip(_SPACES):
            return {} if is_object else []
        inner = slice(opening + 1, closing)
        commas = np.flatnonzero((self._kind[inner] == _COMMA) & (self._depth[inner] == self._depth[opening]))
        edges = np.concatenate(([opening], commas + opening + 1, [closing]))
        at = self._at[edges]
        out: Any = {} if is_object else []
        number = 0
        while number < len(edges) - 1:
            # As many elements as fit, at least one.
            most = min(
                int(np.searchsorted(edges, edges[number] + _PIECE_MARKS, "right")),
                int(np.searchsorted(at, at[number] + _PIECE_BYTES, "right")),
            )
            until = max(number + 1, most - 1)
            start, end = int(at[number]) + 1, int(at[until])
            if until == number + 1 and end - start > 0 and self._is_large(edges, number, start, end):
                self._take_one(out, int(edges[number]), int(edges[until]), start, end)
            elif not self._data[start:end].strip(_SPACES):
                # An element is missing, and the container is not empty.
                raise self._malformed(start)
            elif is_object:
                out.update(self._parsed(b"{", start, end, b"}"))
            else:
                out.extend(self._parsed(b"[", start, end, b"]"))
            number = until
        return out

    @staticmethod
    def _is_large(edges: np.ndarray, number: int, start: int, end: int) -> bool:
        return end - start >= _PIECE_BYTES or int(edges[number + 1] - edges[number]) >= _PIECE_MARKS

    def _take_one(self, out: Any, before: int, behind: int, start: int, end: int) -> None:
        """Adds the one large element between two marks to `out`."""
        if isinstance(out, list):
            out.append(self.element(before, behind, start, end))
            return
        if behind - before < 2 or self._kind[before + 1] != _COLON:
            raise self._malformed(start)
        colon = int(self._at[before + 1])
        key = self._scalar(start, colon)
        if not isinstance(key, str):
            raise self._malformed(start)
        out[key] = self.element(before + 1, behind, colon + 1, end)

    def _scalar(self, start: int, end: int) -> Any:
        text = bytes(self._data[start:end]).strip(_SPACES)
        if len(text) <= _PIECE_BYTES or text[0] != _QUOTE:
            return self._text_parsed(text, start)
        if text[-1] != _QUOTE:
            raise self._malformed(start)
        parts: list[str] = []
        at, last = 1, len(text) - 1
        while at < last:
            cut = _cut(text, at, at + _PIECE_BYTES) if at + _PIECE_BYTES < last else last
            parts.append(self._text_parsed(b'"' + text[at:cut] + b'"', start + at))
            at = cut
        return "".join(parts)

    def _parsed(self, head: bytes, start: int, end: int, tail: bytes) -> Any:
        return self._text_parsed(head + self._data[start:end] + tail, start)

    def _text_parsed(self, text: bytes | bytearray, start: int) -> Any:
        try:
            return from_json(text, allow_inf_nan=False)
        except ValueError as error:
            # The parser's own position is relative to the piece.
            what = str(error).partition(" at line ")[0]
            raise ValueError(f"{what} after byte {start}") from None

    @staticmethod
    def _malformed(start: int) -> ValueError:
        return ValueError(f"expected a value after byte {start}")


def _cut(text: bytes, start: int, end: int) -> int:
    """Returns the last position up to `end` where a written character ends, given that one ends at `start`."""
    window = max(start, end - _CUT_BYTES)
    # In a run of backslashes every second one is escaped.
    slashes = window - start - len(text[start:window].rstrip(b"\\"))
    at = window - slashes % 2
    while (written := _WRITTEN.match(text, at)) is not None and written.end() <= end:
        at = written.end()
    return at if at > start else end
