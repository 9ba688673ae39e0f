"""`satchel up`, `down` and `leave`, with small programs in place of the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from satchel.api.cli.machines import service as cli_service
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config, default_config
from satchel.cluster.errors import ClusterError, HomeInUse, NotRunning, PortInUse
from satchel.cluster.home import Home, prepare_home, read_json, write_private_json
from satchel.cluster.processes import ProcessMark

PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path
import psutil

run, how = Path(sys.argv[1]), sys.argv[2:]
terminations = []

def arrived(number, frame):
    terminations.append(time.monotonic())
    (run / "terminations").write_text(str(len(terminations)))

signal.signal(signal.SIGTERM, arrived)
print("Starting", flush=True)
if "fail" in how:
    sys.exit("satchel: the port is taken")
if "crash" in how:
    os._exit(3)

def record(url):
    me = psutil.Process()
    fields = dict(address="10.0.0.1:6379", home="h", namespace="satchel", version="0", endpoint_url=url,
        pid=me.pid, pid_created_s=me.create_time(), temp_dir="/tmp/x", ray_sid=0, node="mac1", joined="joined" in how)
    part = run / "part"
    part.write_text(json.dumps(fields))
    part.replace(run / "cluster.json")

record(None)
time.sleep(0.3)
if "slow" not in how:
    record("http://127.0.0.1:1")
    print("Ready: http://127.0.0.1:1/v1", flush=True)
wanted = 2 if "busy" in how else 1
while len(terminations) < wanted or "stuck" in how:
    time.sleep(0.02)
(run / "cluster.json").unlink(missing_ok=True)
"""


class World:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.home = Home(folder / "home")
        self.config: Config = default_config()
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        self.said: list[str] = []
        self.stack = stack

    def command(self, *how: str) -> list[str]:
        # `--ordered` stands among its arguments as in those of a node that a head keeps.
        return [sys.executable, str(self.program), str(self.home.run), *how]

    def up(self, *how: str) -> int:
        """A server in the background: its process id."""
        self.stack.callback(self.kill)
        return cli_service.up(self.command(*how), self.config, self.home, self.said.append).pid

    def run(self, *how: str) -> subprocess.Popen[bytes]:
        """A server in the foreground of somebody else."""
        prepare_home(self.home)
        process = subprocess.Popen(self.command(*how), stdout=subprocess.DEVNULL)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        ends = time.monotonic() + 20
        while (read_json(self.home.cluster_file) or {}).get("endpoint_url") is None:
            assert time.monotonic() < ends and process.poll() is None
            time.sleep(0.02)
        return process

    def kill(self) -> None:
        """Whatever the home's record names."""
        data = read_json(self.home.cluster_file)
        if data is not None and ProcessMark(data["pid"], data["pid_created_s"]).is_alive():
            os.kill(data["pid"], signal.SIGKILL)

    def terminations(self) -> int:
        path = self.home.run / "terminations"
        # It may just be being written.
        return int(path.read_text() or 0) if path.exists() else 0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        found = World(tmp_path, stack)
        found.config = replace(found.config, endpoint=replace(found.config.endpoint, port=free_port()))
        yield found


def test_up_returns_once_the_server_is_ready_and_down_ends_it(world: World) -> None:
    pid = world.up()
    mark = ProcessMark.of(pid)
    assert mark is not None and os.getsid(pid) == pid, "a terminal's Ctrl-C does not reach it"
    assert world.said == ["Starting"]
    with pytest.raises(HomeInUse, match="satchel down"):
        world.up()
    cli_service.down(world.home, at_once=False, wait_s=20, say=world.said.append)
    assert not mark.is_alive() and world.terminations() == 1
    assert f"process {pid}" in world.said[-2] and world.said[-1] == "Stopped"
    with pytest.raises(NotRunning, match="no server runs on"):
        cli_service.down(world.home, at_once=False, wait_s=20, say=world.said.append)


def test_a_server_that_does_not_start_says_why(world: World) -> None:
    with pytest.raises(ClusterError) as failure:
        world.up("fail")
    assert failure.value.message == "the port is taken"
    with pytest.raises(ClusterError, match=r"ended while it started; see .*server\.log"):
        world.up("crash")


def test_a_taken_port_is_found_before_anything_starts(world: World) -> None:
    with socket.create_server(("127.0.0.1", world.config.endpoint.port)), pytest.raises(PortInUse):
        world.up()
    assert not world.home.run.exists()


def test_whoever_stops_waiting_leaves_no_server_behind(world: World) -> None:
    def interrupt(line: str) -> None:
        if line == "Starting":
            raise KeyboardInterrupt

    # This process may keep helpers of its own from earlier tests.
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        cli_service.up(world.command("slow"), world.config, world.home, interrupt)
    ends = time.monotonic() + 30
    while not world.terminations() or any(
        alive(child) for child in psutil.Process().children() if child.pid not in before
    ):
        assert time.monotonic() < ends
        time.sleep(0.05)


def alive(process: psutil.Process) -> bool:
    return ProcessMark.of(process.pid) is not None


def test_down_at_once_asks_twice(world: World) -> None:
    process = world.run("busy")
    reaping = threading.Thread(target=process.wait)
    reaping.start()
    cli_service.down(world.home, at_once=True, wait_s=20, say=world.said.append)
    reaping.join(20)
    assert (process.returncode, world.terminations()) == (0, 2)


def test_down_waits_no_longer_than_it_is_told(world: World) -> None:
    world.run("stuck")
    with pytest.raises(ClusterError, match="still ending after"):
        cli_service.down(world.home, at_once=False, wait_s=0.2, say=world.said.append)
    assert world.said[-1] != "Stopped"


def test_a_node_leaves_and_is_not_taken_down(world: World) -> None:
    process = world.run("joined")
    with pytest.raises(ClusterError, match="satchel leave"):
        cli_service.down(world.home, at_once=False, wait_s=20, say=world.said.append)
    assert world.terminations() == 0
    cli_service.leave(world.home, wait_s=20, say=world.said.append)
    assert world.said == ["mac1 is leaving the cluster at 10.0.0.1:6379", "Gone"]
    assert process.wait(20) == 0


def test_a_head_does_not_leave(world: World) -> None:
    process = world.run()
    with pytest.raises(ClusterError, match="is the head"):
        cli_service.leave(world.home, wait_s=20, say=world.said.append)
    assert process.poll() is None and world.terminations() == 0


def test_a_node_that_its_head_would_start_again_does_not_leave(world: World) -> None:
    process = world.run("joined", "--ordered")
    with pytest.raises(ClusterError, match="out of the config there"):
        cli_service.leave(world.home, wait_s=20, say=world.said.append)
    assert process.poll() is None and world.terminations() == 0


def test_where_nothing_runs_nobody_is_ended(world: World) -> None:
    def leave() -> None:
        cli_service.leave(world.home, wait_s=1, say=world.said.append)

    with pytest.raises(NotRunning, match="no node runs on"):
        leave()
    prepare_home(world.home)
    # A record whose process id belongs to somebody else by now.
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        fields = {"address": "a:1", "home": "h", "namespace": "n", "version": "0", "endpoint_url": None}
        fields |= {"pid": innocent.pid, "pid_created_s": 1.0, "temp_dir": "x", "ray_sid": 0, "joined": True}
        write_private_json(world.home.cluster_file, fields)
        with pytest.raises(NotRunning, match="no node runs on"):
            leave()
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()
    world.home.cluster_file.unlink()
    write_private_json(world.home.session_file, {"sid": 1, "processes": []})
    with pytest.raises(NotRunning, match="may be starting"):
        leave()
    assert world.said == []
