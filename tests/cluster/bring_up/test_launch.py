"""How a head keeps its nodes up, with small programs in place of `satchel join`."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from satchel.cluster.bring_up import launch
from satchel.cluster.bring_up.doctor import check_hosts
from satchel.cluster.bring_up.launch import SSH, JoinOrder, Launcher, command_of, unresolved
from satchel.cluster.config.nodes import Link, Node
from satchel.cluster.home import Home
from satchel.cluster.processes import ProcessMark
from satchel.cluster.trust.invitations import Invitation

INVITATION = Invitation("10.0.0.1:6379", "f" * 43, "s" * 32)

PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path

folder, how = Path(sys.argv[1]), sys.argv[2]
line = sys.stdin.readline()
starts = folder / "starts"
with starts.open("a") as file:
    file.write(f"{os.getpid()} {time.monotonic()}\\n")
(folder / "order").write_text(line)
if how == "refuse":
    sys.exit("satchel: the cluster is not there")
if how == "long":
    print("x" * 1_000_000, end="", flush=True)
if how == "raw":
    print("[2026-11-28 14:21:30,194 E 1 1] rpc_client.h:204: Failed to connect to GCS within 60 seconds.")
    print("satchel: the head does not answer")
    sys.exit("\\x1b[33m(raylet)\\x1b[0m The program will terminate.")
if how == "silent":
    sys.exit(1)
if how == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Joining", flush=True)
print("\\xff\\n\\nready", flush=True)
if how == "brief":
    sys.exit(3)
sys.stdin.read()
while how == "stuck":
    time.sleep(1)
(folder / "left").touch()
"""


class World:
    """One node, and the launcher that keeps it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        self.node = Node(name="mac1", links=(Link("10.0.0.2", "thunderbolt"),), disk_bytes_max=2**30)
        self.said: list[str] = []
        self.launchers: list[Launcher] = []
        self.leave_s = 3.0

    def start(self) -> Launcher:
        home = Home(self.folder)
        self.launchers.append(Launcher((self.node,), home, lambda: INVITATION, self.said.append, self.leave_s))
        return self.launchers[-1]

    def starts(self) -> list[tuple[int, float]]:
        """Process id and time of each start of the node."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], World]]:
    found = World(tmp_path)
    monkeypatch.setattr(launch, "RETRY_FIRST_S", 0.1)

    def of(how: str) -> World:
        command = [sys.executable, str(found.program), str(found.folder), how]
        monkeypatch.setattr(launch, "command_of", lambda node, home: command)
        return found

    yield of
    for launcher in found.launchers:
        launcher.stop()
    assert not [pid for pid, _ in found.starts() if ProcessMark.of(pid) is not None]


def wait_until(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_node_gets_its_order_says_that_it_is_ready_and_leaves_when_the_head_stops(world: Callable[[str], World]):
    stay = world("stay")
    launcher = stay.start()
    assert launcher.wait(20) == []
    assert stay.said == ["Node mac1 is ready"]
    order = JoinOrder.from_line((stay.folder / "order").read_bytes())
    assert order == JoinOrder(INVITATION, stay.node), "links and limits too"
    launcher.stop()
    assert (stay.folder / "left").exists(), "it had the time to leave in order"
    assert len(stay.starts()) == 1 and stay.said == ["Node mac1 is ready"]


def test_a_node_that_does_not_leave_is_ended(world: Callable[[str], World]):
    stuck = world("stuck")
    stuck.leave_s = 0.3
    launcher = stuck.start()
    assert launcher.wait(20) == []
    began = time.monotonic()
    launcher.stop()
    assert time.monotonic() - began < 20
    assert ProcessMark.of(stuck.starts()[0][0]) is None


def test_a_node_that_ends_is_started_again_later_and_later(world: Callable[[str], World]):
    refused = world("refuse")
    launcher = refused.start()
    wait_until(lambda: len(refused.starts()) >= 4)
    (late,) = launcher.wait(0)
    assert late == "mac1: the cluster is not there"
    assert refused.said[0] == "Node mac1 has not come up (the cluster is not there); it is started again in 0 s"
    launcher.stop()
    at = [at for _, at in refused.starts()]
    pauses = [later - sooner for sooner, later in pairwise(at)]
    assert pauses[0] >= 0.1 and pauses[1] >= 0.2 and pauses[2] >= 0.4
    count = len(at)
    time.sleep(0.3)
    assert len(refused.starts()) == count, "a stopped launcher starts nothing"


def test_a_node_that_stayed_is_soon_started_again(world: Callable[[str], World], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "STEADY_S", 0.0)
    brief = world("brief")
    brief.start()
    wait_until(lambda: len(brief.starts()) >= 6, 20)
    # What it said when all was well is no reason for its end.
    gone = [line for line in brief.said if "is gone" in line]
    assert set(gone) == {"Node mac1 is gone (without a word); it is started again in 0 s"}
    assert len(brief.said) >= 2 * len(gone) - 1, "each time it was ready"


@pytest.mark.parametrize("how", ["silent", "long"])
def test_whatever_a_node_says_it_is_kept(how: str, world: Callable[[str], World]):
    odd = world(how)
    launcher = odd.start()
    if how == "silent":
        wait_until(lambda: odd.said)
        assert launcher.wait(0) == ["mac1: it has said nothing"]
        assert "(without a word)" in odd.said[0]
    else:
        assert launcher.wait(20) == [], "a line without an end is no reason to wait for ever"


def test_a_command_that_cannot_be_started_is_tried_again(world: Callable[[str], World], monkeypatch):
    missing = world("stay")
    monkeypatch.setattr(launch, "command_of", lambda node, home: [str(missing.folder / "nothing")])
    launcher = missing.start()
    wait_until(lambda: len(missing.said) >= 2)
    assert "cannot be started" in launcher.wait(0)[0] and "No such file" in missing.said[0]


def test_stopping_while_nodes_start_leaves_none(world: Callable[[str], World]):
    stay = world("stay")
    launcher = stay.start()
    threads = [threading.Thread(target=launcher.stop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    time.sleep(0.3)
    assert not [pid for pid, _ in stay.starts() if ProcessMark.of(pid) is not None]


def test_a_machine_is_reached_by_ssh_with_its_words_kept_together(tmp_path: Path):
    node = Node(name="mac1", address="10.0.0.2", ssh="me@mac1", home="/a b/$HOME", command="/opt/x y/satchel -P")
    *ssh, host, dashes, words = command_of(node, Home(tmp_path))
    assert (tuple(ssh), host, dashes) == (SSH, "me@mac1", "--")
    assert shlex.split(words) == ["/opt/x", "y/satchel", "-P", "join", "--ordered", "--home", "/a b/$HOME"]
    own = command_of(Node(name="mac1"), Home(tmp_path))
    assert own[0] == sys.executable and own[-1] == str(tmp_path / "nodes" / "mac1") and "--ordered" in own


def test_a_machine_runs_what_uv_installed_though_its_shell_does_not_look_there(tmp_path: Path):
    installed = tmp_path / ".local" / "bin" / "satchel"
    installed.parent.mkdir(parents=True)
    installed.write_text('#!/bin/sh\necho installed "$@"\n')
    installed.chmod(0o755)
    line = command_of(Node(name="mac1", address="10.0.0.2", ssh="mac1"), Home(tmp_path))[-1]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "installed join --ordered\n", run.stderr


def test_a_node_that_ends_says_why_in_words_and_not_in_those_of_ray(world: Callable[[str], World]):
    raw = world("raw")
    raw.start()
    wait_until(lambda: raw.said)
    assert raw.said[0].startswith("Node mac1 has not come up (the head does not answer); ")


@pytest.mark.parametrize(
    ("status", "advice"), [(255, "`ssh me@mac1` has to work"), (127, "`command`"), (126, "`command`")]
)
def test_who_is_not_reached_is_told_what_to_do(status: int, advice: str, world: Callable[[str], World], monkeypatch):
    far = world("stay")
    far.node = Node(name="mac1", address="10.0.0.2", ssh="me@mac1")
    monkeypatch.setattr(launch, "command_of", lambda node, home: ["sh", "-c", f"echo 'no way' >&2; exit {status}"])
    launcher = far.start()
    wait_until(lambda: far.said)
    assert far.said[0].startswith(f"Node mac1 has not come up (no way: {advice}")
    assert launcher.wait(0)[0].startswith(f"mac1: no way: {advice}")


def test_a_secret_is_on_no_command_line_and_in_no_repr(tmp_path: Path):
    order = JoinOrder(INVITATION, Node(name="mac1", address="10.0.0.2", ssh="mac1"))
    told = " ".join(command_of(order.node, Home(tmp_path)))
    assert INVITATION.secret not in repr(order) and INVITATION.secret not in told


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"{}\n",
        b"\xff\n",
        b'{"invitation": "a:1#s.f", "node": {"name": "a"}}\n',
        b'{"invitation": "%s", "node": {"name": "NO"}}\n' % INVITATION.to_text().encode(),
        b'{"invitation": "%s", "node": {"name": "a", "colour": 1}}\n' % INVITATION.to_text().encode(),
    ],
)
def test_what_is_no_order_is_refused(line: bytes):
    with pytest.raises(ValueError):
        JoinOrder.from_line(line)


def test_hosts_without_an_address_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As ssh's config calls them; behind a proxy another machine knows their names."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\ncase $2 in\nmini) echo hostname mini.nowhere;;\n"
        "far) echo hostname far.nowhere; echo proxyjump gate;;\n"
        "*) echo hostname ${2#*@}; echo proxycommand none;;\nesac\n"
    )
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def look_up(host: str, port: None) -> list[object]:
        if host.endswith("nowhere"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(launch.socket, "getaddrinfo", look_up)
    names = {"mini": "mini", "far": "far", "air": "me@air.nowhere", "near": "me@here"}
    head = Node(name="studio", address="10.0.0.1")
    nodes = [head, *(Node(name=name, address="10.0.0.2", ssh=ssh) for name, ssh in names.items())]
    assert unresolved(nodes) == [
        "the host mini.nowhere (ssh: mini) of node mini is not found: Name or service not known",
        "the host air.nowhere (ssh: me@air.nowhere) of node air is not found: Name or service not known",
    ]
    assert [check.result for check in check_hosts(nodes)] == ["warn", "warn"]
    assert [check.result for check in check_hosts([head, nodes[-1]])] == ["ok"] and check_hosts([head]) == []
