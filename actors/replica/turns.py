"""From rows to the disk. What a row holds of an agent's memory is kept until it is on the disk.

A row's whole blocks go while it is still being prefilled, as soon as they are worth a few files, and the rest when it
ends, however it ends. Their copies are computed with the next step and handed over then. Until the disk has them they
are pinned in memory, so a next turn finds them in one place or the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .disk_tier import DiskTier, Turn
from .memory import RowMemory, Sequence, Unsaved

PIECE_BYTES = 32 * 2**20
"""How much of a row that goes on is worth writing."""


@dataclass(frozen=True)
class _SavedOrComing:
    """The ids that are on the disk, or on their way there."""

    saved: dict[bytes, None]
    coming: set[bytes]

    def __contains__(self, block: object) -> bool:
        return block in self.saved or block in self.coming


class Turns:
    """For the engine's thread.

    Args:
        disk: where what agents' rows leave is written; None for nowhere.
        later: runs something on the engine's thread, called on any.
    """

    def __init__(self, memory: RowMemory, disk: DiskTier | None, later: Callable[[Callable[[], None]], None]) -> None:
        self._memory = memory
        self._disk = disk
        self._later = later
        self._noted: list[Turn] = []
        self._coming: set[bytes] = set()
        self._writers = 0

    @property
    def behind(self) -> bool:
        """Whether more waits to be written than may: no row is to begin before that is less."""
        return self._disk is not None and self._disk.behind

    def note_blocks(self, sequence: Sequence) -> None:
        """A row that goes on holds these blocks. Where the disk cannot keep up, the row keeps them meanwhile."""
        disk = self._disk_of(sequence)
        if disk is None:
            return
        known = _SavedOrComing(disk.saved, self._coming)
        self._memory.drop_snapshots(sequence, known)
        nbytes = self._memory.unsaved_bytes(sequence, known)
        if nbytes >= PIECE_BYTES and disk.has_room(nbytes):
            self._offer(disk, sequence, [], self._memory.unsaved_blocks(sequence, known))

    def note(self, sequence: Sequence, ended: bool) -> None:
        """A row is about to leave, and all that it holds is kept; `ended` as for `RowMemory.unsaved`."""
        disk = self._disk_of(sequence)
        if disk is not None:
            unsaved = self._memory.unsaved(sequence, _SavedOrComing(disk.saved, self._coming), ended=ended)
            self._offer(disk, sequence, self._memory.used(sequence), unsaved)

    def hand_over(self) -> None:
        """What was noted in the step before."""
        noted, self._noted = self._noted, []
        for turn in noted:
            assert self._disk is not None
            self._disk.write(turn)

    def _disk_of(self, sequence: Sequence) -> DiskTier | None:
        return self._disk if self._memory.is_written(sequence) else None

    def _offer(self, disk: DiskTier, sequence: Sequence, chain: list[bytes], unsaved: list[Unsaved]) -> None:
        self._writers += 1
        writer, blocks = f"written {self._writers}", {item.id for item in unsaved if item.id is not None}

        def done() -> None:
            self._coming -= blocks
            self._memory.release(writer)

        request = sequence.request
        turn = Turn(request.agent, chain, unsaved, limits=request.disk_limits, done=lambda: self._later(done))
        if disk.accepts(turn):
            self._coming |= blocks
            self._memory.hold(writer, sequence, unsaved)
            self._noted.append(turn)
