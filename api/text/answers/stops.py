"""Stop strings, in text that arrives in pieces. Computation only."""

from __future__ import annotations

from collections.abc import Iterable

from ...tools.answer_pieces import longest_held


class StopMatcher:
    """Cuts text that arrives in pieces at the first stop string; a stage of a `Pipeline`.

    The match that ends first wins; if several end at the same place, the longest one. So the result does not depend on
    the pieces. Text that may be the beginning of a stop string is held back. After a match, `matched` is true, `found`
    the stop string, and no more text comes out.

    Args:
        keeps: whether the stop string that is found stays in the text.

    Attributes:
        waits: while it is true, stop strings that end in the text are no matches.
    """

    def __init__(self, stops: Iterable[str], *, keeps: bool = False) -> None:
        self._stops = tuple(stops)
        self._keeps = keeps
        self._held = ""
        self._passed = 0
        self.waits = False
        self.matched = False
        self.found: str | None = None

    def add(self, text: str) -> list[str]:
        """Returns the text that cannot be part of a stop string any more."""
        if self.matched:
            return []
        buffer = self._held + text
        if self.waits:
            self._passed = len(buffer)
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._find(buffer, stop)) >= 0]
        if matches:
            self.matched = True
            end, cut = min(matches)
            self._held, self.found = "", buffer[cut:end]
            cut = end if self._keeps else cut
        else:
            cut = len(buffer) - longest_held(buffer, self._stops)
            self._held = buffer[cut:]
            self._passed = max(0, self._passed - cut)
        return [buffer[:cut]] if cut else []

    def _find(self, buffer: str, stop: str) -> int:
        """Returns where the first `stop` begins that ends behind the text that was passed; -1 for none."""
        return buffer.find(stop, max(0, self._passed - len(stop) + 1))

    def flush(self) -> list[str]:
        """Returns the text that was held back as a possible beginning of a stop string."""
        held, self._held = self._held, ""
        return [held] if held else []
