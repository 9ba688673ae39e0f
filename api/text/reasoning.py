"""What a model thinks before it answers: found between its markers and taken out of the answer. Computation only."""

from __future__ import annotations

from enum import Enum

from .model import longest_held
from .pipeline import Piece, ReasoningDelta, Skipped


class _State(Enum):
    BEFORE = "nothing yet but white space"
    INSIDE = "the block is open"
    AFTER = "nothing since the block but line ends"
    OVER = "the answer's content"


class ReasoningSplitter:
    """Splits an answer into the block of reasoning at its beginning, and its content.

    Only what an answer begins with is such a block, so an answer may write about the markers. A block that is never
    closed goes on to the answer's end. Line ends just inside the markers and after the block are dropped, as models'
    templates do when they print an earlier answer, and so is white space before the block.

    Args:
        start, end: the markers.
        inside: the prompt has opened the block.
    """

    def __init__(self, start: str, end: str, *, inside: bool) -> None:
        self._start = start
        self._end = end
        self._state = _State.INSIDE if inside else _State.BEFORE
        self._begun = False
        self._buffer = ""

    @property
    def inside(self) -> bool:
        """Whether the text so far ends within the block."""
        return self._state is _State.INSIDE

    @property
    def over(self) -> bool:
        """Whether no marker is looked for any more."""
        return self._state in (_State.AFTER, _State.OVER)

    def add(self, text: str) -> list[Piece]:
        if self._state is _State.OVER:
            return [text]
        self._buffer += text
        out: list[Piece] = []
        if self._state is _State.BEFORE:
            self._open(out)
        if self._state is _State.INSIDE:
            self._close(out)
        if self._state is _State.AFTER:
            self._begin_content(out)
        return out

    def flush(self) -> list[Piece]:
        """What was held back. An unfinished marker is text."""
        out: list[Piece] = []
        if self._state is _State.INSIDE:
            _skip(self._buffer[self._think(self._buffer, out) :], out)
        elif self._buffer:
            out.append(self._buffer)
        self._buffer = ""
        return out

    def _open(self, out: list[Piece]) -> None:
        said = self._buffer.lstrip()
        if said.startswith(self._start):
            self._state = _State.INSIDE
            self._skip_to(len(self._buffer) - len(said) + len(self._start), out)
        elif not self._start.startswith(said):
            self._state = _State.OVER
            out.append(self._buffer)
            self._buffer = ""

    def _close(self, out: list[Piece]) -> None:
        at = self._buffer.find(self._end)
        known = at if at >= 0 else len(self._buffer) - longest_held(self._buffer, (self._end,))
        self._buffer = self._buffer[(thought := self._think(self._buffer[:known], out)) :]
        if at >= 0:
            self._state = _State.AFTER
            self._skip_to(at - thought + len(self._end), out)

    def _begin_content(self, out: list[Piece]) -> None:
        said = self._buffer.lstrip("\n")
        self._skip_to(len(self._buffer) - len(said), out)
        if said:
            self._state = _State.OVER
            out.append(said)
            self._buffer = ""

    def _think(self, text: str, out: list[Piece]) -> int:
        """Give out `text` but for the line ends that may be the block's last; how many characters that was."""
        solid = text.rstrip("\n")
        thought = solid if self._begun else solid.lstrip("\n")
        _skip(solid[: len(solid) - len(thought)], out)
        if thought:
            self._begun = True
            out.append(ReasoningDelta(thought))
        return len(solid)

    def _skip_to(self, at: int, out: list[Piece]) -> None:
        _skip(self._buffer[:at], out)
        self._buffer = self._buffer[at:]


def _skip(text: str, out: list[Piece]) -> None:
    if text:
        out.append(Skipped(text))
