"""What the store says of changes: where a segment's entries went, and which ids came and went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SegmentPlacement:
    """The result of adding a segment's entries.

    Attributes:
        kept: ids whose live copy is in this segment.
        dropped: ids that entries of other segments serve.
        retracted: ids of other entries that are gone.
        refused: ids of copies without an owner.
    """

    kept: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    retracted: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)


class Changes:
    """Ids added and removed since the last `take`. An id is never in both."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()
        self._gone: set[bytes] = set()

    def note(self, come: Sequence[bytes], gone: Sequence[bytes]) -> list[bytes]:
        """Adds changes. Returns `gone`."""
        self._come.update(come)
        self._gone.difference_update(come)
        self._gone.update(gone)
        self._come.difference_update(gone)
        return list(gone)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the sorted ids (added, removed) and clears both."""
        taken = sorted(self._come), sorted(self._gone)
        self._come, self._gone = set(), set()
        return taken
