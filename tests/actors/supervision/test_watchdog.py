"""A process that looks after its parts, with polls made by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from satchel.actors.supervision.watchdog import Watchdog
from satchel.cluster import environment
from satchel.cluster.config.timing import USUAL
from satchel.cluster.home import Home
from satchel.cluster.incidents import incidents


class Part:
    """Runs what is posted at once, or not before it `moves` again."""

    def __init__(self) -> None:
        self.moves = True
        self.posted: list[Callable[[], None]] = []

    def post(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)
        self.run()

    def run(self) -> None:
        while self.moves and self.posted:
            self.posted.pop()()


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def watchdog(tmp_path: Path, ends: list[str], monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    # Only what the machine does could make a poll count less.
    monkeypatch.setattr("satchel.actors.supervision.watchdog.PAGING_FAULTS", 10**9)
    return Watchdog("it", Home(tmp_path), poll_s=USUAL.heartbeat_s, end=ends.append)


def test_a_part_that_stands_still_ends_the_process_with_a_reason(watchdog: Watchdog, ends: list[str]):
    part, other = Part(), Part()
    watchdog.watch("engine", part.post, lambda: 6.0)
    watchdog.watch("loop", other.post, lambda: 6.0)
    for _ in range(20):
        watchdog.poll()
    assert not ends and not watchdog.is_slow("engine")
    part.moves = False
    for _ in range(4):
        watchdog.poll()
    assert watchdog.is_slow("engine") and not watchdog.is_slow("loop") and not ends
    part.moves = True
    part.run()
    watchdog.poll()
    assert not watchdog.is_slow("engine"), "it only took long"
    part.moves = False
    for _ in range(8):
        watchdog.poll()
    (reason,) = ends
    assert "its engine has stood still for 6 s" in reason and len(part.posted) == 1


def test_nothing_is_ended_where_that_would_not_help(watchdog: Watchdog, ends: list[str]):
    """A store that waits for its disk; it is asked again after the same time."""
    part, asked = Part(), []
    part.moves = False

    def may_end() -> bool:
        asked.append(1)
        return len(asked) == 3

    watchdog.watch("disk", part.post, lambda: 5.0, may_end=may_end)
    for _ in range(11):
        watchdog.poll()
    assert len(asked) == 2 and not ends
    for _ in range(5):
        watchdog.poll()
    assert len(ends) == 1


def test_a_part_that_has_ended_is_watched_no_more(watchdog: Watchdog, ends: list[str]):
    pool = ThreadPoolExecutor(1)
    watchdog.watch("pool", pool.submit, lambda: 2.0)
    watchdog.poll()
    pool.shutdown()
    for _ in range(9):
        watchdog.poll()
    assert not ends


async def test_an_event_loop_is_watched_by_what_it_runs(watchdog: Watchdog, ends: list[str]):
    watchdog.watch("event loop", asyncio.get_running_loop().call_soon_threadsafe, lambda: 3.0)
    for _ in range(9):
        watchdog.poll()
        await asyncio.sleep(0)
    assert not ends
    for _ in range(4):
        watchdog.poll()
    assert len(ends) == 1, "it ran nothing between these"


def test_a_process_whose_end_is_intended_says_so_until_then(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch):
    """Else its successor's first heartbeat tells `satchel doctor` that it died, whenever a model is loaded again."""
    said: list[bool] = []
    monkeypatch.setattr(watchdog._heart, "beat", lambda *, leaving=False: said.append(leaving))
    watchdog.poll()
    watchdog.leave()
    watchdog.poll()
    assert said == [False, True, True]


def test_a_thread_is_watched_by_what_it_runs(watchdog: Watchdog, ends: list[str]):
    held = Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.wait)
        watchdog.watch("worker", pool.submit, lambda: 3.0)
        for _ in range(4):
            watchdog.poll()
        held.set()
    assert len(ends) == 1


PROGRAM = """
import sys
from pathlib import Path
from satchel.actors.supervision.watchdog import Watchdog
from satchel.cluster.home import Home
dog = Watchdog("it", Home(Path(sys.argv[1])), poll_s=0.01)
dog.watch("engine", lambda callback: None, lambda: 0.05)
dog.start()
import time
time.sleep(60)
"""


def test_a_real_process_ends_and_says_why(tmp_path: Path):
    home = Home(tmp_path)
    home.run.mkdir()
    # As it would be started by hand.
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, timeout=60)
    assert run.returncode == 1
    assert b"most recent call first" in run.stderr, "where its threads stood"
    (incident,) = incidents(home, 0.0)
    assert incident.kind == "stuck" and "its engine has stood still" in incident.text
    assert environment.heartbeats_path() is None
