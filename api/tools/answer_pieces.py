"""The pieces of an answer: text, reasoning, calls. Computation only."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text that is not shown: markers, the calls between them, and white space around them. Never empty."""

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

    A call that was `begun` came in pieces before. Its arguments may differ from the pieces in white space. If the
    answer was `cut` in the call, or the model's JSON is wrong, its arguments are exactly the pieces.
    """

    index: int
    id: str
    name: str
    arguments: str
    begun: bool = False
    cut: bool = False

    @property
    def given(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are not an object, because the answer was cut in the call or the
        model's JSON is wrong. Such a call must not be run."""
        try:
            given = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return given if isinstance(given, dict) else None


Piece = str | Skipped | ReasoningDelta | CallBegun | CallArguments | ToolCall


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
