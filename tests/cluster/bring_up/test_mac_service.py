"""A server on a Mac that is made of scripts: as a service of launchd from its installation to its end, and Ray's
start."""

from __future__ import annotations

import json
import os
import plistlib
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from satchel.api.cli.main import app
from satchel.cluster.bring_up import ray_node
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.bring_up.ray_node import RaySpec
from satchel.cluster.connection import find_cluster
from satchel.cluster.errors import NotRunning
from satchel.cluster.home import Home
from tests.worlds.fake_mac import FakeMac, fake_mac

REPOSITORY = Path(__file__).parents[3]
START_S = 120.0


@pytest.fixture
def apple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    return fake_mac(tmp_path / "tools", monkeypatch)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_an_agent_of_launchd_serves_until_it_is_removed(
    apple: FakeMac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the very lines that are printed, with launchd's environment, and to the last file."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder / "my models"))
    monkeypatch.chdir(folder)
    home, port = Home(folder / "a home"), free_port()
    model = {"name": "satchel/recall", "source": "embedded:recall"}
    (folder / "my config.yaml").write_text(json.dumps({"models": [model], "endpoint": {"port": port}}))
    result = CliRunner().invoke(app, ["install-service", "my config.yaml", "--home", str(home.root)])
    assert result.exit_code == 0, result.output
    (path,) = (folder / "Library" / "LaunchAgents").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and apple.calls("launchctl") == [], "nothing is started yet"
    job = plistlib.loads(path.read_bytes())
    assert job["EnvironmentVariables"]["HF_HOME"] == str(folder / "my models")
    start, stop = re.findall(r":  +(launchctl .+)$", result.output, re.MULTILINE)
    assert (done := shell(start)).returncode == 0, done.stderr
    try:
        assert shell(start).returncode != 0, "it is loaded already"
        record = wait_for_server(home)
        assert record.endpoint_url == f"http://127.0.0.1:{port}"
        assert psutil.Process(record.pid).environ()["PATH"] == "/usr/bin:/bin:/usr/sbin:/sbin"
    finally:
        done = shell(stop)
    assert done.returncode == 0, done.stderr
    verbs = [call.partition(" ")[0] for call in apple.calls("launchctl")]
    assert verbs == ["bootstrap", "bootstrap", "bootout"]
    assert not path.exists(), "at the next login it does not start again"
    with pytest.raises(NotRunning):
        find_cluster(home)


def wait_for_server(home: Home):
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        try:
            if (record := find_cluster(home)).endpoint_url:
                return record
        except NotRunning:
            pass
        time.sleep(0.2)
    raise AssertionError((home.run / "service.log").read_text())


@pytest.mark.parametrize(("system", "gpus"), [("darwin", 0), ("linux", None)])
def test_ray_looks_for_no_gpu_on_a_mac(system: str, gpus: int | None, apple: FakeMac, monkeypatch: pytest.MonkeyPatch):
    """It would start `system_profiler`, which takes seconds, and then count what only MLX uses."""
    monkeypatch.setattr(sys, "platform", system)
    started: list[object] = []

    def start(**how: object) -> tuple[str, list[int]]:
        started.append(how["num_gpus"])
        return "127.0.0.1:1", []

    monkeypatch.setattr(ray_node, "start_ray_node", start)
    ray_node.start_ray(RaySpec("mac0", "127.0.0.1", "r", None, "/tmp/a", "/tmp/b", "/tmp/c", 2**27))
    assert started == [gpus]


STARTS = """
import json, os, sys
from pathlib import Path
import psutil, pytest, ray
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.home import Home
from tests.worlds.fake_mac import fake_mac

with pytest.MonkeyPatch.context() as patch:
    mac = fake_mac(Path(sys.argv[1]), patch)
    cluster = LocalCluster(Home(Path(sys.argv[2])), cpus=2)
    cluster.start()
    found = {"pid": os.getpid(), "up": [node["Alive"] for node in ray.nodes()], "awake": mac.calls("caffeinate")}
    found["alive"] = cluster._awake.poll() is None
    awake = cluster._awake
    cluster.stop()
    found["ended"] = awake.poll() is not None
    print(json.dumps(found))
"""


def test_a_cluster_comes_up_on_a_mac_and_keeps_it_awake(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path / "tools"), str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["up"] == [True] and found["awake"] == [f"-i -w {found['pid']}"]
    assert found["alive"] and found["ended"], "afterwards it may sleep again"
