"""Processes that give no sign of life are ended; those that stand still with everything else are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up.heartbeats import HeartbeatListener, Heartbeats, HeartbeatSender
from satchel.cluster.processes import ProcessMark

A, B = ProcessMark(1, 100.0), ProcessMark(2, 200.0)


def test_who_is_silent_for_too_long_is_told_once():
    heard = Heartbeats(3)
    heard.hear(A, "a")
    heard.hear(B, "b")
    assert heard.poll(lambda mark: True) == heard.poll(lambda mark: True) == []
    heard.hear(B, "b")
    assert heard.poll(lambda mark: True) == [("a", A)]
    assert heard.poll(lambda mark: True) == []
    assert heard.poll(lambda mark: True) == [("b", B)]


def test_who_has_ended_is_not_silent():
    heard = Heartbeats(1)
    heard.hear(A, "a")
    assert heard.poll(lambda mark: False) == [] == heard.poll(lambda mark: True)


def test_a_successor_tells_of_the_end_of_the_one_before():
    heard = Heartbeats(9)
    assert heard.hear(A, "a") is None and heard.hear(A, "a") is None
    assert heard.hear(B, "a") == A.pid
    assert heard.hear(B, "a") is None
    heard.hear(B, "a", leaving=True)
    assert heard.hear(ProcessMark(3, 300.0), "a") is None, "its end had been asked for"


@pytest.fixture
def folder() -> Iterator[Path]:
    # A socket's name is short.
    with tempfile.TemporaryDirectory(prefix="hb-", dir="/tmp") as name:
        yield Path(name)


PROGRAM = """
import sys, time
from pathlib import Path
from satchel.cluster.bring_up.heartbeats import HeartbeatSender
heart = HeartbeatSender(Path(sys.argv[1]), "it")
while True:
    heart.beat()
    print("beat", flush=True)
    time.sleep(0.01)
"""


def test_a_stopped_process_is_ended_and_no_strangers_is(folder: Path):
    told: list[tuple[str, str]] = []
    path = folder / "heartbeats"
    listener = HeartbeatListener(path, 3.0, 1.0, lambda kind, text: told.append((kind, text)))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(10):
            assert process.stdout.readline()
            listener.listen(process.pid)
            listener.poll(process.pid)
        assert told == []
        # This process is of another session: it is not listened to.
        HeartbeatSender(path, "stranger").beat()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for _ in range(4):
            listener.listen(process.pid)
            listener.poll(process.pid)
        assert process.wait(10) == -signal.SIGKILL
        ((kind, text),) = told
        assert kind == "silent" and text.startswith(f"it (process {process.pid}) sent no heartbeat for 3 s")
    finally:
        process.kill()
        process.wait(10)
        listener.close()


def test_a_machine_that_joins_goes_by_the_times_that_it_hears(folder: Path):
    listener = HeartbeatListener(folder / "heartbeats", 120.0, 1.0, lambda kind, text: None)
    try:
        assert listener._heartbeats.silent_polls_max == 120
        listener.go_by(60.0, 3.0)
        assert listener._heartbeats.silent_polls_max == 20
        listener.go_by(1.0, 3.0)
        assert listener._heartbeats.silent_polls_max == 1
    finally:
        listener.close()


def test_rubbish_is_not_listened_to_and_nobody_need_listen(folder: Path):
    told: list[str] = []
    path = folder / "heartbeats"
    HeartbeatSender(path, "early").beat()
    HeartbeatSender(None, "alone").beat()
    listener = HeartbeatListener(path, 1.0, 1.0, lambda kind, text: told.append(text))
    sender = HeartbeatSender(path, "it")
    for rubbish in (b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid": 1}', b"\xff" * 100):
        sender._socket.sendto(rubbish, str(path))
    listener.listen(os.getsid(0))
    for _ in range(5000):
        # What nobody takes is lost.
        sender.beat()
    listener.listen(os.getsid(0))
    listener.close()
    assert told == []
