"""What a running node learns about its cluster from a real join server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.api.cli.machines import join as cli_join
from satchel.api.cli.machines.join import REFUSALS_MAX, REMOVED, Follower
from satchel.api.cli.machines.stay import node_command
from satchel.cluster.bring_up.launch import JoinOrder
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.connection import versions
from satchel.cluster.errors import NodeRemoved
from satchel.cluster.home import Home, ensure_token, prepare_home
from satchel.cluster.keys import create_key
from satchel.cluster.trust.admission import enter
from satchel.cluster.trust.invitations import invite, remembered
from satchel.cluster.trust.join_server import JoinServer
from satchel.cluster.trust.members import remove
from satchel.cluster.trust.takeover_state import kept_takeover_state, takeover_state_of

RAY = "10.0.0.1:6379"
MAC1 = Node(name="mac1", address="10.0.0.2")


class World:
    def __init__(self, folder: Path) -> None:
        self.head, self.home = Home(folder / "head"), Home(folder / "node")
        for home in (self.head, self.home):
            prepare_home(home)
        ensure_token(self.head)
        self.join_servers: list[JoinServer] = []
        self.open(RAY)
        invitation = invite(self.head, self.join_servers[0].address)
        enter(self.home, MAC1, invitation)
        self.follower = Follower(self.home, JoinOrder(invitation, MAC1), RAY)

    def open(self, ray: str) -> None:
        """Starts the head's server at its former port."""
        port = int(self.join_servers[-1].address.rpartition(":")[2]) if self.join_servers else 0
        join_server = JoinServer(self.head, Node(name="mac0"), port, versions())
        config = {"models": [{"name": "m", "source": "s"}], "nodes": [{"name": "mac0"}]}
        join_server.takeover_state = takeover_state_of(self.head, parse_config(config))
        join_server.open(ray)
        self.join_servers.append(join_server)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    for join_server in found.join_servers:
        join_server.close()


def test_what_the_head_tells_is_kept_as_it_is_now(world: World):
    world.follower.ask()
    known = kept_takeover_state(world.home)
    assert known is not None and known[0].head == "mac0" and known[0].keys is None
    create_key(world.head, "ann")
    world.follower.ask()
    known = kept_takeover_state(world.home)
    assert known is not None and known[0].keys == world.head.keys_file.read_text()
    assert not world.follower.over and world.follower.removed is None and not world.follower.silent


def test_a_head_that_has_ended_or_started_again_is_noticed_long_before_ray_does(world: World):
    world.join_servers[0].close()
    for _ in range(REFUSALS_MAX - 1):
        world.follower.ask()
    assert world.follower.silent and not world.follower.over, "it may be starting its server again"
    world.open(RAY)
    world.follower.ask()
    assert not world.follower.over
    world.join_servers[-1].close()
    for _ in range(REFUSALS_MAX):
        world.follower.ask()
    assert world.follower.over.endswith("has ended")


def test_another_ray_behind_the_join_server_is_a_cluster_that_was_started_again(world: World):
    world.join_servers[0].close()
    world.open("10.0.0.1:7000")
    world.follower.ask()
    assert world.follower.over.endswith("has started again")


def test_a_cut_is_no_end(world: World, monkeypatch: pytest.MonkeyPatch):
    """A network partition gives no answer, not even a refused connection."""
    world.join_servers[0].close()
    monkeypatch.setattr(cli_join, "knock", lambda join_server: "silent")
    for _ in range(2 * REFUSALS_MAX):
        world.follower.ask()
    assert world.follower.silent and not world.follower.over


def test_once_it_has_ended_nothing_is_stored_any_more(world: World):
    """The machine has left, and its takeover state is erased."""
    world.follower.end()
    world.follower.ask()
    assert kept_takeover_state(world.home) is None and not world.follower.silent


def test_what_is_secret_is_erased_where_a_removed_machine_hears_of_it(world: World):
    """It keeps what it needs to learn that again, and to be invited again."""
    world.follower.ask()
    assert world.home.takeover_state_file.exists()
    remove(world.head, "mac1")
    way = remembered(world.home)
    assert way is not None
    said = world.home.root / "said"
    with said.open("wb") as file:
        node = subprocess.Popen(node_command(world.home), stdin=subprocess.PIPE, stdout=file)
    try:
        assert node.stdin is not None
        # Kept open, because otherwise the node would leave.
        node.stdin.write(JoinOrder(way.way_back, MAC1).to_line())
        node.stdin.flush()
        assert node.wait(timeout=60) == REMOVED and "was removed from the cluster" in said.read_text()
    finally:
        node.kill()
        node.communicate()
    assert not world.home.takeover_state_file.exists() and not world.home.token_file.exists()
    assert remembered(world.home) == way and world.home.certificate_file.exists()


def test_the_heads_word_is_heard(world: World):
    remove(world.head, "mac1")
    world.follower.ask()
    assert isinstance(world.follower.removed, NodeRemoved) and not world.follower.over
