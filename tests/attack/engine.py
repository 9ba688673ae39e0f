"""The replica's engine thread stops, as one does that waits for a device which never answers."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .http import AttackOutcome, ask, healthy
from .scene import AttackScene

_ATTACH, _DETACH = 16, 17
_WALL = 0x40000000
_TRIES = 40
_ASKED_S = 8.0
_RECOVERS_S = 120.0
_QUESTION = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "timeout_s": _ASKED_S}


def _ticks(pid: int) -> dict[int, int]:
    """The processor time of each thread, in the kernel's ticks."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (task / "stat").read_text().rpartition(") ")[2].split()
            found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found


def _engine_thread(pid: int) -> int:
    """The busiest thread while answers are being written."""
    before = _ticks(pid)
    time.sleep(2.0)
    return max(now := _ticks(pid), key=lambda thread: now[thread] - before.get(thread, 0))


@contextmanager
def _stopped(thread: int) -> Iterator[bool]:
    """While the thread is stopped; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    attached = libc.ptrace(_ATTACH, thread, None, None) == 0
    if attached:
        os.waitpid(thread, _WALL)
    try:
        yield attached
    finally:
        # Its process may have been ended meanwhile, and waits for us to notice.
        if attached and libc.ptrace(_DETACH, thread, None, None) != 0:
            with suppress(ChildProcessError):
                os.waitpid(thread, _WALL | os.WNOHANG)


def run(scene: AttackScene) -> AttackOutcome:
    """Stops it outside of the interpreter's lock, asks all the while, and lets it go on after the time."""
    if not sys.platform.startswith("linux"):
        return AttackOutcome(skipped="only Linux stops single threads of others")
    replica = scene.process("replica")
    if replica is None:
        return AttackOutcome(skipped="no replica was found")
    outcome = AttackOutcome(allowed=(503, 504))
    thread, chance = _engine_thread(replica.pid), random.Random(scene.seed)
    for _ in range(_TRIES):
        with _stopped(thread) as attached:
            if not attached:
                return AttackOutcome(skipped="ptrace is not allowed here")
            if _interpreter_is_free(replica.pid):
                _watch(scene, outcome)
                break
        time.sleep(0.05 + 0.2 * chance.random())
    else:
        return AttackOutcome(skipped="its thread was never outside of the interpreter's lock")
    began = time.monotonic()
    back = healthy(scene.port, within_s=_RECOVERS_S)
    outcome.notes.append(f"let go on: {'answers' if back else 'no answer'} after {time.monotonic() - began:.0f} s")
    if not back:
        outcome.unexpected.append("no answer after the engine went on")
    return outcome


def _interpreter_is_free(pid: int) -> bool:
    """Whether the process's other threads still run: one that stopped within the lock stops all."""
    before = _ticks(pid)
    time.sleep(1.5)
    now = _ticks(pid)
    return sum(now.values()) > sum(before.values())


def _watch(scene: AttackScene, outcome: AttackOutcome) -> None:
    began, recovered = time.monotonic(), None
    until = began + max(scene.seconds, 60.0)
    while time.monotonic() < until and recovered is None:
        answer = ask(scene.port, "/v1/chat/completions", _QUESTION, timeout_s=_ASKED_S + 4)
        outcome.statuses[str(answer.status or answer.error)] += 1
        if wrong := outcome.wrong(answer) if answer.status else "":
            outcome.unexpected.append(wrong)
        if answer.status == 200:
            recovered = time.monotonic() - began
        time.sleep(1.0)
    if recovered is None:
        outcome.notes.append(f"no answer within {time.monotonic() - began:.0f} s of the engine's stop")
    else:
        outcome.notes.append(f"answers again {recovered:.0f} s after the engine's stop")
