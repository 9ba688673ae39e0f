"""What is said of a Mac and done on it, on one that is made of scripts."""

from __future__ import annotations

import errno
import os
import plistlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from satchel.cluster.bring_up import doctor, mac
from satchel.cluster.bring_up.check import Check
from satchel.cluster.bring_up.doctor import examine
from satchel.cluster.bring_up.services import Service, daemon_advice, launchd_plist, systemd_unit
from satchel.cluster.config.config import Config, Model, parse_config
from satchel.cluster.config.nodes import Link, Node
from satchel.cluster.home import Home
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
    ("state", "rule", "result", "says"),
    [
        ("Firewall is disabled. (State = 0)", "", "ok", "is off"),
        ("Firewall is enabled. (State = 1)", "The application is not part of the firewall", "warn", "--add"),
        ("Firewall is enabled. (State = 1)", "Incoming connection to the application is permitted", "ok", "lets"),
        (
            "Firewall is enabled. (State = 1)",
            "Incoming connection to the application is blocked",
            "warn",
            "--unblockapp",
        ),
        ("Firewall is blocking all non-essential (State = 2)", "", "warn", "--setblockall off"),
    ],
)
def test_the_firewalls_question_is_explained(apple: FakeMac, state: str, rule: str, result: str, says: str):
    apple.firewall, apple.allowed = f"{state}\n", rule
    apple.tell()
    check = found("firewall", node=Node(name="mac0", address="192.168.1.10"))
    assert check.result == result and says in f"{check.found}; {check.mend}"
    if says in ("--add", "--unblockapp"):
        assert check.mend.count(says) == 3, "Python, and Ray's two programs"


def test_pythons_application_is_what_the_firewall_knows(apple: FakeMac, monkeypatch: pytest.MonkeyPatch):
    """Of python.org's and Homebrew's Python."""
    frame = "/opt/homebrew/Frameworks/Python.framework/Versions/3.13/Resources/Python.app"
    monkeypatch.setattr(psutil.Process, "exe", lambda _: f"{frame}/Contents/MacOS/Python")
    apple.firewall = "Firewall is enabled. (State = 1)\n"
    apple.tell()
    check = found("firewall", node=Node(name="mac0", address="192.168.1.10"))
    assert f"--unblockapp {frame};" in check.mend and "connections to Python.app, gcs_server, raylet," in check.found


def test_a_mac_alone_need_not_answer_the_firewall(apple: FakeMac):
    apple.firewall = "Firewall is enabled. (State = 1)\n"
    apple.tell()
    assert found("firewall").result == "ok" and "raylet" not in found("firewall").found
    (check,) = [check for check in mac.checks(HERE, open_to_others=True) if check.name == "firewall"]
    assert check.result == "warn" and check.mend.count("--add") == 1, "its clients are elsewhere"


def bridges(node: Node) -> list[Check]:
    return [check for check in mac.checks(node) if check.name.startswith(("thunderbolt", "link"))]


def test_a_bridge_of_thunderbolt_cables_needs_a_fixed_address_and_a_link(apple: FakeMac):
    node = Node(name="mac0", address="192.168.1.10")
    assert bridges(node) == [], "no cable"
    apple.addresses["bridge0"] = "169.254.17.4"
    (check,) = bridges(node)
    assert check.result == "warn" and "self-assigned" in check.found
    assert 'networksetup -setmanual "Thunderbolt Bridge" 10.10.10.1 255.255.255.0' in check.mend
    apple.addresses["bridge0"] = "10.10.10.1"
    (check,) = bridges(node)
    assert check.result == "warn" and "links: [{address: 10.10.10.1, kind: thunderbolt}]" in check.mend
    linked = Node(name="mac0", address="192.168.1.10", links=(Link(address="10.10.10.1", kind="thunderbolt"),))
    assert [check.result for check in bridges(linked)] == ["ok"]
    assert [check.result for check in bridges(Node(name="mac0"))] == ["ok"], "alone it needs none"
    del apple.addresses["bridge0"]
    (check,) = bridges(linked)
    assert check.result == "warn" and "10.10.10.1" in check.found


def test_what_is_advised_for_a_bridge_is_a_config(apple: FakeMac):
    apple.addresses["bridge0"] = "10.10.10.1"
    (check,) = bridges(Node(name="mac0", address="192.168.1.10"))
    links = yaml.safe_load(check.mend[check.mend.index("links:") :])
    node = {"name": "mac0", "address": "192.168.1.10", **links}
    config = parse_config({"models": [{"name": "x", "source": "x"}], "nodes": [node]})
    assert config.machines[0].links == (Link(address="10.10.10.1", kind="thunderbolt"),)


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


def test_weights_are_only_looked_at_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[Config] = []
    monkeypatch.setattr(doctor, "_largest_weights", lambda config: (looked.append(config), 0)[1])
    examine(Config(models=(Model(name="a/large", source=str(tmp_path)),)), Home(tmp_path / "home"))
    assert looked == []


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


def test_machines_that_are_off_are_waited_for_together(monkeypatch: pytest.MonkeyPatch):
    together = threading.Barrier(4)

    def silent(*_: object) -> socket.socket:
        # Breaks if the next one is only tried when this one has ended.
        together.wait(10)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    nodes = [Node(name=f"mac{number}", address=f"192.168.1.{number}") for number in range(1, 5)]
    assert [(check.name, check.result) for check in mac.reach(nodes)] == [
        (f"network to mac{number}", "warn") for number in range(1, 5)
    ]
    assert mac.reach([]) == []


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
