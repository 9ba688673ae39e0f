"""Ends a process of a group that makes no progress, from outside: a process that hangs in a collective, or was stopped,
cannot end itself.

    python -I -S keeper.py PID

The process writes two numbers a line to the keeper's input: for so many seconds it may be silent from now on if it is
stopped, and if it is not; an interpreter may be held up for a while. If it is silent for longer, it is killed. If its
end of the pipe is closed, it has ended, and so does the keeper. The program uses nothing but Python's own modules, so
that it starts in milliseconds.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 30.0
LOOK_S = 0.1
"""The state of a silent process is looked up this often."""


def keep(pid: int, source: int) -> bool:
    """Watches a process until it has ended. Returns whether it was killed.

    Args:
        source: the file descriptor from which the process's numbers are read.
    """
    said, text, limits = time.monotonic(), b"", (START_S, START_S)
    while True:
        silent = time.monotonic() - said
        if select.select([source], [], [], limits[0] - silent if silent < limits[0] else LOOK_S)[0]:
            data = os.read(source, 4096)
            if not data:
                return False
            *lines, text = (text + data).split(b"\n")
            if lines:
                stopped_s, stalled_s = map(float, lines[-1].split())
                said, limits = time.monotonic(), (stopped_s, stalled_s)
        elif silent >= limits[1] or (silent >= limits[0] and is_stopped(pid)):
            os.kill(pid, signal.SIGKILL)
            return True


def is_stopped(pid: int) -> bool:
    """Whether the system has stopped a process, until somebody lets it go on."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        # macOS has no such folder.
        state = subprocess.run(["/bin/ps", "-o", "state=", "-p", str(pid)], capture_output=True, check=False).stdout
    return state[:1] in (b"T", b"t")


if __name__ == "__main__":
    # It must outlive what ends the process that it watches by Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep(int(sys.argv[1]), sys.stdin.fileno())
