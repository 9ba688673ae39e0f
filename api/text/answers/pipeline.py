"""The stages that an answer's text passes.

::

    characters -> ReasoningSplitter -> StopMatcher -> CallStage -> pieces
    characters -> HarmonySplitter -> StopMatcher -> pieces

A stage takes text as it arrives and emits pieces. Strings are the answer's content and go to the next stage; other
pieces pass through. A stage may hold text back until it knows what it is, but it neither reorders nor loses text: the
strings, `ReasoningDelta` and `Skipped` that it emits concatenate to its input, up to a stop string. So pieces can be
mapped back to tokens by counting characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...tools.answer_pieces import Piece


class Stage(Protocol):
    def add(self, text: str) -> Sequence[Piece]:
        """Takes more text, never empty, and returns the pieces that are certain. No piece is an empty string."""
        ...

    def flush(self) -> Sequence[Piece]:
        """Returns the held pieces at the end of the answer."""
        ...


class Pipeline:
    """Stages that run one after the other."""

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
