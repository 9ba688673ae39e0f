"""Orders the reports of a process that may restart, and detects late, repeated and missing ones. Pure.

Every process has a unique `incarnation` and numbers its reports with a heartbeat sequence, so that the receiver knows
which is newer and whether one is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

FORMER_INCARNATIONS = 4
"""How many earlier processes are remembered, whose late reports are ignored."""


@dataclass(slots=True)
class Voice:
    """What was heard from a process, and which processes had its name before."""

    incarnation: str
    former: tuple[str, ...] = ()
    """Earlier incarnations, the last one last."""
    whole: bool = False
    """Whether no report was missed since the last full one. It stays False until the next full one, because a sender
    may not have received the answer that told it so."""
    sequence: int = -1
    seen: float = -inf
    lost: bool = False
    lost_until: float = -inf
    """Until then a report of this process does not bring it back: it may have been sent before the loss."""

    def is_late(self, incarnation: str, sequence: int, now: float, timeout_s: float) -> bool:
        """Whether something newer than this report was heard."""
        if incarnation == self.incarnation:
            return sequence <= self.sequence
        # A restarted router may hear two processes in the wrong order; then the silent one is the old one.
        return incarnation in self.former and (now - self.seen <= timeout_s or now < self.lost_until)

    def hear(self, sequence: int, now: float, *, full: bool, known: bool) -> bool:
        """Takes a report that is not late. Returns False if an earlier report that it builds on was missed.

        Args:
            full: whether it builds on no earlier one.
            known: whether an earlier one of this process was heard.
        """
        self.whole = full or (self.whole and known and sequence == self.sequence + 1)
        self.sequence, self.seen = sequence, now
        if now >= self.lost_until:
            self.lost = False
        return self.whole

    def succeed(self, incarnation: str) -> Voice:
        """Returns the voice of the process that replaced this one."""
        return Voice(incarnation, (*self.former, self.incarnation)[-FORMER_INCARNATIONS:])

    def lose(self, until: float = -inf) -> None:
        """Avoids the process until it reports again, at `until` or later."""
        self.lost, self.lost_until = True, max(self.lost_until, until)

    def lives(self, now: float, timeout_s: float) -> bool:
        """Whether the process is not lost and reported within `timeout_s`."""
        return not self.lost and now - self.seen <= timeout_s
