"""The state of a home before it becomes the head in place of a lost one. `tests/system/hosts/test_members.py` tests
that the cluster then runs."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from satchel.api.cli.machines.promote import promote
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config, load_config, parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.connection import ClusterRecord, versions
from satchel.cluster.errors import ClusterError, HomeInUse, PortInUse
from satchel.cluster.home import Home, ensure_token, prepare_home, write_private, write_private_json
from satchel.cluster.keys import create_key, read_keys
from satchel.cluster.processes import ProcessMark
from satchel.cluster.trust.admission import enter
from satchel.cluster.trust.certificates import own_fingerprint
from satchel.cluster.trust.invitations import Invitation, invite
from satchel.cluster.trust.join_server import JoinServer
from satchel.cluster.trust.members import Member, members, remove
from satchel.cluster.trust.takeover_state import keep_takeover_state, renounce_takeover_state, takeover_state_of
from tests.worlds.loopback import several_addresses

pytestmark = several_addresses

OWN = "127.0.0.3"
HEAD = "127.0.0.2"


class World:
    """A head with two machines, one of which is promoted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.head, self.home = folder, Home(folder / "head"), Home(folder / "own")
        for home in (self.head, self.home):
            prepare_home(home)
        ensure_token(self.head)
        self.port = free_port(OWN)
        self.join_server = JoinServer(self.head, Node(name="mac0", address=HEAD), self.port, versions())
        self.join_server.open("127.0.0.2:6379")
        enter(self.home, Node(name="mac1", address=OWN), invite(self.head, self.join_server.address))
        third = Home(folder / "third")
        prepare_home(third)
        enter(third, Node(name="mac2", address="127.0.0.4"), invite(self.head, self.join_server.address))
        self.said: list[str] = []

    def tell(self, **more: Any) -> None:
        """The head hands over its takeover state, and is lost."""
        config = parse_config({"models": [{"name": "m", "source": "s"}], **more})
        keep_takeover_state(self.home, takeover_state_of(self.head, config)().to_text())
        self.join_server.close()

    def promote(self, **options: Any) -> Config:
        how: dict[str, Any] = {"listen": None, "force": False, **options}
        return load_config(promote(self.home, say=self.said.append, **how))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.join_server.close()


NODES = [
    {"name": "mac0", "address": HEAD},
    {"name": "mac1", "address": OWN, "ssh": "mac1", "command": "/opt/satchel", "disk_bytes_max": "1GiB"},
    {"name": "mac3", "address": "127.0.0.5", "ssh": "mac3"},
]


def test_the_config_is_the_heads_with_this_machine_in_its_place(world: World):
    models = [{"name": "m", "source": "s", "nodes": ["mac0", "mac3"]}, {"name": "n", "source": "s", "nodes": ["mac0"]}]
    world.tell(nodes=NODES, models=models, replication=2, endpoint={"listen": HEAD, "port": 8123})
    config = world.promote()
    assert [(node.name, node.address, node.ssh) for node in config.machines] == [
        ("mac1", OWN, None),
        ("mac3", "127.0.0.5", "mac3"),
    ]
    assert config.machines[0].disk_bytes_max == 2**30, "what the config says of this machine stays"
    assert (config.endpoint.listen, config.endpoint.port, config.replication) == (OWN, 8123, 2)
    assert config.control_port == world.port, "the others look for it there"
    assert [model.nodes for model in config.models] == [("mac3",), ()], "a model of the lost head alone runs anywhere"


@pytest.mark.parametrize(
    ("of_head", "given", "becomes"), [("0.0.0.0", None, "0.0.0.0"), (HEAD, "10.0.0.9", "10.0.0.9")]
)
def test_the_endpoint_listens_where_the_heads_did_or_as_told(
    world: World, of_head: str, given: str | None, becomes: str
):
    world.tell(nodes=NODES[:1], endpoint={"listen": of_head})
    assert world.promote(listen=given).endpoint.listen == becomes


def test_keys_and_the_endpoints_certificate_come_along_and_own_ones_are_put_aside(world: World, tmp_path: Path):
    key, _ = create_key(world.head, "ann", admin=True)
    create_key(world.home, "of-before")
    for name in ("pem", "key"):
        (tmp_path / f"endpoint.{name}").write_text(f"the {name}")
    files = {"certificate": str(tmp_path / "endpoint.pem"), "key": str(tmp_path / "endpoint.key")}
    world.tell(nodes=NODES[:1], endpoint={"tls": files})
    config = world.promote()
    assert read_keys(world.home) == (key,)
    assert len(list(world.home.root.glob("keys-*.json"))) == 1
    assert config.endpoint.tls is not None
    assert Path(config.endpoint.tls.certificate).read_text() == "the pem"
    assert Path(config.endpoint.tls.key).read_text() == "the key"
    for path in (Path(config.endpoint.tls.key), world.home.keys_file, world.home.promoted_config_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and world.home.root in path.parents


def test_the_machines_that_the_head_knew_may_come_and_those_that_it_removed_may_not(world: World):
    before = world.home.authority_file.read_text()
    (gone,) = remove(world.head, "mac2")
    world.tell(nodes=NODES[:1])
    world.promote()
    (lost,) = members(world.home).admitted.values()
    assert lost == Member("mac0", HEAD, own_fingerprint(world.head)), "it may come back as a node"
    assert members(world.home).removed == {gone.fingerprint: "mac2"}
    assert world.home.former_authorities_file.read_text() == before
    JoinServer(world.home, Node(name="mac1", address=OWN), 0, versions()).close()
    assert world.home.authority_file.read_text() != before
    # Again, as after a failure in between.
    world.promote()
    assert world.home.former_authorities_file.read_text() == before


def test_a_machine_that_was_away_while_another_one_led_is_known_to_the_next(world: World):
    """Its certificate is from the first authority. So the first head finds the present head even after two
    promotions."""
    world.tell(nodes=NODES[:1])
    config = world.promote()
    next_home, own = Home(world.folder / "next"), Node(name="mac4", address="127.0.0.5")
    prepare_home(next_home)
    leads = JoinServer(world.home, config.machines[0], world.port, versions())
    leads.open("127.0.0.3:6379")
    try:
        enter(next_home, own, invite(world.home, leads.address))
        keep_takeover_state(next_home, takeover_state_of(world.home, config)().to_text())
    finally:
        leads.close()
    config = load_config(promote(next_home, listen=None, force=False, say=world.said.append))
    leads = JoinServer(next_home, own, world.port, versions())
    leads.open("127.0.0.5:6379")
    try:
        way = Invitation(leads.address, own_fingerprint(next_home))
        for name in ("head", "own", "third"):
            assert enter(Home(world.folder / name), Node(name=name), way).ray == "127.0.0.5:6379"
        assert takeover_state_of(next_home, config)().authorities.count("BEGIN CERTIFICATE") == 3
    finally:
        leads.close()


def test_a_head_that_answers_is_not_replaced(world: World):
    keep_takeover_state(
        world.home, takeover_state_of(world.head, parse_config({"models": [{"name": "m", "source": "s"}]}))().to_text()
    )
    with pytest.raises(ClusterError, match=rf"the head at {HEAD}:\d+ answers"):
        world.promote()
    assert not world.home.promoted_config_file.exists() and not world.home.former_authorities_file.exists()
    assert world.promote(force=True).machines[0].name == "mac1"


def test_a_machine_that_was_promoted_before_is_not_replaced(world: World):
    """It has the lost head's join port at its own address."""
    world.tell(nodes=NODES[:1])
    taken = pytest.raises(ClusterError, match=r"the head at 127.0.0.4:\d+ answers")
    with closing(socket.create_server(("127.0.0.4", world.port))), taken:
        world.promote()
    assert world.promote().machines[0].name == "mac1"


def test_who_cannot_lead_is_told_why(world: World, tmp_path: Path):
    with pytest.raises(ClusterError, match="has joined no cluster"):
        promote(Home(tmp_path / "new"), listen=None, force=False, say=print)
    with pytest.raises(ClusterError, match="has not told this machine yet"):
        world.promote()
    world.tell(nodes=NODES[:1])
    told = world.home.takeover_state_file.read_text()
    renounce_takeover_state(world.home)
    with pytest.raises(ClusterError, match="or this machine has left it"):
        world.promote()
    write_private(world.home.takeover_state_file, told)
    with closing(socket.create_server((OWN, world.port))), pytest.raises(PortInUse):
        world.promote()
    assert not world.home.promoted_config_file.exists()


def test_a_config_that_goes_by_way_of_the_join_server_stays_what_it_was(tmp_path: Path):
    """For any content of the config."""
    for path in sorted((Path(__file__).parents[3] / "configs").glob("*.yaml")):
        config = load_config(path)
        told = takeover_state_of(Home(tmp_path), config)()
        text = json.loads(told.to_text())
        assert parse_config(text["config"]) == config and told.config == asdict(config), path.name


def test_a_private_file_is_never_left_half_written(world: World, monkeypatch: pytest.MonkeyPatch):
    """The config is written last, because without it nothing is served."""
    world.tell(nodes=NODES[:1])
    written: list[str] = []

    def note(path: Path, text: str) -> None:
        written.append(path.name)
        write_private(path, text)

    monkeypatch.setattr("satchel.api.cli.machines.promote.write_private", note)
    world.promote()
    assert written[-1] == world.home.promoted_config_file.name


@pytest.mark.parametrize("joined", [True, False])
def test_a_node_that_the_lost_head_had_started_is_ended_and_a_head_is_not(world: World, joined: bool):
    world.tell(nodes=NODES[:1])
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        mark = ProcessMark.of(process.pid)
        assert mark is not None
        record = ClusterRecord(
            "10.0.0.1:1", "h", "satchel", "0", None, mark.pid, mark.created_s, "/tmp/x", 0, "mac1", joined=joined
        )
        write_private_json(world.home.cluster_file, asdict(record))
        # Otherwise it would stay a zombie process.
        threading.Thread(target=process.wait, daemon=True).start()
        if joined:
            world.promote()
            assert not mark.is_alive()
        else:
            with pytest.raises(HomeInUse, match="leads a cluster already"):
                world.promote()
            assert mark.is_alive() and not world.home.promoted_config_file.exists()
    finally:
        process.kill()
        process.wait()
