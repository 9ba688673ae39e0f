"""Processes that the harness starts: found again by a mark in their environment, measured together, ended by id.

A server may start others in Unix sessions of their own, so neither parents nor process groups find all of them. Their
environment tells which sessions are ours. It does not tell every process: one that gives itself a title, as Ray's do,
writes over its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from ..programs import ROOT

MARK = "SERVE_BENCHMARK_MARK"
STOP_GRACE_S = 25.0


@dataclass(frozen=True)
class MemoryUse:
    """What processes hold in memory: resident, where a shared page counts in every process that maps it, and
    proportional, where it is divided among them (None where the system cannot say)."""

    processes: int
    rss_bytes: int
    pss_bytes: int | None


class ProcessGroup:
    """One started command and all that it has started."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, *, talks: bool = False) -> None:
        self._mark = uuid.uuid4().hex
        self.log = log
        self.started = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, MARK: self._mark},
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def members(self) -> list[psutil.Process]:
        """All living processes of the sessions in which a process has this group's mark."""
        sessions: dict[int, list[psutil.Process]] = {}
        ours: set[int] = set()
        for process in psutil.process_iter():
            try:
                session = os.getsid(process.pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                sessions.setdefault(session, []).append(process)
                if process.environ().get(MARK) == self._mark:
                    ours.add(session)
            except (psutil.Error, OSError):
                continue
        return [process for session in ours for process in sessions[session]]

    def memory(self) -> MemoryUse:
        return _memory_of(self.members())

    def memory_by_name(self) -> dict[str, dict[str, float]]:
        """Memory in MB by what a process calls itself."""
        by_name: dict[str, list[psutil.Process]] = {}
        for process in self.members():
            with suppress(psutil.Error):
                by_name.setdefault(short_name(process), []).append(process)
        table: dict[str, dict[str, float]] = {}
        for name, processes in by_name.items():
            memory = _memory_of(processes)
            rss, pss = round(memory.rss_bytes / 1e6, 1), round((memory.pss_bytes or 0) / 1e6, 1)
            table[name] = {"processes": memory.processes, "rss_mb": rss, "pss_mb": pss}
        return dict(sorted(table.items(), key=lambda item: -item[1]["rss_mb"]))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since each process started, by what it calls itself."""
        found: dict[str, float] = defaultdict(float)
        for process in self.members():
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[short_name(process)] += times.user + times.system
        return dict(found)

    def tail(self, lines: int = 6) -> str:
        """The end of what it printed."""
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])

    def stop(self) -> None:
        """End the command in its own way; whatever is left after that is killed, each process by its id."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        for process in self.members():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_GRACE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _memory_of(processes: list[psutil.Process]) -> MemoryUse:
    count, rss, pss = 0, 0, 0
    for process in processes:
        with suppress(psutil.Error):
            memory = process.memory_full_info()
            count, rss, pss = count + 1, rss + memory.rss, pss + getattr(memory, "pss", 0)
    return MemoryUse(count, rss, pss if sys.platform == "linux" else None)


def short_name(process: psutil.Process) -> str:
    """What a process is, in a word or two: Ray's own title, a module, or the program's file."""
    command = process.cmdline()
    if not command:
        return process.name()
    if command[0].startswith("ray::"):
        return command[0].split()[0].removeprefix("ray::").split(".")[0]
    for before, argument in pairwise(command):
        if before == "-m":
            return argument
        if argument.endswith(".py"):
            return Path(argument).name
    return Path(command[0]).name
