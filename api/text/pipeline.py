"""The stages that an answer's text runs through, and the pieces that come out of them.

::

    characters -> ReasoningSplitter -> StopMatcher -> ToolCallSplitter -> pieces

A stage takes text as it arrives and gives pieces. Strings are the answer's content, which the next stage takes; other
pieces pass. A stage may hold text back until it knows what it is, but it neither reorders nor loses any: the strings,
`ReasoningDelta` and `Skipped` that come out concatenate to what went in, up to a stop string. So whoever knows which
tokens the characters came from knows it of the pieces too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text that is not shown: markers, the calls between them, white space around them. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. `index` counts the calls of an answer; `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


Piece = str | Skipped | ReasoningDelta | ToolCall


def text_of(piece: Piece) -> str:
    """What of the answer's characters the piece stands for; a call's are in the `Skipped` before it."""
    if isinstance(piece, str):
        return piece
    return "" if isinstance(piece, ToolCall) else piece.text


class Stage(Protocol):
    def add(self, text: str) -> Sequence[Piece]:
        """The pieces that `text`, never empty, has decided. No piece is an empty string."""
        ...

    def flush(self) -> Sequence[Piece]:
        """What was held back, at the end of the answer."""
        ...


class Pipeline:
    """Stages one after the other."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def add(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [text]
        for stage in self._stages:
            pieces = _through(stage, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        for stage in self._stages:
            pieces = [*_through(stage, pieces), *stage.flush()]
        return pieces


def _through(stage: Stage, pieces: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str):
            out.extend(stage.add(piece))
        else:
            out.append(piece)
    return out
