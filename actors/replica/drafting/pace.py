"""Decides how many tokens a step computes for each sequence: one, or its next token and a draft after it.

A step of several tokens costs a device more than one of a single token, by how much depends on the device, the model
and the number of sequences, so it is measured. What it gains depends on how often each sequence's drafts are right.
A draft is computed only if the tokens that it is expected to give take less time so than one after the other. Widths
that were not measured are estimated from narrower ones as if every further token cost as much as the first of them
did, so that wide steps are tried only where narrow ones pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

WIDTHS = (2, 4, 8, 16)
"""How many tokens of each sequence a step may compute if some have drafts: few numbers, for few shapes."""

GAIN_LEAST = 1.05
"""By how much more tokens a second a draft must be expected to give."""

MEASURED, MEASURED_LEAST = 9, 2
"""How many of the last times are remembered, and how many are believed: the first step of a shape may compile it."""

LASTS_STEPS = 4096
"""After so many steps a measured width counts as not measured, because sequences have other lengths then."""


@dataclass(frozen=True)
class Hope:
    """What may be expected of one sequence's draft.

    Attributes:
        share: the part of its drafted tokens that is right, less than 1.
        most: how many tokens it may have; 0 for no draft.
        chance: how likely it is that there will be a draft.
    """

    share: float
    most: int
    chance: float = 1.0

    def gained(self, drafted: int) -> float:
        """Returns how many of its first `drafted` tokens may be expected to be right, up to the first wrong one."""
        count = min(drafted, self.most)
        return self.chance * self.share * (1.0 - self.share**count) / (1.0 - self.share)


class DraftPace:
    """The measured times of one device and model."""

    def __init__(self) -> None:
        self._steps = 0
        self._single: dict[int, deque[float]] = {}
        self._wide: dict[tuple[int, int], deque[tuple[int, float]]] = {}

    def note_step(self, sequences: int, seconds: float) -> None:
        """Notes how long a step of one token for each of so many sequences took."""
        self._steps += 1
        self._single.setdefault(sequences, deque(maxlen=MEASURED)).append(seconds)

    def note_wide(self, sequences: int, width: int, seconds: float) -> None:
        """Notes how long a step of `width` tokens took, one of `WIDTHS`."""
        self._steps += 1
        self._wide.setdefault((sequences, width), deque(maxlen=MEASURED)).append((self._steps, seconds))

    def width(self, hopes: Sequence[Hope]) -> int:
        """Returns how many tokens the next step should compute for each sequence, one of `WIDTHS`; 1 if no draft is
        worth it.

        Args:
            hopes: of every sequence in the step.
        """
        most, sequences = max((hope.most for hope in hopes), default=0), len(hopes)
        if not most or len(self._single.get(sequences, ())) < MEASURED_LEAST:
            return 1
        gains = {
            width: (sequences + sum(hope.gained(width - 1) for hope in hopes)) / self.cost(sequences, width) / sequences
            for width in self._tried(sequences)
            if 2 * most >= width
        }
        best = max(gains, key=lambda width: gains[width])
        return best if gains[best] >= GAIN_LEAST else 1

    def _tried(self, sequences: int) -> list[int]:
        """Returns the widths that were measured and the next one."""
        known = [width for width in WIDTHS if self._known(sequences, width) is not None]
        return list(WIDTHS[: len(known) + 1])

    def cost(self, sequences: int, width: int) -> float:
        """Returns how many times as long as a step of one token a step of `width` tokens takes, as far as known."""
        single = median(self._single[sequences])
        if (seconds := self._known(sequences, width)) is not None:
            return max(1.0, seconds / single)
        narrower = width // 2
        seconds = self._known(sequences, narrower)
        if seconds is None:
            return 1.0
        return 1.0 + (max(1.0, seconds / single) - 1.0) * (width - 1) / (narrower - 1)

    def _known(self, sequences: int, width: int) -> float | None:
        """Returns how long a step of this width takes, in seconds; None if that is not known."""
        times = [
            seconds for step, seconds in self._wide.get((sequences, width), ()) if self._steps - step <= LASTS_STEPS
        ]
        return median_low(times) if len(times) >= MEASURED_LEAST else None
