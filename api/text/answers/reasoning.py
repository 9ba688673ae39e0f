"""Separates a model's reasoning, between its markers, from the answer. Computation only."""

from __future__ import annotations

from enum import Enum

from ...tools.answer_pieces import Piece, ReasoningDelta, Skipped, longest_held
from ...tools.lenient.thought_calls import ThoughtCalls


class _ReasoningState(Enum):
    BEFORE = "nothing yet but white space"
    INSIDE = "the block is open"
    AFTER = "nothing since the block but line ends"
    OVER = "the answer's content"


class ReasoningSplitter:
    """A stage of a `Pipeline` that splits an answer into the reasoning block at its beginning, and its content.

    Only a block at the beginning counts, so an answer may mention the markers. A block that is never closed extends to
    the answer's end. White space before the block is dropped, and so are line breaks just inside the markers and after
    the block, because templates drop them too when they print an earlier answer.

    If the block ends with a call and no answer follows, the call is content.

    Args:
        start, end: the markers.
        inside: whether the prompt has opened the block.
        calls: finds such a call; None if there can be none.
    """

    def __init__(self, start: str, end: str, *, inside: bool, calls: ThoughtCalls | None = None) -> None:
        self._start = start
        self._end = end
        self._state = _ReasoningState.INSIDE if inside else _ReasoningState.BEFORE
        self._begun = False
        self._buffer = ""
        self._calls = calls
        self._searched = 0

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside the block."""
        return self._state is _ReasoningState.INSIDE

    @property
    def over(self) -> bool:
        """Whether no more markers are expected."""
        return self._state in (_ReasoningState.AFTER, _ReasoningState.OVER)

    def add(self, text: str) -> list[Piece]:
        if self._state is _ReasoningState.OVER:
            return [text]
        self._buffer += text
        out: list[Piece] = []
        if self._state is _ReasoningState.BEFORE:
            self._open(out)
        if self._state is _ReasoningState.INSIDE:
            self._close(out)
        if self._state is _ReasoningState.AFTER:
            self._begin_content(out)
        return out

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer. An unfinished marker is text."""
        out: list[Piece] = []
        if self._state is _ReasoningState.INSIDE:
            self._end_open(out)
        elif self._buffer:
            out.append(self._buffer)
        self._buffer = ""
        return out

    def _open(self, out: list[Piece]) -> None:
        text = self._buffer.lstrip()
        if text.startswith(self._start):
            self._state = _ReasoningState.INSIDE
            self._skip_to(len(self._buffer) - len(text) + len(self._start), out)
        elif not self._start.startswith(text):
            self._state = _ReasoningState.OVER
            out.append(self._buffer)
            self._buffer = ""

    def _close(self, out: list[Piece]) -> None:
        if self._holds_call(out):
            return
        at = self._buffer.find(self._end)
        marks = (self._end,) if self._calls is None else (self._end, *self._calls.starts)
        known = at if at >= 0 else len(self._buffer) - longest_held(self._buffer, marks)
        thought = self._think(self._buffer[:known], out)
        self._drop(thought)
        if at >= 0:
            self._state = _ReasoningState.AFTER
            self._skip_to(at - thought + len(self._end), out)

    def _holds_call(self, out: list[Piece]) -> bool:
        """Returns whether the block so far ends with a possible call."""
        if self._calls is None:
            return False
        while (at := self._calls.find(self._buffer, self._searched)) >= 0:
            call, answer = self._split(at)
            if call and not answer.strip() and self._calls.may_be(call):
                self._drop(self._think(self._buffer[:at], out))
                return True
            self._searched = at + 1
        return False

    def _split(self, at: int) -> tuple[str, str]:
        """Returns the text from `at` to the end of the block, and the text behind that."""
        end = self._buffer.find(self._end)
        if end < 0:
            return self._buffer[at:], ""
        return self._buffer[at:end] if at < end else "", self._buffer[end + len(self._end) :]

    def _end_open(self, out: list[Piece]) -> None:
        """Ends the block at the end of the answer."""
        if self._calls is not None and (at := self._calls.find(self._buffer, self._searched)) >= 0:
            call, _ = self._split(at)
            if call and self._calls.is_call(call):
                self._drop(self._think(self._buffer[:at], out))
                at = self._buffer.index(call)
                _skip(self._buffer[:at], out)
                out.append(call)
                _skip(self._buffer[at + len(call) :], out)
                return
        end = self._buffer.find(self._end)
        thought = self._think(self._buffer if end < 0 else self._buffer[:end], out)
        _skip(self._buffer[thought:], out)

    def _begin_content(self, out: list[Piece]) -> None:
        text = self._buffer.lstrip("\n")
        self._skip_to(len(self._buffer) - len(text), out)
        if text:
            self._state = _ReasoningState.OVER
            out.append(text)
            self._buffer = ""

    def _think(self, text: str, out: list[Piece]) -> int:
        """Emits `text` as reasoning, except trailing line breaks, which may be the block's last. Returns its length."""
        solid = text.rstrip("\n")
        thought = solid if self._begun else solid.lstrip("\n")
        _skip(solid[: len(solid) - len(thought)], out)
        if thought:
            self._begun = True
            out.append(ReasoningDelta(thought))
        return len(solid)

    def _skip_to(self, at: int, out: list[Piece]) -> None:
        _skip(self._buffer[:at], out)
        self._drop(at)

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._searched = max(0, self._searched - count)


def _skip(text: str, out: list[Piece]) -> None:
    if text:
        out.append(Skipped(text))
