"""What requests took, added up: by phase, and for a whole run."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .endpoint import RequestUsage

Cell = str | int | float | None
Seq = dict[str, Cell]
Say = Callable[[str], None]


@dataclass(frozen=True)
class LedgerEntry:
    """A request.

    Args:
        again_tokens: of the prompt, that had been computed for this agent before and now were again.
    """

    phase: str
    agent: str
    usage: RequestUsage
    again_tokens: int


class Ledger:
    """The requests of one run. Any number of threads may add to it; those of one agent come one after the other."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, phase: str, agent: str, usage: RequestUsage, known_tokens: int | None = None) -> LedgerEntry:
        """Enter a request.

        Args:
            known_tokens: how many tokens at the prompt's beginning had been computed for this agent before. By default
                all of its last prompt and answer, as in a conversation that only grows.
        """
        with self._lock:
            known = self._known.get(agent, 0) if known_tokens is None else known_tokens
            # The last token of a prompt is always computed: the first one of the answer comes from it.
            again = max(0, min(known, usage.prompt_tokens - 1) - usage.cached_tokens)
            entry = LedgerEntry(phase, agent, usage, again)
            self._known[agent] = usage.prompt_tokens + usage.completion_tokens
            self.entries.append(entry)
            return entry

    @property
    def again_tokens(self) -> int:
        return sum(entry.again_tokens for entry in self.entries)

    @property
    def computed_tokens(self) -> int:
        return sum(entry.usage.computed_tokens for entry in self.entries)

    @property
    def prompt_tokens(self) -> int:
        return sum(entry.usage.prompt_tokens for entry in self.entries)

    def by_phase(self) -> list[Seq]:
        """A sequence for each phase, in order, and one for all."""
        names = list(dict.fromkeys(entry.phase for entry in self.entries))
        sequences = [self._sequence(name, [entry for entry in self.entries if entry.phase == name]) for name in names]
        return [*sequences, self._sequence("all", self.entries)]

    @staticmethod
    def _sequence(name: str, entries: Sequence[LedgerEntry]) -> Seq:
        prompt = sum(entry.usage.prompt_tokens for entry in entries)
        cached = sum(entry.usage.cached_tokens for entry in entries)
        return {
            "phase": name,
            "requests": len(entries),
            "prompt tokens": prompt,
            "cached": cached,
            "prefilled": prompt - cached,
            "of them again": sum(entry.again_tokens for entry in entries),
            "not prefilled": cached / prompt if prompt else None,
            "first token, ms": median_ms(entry.usage.first_token_s for entry in entries),
        }


def median_ms(seconds: Iterable[float | None]) -> float | None:
    """The median in milliseconds of those that are there."""
    known = [value for value in seconds if value is not None]
    return 1000 * statistics.median(known) if known else None


def compared(ledgers: dict[str, Ledger]) -> list[Seq]:
    """A sequence for each run of the same story; the last column is how many times the first one's prefill it took."""
    base = next(iter(ledgers.values())).computed_tokens
    sequences = []
    for way, ledger in ledgers.items():
        sequence = {name: cell for name, cell in ledger.by_phase()[-1].items() if name != "phase"}
        sequences.append({"KV": way, **sequence, "prefill, times": ledger.computed_tokens / base if base else None})
    return sequences


def table(sequences: Sequence[Seq]) -> str:
    """Sequences with equal keys as Markdown; None is a dash."""
    if not sequences:
        return ""
    heads = list(sequences[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join(shown(cell) for cell in sequence.values()) + " |" for sequence in sequences]
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """A cell with as many digits as say something."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
