"""Threads that move KV give way to threads that compute if a machine has too few cores for both."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LOWER = 4
"""The nice increment: such a thread gets two fifths of a computing thread's time. If 16 sequences, a pull and its
source share one core, the sequences get 58% of it, and 41% without this (three rounds each). With a core for each it
changes nothing. A larger increment could make a pull miss its deadline, and then its tokens would have to be computed
after all."""


def give_way() -> None:
    """Lowers the priority of the calling thread, for good. Only Linux has one for every thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + LOWER))
