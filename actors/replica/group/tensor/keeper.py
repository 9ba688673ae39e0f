"""Ends a process of a group that makes no progress, from outside: a process that hangs in a collective, or was stopped,
cannot end itself.

    python -I -S keeper.py PID

The process writes numbers to the keeper's input, one a line: for so many seconds it may say nothing from now on. If it
says nothing for longer, it is killed. If its end of the pipe is closed, it has ended, and so does the keeper. The
program uses nothing but Python's own modules, so that it starts in milliseconds.
"""

import os
import select
import signal
import sys
import time

START_S = 5.0


def keep(pid: int, source: int, start_s: float = START_S) -> bool:
    """Watches a process until it has ended. Returns whether it was killed.

    Args:
        source: the file descriptor from which the process's numbers are read.
    """
    until, text = time.monotonic() + start_s, b""
    while True:
        left = until - time.monotonic()
        if not select.select([source], [], [], max(0.0, left))[0]:
            if left > 0:
                continue
            os.kill(pid, signal.SIGKILL)
            return True
        data = os.read(source, 4096)
        if not data:
            return False
        *lines, text = (text + data).split(b"\n")
        if lines:
            until = time.monotonic() + float(lines[-1])


if __name__ == "__main__":
    # It must outlive what ends the process that it watches by Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep(int(sys.argv[1]), sys.stdin.fileno())
