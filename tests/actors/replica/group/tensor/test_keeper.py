"""A keeper ends the process that it watches if that process stands still, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from satchel.actors.replica.group.tensor.keeper import keep

KEPT = """
import sys, time
from satchel.actors.replica.group.tensor.kept import Kept
kept = Kept(0.05, float(sys.argv[1]), 10 * float(sys.argv[1]))
print(kept.pid, flush=True)
for what in sys.stdin:
    if what == "patient\\n":
        kept.allow(60.0)
    elif what == "end\\n":
        break
    print("did", what, end="", flush=True)
kept.end()
"""


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_killed_once_it_says_nothing_for_longer_than_it_may(stopped: bool):
    """That is not as long if it is stopped. The begin of a line says nothing."""
    with sleeping() as process:
        source, told = os.pipe()
        try:
            if stopped:
                os.kill(process.pid, signal.SIGSTOP)
            os.write(told, b"60 60\n0.1 60\n" if stopped else b"60 60\n0.1 0.5\n60")
            assert keep(process.pid, source)
        finally:
            os.close(source)
            os.close(told)
        assert process.wait(10.0) == -signal.SIGKILL


def test_a_keeper_leaves_alone_a_process_that_has_closed_its_pipe():
    with sleeping() as process:
        source, told = os.pipe()
        os.close(told)
        try:
            assert not keep(process.pid, source)
        finally:
            os.close(source)
        assert process.poll() is None


@contextmanager
def kept(silent_s: float) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process with a keeper, and the keeper."""
    process = subprocess.Popen(
        [sys.executable, "-c", KEPT, str(silent_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, psutil.Process(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def say(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    if what != "end":
        assert process.stdout.readline() == f"did {what}\n"


def test_a_process_that_is_stopped_is_killed_and_one_that_runs_is_not():
    with kept(1.0) as (process, keeper):
        time.sleep(1.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(20.0) == -signal.SIGKILL
        keeper.wait(20.0)


def test_a_process_may_stand_still_while_it_was_said_to():
    with kept(0.5) as (process, keeper):
        say(process, "patient")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        say(process, "end")
        assert process.wait(20.0) == 0 and not keeper.is_running()
