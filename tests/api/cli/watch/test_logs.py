"""`satchel logs`: the files of this machine's server, by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from satchel.api.cli.main import app
from satchel.cluster.connection import ClusterRecord
from satchel.cluster.errors import SatchelError
from satchel.cluster.home import Home, prepare_home, write_private_json
from satchel.cluster.processes import ProcessMark

from ..conftest import Served


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home with a server's lines, and the files of Ray's processes."""
    made = Home(tmp_path / "home")
    prepare_home(made)
    mark = ProcessMark.of(os.getpid())
    assert mark is not None
    record = ClusterRecord("127.0.0.1:1", "t", "satchel", "0", None, mark.pid, mark.created_s, str(tmp_path / "ray"), 0)
    write_private_json(made.cluster_file, asdict(record))
    record.log_dir.mkdir(parents=True)
    (record.log_dir / "worker-1.err").write_text(":job_id:01\n:actor_name:ReplicaActor\nloaded\n")
    (record.log_dir / "worker-2.err").write_text(":job_id:01\n:actor_name:RouterActor\n")
    (record.log_dir / "raylet.out").write_text("raylet\n")
    (made.run / "server.log").write_text("".join(f"line {number}\n" for number in range(50)))
    return made


def logs(home: Home, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["logs", *arguments, "--home", str(home.root)])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def test_the_last_lines_of_each_file(home: Home) -> None:
    server, worker = logs(home, "-n", "2").split("\n\n")
    assert server.splitlines() == [f"==> {home.run / 'server.log'} <==", "line 48", "line 49"]
    assert worker.splitlines()[0].startswith("==> ReplicaActor: ") and worker.splitlines()[1:] == ["loaded"]


def test_the_logs_of_satchels_processes_come_first(home: Home) -> None:
    home.logs.mkdir()
    (home.logs / "router.log").write_text("2026-01-31T12:00:05.117Z INFO    router satchel: it begins\n")
    (home.logs / "router.log.1").write_text("older\n")
    files = json.loads(logs(home, "--files", "--json"))
    assert [Path(file).name for file in files] == ["router.log", "server.log", "worker-1.err", "worker-2.err"]
    assert logs(home, "-n", "1").startswith(f"==> router: {home.logs / 'router.log'} <==\n2026-01-31T12:00:05.117Z")
    assert json.loads(logs(home, "-n", "1", "--json").splitlines()[0])["actor"] == "router"


def test_lines_for_programs(home: Home) -> None:
    found = [json.loads(line) for line in logs(home, "-n", "1", "--json").splitlines()]
    assert [(Path(each["file"]).name, each["actor"], each["line"]) for each in found] == [
        ("server.log", None, "line 49"),
        ("worker-1.err", "ReplicaActor", "loaded"),
    ]
    files = json.loads(logs(home, "--files", "--json"))
    assert [Path(file).name for file in files] == ["server.log", "worker-1.err", "worker-2.err"]


def test_following_shows_what_is_added(home: Home) -> None:
    command = [sys.executable, "-m", "satchel.api.cli", "logs", "-f", "-n", "1", "--home", str(home.root)]
    # Where tests run in the background, Ctrl-C is ignored, and so it would be there.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stdout is not None and process.stderr is not None
    shown: list[str] = []
    threading.Thread(target=shown.extend, args=[process.stdout], daemon=True).start()

    def wait_for(line: str) -> None:
        ends = time.monotonic() + 60
        while line not in shown and time.monotonic() < ends:
            time.sleep(0.05)
        assert line in shown

    try:
        wait_for("line 49\n")
        with (home.run / "server.log").open("a") as file:
            file.write("half a ")
            file.flush()
            time.sleep(0.5)
            file.write("line\n")
        (home.run / "ray.log").write_text("new\n")
        wait_for("half a line\n")
        wait_for("new\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


async def test_another_nodes_logs_are_said_to_be_there(served: Served) -> None:
    assert await served.refuses("logs", "--node", "mac1") == (
        "the logs of mac1 cannot be read from local: run `satchel logs` on that machine"
    )
    assert await served.refuses("logs", "--node", "mac9") == "there is no node mac9; there are: mac0, mac1"


def test_a_home_without_logs_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["logs", "--home", str(tmp_path)])
    assert isinstance(result.exception, SatchelError)
    assert result.exception.message == f"nothing was written on {tmp_path} yet: no server or node has run there"
