"""What has come to a store and gone from it since somebody asked last. Pure; bounded by what the store holds."""

from __future__ import annotations

from collections.abc import Sequence


class Changes:
    """Ids that answer now and did not, and the other way round. An id is never in both."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()
        self._gone: set[bytes] = set()

    def note(self, come: Sequence[bytes], gone: Sequence[bytes]) -> list[bytes]:
        """Returns what has gone."""
        self._come.update(come)
        self._gone.difference_update(come)
        self._gone.update(gone)
        self._come.difference_update(gone)
        return list(gone)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(come, gone), in order, and begin anew."""
        taken = sorted(self._come), sorted(self._gone)
        self._come, self._gone = set(), set()
        return taken
