"""Decides how many tokens a step computes for each sequence: one, or its next token and a draft after it.

A step of several tokens costs a device more than one of a single token, by how much depends on the device, the model
and the number of sequences, so it is measured. What it gains depends on how often each sequence's drafts are right.
Drafts are computed only if the tokens that they are expected to give take less time so than one after the other. Steps
that were not measured are estimated from smaller ones as if every further token cost as much as the first of them did,
so that large steps are tried only where small ones pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import median, median_low

WIDTHS = (2, 4, 8, 16)
"""To how many tokens of each sequence a step is padded, if all have as many: few numbers, for few shapes."""

TOKENS_MOST = 128
"""The most tokens of a step in which sequences have different numbers of them."""

GAIN_LEAST = 1.05
"""By how much more tokens a second drafts must be expected to give."""

MEASURED, MEASURED_LEAST = 9, 2
"""How many of the last times are remembered, and how many are believed: the first step of a shape may compile it."""

LASTS_STEPS = 4096
"""After so many steps a measured step counts as not measured, because sequences have other lengths then."""


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
    """The measured times of one device and model.

    Args:
        tokens_most: the most tokens of a step, if sequences have different numbers of them; no more than `TOKENS_MOST`.

    Attributes:
        tokens_most: as given.
    """

    def __init__(self, tokens_most: int = TOKENS_MOST) -> None:
        self.tokens_most = min(tokens_most, TOKENS_MOST)
        self._steps = 0
        self._single: dict[int, deque[float]] = {}
        self._larger: dict[tuple[int, int], deque[tuple[int, float]]] = {}

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """Notes how long a step took that computed `tokens` tokens, padding included; as many as there are sequences
        if none has a draft."""
        self._steps += 1
        if tokens == sequences:
            self._single.setdefault(sequences, deque(maxlen=MEASURED)).append(seconds)
        else:
            self._larger.setdefault((sequences, tokens), deque(maxlen=MEASURED)).append((self._steps, seconds))

    def lengths(self, hopes: Sequence[Hope], *, ragged: bool) -> list[int]:
        """Returns how many tokens the next step should draft for each sequence; all 0 if no draft is worth it.

        Args:
            hopes: of every sequence in the step.
            ragged: whether a step's cost depends on the sum of its tokens; else all sequences are padded to one width.
        """
        return self.best(hopes, ragged=ragged)[1]

    def best(self, hopes: Sequence[Hope], *, ragged: bool, before_s: float = 0.0) -> tuple[float, list[int]]:
        """As `lengths`; returns also how many times as many tokens a second that is expected to give.

        Args:
            before_s: how long it takes to make the drafts.
        """
        sequences, best, most = len(hopes), [0] * len(hopes), GAIN_LEAST
        speed_found = 1.0
        if not any(hope.most for hope in hopes) or not self.is_timed(sequences):
            return speed_found, best
        before = before_s / self.single_s(sequences)
        for tokens, lengths, gained in _ragged(hopes, self.tokens_most) if ragged else _padded(hopes):
            speed = (sequences + gained) / sequences / (self.cost(sequences, tokens) + before)
            if speed >= most:
                best, most, speed_found = lengths, speed, speed
            if self._known(sequences, tokens) is None:
                break
        return speed_found, best

    def is_timed(self, sequences: int) -> bool:
        """Whether it is known how long a step without drafts takes."""
        return len(self._single.get(sequences, ())) >= MEASURED_LEAST

    def single_s(self, sequences: int) -> float:
        """Returns how long a step without drafts takes, in seconds; it must be timed."""
        return median(self._single[sequences])

    def cost(self, sequences: int, tokens: int) -> float:
        """Returns how many times as long as a step without drafts a step of so many tokens takes, as far as known."""
        single = self.single_s(sequences)
        if (seconds := self._known(sequences, tokens)) is not None:
            return max(1.0, seconds / single)
        smaller = [size for of, size in self._larger if of == sequences and size < tokens]
        for size in sorted(smaller, reverse=True):
            if (seconds := self._known(sequences, size)) is not None:
                return 1.0 + (max(1.0, seconds / single) - 1.0) * (tokens - sequences) / (size - sequences)
        return 1.0

    def _known(self, sequences: int, tokens: int) -> float | None:
        """Returns how long a step of so many tokens takes, in seconds; None if that is not known."""
        times = [
            seconds for step, seconds in self._larger.get((sequences, tokens), ()) if self._steps - step <= LASTS_STEPS
        ]
        return median_low(times) if len(times) >= MEASURED_LEAST else None


def _padded(hopes: Sequence[Hope]) -> Iterator[tuple[int, list[int], float]]:
    """Yields steps in which all sequences are padded to one width: their tokens, the lengths of drafts, and how many of
    these may be expected to be right."""
    most = max(hope.most for hope in hopes)
    for width in WIDTHS:
        if width <= 2 * most:
            lengths = [min(hope.most, width - 1) for hope in hopes]
            gained = sum(hope.gained(length) for hope, length in zip(hopes, lengths, strict=True))
            yield width * len(hopes), lengths, gained


def _ragged(hopes: Sequence[Hope], tokens_most: int) -> Iterator[tuple[int, list[int], float]]:
    """Yields steps with a power of two of tokens, as `_padded`; the drafted ones are those that give most."""
    sequences, most = len(hopes), sum(hope.most for hope in hopes)
    lengths, gained, drafted = [0] * sequences, 0.0, 0
    # What each sequence's next drafted token may be expected to give, negated.
    heap = [(-hope.chance * hope.share, index) for index, hope in enumerate(hopes) if hope.most]
    heapify(heap)
    tokens = 1 << sequences.bit_length()
    while tokens <= tokens_most and tokens - sequences <= 2 * most:
        while heap and drafted < tokens - sequences:
            gain, index = heap[0]
            gained, drafted = gained - gain, drafted + 1
            lengths[index] += 1
            if lengths[index] < hopes[index].most:
                heapreplace(heap, (gain * hopes[index].share, index))
            else:
                heappop(heap)
        yield tokens, [*lengths], gained
        tokens *= 2
