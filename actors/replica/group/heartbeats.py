"""Heartbeats between two processes of a group, on a connection and a thread of their own.

A process that computes for long says nothing on its other connections, so these have no time limit. Heartbeats have
one: a process that ended, stopped or cannot be reached is noticed within it. A process whose computation hangs still
sends heartbeats; that is for its watchdog to notice (`supervision`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....cluster.errors import SatchelError
from .broken import in_words
from .connection import FAILED, Connection

_BEAT, _END = "beat", "end"


class Heartbeats:
    """Sends heartbeats and waits for the peer's, until `stop`.

    Args:
        peer: its name.
        every_s: the time between two heartbeats.
        silent_s: how long the peer may be silent; several times `every_s`.
        lost: called once, by the thread of the heartbeats, with why the peer counts as lost.
        says: returns a number that goes with each heartbeat.

    Attributes:
        said: the number of the peer's last heartbeat.
    """

    def __init__(
        self,
        connection: Connection,
        peer: str,
        every_s: float,
        silent_s: float,
        lost: Callable[[str], object],
        says: Callable[[], int] = lambda: 0,
    ) -> None:
        self.said = 0
        self._connection, self._peer, self._lost, self._says = connection, peer, lost, says
        self._every_s, self._silent_s = every_s, silent_s
        self._ends, self._why = False, ""
        self._thread = threading.Thread(target=self._beat, name=f"heartbeats of {peer}", daemon=True)
        self._thread.start()

    def end(self, why: str = "") -> None:
        """Ends heartbeats on both sides, within the time between two of them; from any thread. The peer counts as lost
        there if there is a reason `why` it must."""
        self._why, self._ends = why, True

    def join(self) -> None:
        """Waits for the end of heartbeats."""
        self._thread.join()

    def _beat(self) -> None:
        heard = sent = time.monotonic()
        try:
            self._connection.send(_BEAT, self._says())
            while not self._ends:
                said = self._connection.receive(max(0.0, sent + self._every_s - time.monotonic()))
                now = time.monotonic()
                if said is not None:
                    if said[0] == _END:
                        return
                    heard = now
                    self.said = int(said[1][0])
                if now - heard > self._silent_s:
                    self._lost(f"{self._peer} says nothing for {self._silent_s:g} s")
                    return
                if now - sent >= self._every_s:
                    self._connection.send(_BEAT, self._says())
                    sent = now
            self._connection.send(*((FAILED, self._why) if self._why else (_END,)))
        except SatchelError as error:
            if not self._ends:
                self._lost(f"{self._peer} is lost: {in_words(error)}")
