"""A process's logs: what a line says, which lines are written, and where."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from satchel.cluster.config.config import Logs
from satchel.cluster.home import Home
from satchel.cluster.telemetry.context import working_for
from satchel.cluster.telemetry.log_file import FORMER, LogFile, remove_old
from satchel.cluster.telemetry.logs import adopt_ray_loggers, begin_logs

OWN, THEIRS = logging.getLogger("satchel.api.test"), logging.getLogger("some_library")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Logging is as before afterwards."""
    root, own = logging.getLogger(), logging.getLogger("satchel")
    handlers, level = list(root.handlers), own.level
    yield Home(tmp_path)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
        handler.close()
    own.setLevel(level)


def lines(home: Home, name: str = "router") -> list[str]:
    return (home.logs / f"{name}.log").read_text().splitlines()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("satchel", logging.INFO, "", 0, text, None, None)


def test_a_line_for_people(home: Home):
    begin_logs("replica:m-0", Logs(), home)
    OWN.warning("%d sequences end", 3)
    with working_for("req-1"):
        try:
            raise ValueError("a fault")
        except ValueError:
            OWN.exception("it failed")
    _, plain, failed, *more = lines(home, "replica-m-0")
    time_, rest = plain.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time_)
    assert rest == "WARNING replica:m-0 satchel.api.test: 3 sequences end"
    assert failed.endswith("ERROR   replica:m-0 satchel.api.test [req-1]: it failed")
    assert more[0] == "    Traceback (most recent call last):" and more[-1] == "    ValueError: a fault"


def test_a_line_for_programs(home: Home):
    begin_logs("router", Logs(format="json"), home)
    with working_for("req-1"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            OWN.exception("it failed")
    first, failed = map(json.loads, lines(home))
    assert first["process"] == "router" and first["pid"] == os.getpid() and "request_id" not in first
    trace = failed.pop("traceback")
    assert trace.startswith("Traceback") and trace.endswith("ValueError: two\nlines")
    assert failed.pop("time").endswith("Z")
    assert failed == {
        "level": "error",
        "logger": "satchel.api.test",
        "process": "router",
        "pid": os.getpid(),
        "message": "it failed",
        "request_id": "req-1",
    }


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["own debug", "own info", "own warning", "their warning"]),
        ("info", ["own info", "own warning", "their warning"]),
        ("error", []),
    ],
)
def test_the_level_is_for_own_lines_and_libraries_may_only_warn(home: Home, level: Any, written: list[str]):
    begin_logs("router", Logs(level=level), home)
    for name in ("debug", "info", "warning"):
        getattr(OWN, name)("own %s", name)
        THEIRS.setLevel(logging.DEBUG)
        getattr(THEIRS, name)("their %s", name)
    found = lines(home) if (home.logs / "router.log").exists() else []
    assert [line.split(": ", 1)[1] for line in found if "begins" not in line] == written


def test_rays_lines_go_there_and_not_to_the_terminal(home: Home, capsys: pytest.CaptureFixture[str]):
    ray = logging.getLogger("ray")
    handlers, passed_on = list(ray.handlers), ray.propagate
    try:
        ray.addHandler(logging.StreamHandler(sys.stderr))
        begin_logs("server", Logs(), home, terminal=True)
        adopt_ray_loggers()
        logging.getLogger("ray.serve").propagate = True
        ray.error("a raylet died")
        OWN.warning("a replica has ended")
        OWN.info("this is for the file")
        assert capsys.readouterr().err == "a replica has ended\n"
        assert lines(home, "server")[1].endswith("ERROR   server ray: a raylet died")
    finally:
        ray.handlers, ray.propagate = handlers, passed_on


def test_files_have_a_bounded_size_and_number(tmp_path: Path):
    file = LogFile(tmp_path, "router", bytes_max=100)
    for number in range(40):
        file.emit(record(f"line {number:02} {'x' * 20}"))
    file.close()
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found] == ["router.log", *(f"router.log.{n + 1}" for n in range(FORMER))]
    assert all(path.stat().st_size <= 100 and path.stat().st_mode & 0o777 == 0o600 for path in found)
    # What is there are the last lines, none twice and none missing.
    numbers = [int(line.split()[1]) for path in reversed(found) for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 40)) and len(numbers) == 7


def test_two_processes_of_a_name_have_a_file_each(tmp_path: Path):
    first, second = (LogFile(tmp_path, "router", bytes_max=60) for _ in range(2))
    for number in range(5):
        first.emit(record(f"the first says {number}"))
        second.emit(record(f"the second says {number}"))
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert all("second" not in text for name, text in texts.items() if name.startswith("router.log"))
    assert all("first" not in text for name, text in texts.items() if name.startswith("router.2.log"))
    first.close()
    third = LogFile(tmp_path, "router")
    third.emit(record("the third goes on where the first ended"))
    assert "the first says 4" in (tmp_path / "router.log").read_text()
    assert "the third" in (tmp_path / "router.log").read_text()
    second.close()
    third.close()


def test_a_file_of_a_killed_process_is_free(tmp_path: Path):
    program = (
        "import logging, sys, pathlib; from satchel.cluster.telemetry.log_file import LogFile\n"
        "file = LogFile(pathlib.Path(sys.argv[1]), 'router')\n"
        "file.emit(logging.LogRecord('s', 20, '', 0, 'mine', None, None)); print('written', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "written\n"
    for text in ("while it lives", "after it"):
        file = LogFile(tmp_path, "router")
        file.emit(record(text))
        file.close()
        other.kill()
        other.communicate()
    assert (tmp_path / "router.2.log").read_text() == "while it lives\n"
    assert (tmp_path / "router.log").read_text() == "mine\nafter it\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "router.log").symlink_to("/dev/full")
    file = LogFile(tmp_path, "router")
    file.emit(record("this is lost"))
    (tmp_path / "router.log").unlink()
    file.close()
    file.emit(record("there is room again"))
    assert (tmp_path / "router.log").read_text() == "there is room again\n"
    assert capsys.readouterr().err == ""
    file.close()


def test_a_line_that_was_cut_ends_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, write = LogFile(tmp_path, "router"), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4]))
        file.emit(record("a long line"))
    file.emit(record("another"))
    assert (tmp_path / "router.log").read_text() == "a lo\nanother\n"
    file.close()


def test_a_folder_that_cannot_be_made_costs_lines_and_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("")
    LogFile(tmp_path / "file" / "logs", "router").emit(record("this is lost"))


def test_files_of_former_processes_go_and_those_in_use_stay(tmp_path: Path):
    used = LogFile(tmp_path, "used")
    used.emit(record("from long ago"))
    for name in ("old.log", "old.log.1", "new.log"):
        (tmp_path / name).write_text("x")
    long_ago = time.time() - 1000
    for name in ("used.log", "old.log"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    remove_old(tmp_path, time.time() - 500, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.log", "used.log"]
    (tmp_path / "newer.log").write_text("x")
    os.utime(tmp_path / "new.log", (long_ago + 900, long_ago + 900))
    remove_old(tmp_path, 0.0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newer.log", "used.log"]
    used.close()
