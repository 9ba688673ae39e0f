"""Threads that move KV give way to those that compute where a machine has too few cores for both."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LOWER = 4
"""By so much nicer: such a thread gets two fifths of what one gets that computes. Where 16 rows, a pull and its source
had one core for all, the rows had 58% of it, and 41% without (three rounds each). With a core for each it changes
nothing. More would let a pull wait for its deadline, and then its tokens be computed by those who were spared it."""


def give_way() -> None:
    """Lowers the priority of the calling thread, for good. Only Linux has one for every thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + LOWER))
