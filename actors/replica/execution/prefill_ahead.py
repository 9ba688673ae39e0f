"""A prefill that is launched and not waited for: while the device computes it, the host launches a decode step behind
it and builds the next prefill. Only where a device computes everything in the order in which it was launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx

Note = Callable[[int, float], None]
"""Is told the tokens of a call's prefill and how long it took, in seconds, once it is known to have ended."""


class PrefillAhead:
    """At most one prefill that runs ahead, and the time of each call's prefills, of which there may be several."""

    def __init__(self) -> None:
        # What is there once the prefill has ended, and when its call began.
        self._running: tuple[mx.array, float] | None = None
        self._followed = False
        self._call_began: float | None = None
        # Who is told of the call whose last prefill runs ahead, its tokens and begin; and when the one before ended.
        self._timed: tuple[Note, int, float] | None = None
        self._ended_at = 0.0

    @property
    def running(self) -> bool:
        """Whether there is one that was not waited for."""
        return self._running is not None

    def begin_call(self) -> None:
        """Begins a call, whose time counts from now, or from the end of the prefill that runs ahead."""
        self._call_began = perf_counter()

    def end_call(self, tokens: int, note: Note | None) -> None:
        """Ends a call that launched or computed prefills.

        Args:
            note: None if nobody is to be told of it.
        """
        began, self._call_began = self._call_began, None
        if note is None or began is None:
            return
        if self._running is None:
            note(tokens, perf_counter() - began)
        else:
            self._timed = note, tokens, began

    def launch(self, states: Sequence[mx.array]) -> None:
        """Launches a prefill, given all arrays that it computes. The one before must have been waited for."""
        assert self._running is None and self._call_began is not None
        # One of them would do, but what is kept cannot be written in place.
        (ended,) = mx.depends([mx.array(0) + 0], list(states))
        mx.async_eval(list(states), ended)
        self._running, self._followed = (ended, self._call_began), False

    def wait(self) -> None:
        """Waits for the prefill that runs ahead."""
        if self._running is None:
            return
        ended, call_began = self._running
        mx.eval(ended)
        self._running = None
        if self._timed is not None:
            (note, tokens, began), self._timed = self._timed, None
            note(tokens, perf_counter() - max(began, self._ended_at))
        # Those of the running call count as one.
        if call_began != self._call_began:
            self._ended_at = perf_counter()

    def is_followed(self) -> bool:
        """Says that a decode step comes, and returns whether another one was launched behind the prefill already."""
        followed, self._followed = self._followed, True
        return followed

    def forget(self) -> None:
        """Forgets it, after the device has failed."""
        self._running = self._timed = None
