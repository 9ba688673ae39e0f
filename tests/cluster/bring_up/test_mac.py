"""What is said of a Mac and done on it, on one that is made of scripts."""

from __future__ import annotations

import errno
import os
import plistlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up import mac
from satchel.cluster.bring_up.check import Check
from satchel.cluster.bring_up.doctor import examine
from satchel.cluster.bring_up.services import Service, daemon_advice, launchd_plist, systemd_unit
from satchel.cluster.config import Config, Home, Model
from satchel.cluster.nodes import Node
from tests.worlds.fake_mac import GIB, FakeMac, fake_mac, other_values

HERE = Node(name="mac0")


@pytest.fixture
def apple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    return fake_mac(tmp_path / "tools", monkeypatch)


def found(name: str, weights_bytes: int = 0, node: Node = HERE) -> Check:
    (check,) = [check for check in mac.checks(node, weights_bytes) if check.name == name]
    return check


def test_a_mac_that_falls_asleep_is_kept_awake_or_named(apple: FakeMac):
    assert found("sleep").result == "ok" and "after 1 minute " in found("sleep").found
    dozing = found("sleep", node=Node(name="mac0", keep_awake=False))
    assert dozing.result == "warn" and "keep_awake" in dozing.mend
    apple.pmset = apple.pmset.replace("sleep                1", "sleep                0")
    apple.tell()
    assert found("sleep", node=Node(name="mac0", keep_awake=False)).result == "ok"


@pytest.mark.parametrize(
    ("memory", "limit_mb", "weights", "says"),
    [
        (64, 0, 40, "the GPU may use 48 of 64 GiB"),
        (16, 0, 4, "the GPU may use 11 of 16 GiB"),
        (64, 0, 50, "sudo sysctl iogpu.wired_limit_mb=57344"),
        (64, 57344, 50, "the GPU may use 56 of 64 GiB"),
        (64, 0, 60, "a smaller model"),
    ],
)
def test_a_model_that_the_gpu_may_not_hold_is_named(
    apple: FakeMac, memory: int, limit_mb: int, weights: int, says: str
):
    other_values(apple, {"hw.memsize": memory * GIB, "iogpu.wired_limit_mb": limit_mb})
    check = found("gpu memory", weights * GIB)
    assert says in f"{check.found}; {check.mend}" and (check.result == "warn") == bool(check.mend)


@pytest.mark.parametrize(
    ("says", "then"), [("Firewall is disabled. (State = 0)", "off"), ("enabled. (State = 1)", "asks")]
)
def test_the_firewalls_question_is_explained(apple: FakeMac, says: str, then: str):
    apple.firewall = f"{says}\n"
    apple.tell()
    assert then in found("firewall").found


def test_tools_that_are_missing_or_say_something_else_leave_their_check_out(apple: FakeMac):
    apple.pmset = apple.firewall = "nothing of the kind\n"
    apple.sysctl.clear()
    apple.tell()
    assert mac.checks(HERE) == []
    for tool in ("sysctl", "pmset", "socketfilterfw"):
        (apple.folder / tool).unlink()
    assert mac.checks(HERE) == []


def test_nothing_is_asked_elsewhere(apple: FakeMac, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert mac.checks(HERE) == [] and mac.stay_awake(os.getpid()) is None
    assert not list(apple.folder.glob("*.calls"))


def test_the_doctor_says_it(apple: FakeMac, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(50 * GIB)
    config = Config(models=(Model(name="a/large", source=str(folder)),))
    said = {check.name: check for check in examine(config, Home(tmp_path / "home"))}
    assert said["gpu memory"].result == "warn" and "wired_limit_mb" in said["gpu memory"].mend
    assert {"sleep", "firewall"} <= said.keys()


@pytest.fixture
def served() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_mac_is_awake_as_long_as_the_process_lives(apple: FakeMac, served: subprocess.Popen[bytes]):
    """Also if it is killed."""
    awake = mac.stay_awake(served.pid)
    assert awake is not None and awake.poll() is None
    served.kill()
    served.wait()
    awake.wait(timeout=10)
    assert apple.calls("caffeinate") == [f"-i -w {served.pid}"]


def test_a_mac_without_caffeinate_serves_too(apple: FakeMac, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert mac.stay_awake(os.getpid()) is None


def test_a_node_that_refuses_is_there_and_one_without_a_route_is_named(apple: FakeMac, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert [check.result for check in mac.reach([HERE], port)] == ["ok"]
    assert [check.result for check in mac.reach([HERE], port)] == ["ok"], "it refuses"

    def no_route(*_: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", no_route)
    (check,) = mac.reach([Node(name="mac1", address="192.168.1.11")])
    assert check.result == "warn" and "No route to host" in check.found and "Local Network" in check.mend
    monkeypatch.setattr(sys, "platform", "linux")
    (check,) = mac.reach([Node(name="mac1", address="192.168.1.11")])
    assert check.result == "warn" and "Local Network" not in check.mend


def test_silence_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mac, "_CONNECT_S", 0.2)
    began = time.monotonic()
    # A queue of connections that is full, as a machine is that does not answer.
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        assert [check.result for check in mac.reach([HERE], full.getsockname()[1])] == ["warn"]
    assert time.monotonic() - began < 10


def test_a_service_has_the_variables_and_a_daemon_its_user():
    service = Service(
        "satchel-join", "", ("/a/python", "-m"), Path("/srv"), Path("/x.log"), (("HF_HOME", "/my models"),)
    )
    found = plistlib.loads(launchd_plist(service, "ann"))
    assert (found["UserName"], found["EnvironmentVariables"]) == ("ann", {"HF_HOME": "/my models"})
    assert "UserName" not in plistlib.loads(launchd_plist(service))
    assert '\nEnvironment="HF_HOME=/my models"\nRestart=on-failure\n' in systemd_unit(service)
    start, stop, _ = daemon_advice(service, Path("/h/run/a b.plist"))
    assert "sudo install -o root -g wheel -m 600 '/h/run/a b.plist' /Library/LaunchDaemons/satchel-join.plist" in start
    assert "launchctl bootstrap system" in start and "bootout system/satchel-join" in stop
