"""The interface of readers, which read calls while they are written. Computation only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Begun:
    """A call with this name begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The call that began last is complete."""


Said = Begun | Ended | str
"""What a reader returns; a string is more of the arguments, as JSON."""


class Reader(Protocol):
    """Reads the text of one or several calls, from their marker on.

    Attributes:
        lost: whether the text is not in the form of the model's template. Then it is parsed as a whole at its end, or
            is not a call.
        rest: the text that completes the arguments if the call ends here too early; None if that is impossible, because
            a value has no end or is missing.
    """

    lost: bool

    @property
    def rest(self) -> str | None: ...

    def add(self, text: str) -> list[Said]:
        """Takes more of the text, and returns what is found in it."""
        ...


class StepReader:
    """The base of readers: a buffer, and steps. Each step takes what it can from the buffer, and returns False if it
    needs more text; see `Reader`.

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
