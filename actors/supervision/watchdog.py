"""A process looks after itself: it gives signs of life, and ends where a part of it stands still, so that Ray starts it
again.

Each part is asked, once a poll, to run a callback: an event loop, the engine's thread, a pool of one thread. While a
call that never returns holds the interpreter, this thread stands still too. Then the router misses the reports, readers
of frames hear nothing, and the server misses the signs of life and ends the process
(`satchel.cluster.bring_up.heartbeats`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...cluster.bring_up.heartbeats import HeartbeatSender
from ...cluster.config import Home
from ...cluster.environment import default_home, heartbeats_path
from ...cluster.incidents import note_incident
from .stall import Pulse, Stall

logger = logging.getLogger(__name__)

LOOP_S = 60.0
"""An event loop that runs nothing for this long is stuck."""

PAGING_FAULTS = 20
"""Page faults that went to the disk, in one poll, from which on a process is waiting for its memory."""

LAST_WORDS_S = 3.0
"""How long an end may take to be written down: the disk may be what hangs."""


@dataclass
class _WatchedPart:
    name: str
    post: Callable[[Callable[[], None]], object]
    limit_s: Callable[[], float]
    may_end: Callable[[], bool]
    stall: Stall
    answered: threading.Event = field(default_factory=threading.Event)
    pulse: Pulse = Pulse.MOVING
    asked: bool = False


class Watchdog:
    """Of one process, known as `name`. `watch` what is to be watched, then `start`.

    Args:
        home: where an end is written down.
        poll_s: how often the parts are looked at and a sign of life is given: `timing.heartbeat_s`.
        end: ends the process, with a reason.
    """

    def __init__(
        self, name: str, home: Home | None = None, *, poll_s: float, end: Callable[[str], None] | None = None
    ) -> None:
        self._name = name
        self._home = home or default_home()
        self._poll_s = poll_s
        self._end = end or self._end_process
        self._heart = HeartbeatSender(heartbeats_path(), name)
        self._parts: list[_WatchedPart] = []
        self._faults = 0

    def watch(
        self,
        part: str,
        post: Callable[[Callable[[], None]], object],
        limit_s: Callable[[], float] = lambda: LOOP_S,
        *,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        """Look after one more part.

        Args:
            part: what it is called.
            post: has it run a callback soon.
            limit_s: how long that may take now.
            may_end: asked before the process is ended for it; may block. Where it says no, the time begins anew.
        """
        self._parts.append(_WatchedPart(part, post, limit_s, may_end, Stall(self._poll_s)))

    def start(self) -> None:
        self._heart.beat()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self) -> None:
        """The process is about to be ended because somebody asked for it."""
        self._heart.beat(leaving=True)

    def is_slow(self, part: str) -> bool:
        """Whether the part takes so long that nothing new should be asked of it."""
        return any(one.pulse is not Pulse.MOVING for one in self._parts if one.name == part)

    def _run(self) -> None:
        while True:
            time.sleep(self._poll_s)
            self.poll()

    def poll(self) -> None:
        """Look at every part once. On this object's thread."""
        self._heart.beat()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        paging, self._faults = faults - self._faults >= PAGING_FAULTS, faults
        for part in list(self._parts):
            try:
                self._look(part, paging)
            except Exception as error:
                # A loop that is closed, or an executor that was shut down: the process is ending.
                logger.warning("%s is not watched any more: %s", part.name, error)
                self._parts.remove(part)

    def _look(self, part: _WatchedPart, paging: bool) -> None:
        moved = not part.asked or part.answered.is_set()
        if moved:
            part.answered.clear()
            part.asked = True
            part.post(part.answered.set)
        limit = part.limit_s()
        part.pulse = part.stall.poll(moved, limit, paging=paging)
        if part.pulse is not Pulse.STUCK:
            return
        if part.may_end():
            self._end(f"{self._name} (process {os.getpid()}): its {part.name} has stood still for {limit:.0f} s")
        else:
            logger.warning("the %s of %s has stood still for %g s", part.name, self._name, limit)
        part.stall = Stall(self._poll_s)

    def _end_process(self, reason: str) -> None:
        def tell() -> None:
            logger.critical("%s; the process ends", reason)
            note_incident(self._home, "stuck", f"{reason}; the process was ended")
            # Where every thread stands goes to the process's log.
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

        telling = threading.Thread(target=tell, name="last words", daemon=True)
        telling.start()
        telling.join(LAST_WORDS_S)
        os._exit(1)
