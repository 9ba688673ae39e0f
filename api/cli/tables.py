"""Tables for terminals of any width. A name is never cut within a word: it wraps at a separator, and if the columns do
not fit beside each other, each row becomes a few lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_PIECE = re.compile(r"[^\s/\-_.:@,]*[\s/\-_.:@,]?")
_SPACE = 2
"""Columns between two cells."""


class NameTable:
    """Rows under titles.

    Args:
        titles: of columns whose cells wrap.
        numbers: of further columns, whose cells do not.
    """

    def __init__(self, titles: tuple[str, ...], numbers: tuple[str, ...]) -> None:
        self._titles, self._names = (*titles, *numbers), len(titles)
        self._rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append((texts + [Text("")] * (len(self._titles) - len(texts)), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if widths is None:
            yield from (wrapped(line, options.max_width) for line in self._records())
            return
        made = Table(box=SIMPLE_HEAD, padding=(0, _SPACE, 0, 0), show_edge=False, pad_edge=False)
        for index, (title, width) in enumerate(zip(self._titles, widths, strict=True)):
            shown = wrapped(Text(title), width)
            made.add_column(shown, width=width, no_wrap=True, justify="left" if index < self._names else "right")
        for cells, style in self._rows:
            made.add_row(*map(wrapped, cells, widths), style=style)
        yield made

    def _widths(self, whole: int) -> list[int] | None:
        """Returns the columns' widths; None if they do not fit without cutting a word."""
        columns = [
            [Text(title), *(cells[index] for cells, _ in self._rows)] for index, title in enumerate(self._titles)
        ]
        widths = [max(map(_width, column)) for column in columns]
        least = [
            max(_least(column[0]), max(map(_least if index < self._names else _width, column[1:]), default=0))
            for index, column in enumerate(columns)
        ]
        # Between two columns rich puts one more space, in the place of a line.
        room = whole - (_SPACE + 1) * (len(columns) - 1)
        while sum(widths) > room:
            spare = [width - most for width, most in zip(widths, least, strict=True)]
            widest = max(range(len(widths)), key=lambda index: (spare[index] > 0, widths[index]))
            if spare[widest] <= 0:
                return None
            widths[widest] -= 1
        return widths

    def _records(self) -> Iterator[Text]:
        """Yields each row as a name, and below it a line for each of its other cells."""
        for cells, style in self._rows:
            head, *rest = [(title, cell) for title, cell in zip(self._titles, cells, strict=True) if cell.plain]
            yield Text.assemble(head[1], style=style)
            for title, cell in rest:
                lines = cell.split("\n")
                yield Text.assemble(f"  {title}: " if title else "  ", Text(", ").join(lines), style=style)


def names_line(name: str, aliases: Sequence[str]) -> str:
    """Returns a model's name with its aliases, such as `coder (gpt-4o, o3)`."""
    return f"{name} ({', '.join(aliases)})" if aliases else name


def state_line(model: Mapping[str, Any]) -> str:
    """Returns a model's `state` and `progress`, such as `loading 43%: reading weights`."""
    progress = model["progress"] or {}
    done = "" if progress.get("fraction") is None else f" {int(100 * progress['fraction'])}%"
    what = f": {progress['what']}" if progress.get("what") else ""
    return f"{model['state']}{done}{what}"


def table(*titles: str, numbers: tuple[str, ...] = ()) -> NameTable:
    """Makes a table; see `NameTable`."""
    return NameTable(titles, numbers)


def wrapped(text: Text, width: int) -> Text:
    """Returns the text in lines of at most `width` columns, broken after separators."""
    return Text("\n").join(line for part in text.split("\n", allow_blank=True) for line in _lines(part, width))


def _lines(text: Text, width: int) -> Iterator[Text]:
    pieces = _pieces(text.plain)
    starts, used = [], 0
    for start, piece in zip(accumulate(map(len, pieces), initial=0), pieces, strict=False):
        if used and used + len(piece.rstrip()) > width:
            starts.append(start)
            used = 0
        used += len(piece)
    for line in text.divide(starts):
        line.rstrip()
        yield line


def _pieces(text: str) -> list[str]:
    return [piece for piece in _PIECE.findall(text) if piece]


def _width(text: Text) -> int:
    return max((len(line) for line in text.plain.split("\n")), default=0)


def _least(text: Text) -> int:
    """The width below which a word would be cut."""
    return max((len(piece.rstrip()) for line in text.plain.split("\n") for piece in _pieces(line)), default=0)


def size(count: int | None) -> str:
    """Formats a number of bytes; "" if unknown."""
    if count is None:
        return ""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if amount >= 10 or units[0] == "B" else f"{amount:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Formats a time roughly: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length, most in (("s", 1, 100), ("min", 60, 100 * 60), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
