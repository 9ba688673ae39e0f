"""The stage of a `Pipeline` that finds an answer's calls: in the form of the model's template, or else in other
forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from .answer_pieces import CallArguments, CallBegun, Piece, Skipped, ToolCall
from .lenient.reading import Calls
from .lenient.stage import LenientCalls

_ALIKE_MAX = 3
"""After this many equal calls in succession an answer ends."""


class OwnCalls(Protocol):
    """A stage that finds calls in the model's own format.

    Attributes:
        cut: whether the answer was cut: by a limit, a stop string or a stop token; set before `flush`.
    """

    cut: bool

    @property
    def in_call(self) -> bool: ...

    @property
    def inside(self) -> bool: ...

    @property
    def full(self) -> bool: ...

    def add(self, text: str) -> Sequence[Piece]: ...

    def flush(self) -> Sequence[Piece]: ...


class CallStage:
    """Finds calls, and ends an answer that repeats them.

    Args:
        own: finds calls in the model's own format; None if that is not known, or the lenient stage reads it.
        lenient: finds calls in other formats, if there is none in the model's own.
        limit: decides when the answer is over.
    """

    def __init__(self, own: OwnCalls | None, lenient: LenientCalls, limit: CallLimit) -> None:
        self._own = own
        self._lenient: LenientCalls | None = lenient
        self._limit = limit
        self._behind: list[Piece] = []
        self._held: list[Piece] = []
        self._holds = False

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside a possible call."""
        return (self._own is not None and self._own.inside) or (self._lenient is not None and self._lenient.holding)

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends inside a call in the model's own format."""
        return self._own is not None and self._own.in_call

    @property
    def limited(self) -> bool:
        """Whether complete calls ended the answer."""
        return self._limit.reached

    @property
    def full(self) -> bool:
        """Whether the answer is over. Then no more text comes out."""
        return self._limit.reached or (self._own is not None and self._own.full)

    def end(self, *, cut: bool) -> None:
        """Must be called before `flush`, with whether the answer was cut: by a limit, a stop string or a stop token."""
        for stage in (self._own, self._lenient):
            if stage is not None:
                stage.cut = cut

    def add(self, text: str) -> list[Piece]:
        return self._through([text] if self._own is None else self._own.add(text))

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer."""
        out = [] if self._own is None else self._through(self._own.flush())
        if self._lenient is not None:
            out += self._limited(self._lenient.flush())
        return [*out, *self._limited(self._behind)]

    def _through(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Passes text in which the first stage found no call through the lenient stage, until there is a call."""
        out: list[Piece] = []
        for piece in pieces:
            if self._lenient is None:
                out += self._limited([piece])
            elif isinstance(piece, Skipped) and (self._lenient.holding or self._behind):
                # Text that is held may still be a call, so the other piece must wait behind it.
                self._behind.append(piece)
            elif isinstance(piece, str) and not self._behind:
                out += self._limited(self._lenient.add(piece))
            else:
                out += self._limited([*self._lenient.release(), *self._behind])
                self._behind = []
                if isinstance(piece, CallBegun | ToolCall):
                    self._lenient = None
                out += self._limited(self._lenient.add(piece) if self._lenient and isinstance(piece, str) else [piece])
        return out

    def _limited(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Drops everything after the answer's end, and the call that exceeds the limit."""
        out: list[Piece] = []
        for piece in pieces:
            if self._limit.reached:
                break
            if isinstance(piece, CallBegun):
                self._holds = self._limit.may_repeat(piece.name)
            if isinstance(piece, CallBegun | CallArguments) and self._holds:
                self._held.append(piece)
            elif isinstance(piece, ToolCall):
                held, self._held, self._holds = self._held, [], False
                if self._limit.takes(piece.name, piece.arguments):
                    out += [*held, piece]
            else:
                out.append(piece)
        return out


class CallLimit:
    """Decides when an answer's calls are over.

    Args:
        forced: whether the answer must call a tool. Then its first repeated call is dropped, and ends the answer.
        calls_max: after so many calls the answer is over; None for no limit.

    Attributes:
        reached: whether the answer is over.
    """

    def __init__(self, *, forced: bool = False, calls_max: int | None = None) -> None:
        self._forced = forced
        self._calls_max = calls_max
        self._known: list[tuple[str, str]] = []
        self.reached = False

    def may_repeat(self, name: str) -> bool:
        """Returns whether a call of this name may exceed the limit."""
        return self._forced and any(known == name for known, _ in self._known)

    def takes(self, name: str, arguments: str) -> bool:
        """Counts a call. Returns False if it is dropped."""
        call = (name, _canonical(arguments))
        if self._forced and call in self._known:
            self.reached = True
            return False
        self._known.append(call)
        if call[1] == arguments and not _is_json(arguments):
            # The call was cut, because the answer was.
            return True
        alike = len(self._known) >= _ALIKE_MAX and len(set(self._known[-_ALIKE_MAX:])) == 1
        self.reached = alike or (self._calls_max is not None and len(self._known) >= self._calls_max)
        return True

    def ended_by(self, calls: Calls) -> bool:
        """Returns whether these calls end an answer, whatever follows them."""
        trial = CallLimit(forced=self._forced, calls_max=self._calls_max if self._forced else None)
        for name, arguments in calls:
            trial.takes(name, arguments)
            if trial.reached:
                return True
        return False


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
