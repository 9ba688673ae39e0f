"""Whether a silent peer is lost. Pure.

A peer that says nothing may be gone, cut off, or only busy: an interpreter that compiles a kernel or collects garbage
sends no heartbeat for seconds. Its machine's kernel acknowledges what is sent to it all the same. So there are two
limits: a short one for a peer whose machine acknowledges nothing, and a long one for a peer that only says nothing.

A process that was held up itself has heard nothing meanwhile, so time in which it did not look does not count.
"""

from __future__ import annotations

LOOKS_LATE = 2.0
"""At most so many intervals between heartbeats count from one look to the next; the rest was a pause of its own."""


class Silence:
    """How long a peer has said nothing.

    Args:
        every_s: the time between two heartbeats, and at most between two looks.
        silent_s: how long its machine may acknowledge nothing.
        stalled_s: how long it may say nothing.
        now: monotonic seconds.
    """

    def __init__(self, every_s: float, silent_s: float, stalled_s: float, now: float) -> None:
        self._most_s, self._silent_s, self._stalled_s = LOOKS_LATE * every_s, silent_s, stalled_s
        self._looked, self._unheard_s, self._unreached_s = now, 0.0, 0.0
        self._unacknowledged: int | None = None

    def heard(self) -> None:
        """The peer said something."""
        self._unheard_s = self._unreached_s = 0.0

    def sent(self, unacknowledged: int | None) -> None:
        """Something was sent to the peer; the argument is as for `lost`."""
        self._unacknowledged = unacknowledged

    def lost(self, now: float, unacknowledged: int | None) -> str:
        """Returns why the peer is lost, as the end of a sentence; empty if it is not. All that it has said by `now`
        must have been `heard`.

        Args:
            unacknowledged: how many bytes were sent that its machine has not acknowledged; None if that is not known.
        """
        passed = min(now - self._looked, self._most_s)
        self._looked = now
        self._unheard_s += passed
        self._unreached_s += passed
        if unacknowledged is not None:
            before, self._unacknowledged = self._unacknowledged, unacknowledged
            if not unacknowledged or (before is not None and unacknowledged < before):
                self._unreached_s = 0.0
        if self._unreached_s > self._silent_s:
            return f"cannot be reached for {self._silent_s:g} s"
        return f"says nothing for {self._stalled_s:g} s" if self._unheard_s > self._stalled_s else ""
