"""Whether a report is news: processes that restart, reports that come late, twice or not at all. Pure.

Replicas and stores speak alike: a process has an `incarnation` of its own and counts its reports, so whoever hears them
knows which is newer and whether one is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

FORMER_INCARNATIONS = 4
"""How many earlier processes are remembered, whose late reports say nothing any more."""


@dataclass(slots=True)
class Voice:
    """What was heard of one process, and of those before it under the same name."""

    incarnation: str
    former: tuple[str, ...] = ()
    """Earlier processes, the last one last."""
    whole: bool = False
    """Whether all that the process has said so far is known. A report may come twice, and its sender hear one answer:
    so what was missed stays missed until everything is said again."""
    sequence: int = -1
    seen: float = -inf
    lost: bool = False
    lost_until: float = -inf
    """While this lies ahead, a report of this process does not bring it back: it may have left before the loss."""

    def is_late(self, incarnation: str, sequence: int, now: float, timeout_s: float) -> bool:
        """Whether something newer than this report has been heard."""
        if incarnation == self.incarnation:
            return sequence <= self.sequence
        # A listener that is new itself may have heard two processes in the wrong order: the silent one is the old one.
        return incarnation in self.former and (now - self.seen <= timeout_s or now < self.lost_until)

    def hear(self, sequence: int, now: float, *, full: bool, known: bool) -> bool:
        """Take a report that is not late. False where something that it builds on was missed.

        Args:
            full: it builds on nothing.
            known: an earlier one of this process was heard.
        """
        self.whole = full or (self.whole and known and sequence == self.sequence + 1)
        self.sequence, self.seen = sequence, now
        if now >= self.lost_until:
            self.lost = False
        return self.whole

    def succeed(self, incarnation: str) -> Voice:
        """The voice of the process that took this one's place."""
        return Voice(incarnation, (*self.former, self.incarnation)[-FORMER_INCARNATIONS:])

    def lose(self, until: float = -inf) -> None:
        """Avoid the process until it reports again, `until` or later."""
        self.lost, self.lost_until = True, max(self.lost_until, until)

    def lives(self, now: float, timeout_s: float) -> bool:
        return not self.lost and now - self.seen <= timeout_s
