"""Ends a Ray session once its server is gone: `python -m satchel.cluster.bring_up.keeper FOLDER LOGS PID...`.

It is the leader of the session. It waits until its standard input closes, because the server that started it has
ended or was killed, or until one of the essential processes dies; then it ends every process of the session, removes
the folder and exits. So even `kill -9` of a server leaves nothing behind. If the keeper itself is killed too, the next
server on the same home cleans up from the session file. If an essential process died, the logs of Ray's processes are
moved to LOGS first.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from ..processes import ProcessMark, UnixSession, end_session

_POLL_S = 0.5
_PR_SET_CHILD_SUBREAPER = 36


def _adopt_orphans() -> None:
    """On Linux, adopts its descendants' orphans, so that it can reap them: not every container has a process 1 that
    does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> set[int]:
    """Process ids of children that have ended since the last call."""
    ended: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.add(pid)


def keep(essential: set[int]) -> bool:
    """Returns when standard input has closed (True) or an essential process has ended by itself (False)."""
    while not _closed(_POLL_S):
        if _reap() & essential or any(ProcessMark.of(pid) is None for pid in essential):
            # A server that ends the session itself closes standard input first.
            return _closed(0.0)
    return True


def _closed(within_s: float) -> bool:
    """Whether standard input closes in this time; data written to it is ignored."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], within_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def keep_logs(folder: Path, logs: Path) -> None:
    """Moves Ray's logs out of its folder. On a full disk the logs are lost, and nothing is raised."""
    for found in folder.glob("ray/session_*_*/logs"):
        with suppress(OSError):
            shutil.rmtree(logs, ignore_errors=True)
            shutil.move(found, logs)


def main() -> None:
    folder, logs, *pids = sys.argv[1:]
    # It ends last, after the other processes of the session.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getsid(0) != os.getpid():
        raise SystemExit("the keeper must lead a session of its own")
    _adopt_orphans()
    in_order = keep({int(pid) for pid in pids})
    # A mark of now: in weeks the system's clock may have been set by seconds, which shifts times of creation.
    me = ProcessMark.of(os.getpid())
    assert me is not None
    end_session(UnixSession(os.getpid(), (me,)), grace_s=1.0, spare=os.getpid())
    _reap()
    if not in_order:
        keep_logs(Path(folder), Path(logs))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
