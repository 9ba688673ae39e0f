"""Which processes are ours, and how to end them. Never by name.

Ray runs in a session of its own (`setsid`), and everything it starts stays in that session. The kernel gives a session
number to nobody else while one member lives. So the members of a session are certainly ours as long as one process
that we wrote down, by process id *and* creation time, is still alive in it; without such a witness nothing is touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

_CREATION_TOLERANCE_S = 2.0
"""Linux counts from a boot time in whole seconds, which clock corrections move."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**20


@dataclass(frozen=True)
class ProcessMark:
    """One process, so that a later process with the same id is not mistaken for it. `created_s` is Unix time."""

    pid: int
    created_s: float

    @staticmethod
    def of(pid: int) -> ProcessMark | None:
        """The mark of a living process; None where there is none."""
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else ProcessMark(pid, process.create_time())
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        now = ProcessMark.of(self.pid)
        return now is not None and abs(now.created_s - self.created_s) <= _CREATION_TOLERANCE_S


@dataclass(frozen=True)
class UnixSession:
    """A Unix session and those of its members that were written down."""

    sid: int
    witnesses: tuple[ProcessMark, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"sid": self.sid, "processes": [[mark.pid, mark.created_s] for mark in self.witnesses]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> UnixSession | None:
        """The session that `to_dict` described; None where the data is not one."""
        try:
            marks = tuple(ProcessMark(int(pid), float(created)) for pid, created in data["processes"])
            return UnixSession(int(data["sid"]), marks)
        except (KeyError, TypeError, ValueError):
            return None

    def is_ours(self) -> bool:
        """Whether a written-down process still lives in it, so that all of its members are ours."""
        return any(mark.is_alive() and _session_of(mark.pid) == self.sid for mark in self.witnesses)

    def members(self) -> list[int]:
        """The ids of its living processes; none where nothing proves that they are ours."""
        return session_members(self.sid) if self.is_ours() else []

    def refreshed(self) -> UnixSession:
        """The same session with all present members as witnesses."""
        marks = [mark for mark in map(ProcessMark.of, self.members()) if mark is not None]
        return UnixSession(self.sid, tuple(marks)) if marks else self


def session_members(sid: int) -> list[int]:
    """Ids of the processes in a session, zombies left out."""
    return [pid for pid in psutil.pids() if _session_of(pid) == sid and ProcessMark.of(pid) is not None]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def end_session(session: UnixSession, *, grace_s: float, kill_s: float = 3.0, spare: int | None = None) -> list[int]:
    """Ends every process of the session: SIGTERM, after `grace_s` SIGKILL, until none is left or `kill_s` have passed.

    Args:
        spare: a member to leave alone (the caller itself).

    Returns:
        The ids of processes that survived; empty unless the kernel holds one of them.
    """
    if not session.is_ours():
        return []

    def living() -> list[int]:
        # The proof was made above, and holds as long as a member lives.
        return [pid for pid in session_members(session.sid) if pid != spare]

    if grace_s > 0:
        _send(living(), signal.SIGTERM)
        _wait_until_gone(living, grace_s)
    deadline = time.monotonic() + kill_s
    while remaining := living():
        if time.monotonic() > deadline:
            return remaining
        _send(remaining, signal.SIGKILL)
        _wait_until_gone(living, 0.1)
    return []


def _wait_until_gone(living: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while living() and time.monotonic() < deadline:
        time.sleep(0.05)


def give_freed_memory_back() -> None:
    """From now on what this process frees goes back to the system, but for 1 MiB a heap. With glibc's own settings each
    thread's heap keeps up to 64 MiB, once there was a large block. Large arrays are then mapped anew each time, so this
    is for processes that do not compute. Other C libraries than glibc are left as they are."""
    if tell := getattr(ctypes.CDLL(None), "mallopt", None):
        tell(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        tell(_M_TRIM_THRESHOLD, _KEPT_BYTES)
