"""What reads calls while they are written, and what it says. Computation only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Begun:
    """Where calls are read: one with this name begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Where calls are read: the one that began last is complete."""


Said = Begun | Ended | str
"""What is found in the text of calls; a string is more of the arguments, as JSON."""


class Reader(Protocol):
    """Follows the text of one or several calls, from their marker on.

    Attributes:
        lost: whether it is not written as the model's template writes calls. Then it is parsed as a whole at its end,
            or no call at all.
        rest: what makes the arguments that it said whole, if the call ends here though it should not; None if nothing
            does, because a value has no end or is missing.
    """

    lost: bool

    @property
    def rest(self) -> str | None: ...

    def add(self, text: str) -> list[Said]:
        """Takes more of the text, and returns what it says."""
        ...


class StepReader:
    """What readers of calls share: a buffer, and steps that each take what they can from it and return False if they
    need more; see `Reader`.

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
