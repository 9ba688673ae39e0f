"""Finds out which processes are ours, and ends them. Never by name.

Ray runs in a session of its own (`setsid`), and everything it starts stays in that session. The kernel does not reuse a
session number while one member lives. So the members of a session are certainly ours as long as one process that we
recorded, by process id *and* creation time, is still alive in it; without such a witness nothing is touched.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

_CREATION_TOLERANCE_S = 2.0
"""Linux counts creation times from a boot time in whole seconds, which clock corrections shift."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**20

OPEN_FILES = 10_240
"""The limit of open files of a server's processes: macOS gives a process 256, of which 220 streams need all."""


@dataclass(frozen=True)
class ProcessMark:
    """The identity of one process: a later process with the same id differs in `created_s` (Unix time)."""

    pid: int
    created_s: float

    @staticmethod
    def of(pid: int) -> ProcessMark | None:
        """Returns the mark of a living process; None if there is none."""
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else ProcessMark(pid, process.create_time())
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        """Returns whether this very process still runs. A zombie does not."""
        now = ProcessMark.of(self.pid)
        return now is not None and abs(now.created_s - self.created_s) <= _CREATION_TOLERANCE_S


@dataclass(frozen=True)
class UnixSession:
    """A Unix session and those of its members that were recorded."""

    sid: int
    witnesses: tuple[ProcessMark, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"sid": self.sid, "processes": [[mark.pid, mark.created_s] for mark in self.witnesses]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> UnixSession | None:
        """Rebuilds the session that `to_dict` described; None if the data does not fit."""
        try:
            marks = tuple(ProcessMark(int(pid), float(created)) for pid, created in data["processes"])
            return UnixSession(int(data["sid"]), marks)
        except (KeyError, TypeError, ValueError):
            return None

    def is_ours(self) -> bool:
        """Returns whether a recorded process still lives in it, so that all of its members are ours."""
        return any(mark.is_alive() and _session_of(mark.pid) == self.sid for mark in self.witnesses)

    def members(self) -> list[int]:
        """Returns the ids of its living processes; none if nothing proves that they are ours."""
        return session_members(self.sid) if self.is_ours() else []

    def refreshed(self) -> UnixSession:
        """Returns the same session with all present members as witnesses."""
        marks = [mark for mark in map(ProcessMark.of, self.members()) if mark is not None]
        return UnixSession(self.sid, tuple(marks)) if marks else self


def session_members(sid: int) -> list[int]:
    """Returns the ids of the processes in a session, without zombies."""
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
    """Ends every process of the session: SIGTERM, after `grace_s` SIGKILL, until none is left or `kill_s` has passed.

    Args:
        spare: a member to leave alone (the caller itself).

    Returns:
        The ids of processes that survived; empty unless the kernel holds one of them.
    """
    if not session.is_ours():
        return []

    def living() -> list[int]:
        # `is_ours` was checked above; that holds as long as a member lives.
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
    """Makes this process return freed memory to the system, except for 1 MiB a heap.

    By default glibc keeps up to 64 MiB for each thread's heap after one large block. With this setting large arrays are
    mapped anew each time, so it is for processes that do not compute. It does nothing with other allocators; jemalloc
    returns memory by itself within seconds.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_from_collection() -> None:
    """Collects garbage, and leaves all objects that there are now out of later collections. For a process that has
    loaded what it will always need: a whole collection looks at every object, and no thread runs meanwhile. With a
    model's libraries that took up to 0.4 s, in the middle of answers."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def keep_to_the_end() -> None:
    """Leaves all objects that there are now, and when this process ends all others too, out of collections. For a
    process that needs until its end what it has imported: Python collects garbage several times while it ends, which
    was a fifth of what a short command took."""
    gc.freeze()
    atexit.register(gc.freeze)


def raise_open_files() -> int:
    """Raises this process's limit of open files, which the processes that it starts inherit, to `OPEN_FILES` or as far
    as the system allows. Lowers nothing. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        # macOS may have a lower limit than the hard one that it names.
        return soft
    return most
