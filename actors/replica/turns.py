"""From rows that have just ended to the disk: their copies are computed with the next step, and handed over then."""

from __future__ import annotations

from .disk_tier import DiskTier, Turn
from .memory import RowMemory, Sequence


class Turns:
    """For the engine's thread.

    Args:
        disk: where what agents' rows leave is written; None for nowhere.
    """

    def __init__(self, memory: RowMemory, disk: DiskTier | None) -> None:
        self._memory = memory
        self._disk = disk
        self._ended: list[Turn] = []

    def note(self, sequence: Sequence) -> None:
        """A row is over and kept. Of an agent's several choices only the first is its memory."""
        agent = sequence.request.agent
        if self._disk is not None and agent and sequence.request.sampling.choice == 0:
            unsaved = self._memory.unsaved(sequence, self._disk.saved)
            self._ended.append(Turn(agent, self._memory.used(sequence), unsaved))

    def hand_over(self) -> None:
        """What the rows of the step before left."""
        ended, self._ended = self._ended, []
        for turn in ended:
            assert self._disk is not None
            self._disk.offer(turn)
