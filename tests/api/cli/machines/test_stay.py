"""A machine rejoins its cluster by itself; small programs stand in for its node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from satchel.api.cli.machines import stay
from satchel.api.cli.machines.service import leave
from satchel.api.cli.machines.stay import invited, named_node, own_node
from satchel.cluster.bring_up.launch import JoinOrder
from satchel.cluster.config.nodes import Node
from satchel.cluster.errors import ClusterError, HomeInUse
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.node_keeper import find_keeper
from satchel.cluster.trust.invitations import Invitation, remember
from satchel.cluster.trust.members import Member, Members
from satchel.cluster.trust.takeover_state import TakeoverState, keep_takeover_state
from tests.worlds.loopback import several_addresses

INVITATION = Invitation("10.0.0.1:6379", "f" * 43, "s" * 32)
MAC1 = Node(name="mac1", address="127.0.0.1")

PROGRAM = """\
import os, signal, sys, time
from pathlib import Path

folder, home = Path(sys.argv[1]), Path(sys.argv[2])
line = sys.stdin.readline()
number = len(list(folder.glob("order*")))
(folder / f"order{number}").write_text(line)
how = (folder / "script").read_text().split()[number]
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
print("Joining", flush=True)
print("raw words of a library", file=sys.stderr, flush=True)
if how == "refuse":
    print("satchel: the invitation is not good", flush=True)
    sys.exit(1)
print("ready", flush=True)
if how == "lose":
    time.sleep(0.3)
    print("satchel: the head does not answer", flush=True)
    sys.exit(1)
if how == "crash":
    time.sleep(0.3)
    os.abort()
if how == "removed":
    time.sleep(0.3)
    print("satchel: it was removed from the cluster", flush=True)
    sys.exit(4)
import select
while not leaving:
    if select.select([sys.stdin], [], [], 0.02)[0]:
        (folder / "orphaned").touch()
        sys.exit(0)
print("Leaving", flush=True)
(folder / "left").touch()
"""

RUN = """\
import sys
from pathlib import Path
from satchel.api.cli.machines import stay
from satchel.cluster.bring_up.launch import JoinOrder
from satchel.cluster.home import Home

folder = Path(sys.argv[1])
stay.LOOK_S = stay.RETRY_FIRST_S = 0.1
stay.node_command = lambda home: [sys.executable, str(folder / "program.py"), str(folder), str(home.root)]
order = JoinOrder.from_line((folder / "first").read_bytes())
stay.stay(order.invitation, order.node, Home(folder / "home"))
"""


class World:
    """One machine; `script` is the program that its node runs at each start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / "home")
        prepare_home(self.home)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "run.py").write_text(RUN)
        self.process: subprocess.Popen[str] | None = None

    def start(self, script: str, invitation: Invitation = INVITATION) -> subprocess.Popen[str]:
        (self.folder / "script").write_text(script)
        (self.folder / "first").write_bytes(JoinOrder(invitation, MAC1).to_line())
        command = [sys.executable, str(self.folder / "run.py"), str(self.folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.process

    def order(self, number: int) -> JoinOrder:
        """Returns the order that the node got at one of its starts."""
        path = self.folder / f"order{number}"
        wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
        return JoinOrder.from_line(path.read_bytes())

    def heard(self) -> str:
        """Returns its whole output, after it has ended."""
        assert self.process is not None
        said, wrong = self.process.communicate(timeout=30)
        return said + wrong


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    if found.process is not None and found.process.poll() is None:
        found.process.kill()
        found.process.communicate()


@pytest.fixture
def join_server() -> Iterator[str]:
    """An address at which a server listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def wait_until(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("loss", ["lose", "crash"])
def test_a_machine_that_has_lost_its_cluster_joins_again_until_it_leaves(world: World, join_server: str, loss: str):
    remember(world.home, Invitation(join_server, "f" * 43), MAC1)
    world.start(f"{loss} refuse {loss} stay", Invitation(join_server, "f" * 43, "s" * 32))
    assert world.order(0).invitation.secret, "the invitation is good once"
    last = world.order(3)
    assert last.invitation == Invitation(join_server, "f" * 43), "after that its certificate lets it in"
    assert last.node == MAC1
    wait_until(lambda: (world.folder / "order3").exists() and find_keeper(world.home))
    time.sleep(0.2)
    leave(world.home, wait_s=20, say=lambda line: None)
    said = world.heard()
    assert world.process is not None and world.process.returncode == 0
    assert (world.folder / "left").exists()
    assert said.count(f"mac1 has joined {join_server}; Ctrl-C leaves") == 1
    assert said.count("mac1 is back in the cluster") == 2
    assert said.count("mac1 has lost the cluster at") == 2
    assert "mac1 is not back yet: the invitation is not good" in said
    assert ("the head does not answer" in said) == (loss == "lose")
    assert "raw words" not in said and "raw words" in world.home.node_log_file.read_text()
    assert said.count("Joining") == 1, "how it joins is shown once"


@several_addresses
def test_a_cluster_that_is_led_elsewhere_is_found_by_those_who_may_lead_it(world: World, join_server: str):
    """At the same port, and recognised by the key in the lost head's takeover state."""
    port = join_server.rpartition(":")[2]
    remember(world.home, Invitation(f"127.0.0.2:{port}", "f" * 43), MAC1)
    others = {name: Member(name, "127.0.0.1", name[0] * 43) for name in ("mac1", "other")}
    keep_takeover_state(world.home, TakeoverState("mac0", {}, Members(others)).to_text())
    world.start("lose stay", Invitation(f"127.0.0.2:{port}", "f" * 43, "s" * 32))
    assert world.order(1).invitation == Invitation(join_server, "o" * 43), "not itself, nor the head that is gone"


def test_a_disk_that_is_full_for_a_while_does_not_end_it(world: World, join_server: str):
    way = Invitation(join_server, "f" * 43)
    remember(world.home, way, MAC1)
    world.start("lose stay", way)
    world.order(0)
    world.home.node_log_file.unlink()
    # Writing to its path fails.
    world.home.node_log_file.mkdir()
    assert world.process is not None and world.process.stdout is not None
    while "mac1 is not back yet: cannot write" not in (line := world.process.stdout.readline()):
        assert line, "it has ended"
    world.home.node_log_file.rmdir()
    world.order(1)
    leave(world.home, wait_s=20, say=lambda line: None)
    world.heard()
    assert world.process.returncode == 0


def test_the_first_attempt_that_fails_ends_with_its_reason(world: World):
    world.start("refuse")
    assert world.heard().endswith("satchel: the invitation is not good\n")
    assert world.process is not None and world.process.returncode == 1
    assert not world.home.node_file.exists()


def test_the_heads_word_ends_it(world: World):
    world.start("removed")
    assert "mac1 is no node of its cluster any more: it was removed" in world.heard()
    assert world.process is not None and world.process.returncode == 0, "a service does not start it again"


def test_it_can_leave_while_the_cluster_is_away(world: World):
    remember(world.home, INVITATION, MAC1)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = Invitation(f"127.0.0.1:{taken.getsockname()[1]}", "f" * 43)
        remember(world.home, nobody, MAC1)
        world.start("lose", nobody)
        world.order(0)
        assert world.process is not None and world.process.stdout is not None
        while "joins again by itself" not in world.process.stdout.readline():
            assert world.process.poll() is None
        leave(world.home, wait_s=20, say=lambda line: None)
    assert world.heard() == "Left, while the cluster did not answer\n"
    assert world.process.returncode == 0


def test_a_node_whose_keeper_was_killed_ends_too(world: World):
    process = world.start("stay")
    # Until then its node may end by writing to a reader that is gone.
    assert process.stdout is not None
    while "mac1 has joined" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    process.kill()
    wait_until((world.folder / "orphaned").exists)
    assert find_keeper(world.home) is None


def test_a_home_has_one_keeper(world: World):
    world.start("stay")
    world.order(0)
    with pytest.raises(HomeInUse):
        stay.stay(INVITATION, MAC1, world.home)
    assert world.process is not None
    os.kill(world.process.pid, signal.SIGTERM)
    assert "Leaving" in world.heard()


@several_addresses
def test_a_machine_keeps_its_name_and_its_address_while_it_has_it(tmp_path: Path):
    home = Home(tmp_path)
    prepare_home(home)
    way = Invitation("127.0.0.1:6379", "f" * 43)
    assert named_node("mac7", "", way, home) == Node(name="mac7", address="127.0.0.1")
    remember(home, way, Node(name="studio", address="127.0.0.5"))
    assert named_node(None, "", way, home) == Node(name="studio", address="127.0.0.5")
    assert named_node("mac7", "10.0.0.7", way, home) == Node(name="mac7", address="10.0.0.7")
    remember(home, way, Node(name="studio", address="192.0.2.1"))
    assert named_node(None, "", way, home) == Node(name="studio", address="127.0.0.1"), "it has another one now"
    # As earlier versions stored it.
    home.membership_file.write_text(json.dumps({"door": way.join_server, "fingerprint": way.fingerprint}))
    assert named_node(None, "", way, home).name


@pytest.mark.parametrize("head", ["mac0", "mac0:", ":6379", "mac0:port", "mac0:0", "mac0:65536", "mac0:٣"])
def test_what_is_no_address_of_a_cluster_is_refused(head: str):
    with pytest.raises(ClusterError, match="HOST:PORT"):
        own_node("mac1", "", head)


def test_a_machine_that_never_joined_is_told_what_is_no_address(tmp_path: Path):
    for where in ("abc", "", "10.0.0.1", "10.0.0.1:port"):
        with pytest.raises(ClusterError, match=f"{where}' is neither an invitation.* nor the address.*HOST:PORT"):
            invited(where, Home(tmp_path))


def test_a_machine_that_joins_has_the_address_by_which_it_reaches_the_head():
    assert own_node("mac1", "", "127.0.0.1:6379") == Node(name="mac1", address="127.0.0.1")
    assert own_node("mac1", "10.0.0.7", "10.0.0.1:6379").address == "10.0.0.7"
    for name, address in (("M_1", ""), ("mac1", "here")):
        with pytest.raises(ClusterError, match="is no node"):
            own_node(name, address, "127.0.0.1:6379")


def test_without_an_invitation_a_machine_joins_the_cluster_that_it_was_in(tmp_path: Path):
    home = Home(tmp_path)
    prepare_home(home)
    for where in (None, "10.0.0.1:1"):
        with pytest.raises(ClusterError, match="satchel invite"):
            invited(where, home)
    remember(home, INVITATION, MAC1)
    assert invited(None, home) == Invitation(INVITATION.join_server, INVITATION.fingerprint)
    assert invited("10.0.0.9:1", home) == Invitation("10.0.0.9:1", INVITATION.fingerprint)
    assert invited(INVITATION.to_text(), home) == INVITATION
    with pytest.raises(ClusterError, match="satchel invite") as refused:
        invited(INVITATION.to_text()[:-1], home)
    assert INVITATION.secret not in refused.value.message
