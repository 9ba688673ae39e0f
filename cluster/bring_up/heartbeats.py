"""Heartbeats of a machine's Satchel processes, sent as datagrams to its server, which ends processes without them.

A process supervises itself (`satchel.actors.supervision.watchdog`) while its interpreter runs. It cannot if it is
stopped, or if a call that never returns holds its interpreter. Silence is counted in polls and not by the clock: if the
whole machine stood still, as a Mac that slept, no process counts as silent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..incidents import Kind
from ..processes import ProcessMark

_log = logging.getLogger(__name__)

_MESSAGE_BYTES_MAX = 1024


class HeartbeatSender:
    """The heartbeats of one process, known as `name`.

    Args:
        path: the socket of the machine's server; None sends nothing.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self._path, self._name = path, name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def beat(self, *, leaving: bool = False) -> None:
        """Sends a heartbeat; with `leaving` the last one, before an intended end."""
        if self._path is None:
            return
        message = json.dumps({"pid": os.getpid(), "name": self._name, "leaving": leaving}).encode()
        try:
            self._socket.sendto(message, str(self._path))
        except OSError:
            # The server hangs or has ended, which is handled elsewhere.
            _log.debug("a heartbeat was not taken")

    def close(self) -> None:
        self._socket.close()


@dataclass
class _HeardProcess:
    name: str
    mark: ProcessMark
    silent_polls: int = 0


class Heartbeats:
    """Which processes sent heartbeats, and how many polls ago. Without sockets, processes and clock.

    Args:
        silent_polls_max: after so many polls without a heartbeat a process is to be ended.
    """

    def __init__(self, silent_polls_max: int) -> None:
        self.silent_polls_max = silent_polls_max
        self._heard: dict[int, _HeardProcess] = {}
        self._by_name: dict[str, int] = {}

    def hear(self, mark: ProcessMark, name: str, *, leaving: bool = False) -> int | None:
        """Takes a heartbeat. Returns the id of the process that this one replaces, None if it replaces none."""
        if leaving:
            self._heard.pop(mark.pid, None)
            self._by_name.pop(name, None)
            return None
        before, self._by_name[name] = self._by_name.get(name), mark.pid
        known = self._heard.get(mark.pid)
        if known is None or known.mark != mark:
            self._heard[mark.pid] = _HeardProcess(name, mark)
        else:
            known.silent_polls = 0
        return None if before in (None, mark.pid) else before

    def poll(self, is_alive: Callable[[ProcessMark], bool]) -> list[tuple[str, ProcessMark]]:
        """Counts one poll. Returns (name, mark) of each process that has just been silent for too long."""
        for pid in [pid for pid, heard in self._heard.items() if not is_alive(heard.mark)]:
            del self._heard[pid]
        silent = []
        for heard in self._heard.values():
            heard.silent_polls += 1
            if heard.silent_polls == self.silent_polls_max:
                silent.append((heard.name, heard.mark))
        return silent


class HeartbeatListener:
    """The server's end: receives the heartbeats of one session's processes, and ends silent ones.

    Args:
        path: of the socket to make, in a folder that only this user may enter.
        silent_s: a process without a heartbeat for this long is ended.
        poll_s: the interval of `poll`, and of every process's heartbeats.
        say: called with what happened (`died`, `silent`) and a sentence.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, silent_s: float, poll_s: float, say: Callable[[Kind, str], None]) -> None:
        self._say = say
        self._silent_s = silent_s
        self._heartbeats = Heartbeats(_polls(silent_s, poll_s))
        self._marks: dict[int, ProcessMark] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def go_by(self, silent_s: float, poll_s: float) -> None:
        """Changes the times."""
        self._silent_s = silent_s
        self._heartbeats.silent_polls_max = _polls(silent_s, poll_s)

    def listen(self, session: int) -> None:
        """Takes the heartbeats that have arrived; ignores those of other Unix sessions."""
        while True:
            try:
                data = json.loads(self._socket.recv(_MESSAGE_BYTES_MAX))
                pid, name, leaving = int(data["pid"]), str(data["name"]), bool(data["leaving"])
            except BlockingIOError:
                return
            except (OSError, ValueError, KeyError, TypeError):
                continue
            mark = self._mark(pid, session)
            if mark is None:
                continue
            former = self._heartbeats.hear(mark, name, leaving=leaving)
            if former is not None:
                self._say("died", f"{name} (process {former}) has ended; it was started again as process {pid}")

    def poll(self, session: int) -> None:
        """Kills processes that have been silent for too long. Call it every `poll_s`, after `listen`."""
        silent = self._heartbeats.poll(ProcessMark.is_alive)
        self._marks = {pid: mark for pid, mark in self._marks.items() if mark.is_alive()}
        for name, mark in silent:
            if _session_of(mark.pid) != session or not mark.is_alive():
                continue
            what = f"sent no heartbeat for {self._silent_s:g} s and was ended"
            self._say("silent", f"{name} (process {mark.pid}) {what}")
            try:
                os.kill(mark.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        self._socket.close()

    def _mark(self, pid: int, session: int) -> ProcessMark | None:
        """The mark of a process; None if it has ended or belongs to another session."""
        mark = self._marks.get(pid)
        if mark is None and _session_of(pid) == session and (mark := ProcessMark.of(pid)) is not None:
            self._marks[pid] = mark
        return mark


def _polls(silent_s: float, poll_s: float) -> int:
    return max(1, round(silent_s / poll_s))


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
