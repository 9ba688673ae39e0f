"""How fast jobs are done, and how much memory they take. Pure."""

from __future__ import annotations

PACE_WEIGHT = 0.2
"""The weight of the newest step in the measured rate."""

FARTHEST = 4
"""How many times the size of the largest job so far has the largest one whose memory is predicted from it."""


class JobPace:
    """How fast jobs are done.

    Attributes:
        tokens_per_s: of a job's cost; 0 before the first step.
        step_s: of the latest step; None before the first one.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.step_s: float | None = None
        self._largest: tuple[int, int] | None = None
        """The size and the temporary bytes of the largest job so far."""

    def note_step(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-9)
        known = self.tokens_per_s
        self.tokens_per_s = known + PACE_WEIGHT * (rate - known) if known else rate
        self.step_s = seconds

    def note_job(self, size: int, temporary_bytes: int) -> None:
        """Notes the memory of a job of some size, in bytes."""
        self._largest = min(self._largest or (0, 0), (size, temporary_bytes), key=lambda each: (-each[0], each[1]))

    def job_bytes(self, size: int) -> int:
        """Predicts the temporary memory of a job of some size, in bytes; 0 before the first job.

        A small job says little of a large one, for a part of its memory does not grow. So the prediction grows with the
        size up to `FARTHEST` times that of the largest job so far, and no further.
        """
        if self._largest is None:
            return 0
        most, nbytes = self._largest
        return nbytes * min(size, FARTHEST * most) // most
