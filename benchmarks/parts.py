"""The result of a part of a benchmark: rows of a table, targets that were met or missed, and remarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | None
Say = Callable[[str], None]


@dataclass(frozen=True)
class Goal:
    """A figure and its target."""

    what: str
    wanted: str
    found: float
    met: bool


@dataclass
class ResultTable:
    """One table. `rows` have equal keys; None is a dash."""

    title: str
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at_least(self, what: str, found: float, wanted: float) -> None:
        self.targets.append(Goal(what, f"at least {wanted:g}", found, found >= wanted))

    def at_most(self, what: str, found: float, wanted: float) -> None:
        self.targets.append(Goal(what, f"at most {wanted:g}", found, found <= wanted))


class Budget:
    """The time for all parts together."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def rounds(self, most: int) -> Iterable[int]:
        """Numbers from 0 below `most`, as long as another round like the longest so far would end in time. The first
        comes whenever any time is left."""
        longest = 0.0
        for number in range(most):
            if self.left_s <= longest:
                return
            started = time.monotonic()
            yield number
            longest = max(longest, time.monotonic() - started)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values are below."""
    return sorted(values)[int(len(values) * share)]


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"# {result.get('title', 'Memory')}",
        "",
        f"{machine['gpu'] or machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}; {', '.join(f'{n} {v}' for n, v in versions.items())}. "
        f"Load before: {machine['load_before']}. {result['when']}.",
        "",
    ]
    for name, part in result["parts"].items():
        lines += [f"## {part['title']}", ""]
        if part["rows"]:
            heads = list(part["rows"][0])
            lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" + " ---: |" * (len(heads) - 1)]
            lines += ["| " + " | ".join(map(shown, row.values())) + " |" for row in part["rows"]]
            lines.append("")
        for target in part["targets"]:
            verdict = "met" if target["met"] else "**missed**"
            lines.append(f"- {target['what']}: {shown(target['found'])}, wanted {target['wanted']}: {verdict}")
        lines += [f"- {note}" for note in part["notes"]]
        lines += [f"- `{name}` in {part['seconds']:.0f} s", ""]
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """A cell with as many digits as say something."""
    if cell is None or cell != cell:
        return "–"
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 1 else f"{cell:.4g}"
