"""Calls at the end of a reasoning block that was not closed. Computation only."""

from __future__ import annotations

from collections.abc import Sequence

from .loose_reader import LooseReader, State
from .stage import GROWTH, HELD_CHARACTERS_MAX, TRIED_ALWAYS_CHARACTERS


class ThoughtCalls:
    """Finds a call with the model family's own markers in one answer's reasoning.

    Args:
        starts: the markers that begin a call.
    """

    def __init__(self, loose: LooseReader, starts: Sequence[str]) -> None:
        self.starts = tuple(starts)
        self._loose = loose
        self._tried = 0

    def find(self, text: str, at: int) -> int:
        """Returns where a call may begin, -1 if there is none."""
        return min((found for start in self.starts if (found := text.find(start, at)) >= 0), default=-1)

    def may_be(self, text: str) -> bool:
        """Returns whether text that begins with a marker may become a call."""
        if len(text) < self._tried:
            return True
        possible = len(text) <= HELD_CHARACTERS_MAX and self._read(text, final=False) is not State.OTHER
        self._tried = int(len(text) * GROWTH) if possible and len(text) >= TRIED_ALWAYS_CHARACTERS else 0
        return possible

    def is_call(self, text: str) -> bool:
        """Returns whether text that begins with a marker is a call."""
        return len(text) <= HELD_CHARACTERS_MAX and self._read(text, final=True) is State.WHOLE

    def _read(self, text: str, *, final: bool) -> State:
        return self._loose.read(text, final=final, bare=False).state
