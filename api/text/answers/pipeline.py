"""The stages that an answer's text passes, and the pieces that they emit.

::

    characters -> ReasoningSplitter -> StopMatcher -> ToolCallSplitter -> pieces
    characters -> HarmonySplitter -> StopMatcher -> pieces

A stage takes text as it arrives and emits pieces. Strings are the answer's content, which the next stage takes; other
pieces pass through. A stage may hold text back until it knows what it is, but it neither reorders nor loses any: the
strings, `ReasoningDelta` and `Skipped` that it emits concatenate to its input, up to a stop string. So pieces can be
mapped back to tokens by counting characters.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text that is not shown: markers, the calls between them, white space around them. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning before its answer. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose name is known. Its arguments follow in pieces, and the whole call at the end."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call with this index, as the model writes them. Never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `index` counts the calls of an answer; `arguments` is JSON text.

    A call that was `begun` came in pieces before. Its arguments may differ from them in white space, and where the
    answer was `cut` in the call or the model's JSON is wrong, they are these pieces.
    """

    index: int
    id: str
    name: str
    arguments: str
    begun: bool = False
    cut: bool = False

    @property
    def given(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are none, because the answer was cut in the call or the model wrote
        it wrongly. Nobody may run such a call."""
        try:
            given = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return given if isinstance(given, dict) else None


Piece = str | Skipped | ReasoningDelta | CallBegun | CallArguments | ToolCall


@dataclass(frozen=True, slots=True)
class Begun:
    """Where calls are read: one with this name begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Where calls are read: the one that began last is complete."""


Said = Begun | Ended | str
"""What is found in the text of calls; a string is more of the arguments, as JSON."""


def text_of(piece: Piece) -> str:
    """Returns the answer's characters in a piece; those of a call are in the `Skipped` before it."""
    if isinstance(piece, str):
        return piece
    return piece.text if isinstance(piece, Skipped | ReasoningDelta) else ""


def new_call_id() -> str:
    """Returns a tool call's id."""
    return f"call_{secrets.token_hex(12)}"


def longest_held(text: str, markers: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of a marker."""
    cut = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= at < cut:
            if marker.startswith(text[at:]):
                cut = at
            at = text.find(marker[0], at + 1)
    return len(text) - cut


class Stage(Protocol):
    def add(self, text: str) -> Sequence[Piece]:
        """Takes more text, never empty, and returns the pieces that are decided. No piece is an empty string."""
        ...

    def flush(self) -> Sequence[Piece]:
        """Returns the held pieces at the end of the answer."""
        ...


class Pipeline:
    """A sequence of stages."""

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


class StepReader:
    """What readers of calls share: a buffer, and steps that each take what they can from it and return False if they
    need more; see `call_reader.Reader`.

    Args:
        first: the step to begin with.
    """

    def __init__(self, first: Callable[[], bool]) -> None:
        self._buffer = ""
        self._said: list[Said] = []
        self._step = first
        self.lost = False
        self.rest: str | None = ""

    def add(self, text: str) -> list[Said]:
        self._buffer += text
        self._said = []
        while not self.lost and self._step():
            pass
        return self._said

    def _take(self, count: int) -> None:
        self._buffer = self._buffer[count:]

    def _say(self, *said: Said) -> None:
        for each in said:
            if isinstance(each, str) and self._said and isinstance(self._said[-1], str):
                self._said[-1] += each
            elif each != "":
                self._said.append(each)
