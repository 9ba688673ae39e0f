"""One cluster on several hosts: agents move between them, outlive them, and hosts come and go as they like.

The hosts are network namespaces of this machine with addresses of their own; the tests are users outside of them. They
tell one story, in order: starting hosts takes most of the time.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from satchel.cluster.bring_up.launch import Launcher
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import USUAL
from satchel.cluster.trust.invitations import invite

from . import secure_shell
from .hosts import holders, named, wait_until
from .hosts_world import ALL, NODES, RETURN_S, START_S, World, ended, hear, succeeds, three_hosts
from .secure_shell import IMPOSTOR, NOWHERE, STRANGER

CODES = {"Anna": "6305", "Ben": "3471", "Carla": "7468", "David": "1791", "Emma": "2186", "Felix": "9779"}
NUMBERS = "Say the numbers from one to forty."

ANSWER_S = 30.0
"""For what is asked while a host is cut off: the router takes 5 s to notice."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with three_hosts(tmp_path_factory, "hosts") as found:
        yield found


def test_a_host_joins_by_hand_and_hands_its_agents_over_when_it_leaves(world: World):
    talk, starting = world.talk, world.up()
    # The other host has joined already, so this one may.
    wait_until(world.home("mac1").cluster_file.exists, START_S)
    third = world.join(world.invitation().to_text())
    hear(third, "has joined")
    assert "Ready: " in succeeds(starting, START_S)
    wait_until(lambda: talk.answering() == set(ALL), RETURN_S)

    carol, dave = named("carol", "mac0", ALL), named("dave", "mac2", ALL)
    known = talk.tell_codes(carol, CODES)
    assert talk.http.post(f"/v1/agents/{carol}/move", json={"to": "mac2"}).status_code == 200
    said = talk.ask(carol, "What is the code of Carla?")
    assert CODES["Carla"] in said.text and said.node == "mac2" and said.cached >= known
    assert talk.ask(dave, "Remember: the code of heron is 2002.").node == "mac2"

    succeeds(world.satchel(world.third, "leave", home="mac2"))
    assert "2 of 2 agents live on other nodes now" in succeeds(third, 10)
    # It is no node any more, not one that is down.
    wait_until(lambda: talk.nodes() == {"mac0": True, "mac1": True}, RETURN_S)
    # Nobody has asked for them, and they are at home already.
    places = [talk.where(agent) for agent in (carol, dave)]
    assert all(place["home"] in NODES and place["alive"] for place in places), places
    said = talk.ask(carol, "What is the code of Felix?")
    assert CODES["Felix"] in said.text and said.prompt - said.cached < 30, "its KV has come too"
    assert "2002" in talk.ask(dave, "What is the code of heron?").text


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""With which a client of gRPC begins; the server answers with settings of its own."""


def answers(address: str, port: int, context: ssl.SSLContext | None) -> bool:
    """Whether a gRPC server goes on talking: in clear, or with what `context` shows."""
    with socket.create_connection((address, port), 5) as plain:
        try:
            with plain if context is None else context.wrap_socket(plain) as sock:
                sock.sendall(PREFACE)
                return sock.recv(9)[3:4] == b"\x04"
        except (ssl.SSLError, ConnectionError):
            return False


def test_between_hosts_nobody_is_heard_without_a_certificate(world: World):
    """What Ray opens on all addresses of a host asks for one, and the secret is not enough."""
    world.whole()
    home = world.home("mac1")
    stranger, member = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    for context in (stranger, member):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    member.load_cert_chain(home.certificate_file, home.key_file)
    for host in (world.head, world.second):
        ports = host.open_ports() - {secure_shell.PORT}
        assert ports, "Ray's"
        for port in ports:
            heard = [answers(host.address, port, context) for context in (None, stranger, member)]
            assert heard == [False, False, True], (host.name, port)
    token = home.token_file.read_text()
    with grpc.insecure_channel(world.record("mac0").address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=10, metadata=(("authorization", f"Bearer {token}"),))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_an_agent_moves_and_outlives_its_host_in_the_middle_of_an_answer(world: World):
    world.whole()
    talk, alice, fred = world.talk, named("alice", "mac0", NODES), named("fred", "mac1", NODES)
    talk.ask(fred, "Remember: the code of tern is 3003.")
    known = talk.tell_codes(alice, CODES)
    assert known > 256, "there are whole blocks"
    assert talk.ask(alice, "What is the code of Anna?").node == "mac0"
    talk.settled(alice, "mac0", ["mac1"])

    moved = succeeds(world.satchel(world.head, "agents", "move", alice, "mac1", home="mac0"))
    assert f"{alice} has moved from mac0 to mac1: " in moved
    said = talk.ask(alice, "What is the code of Carla?")
    assert CODES["Carla"] in said.text and said.node == "mac1"
    assert said.cached >= known and said.prompt - said.cached < 30, "only the new words are computed"

    assert talk.http.post(f"/v1/agents/{alice}/fork", json={"as": "mirror"}).status_code == 200
    undisturbed = talk.ask("mirror", NUMBERS, max_tokens=400)
    assert "thirty-nine, forty" in undisturbed.text
    wait_until(lambda: talk.where(alice)["copies"] == ["mac0"], 20)

    def kill(pieces: int) -> None:
        if pieces == 3:
            world.kill(world.second)

    text = talk.stream(alice, NUMBERS, kill, max_tokens=400)
    assert text == undisturbed.text, "one stream, nothing twice and nothing missing"
    # The view of places follows the stores' reports.
    wait_until(lambda: talk.where(alice)["home"] == "mac0", 20)
    assert talk.where(alice)["alive"]
    said = talk.ask(alice, "What is the code of Ben?")
    assert CODES["Ben"] in said.text and said.node == "mac0"
    assert said.prompt - said.cached < 30, "the answer is remembered whole"
    # All that it knew is here too, whoever was at home there.
    assert CODES["Felix"] in talk.ask("mirror", "What is the code of Felix?").text
    wait_until(lambda: talk.nodes() == {"mac0": True, "mac1": False}, 20)


def test_a_head_that_was_killed_finds_everybody_s_memory_again(world: World):
    """Also what the other host has, that was killed just before and has had no time to come back."""
    talk, alice, fred = world.talk, named("alice", "mac0", NODES), named("fred", "mac1", NODES)
    world.kill(world.head)
    succeeds(world.up(), START_S)
    world.whole()
    said = talk.ask(alice, "What is the code of Emma?")
    assert CODES["Emma"] in said.text and said.node == "mac0", "who has come back claims nobody"
    said = talk.ask(fred, "What is the code of tern?")
    assert "3003" in said.text and said.node == "mac1", "nobody has asked for it while its home was away"
    wait_until(lambda: talk.where(alice)["copies"] == ["mac1"], 20)


@pytest.mark.slow
def test_while_a_host_is_cut_off_its_agents_go_on_and_afterwards_the_newest_home_counts(world: World):
    if not world.home("mac0").cluster_file.exists():
        # Without the tests before.
        succeeds(world.up(), START_S)
    world.whole()
    talk = world.talk
    dora, eric = named("dora", "mac1", NODES), named("eric", "mac1", NODES)
    talk.ask(dora, "Remember: the code of zebra is 4711.")
    talk.ask(eric, "Remember: the code of quokka is 5813.")
    before = talk.settled(dora, "mac1", ["mac0"])
    world.second.cut()
    try:
        began = time.monotonic()
        said = talk.ask(dora, "What is the code of zebra?", timeout_s=ANSWER_S)
        assert time.monotonic() - began < ANSWER_S
        assert "4711" in said.text and said.node == "mac0"
        began = time.monotonic()
        refused = talk.http.post(f"/v1/agents/{dora}/move", json={"to": "mac1"})
        assert refused.status_code in (400, 503), refused.text
        # Nobody waits for those who are not there.
        assert (gone := talk.http.delete(f"/v1/agents/{eric}")).status_code == 200, gone.text
        assert time.monotonic() - began < ANSWER_S
        world.deleted[eric] = "quokka"
    finally:
        world.second.heal()
    world.whole()
    wait_until(lambda: talk.where(dora)["copies"] == ["mac1"], 20)
    after = talk.where(dora)
    assert after["home"] == "mac0" and after["epoch"] > before["epoch"]
    # A store believes for two seconds what it has heard of the others.
    wait_until(lambda: talk.http.post(f"/v1/agents/{dora}/move", json={"to": "mac1"}).status_code == 200, 10)
    said = talk.ask(dora, "What is the code of zebra?")
    assert "4711" in said.text
    assert said.prompt - said.cached < 30, "what was said while it was cut off has come too"


def test_who_may_not_join_is_told_why_in_a_sentence(world: World):
    good = world.invitation()
    wrong, nowhere = replace(good, secret="0" * 32), replace(good, join_server=f"{world.head.address}:9")
    impostor = replace(good, fingerprint="0" * 43)
    refused = {
        ".* does not let mac2 in: the invitation is not good": world.join(wrong.to_text(), home="refused0"),
        "no cluster answers at .*:9: .*refused": world.join(nowhere.to_text(), home="refused1"),
        "at .* another machine answers than the inviting one": world.join(impostor.to_text(), home="refused2"),
        "this machine has joined no cluster yet": world.join(good.join_server, home="refused3"),
    }
    for reason, process in refused.items():
        said = ended(process, 30)
        assert process.returncode == 1 and "Traceback" not in said
        lines = [line for line in said.splitlines() if line.startswith("satchel: ")]
        assert len(lines) == 1, said
        assert re.match(f"satchel: {reason}", lines[0]), said
    assert world.talk.nodes() == {"mac0": True, "mac1": True}


def start(world: World, nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a head that keeps these nodes says of each when it has tried."""
    monkeypatch.setenv("PATH", world.path)
    head, join_server = world.home("mac0"), world.record("mac0").join_server
    said: list[str] = []
    launcher = Launcher(
        tuple(nodes), world.home("another"), lambda: invite(head, join_server), said.append, USUAL.node_leave_s
    )
    try:
        wait_until(lambda: len({line.split()[1] for line in said}) == len(nodes), 60)
    finally:
        launcher.stop()
    return [next(line for line in said if line.startswith(f"Node {node.name} ")) for node in nodes]


def test_a_host_that_cannot_run_satchel_is_named_with_what_to_do(world: World, monkeypatch: pytest.MonkeyPatch):
    """There is none, or another version."""
    old = world.folder / "old" / "satchel-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: satchel\nVersion: 0.0.1\n")
    another = Node("mac2", address=world.third.address, ssh=world.third.name, home=str(world.folder / "old" / "home"))
    nowhere, other = start(
        world,
        [
            replace(another, command="/no/such/satchel"),
            replace(another, name="mac3", command=f"env PYTHONPATH={old.parent} {sys.executable} -m satchel.api.cli"),
        ],
        monkeypatch,
    )
    assert "/no/such/satchel" in nowhere and "`command` in the config has to say where Satchel is on mac2" in nowhere
    assert re.search(r"runs satchel .*, this machine satchel 0\.0\.1, .*; install the same\)", other), other
    assert world.talk.nodes() == {"mac0": True, "mac1": True}


def test_a_host_that_ssh_does_not_reach_is_named_with_what_to_do(world: World, monkeypatch: pytest.MonkeyPatch):
    if world.no_secure_shell is not None:
        pytest.skip(world.no_secure_shell)
    why = {
        STRANGER: "Permission denied",
        IMPOSTOR: "Host key verification failed",
        NOWHERE: "No route to host",
    }
    nodes = [Node(f"mac{3 + number}", address=world.third.address, ssh=name) for number, name in enumerate(why)]
    for (name, reason), line in zip(why.items(), start(world, nodes, monkeypatch), strict=True):
        assert "has not come up" in line and reason in line, line
        assert f"`ssh {name}` has to work from here, without a question" in line


@pytest.mark.slow
def test_what_was_deleted_while_a_host_was_away_does_not_come_back_with_it(world: World):
    assert world.deleted, "a test before has deleted something"
    for agent, word in world.deleted.items():
        assert world.talk.http.get(f"/v1/agents/{agent}").status_code == 404
        # Where the other host took long to say what was forgotten, it is asked again.
        wait_until(lambda agent=agent: agent not in world.talk.agents(), 20)
        ends = time.monotonic() + 60
        while files := [str(path) for node in NODES for path in holders(world.home(node).kv, word)]:
            assert time.monotonic() < ends, f"{word!r} is still in {files}"
            time.sleep(0.2)


def test_down_ends_everything_on_all_hosts(world: World):
    world.whole()
    folders = [Path(world.record(node).temp_dir).parent for node in NODES]
    assert all(folder.is_dir() for folder in folders)
    assert "Stopped" in succeeds(world.satchel(world.head, "down", home="mac0"))
    wait_until(lambda: not world.left(), 10)
    assert not [folder for folder in folders if folder.exists()]
