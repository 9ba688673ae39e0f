"""Into how many micro-batches the decoding sequences of a divided model are divided, by measured steps. Pure.

With two, the stages compute at the same time. How much that saves depends on what a stage computes with: if a step of
half of the sequences takes half as long, it takes half the time of a step; if it takes as long, because reading the
weights takes most of it, nothing. Then uneven stages even lose, because the longer one sets the pace. With more than
two, the stages would stand still at the end of each step for longer than they gain.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TWO = 2

TRIAL_STEPS = 24
"""So many steps are measured before one way is compared with the other."""

AGAIN_STEPS = 2000
"""After so many steps the slower way is measured again."""

GAIN = 1.02
"""One micro-batch is chosen only if it is faster by this factor."""


class MicroBatchRule:
    """Chooses between one micro-batch and two for a number of sequences. Numbers between two powers of two count as
    one."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._since: dict[int, int] = {}

    def choose(self, sequences: int) -> int:
        """Returns how many micro-batches a step of so many sequences should have."""
        if sequences < TWO:
            return 1
        two, one = self._of(sequences, TWO), self._of(sequences, 1)
        if len(two) < TRIAL_STEPS:
            return TWO
        if len(one) < TRIAL_STEPS:
            return 1
        return 1 if median(one) * GAIN < median(two) else TWO

    def note(self, sequences: int, micro_batches: int, seconds: float) -> None:
        """Records how long a step took, if only steps with the same sequences came before and nothing else."""
        if sequences < TWO:
            return
        self._of(sequences, micro_batches).append(seconds)
        size = sequences.bit_length()
        self._since[size] = self._since.get(size, 0) + 1
        if self._since[size] >= AGAIN_STEPS:
            self._since[size] = 0
            # Measured anew: the slower way, which is not in use.
            self._of(sequences, 1 if micro_batches == TWO else TWO).clear()

    def _of(self, sequences: int, micro_batches: int) -> deque[float]:
        key = sequences.bit_length(), micro_batches
        return self._times.setdefault(key, deque(maxlen=TRIAL_STEPS))
