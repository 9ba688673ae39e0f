"""The next worker is started ahead. Whatever has become of it, a file is decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from satchel.api.media.pixels import Undecodable
from satchel.api.media.worker_process import WorkerAhead, run_worker

Workers = Callable[[], list[psutil.Process]]

ECHO = """
import os, sys, msgpack
from satchel.api.media.worker_process import awaited_file
data = awaited_file({wait_s})
sys.stdout.buffer.write(msgpack.packb([os.getpid(), data]))
"""
REFUSES = """
import sys, msgpack
from satchel.api.media.worker_process import awaited_file
awaited_file()
sys.stdout.buffer.write(msgpack.packb("is refused"))
"""


@pytest.fixture
def ahead() -> Iterator[WorkerAhead]:
    started = WorkerAhead()
    yield started
    started.close()


@pytest.fixture
def workers() -> Workers:
    """Returns the processes that a test has started. Others of this process may end meanwhile."""
    others = psutil.Process().children()
    return lambda: [each for each in psutil.Process().children() if each not in others]


def decode(ahead: WorkerAhead, data: bytes, wait_s: float = 60.0, **variables: str) -> int:
    """Returns the id of the process that has decoded a file."""
    worker, found = run_worker(["-c", ECHO.format(wait_s=wait_s)], data, 30.0, variables, ahead)
    assert found == data
    return worker


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_the_next_file_goes_to_the_process_that_waits(ahead: WorkerAhead, workers: Workers) -> None:
    decode(ahead, b"a")
    for data in (b"b", bytes(2**20)):
        (waiting,) = workers()
        assert decode(ahead, data) == waiting.pid
    ahead.close()
    assert not workers()


def test_after_a_refusal_the_next_process_waits_too(ahead: WorkerAhead, workers: Workers) -> None:
    for _ in range(2):
        with pytest.raises(Undecodable, match="is refused"):
            run_worker(["-c", REFUSES], b"a", 30.0, ahead=ahead)
        assert len(workers()) == 1


def test_a_process_for_other_files_is_ended(ahead: WorkerAhead, workers: Workers) -> None:
    decode(ahead, b"a")
    (waiting,) = workers()
    assert decode(ahead, b"b", KIND="other") != waiting.pid
    assert waiting not in workers() and len(workers()) == 1


def test_a_process_that_has_ended_meanwhile_is_replaced(ahead: WorkerAhead, workers: Workers) -> None:
    decode(ahead, b"a")
    (waiting,) = workers()
    waiting.kill()
    until(lambda: waiting.status() == psutil.STATUS_ZOMBIE)
    assert decode(ahead, b"b") != waiting.pid


def test_a_process_that_ends_while_its_file_comes_is_replaced(
    ahead: WorkerAhead, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing came for so long that it ended, just before its file."""
    decode(ahead, b"a", wait_s=0.01)
    (waiting,) = workers()
    until(lambda: waiting.status() == psutil.STATUS_ZOMBIE)
    taken = ahead._waiting
    assert taken is not None
    monkeypatch.setattr(ahead, "take", lambda command: taken[1])
    assert decode(ahead, b"b") != waiting.pid


def test_what_ends_after_it_was_closed_leaves_no_process(ahead: WorkerAhead, workers: Workers) -> None:
    ahead.close()
    decode(ahead, b"a")
    assert not workers()
