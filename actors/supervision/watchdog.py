"""The watchdog of a process: sends heartbeats, and ends the process if a part of it is stuck, so that Ray restarts it.

Each part runs a callback once a poll: an event loop, the engine's thread, a pool of one thread. If a call that never
returns holds the interpreter, this thread hangs too. Then the server misses the heartbeats and ends the process
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
from ...cluster.environment import default_home, heartbeats_path
from ...cluster.home import Home
from ...cluster.incidents import note_incident
from .stall import Pulse, Stall

logger = logging.getLogger(__name__)

ENGINE = "engine"
"""The part of a replica that computes."""

LOOP_S = 60.0
"""An event loop that runs nothing for this long is stuck."""

PAGING_FAULTS = 20
"""With this many major page faults in one poll a process is waiting for swapped-out memory."""

LAST_WORDS_S = 3.0
"""How long recording the reason may take before the process ends: the disk may be what hangs."""


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
    """The watchdog of one process, known as `name`. Call `watch` for each part, then `start`.

    Args:
        home: where an end is recorded as an incident.
        poll_s: the interval of polls and heartbeats: `timing.heartbeat_s`.
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
        self._leaving = False

    def watch(
        self,
        part: str,
        post: Callable[[Callable[[], None]], object],
        limit_s: Callable[[], float] = lambda: LOOP_S,
        *,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        """Adds a part.

        Args:
            part: its name.
            post: makes the part run a callback soon.
            limit_s: returns how long that may take now.
            may_end: asked before the process is ended for this part; may block. If False, the time begins anew.
        """
        self._parts.append(_WatchedPart(part, post, limit_s, may_end, Stall(self._poll_s)))

    def start(self) -> None:
        self._heart.beat()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self) -> None:
        """Says from now on that the end of this process is intended."""
        self._leaving = True
        self._heart.beat(leaving=True)

    def is_slow(self, part: str) -> bool:
        """Returns whether the part is so slow that it should get nothing new to do."""
        return any(one.pulse is not Pulse.MOVING for one in self._parts if one.name == part)

    def _run(self) -> None:
        while True:
            time.sleep(self._poll_s)
            self.poll()

    def poll(self) -> None:
        """Sends a heartbeat and checks every part once. Runs on the watchdog's thread."""
        self._heart.beat(leaving=self._leaving)
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
        def record() -> None:
            logger.critical("%s; the process ends", reason)
            note_incident(self._home, "stuck", f"{reason}; the process was ended")
            # The stacks of all threads go to the process's log.
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

        recording = threading.Thread(target=record, name="last words", daemon=True)
        recording.start()
        recording.join(LAST_WORDS_S)
        os._exit(1)
