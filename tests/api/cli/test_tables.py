"""Tables at any width: no name is cut within a word."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from satchel.api.cli.tables import NameTable, duration, table, wrapped

NAME = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"


def shown(made: NameTable, width: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(made)
    return output.getvalue().splitlines()


def example(*numbers: str) -> NameTable:
    made = table("model", "node", numbers=numbers)
    made.add_row(Text(NAME), "studio.lan", *("12,345 kB" for _ in numbers))
    return made


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("count", [0, 2, 8])
def test_words_stay_whole_at_every_width(width: int, count: int) -> None:
    lines = shown(example(*(f"column {number}" for number in range(count))), width)
    assert all(len(line) <= width for line in lines)
    words = set(re.split(r"[\s/\-_.:,]+", "\n".join(lines)))
    assert set(re.split(r"[/\-.]", f"{NAME}/studio.lan")) <= words
    assert "\n".join(lines).count("12,345 kB") == count


def test_what_fits_is_one_line() -> None:
    assert [line.split() for line in shown(example("size"), 80)][2] == [NAME, "studio.lan", "12,345", "kB"]


def test_columns_that_do_not_fit_become_lines_of_their_own() -> None:
    lines = shown(example(*(f"c{number}" for number in range(8))), 40)
    assert lines[-8:] == [f"  c{number}: 12,345 kB" for number in range(8)]


def test_text_breaks_after_separators() -> None:
    assert wrapped(Text("a-long/name.of_many:parts"), 8).plain.split("\n") == ["a-long/", "name.of_", "many:", "parts"]


@pytest.mark.parametrize(("seconds", "text"), [(4.2, "4 s"), (400, "7 min"), (7200, "2 h"), (300_000, "3 d")])
def test_times_are_rough(seconds: float, text: str) -> None:
    assert duration(seconds) == text
