"""Heartbeats between two processes of a group, on a connection and a thread of their own.

A process that computes for long says nothing on its other connections, so these have no time limit. Heartbeats have
two: a machine that cannot be reached is noticed within the short one, a process that stands still within the long one
(`silence.py`). A process that ended closes its connections, which is noticed at once. A process whose computation hangs
still sends heartbeats; that is for its watchdog to notice (`supervision`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .....cluster.errors import SatchelError
from .broken import in_words
from .connection import FAILED, Connection
from .silence import Silence

_BEAT, _END = "beat", "end"


class Heartbeats:
    """Sends heartbeats and waits for the peer's, until `stop`.

    Args:
        peer: its name.
        every_s: the time between two heartbeats.
        silent_s: how long the peer's machine may acknowledge nothing; several times `every_s`.
        stalled_s: how long the peer may say nothing.
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
        stalled_s: float,
        lost: Callable[[str], object],
        says: Callable[[], int] = lambda: 0,
    ) -> None:
        self.said = 0
        self._connection, self._peer, self._lost, self._says = connection, peer, lost, says
        self._every_s = every_s
        self._silence = Silence(every_s, silent_s, stalled_s, time.monotonic())
        connection.limit(stalled_s)
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
        connection, silence = self._connection, self._silence
        sent = -self._every_s
        try:
            while not self._ends:
                if time.monotonic() - sent >= self._every_s:
                    connection.send(_BEAT, self._says())
                    sent = time.monotonic()
                    silence.sent(connection.unacknowledged())
                if not self._hear(max(0.0, sent + self._every_s - time.monotonic())):
                    return
                if why := silence.lost(time.monotonic(), connection.unacknowledged()):
                    self._lost(f"{self._peer} {why}")
                    return
            connection.send(*((FAILED, self._why) if self._why else (_END,)))
        except SatchelError as error:
            if not self._ends:
                self._lost(f"{self._peer} is lost: {in_words(error)}")

    def _hear(self, wait_s: float) -> bool:
        """Hears what has come, after waiting for the first of it. Returns whether heartbeats go on."""
        while (said := self._connection.receive(wait_s)) is not None:
            if said[0] == _END:
                return False
            self._silence.heard()
            self.said = int(said[1][0])
            wait_s = 0.0
        return True
