"""Machines are let in with an invitation, once, and only by the head that invited them; strangers learn nothing."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from filelock import FileLock

from satchel.cluster.config.config import parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.connection import versions
from satchel.cluster.errors import ClusterError, NodeRemoved, NotRunning, PortInUse
from satchel.cluster.home import Home, ensure_token, prepare_home, write_private
from satchel.cluster.keys import create_key
from satchel.cluster.trust import admission, invitations
from satchel.cluster.trust.admission import Admission, News, ask_news, enter, knock, led_elsewhere
from satchel.cluster.trust.certificates import Authority, own_fingerprint, request
from satchel.cluster.trust.invitations import Invitation, Membership, find_invitation, invite, remembered, use_up
from satchel.cluster.trust.join_server import CALLERS_MAX, REQUEST_BYTES_MAX, JoinServer, known_join_server
from satchel.cluster.trust.members import Member, Members, keep_members, members, remove
from satchel.cluster.trust.takeover_state import (
    TakeoverState,
    digest,
    keep_takeover_state,
    kept_takeover_state,
    renounce_takeover_state,
    takeover_state_of,
    ways_back,
)
from tests.worlds.macos_sockets import accepts_as_macos, reset

MAC0, MAC1 = Node(name="mac0"), Node(name="mac1", address="10.0.0.2")
RAY = "10.0.0.1:6379"


def made(folder: Path) -> Home:
    home = Home(folder)
    prepare_home(home)
    return home


@pytest.fixture
def head(tmp_path: Path) -> Home:
    home = made(tmp_path / "head")
    ensure_token(home)
    return home


@pytest.fixture
def node(tmp_path: Path) -> Home:
    return made(tmp_path / "node")


@pytest.fixture
def join_server(head: Home) -> Iterator[JoinServer]:
    found = JoinServer(head, MAC0, 0, versions(), talk_s=5.0)
    found.open(RAY)
    yield found
    found.close()
    found.close()


def files(home: Home) -> set[str]:
    return {path.name for folder in (home.run, home.tls) for path in folder.iterdir() if path.is_file()}


def test_who_is_invited_learns_all_that_it_must_know_and_comes_in_again_without_a_secret(head, node, join_server):
    invitation = invite(head, join_server.address)
    assert Invitation.from_text(invitation.to_text()) == invitation and invitation.secret not in repr(invitation)
    assert enter(node, MAC1, invitation) == Admission(join_server.address, RAY)
    assert node.token_file.read_text() == head.token_file.read_text()
    assert node.authority_file.read_text() == head.authority_file.read_text()
    kept = [path for home in (head, node) for path in home.tls.iterdir() if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    assert stat.S_IMODE(head.tls.stat().st_mode) == 0o700

    node.token_file.unlink()
    again = remembered(node)
    assert again is not None and not again.way_back.secret
    assert (again.name, again.address) == ("mac1", "10.0.0.2"), "it keeps its name"
    assert enter(node, MAC1, again.way_back).ray == RAY
    assert node.token_file.exists()


def test_a_certificate_is_for_the_machines_own_key_and_address(head, node, join_server):
    enter(node, MAC1, invite(head, join_server.address))
    found = x509.load_pem_x509_certificate(node.certificate_file.read_bytes())
    authority = x509.load_pem_x509_certificate(node.authority_file.read_bytes())
    found.verify_directly_issued_by(authority)
    places = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(each) for each in places.get_values_for_type(x509.IPAddress)} == {"10.0.0.2", "127.0.0.1", "::1"}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert x509.load_pem_x509_csr(request(node).encode()).public_key() == found.public_key()
    assert node.key_file.read_text() not in "".join(path.read_text() for path in head.tls.iterdir() if path.is_file())


def test_an_invitation_is_good_once_however_many_try(head, tmp_path, join_server):
    invitation = invite(head, join_server.address)

    def attempt(number: int) -> bool:
        try:
            enter(made(tmp_path / str(number)), MAC1, invitation)
        except ClusterError as error:
            assert "is not good" in error.message or "has been used" in error.message
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(attempt, range(4))) == [False, False, False, True]


def test_wrong_old_and_foreign_invitations_are_refused(head, node, join_server, tmp_path, monkeypatch):
    invitation = invite(head, join_server.address)
    with pytest.raises(ClusterError, match="the invitation is not good"):
        enter(node, MAC1, replace(invitation, secret="x" * 32))
    with pytest.raises(ClusterError, match="no certificate"):
        enter(node, MAC1, replace(invitation, secret=""))
    # Of another cluster.
    foreign = Authority(made(tmp_path / "other"))
    node.certificate_file.write_text(foreign.sign(request(node), MAC1))
    with pytest.raises(ClusterError, match="invite"):
        enter(node, MAC1, replace(invitation, secret=""))
    now = invitations.time.time()
    monkeypatch.setattr(invitations.time, "time", lambda: now + invitations.LIFE_S + 1)
    with pytest.raises(ClusterError, match="the invitation is not good"):
        enter(node, MAC1, invitation)
    invite(head, join_server.address)
    assert len(list(head.invitations.iterdir())) == 1, "those that are over are gone"
    assert not node.token_file.exists() and remembered(node) is None


def test_other_versions_are_refused_and_the_invitation_stays_good(head, node, join_server, monkeypatch):
    invitation = invite(head, join_server.address)
    monkeypatch.setattr(admission, "versions", lambda: "satchel 0.0.1")
    with pytest.raises(ClusterError, match=r"runs satchel .*, this machine satchel 0\.0\.1; install the same"):
        enter(node, MAC1, invitation)
    monkeypatch.undo()
    enter(node, MAC1, invitation)


def test_of_a_secret_the_head_keeps_a_hash(head):
    Authority(head)
    head.certificate_file.write_text(Authority(head).sign(request(head), MAC0))
    invitation = invite(head, "10.0.0.1:1")
    assert not [path for path in head.root.rglob("*") if path.is_file() and invitation.secret in path.read_text()]
    found = find_invitation(head, invitation.secret)
    assert found is not None and use_up(found) and not use_up(found)
    assert find_invitation(head, invitation.secret) is None and find_invitation(head, "") is None


def test_somebody_else_at_the_heads_address_hears_nothing(head, node, join_server, tmp_path):
    """Not the invitation's secret, nor who asks: the connection ends after the handshake."""
    invitation = invite(head, join_server.address)
    impostor = made(tmp_path / "impostor")
    impostor.certificate_file.write_text(Authority(impostor).sign(request(impostor), MAC0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor.certificate_file, impostor.key_file)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            sock, _ = listener.accept()
            with context.wrap_socket(sock, server_side=True, suppress_ragged_eofs=True) as tls:
                heard.append(tls.recv(4096))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        there = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ClusterError, match="another machine answers than the inviting one; nothing was sent"):
            enter(node, MAC1, replace(invitation, join_server=there))
        thread.join(10)
    assert heard == [b""] and not node.token_file.exists()
    enter(node, MAC1, invitation)


def test_where_nobody_or_no_join_server_answers_is_said(head, node, join_server):
    invitation = invite(head, join_server.address)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            sock, _ = listener.accept()
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NotRunning, match="does not answer as a cluster's join server"):
            enter(node, MAC1, replace(invitation, join_server=closed))
    with pytest.raises(NotRunning, match="no cluster answers at"):
        enter(node, MAC1, replace(invitation, join_server=closed))
    with pytest.raises(PortInUse):
        JoinServer(head, MAC0, int(join_server.address.rpartition(":")[2]), versions())


def connected(join_server: JoinServer) -> socket.socket:
    host, _, port = join_server.address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def spoken(join_server: JoinServer, said: bytes) -> bytes:
    """What the join server answers to whoever does not mind who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connected(join_server) as plain, context.wrap_socket(plain) as sock:
        sock.sendall(said)
        try:
            return sock.recv(65_536)
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b"\xff\n",
        json.dumps({"name": "NO", "address": "10.0.0.2", "secret": "", "versions": "", "request": ""}).encode() + b"\n",
        json.dumps({"name": "a", "address": "10.0.0.2", "secret": "", "versions": "", "request": "x"}).encode() + b"\n",
        b"[" * 10_000 + b"\n",
    ],
)
def test_who_says_something_else_learns_nothing(join_server, head, said):
    answer = spoken(join_server, said)
    assert set(json.loads(answer)) == {"error"}
    assert head.token_file.read_text().encode() not in answer and versions().encode() not in answer


def test_who_says_too_much_or_speaks_no_tls_is_sent_away(join_server, node, head):
    assert spoken(join_server, b"x" * (REQUEST_BYTES_MAX + 1) + b"\n") == b""
    with connected(join_server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.settimeout(20)
        assert b"{" not in sock.recv(4096)
    enter(node, MAC1, invite(head, join_server.address))


def test_a_request_that_is_not_signed_with_its_key_gets_no_certificate(head, tmp_path):
    authority = Authority(head)
    good = request(made(tmp_path / "a"))
    body = good.splitlines()
    middle = len(body) - 3
    body[middle] = body[middle][::-1]
    for bad in ("\n".join(body), "", good[: len(good) // 2]):
        with pytest.raises(ValueError):
            authority.sign(bad, MAC1)


def test_strangers_who_say_nothing_keep_nobody_out(join_server, head, node):
    made = [connected(join_server) for _ in range(4 * CALLERS_MAX)]
    enter(node, MAC1, invite(head, join_server.address))
    assert join_server.callers() <= CALLERS_MAX
    for sock in made:
        sock.close()
    ends = time.monotonic() + 5
    while join_server.callers():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_caller_that_resets_its_connection_at_once_stops_no_mac(join_server, head, node, monkeypatch):
    accepts_as_macos(monkeypatch)
    host, _, port = join_server.address.rpartition(":")
    reset((host, int(port)))
    enter(node, MAC1, invite(head, join_server.address))


def test_who_is_slow_has_no_more_time_than_others(head, node):
    join_server = JoinServer(head, MAC0, 0, versions(), talk_s=0.2)
    join_server.open(RAY)
    try:
        with connected(join_server) as sock:
            sock.settimeout(20)
            assert sock.recv(1) == b""
    finally:
        join_server.close()


@pytest.mark.parametrize("text", ["", "mac0:1", "mac0:1#", "mac0:1#a.b", "#" + "a" * 32 + "." + "b" * 43])
def test_what_is_no_invitation_is_refused(text):
    with pytest.raises(ValueError, match="satchel invite"):
        Invitation.from_text(text)


def test_a_head_that_starts_again_is_known_by_the_same_key(head, node):
    places = []
    for _ in range(2):
        join_server = JoinServer(head, MAC0, 0, versions())
        join_server.open(RAY)
        invitation = (
            invite(head, join_server.address)
            if not places
            else replace(places[0], join_server=join_server.address, secret="")
        )
        enter(node, MAC1, invitation)
        places.append(invitation)
        join_server.close()


def told(found: TakeoverState) -> dict[str, object]:
    return {"keys": found.keys, "members": {each.name for each in found.members.admitted.values()}}


def test_a_machine_hears_what_it_needs_to_take_over_the_lead_and_only_what_has_changed(head, node, join_server):
    """Of keys only their hashes."""
    enter(node, MAC1, invite(head, join_server.address))
    way = Invitation(join_server.address, own_fingerprint(head))
    assert ask_news(node, "mac1", way, "") == News(RAY, ""), "nothing is known yet"
    join_server.takeover_state = takeover_state_of(head, parse_config({"models": [{"name": "m", "source": "s"}]}))
    _, secret = create_key(head, "ann")
    text = ask_news(node, "mac1", way, "").takeover_state
    assert told(TakeoverState.from_text(text)) == {"keys": head.keys_file.read_text(), "members": {"mac1"}}
    assert secret not in text and TakeoverState.from_text(text).certificate_key == ""
    assert ask_news(node, "mac1", way, digest(text)).takeover_state == ""
    create_key(head, "bob")
    assert '"bob"' in (TakeoverState.from_text(ask_news(node, "mac1", way, digest(text)).takeover_state).keys or "")


def test_news_are_for_machines_of_the_cluster(head, node, join_server, tmp_path):
    join_server.takeover_state = takeover_state_of(head, parse_config({"models": [{"name": "m", "source": "s"}]}))
    way = Invitation(invite(head, join_server.address).join_server, own_fingerprint(head))
    with pytest.raises(ClusterError, match="no certificate"):
        ask_news(node, "mac1", way, "")
    stranger = made(tmp_path / "stranger")
    foreign = Authority(made(tmp_path / "other"))
    stranger.certificate_file.write_text(foreign.sign(request(stranger), MAC1))
    with pytest.raises(NotRunning):
        ask_news(stranger, "mac1", way, "")


def test_a_machine_that_was_removed_is_refused_until_it_is_invited_again(head, node, join_server, tmp_path):
    """Whatever it calls itself; another machine may take its name."""
    enter(node, MAC1, invite(head, join_server.address))
    way = remembered(node)
    assert way is not None
    assert remove(head, "mac7") == []
    assert [gone.address for gone in remove(head, "mac1")] == [MAC1.address]
    for name in ("mac1", "mac5"):
        with pytest.raises(NodeRemoved, match="was removed"):
            enter(node, Node(name=name, address=MAC1.address), way.way_back)
    with pytest.raises(NodeRemoved, match="was removed"):
        ask_news(node, "mac1", way.way_back, "")
    enter(made(tmp_path / "another"), MAC1, invite(head, join_server.address))
    with pytest.raises(NodeRemoved):
        enter(node, MAC1, way.way_back)
    enter(node, MAC1, invite(head, join_server.address))
    assert enter(node, MAC1, way.way_back).ray == RAY and not members(head).removed


def test_a_name_that_two_machines_want_is_removed_with_both(head, node, join_server, tmp_path):
    """The second may not get any further, as the first has the name."""
    way, second = Invitation(join_server.address, own_fingerprint(head)), made(tmp_path / "second")
    for home in (node, second):
        enter(home, MAC1, invite(head, join_server.address))
    assert len(remove(head, "mac1")) == 2
    for home in (node, second):
        with pytest.raises(NodeRemoved):
            ask_news(home, "mac1", way, "")


def test_a_machine_that_has_another_name_now_is_not_removed_by_its_old_one(head, node, join_server):
    enter(node, MAC1, invite(head, join_server.address))
    way = remembered(node)
    assert way is not None
    enter(node, Node(name="mac5", address=MAC1.address), way.way_back)
    assert remove(head, "mac1") == []
    assert ask_news(node, "mac5", way.way_back, "").ray == RAY


def test_a_certificate_without_an_invitation_is_for_the_key_that_was_admitted(
    head, node, join_server, tmp_path, monkeypatch
):
    """Else a machine could have another one ready for the day when it is removed."""
    enter(node, MAC1, invite(head, join_server.address))
    way, spare = remembered(node), made(tmp_path / "spare")
    assert way is not None
    monkeypatch.setattr(admission, "request", lambda home: request(spare))
    with pytest.raises(ClusterError, match="does not know this machine"):
        enter(node, MAC1, way.way_back)


def test_what_the_head_cannot_store_or_read_is_answered_in_words(head, node, join_server, monkeypatch, caplog):
    message = {"name": "mac1", "address": "10.0.0.2", "secret": "\ud800", "versions": "", "request": request(node)}
    assert b"does not understand" in spoken(join_server, json.dumps(message).encode() + b"\n")
    with FileLock(head.run / "members.lock"), pytest.raises(ClusterError, match="cannot store that: another process"):
        monkeypatch.setattr("satchel.cluster.trust.members.LOCK_S", 0.05)
        enter(node, MAC1, invite(head, join_server.address))
    assert not caplog.records, "nor is there a stack trace"


def test_who_takes_over_the_lead_is_known_by_its_key_and_lets_the_others_in(head, node, join_server, tmp_path):
    """The lost head too, which was never told a secret of the new one."""
    third = made(tmp_path / "third")
    enter(node, MAC1, invite(head, join_server.address))
    enter(third, Node(name="mac2", address="10.0.0.3"), invite(head, join_server.address))
    last, first = remembered(node), remembered(third)
    assert last is not None and first is not None
    keep_takeover_state(third, TakeoverState("mac0", {}, members(head)).to_text())
    join_server.close()
    before = node.authority_file.read_text()
    write_private(node.former_authorities_file, before)
    lost = Member("mac0", "127.0.0.1", own_fingerprint(head))
    keep_members(node, Members({**members(head).admitted, lost.fingerprint: lost}))
    port = int(join_server.address.rpartition(":")[2])
    leads = JoinServer(node, replace(MAC1, address="127.0.0.1"), port, versions())
    leads.open("10.0.0.2:6379")
    try:
        assert node.authority_file.read_text() != before, "it signs by a key of its own"
        ways = ways_back(third, first)
        assert [way.name for way in ways] == ["mac2", "mac2"] and ways[1].fingerprint == own_fingerprint(node)
        found = replace(ways[1].way_back, join_server=leads.address)
        assert enter(third, Node(name="mac2", address="10.0.0.3"), found).ray == "10.0.0.2:6379"
        assert third.authority_file.read_text() == node.authority_file.read_text()
        assert enter(head, MAC0, found).ray == "10.0.0.2:6379"
        stranger = made(tmp_path / "stranger")
        stranger.certificate_file.write_text(Authority(made(tmp_path / "other")).sign(request(stranger), MAC1))
        with pytest.raises(ClusterError):
            enter(stranger, MAC1, found)
        # Whoever has the lost head's disk has its authority.
        stranger.certificate_file.write_text(Authority(head).sign(request(stranger), MAC1))
        with pytest.raises(ClusterError, match="does not know this machine"):
            enter(stranger, MAC1, found)
        with pytest.raises(ClusterError, match="does not know this machine"):
            ask_news(stranger, "mac1", found, "")
        assert ask_news(third, "mac2", found, "").ray == "10.0.0.2:6379"
    finally:
        leads.close()


@pytest.mark.parametrize("there_run", [versions(), "others"])
def test_a_lost_head_that_starts_again_sees_who_leads_in_its_place(head, node, join_server, there_run):
    """Even if it runs other versions by now."""
    there = replace(MAC1, address="127.0.0.1")
    enter(node, there, invite(head, join_server.address))
    port = int(join_server.address.rpartition(":")[2])
    head.join_server_file.write_text(json.dumps({"port": port}))
    assert led_elsewhere(head) is None, "its own join server has another key than the other machine's"
    join_server.close()
    assert led_elsewhere(head) is None, "nobody listens"
    write_private(node.former_authorities_file, node.authority_file.read_text())
    leads = JoinServer(node, there, port, there_run)
    leads.open("10.0.0.2:6379")
    try:
        found = led_elsewhere(head)
        assert found is not None and found == Invitation(leads.address, own_fingerprint(node))
        assert Invitation.from_text(found.to_text()) == found, "it can be typed"
        lost = Member("mac0", "127.0.0.1", own_fingerprint(head))
        keep_members(node, Members({lost.fingerprint: lost}))
        remove(node, "mac0")
        assert led_elsewhere(head) is None, "that cluster goes on without this machine"
    finally:
        leads.close()


@pytest.mark.parametrize("listening", [True, False])
def test_a_join_server_is_knocked_at(listening: bool):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listening:
            taken.listen()
        assert knock(f"127.0.0.1:{taken.getsockname()[1]}") == ("open" if listening else "refused")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("06082a8648ce3d030107", "06082a8648ce3d03017f", id="curve"),
        pytest.param("06072a8648ce3d0201", "06072a8648ce3d027f", id="kind of key"),
        pytest.param("020100", "020105", id="version"),
        pytest.param("06082a8648ce3d040302", "06082a8648ce3d04037f", id="hash"),
    ],
)
def test_a_request_of_another_kind_is_answered_in_words(head, node, join_server, before, after, caplog):
    """A stranger needs no invitation to send one. The objects in it are what no library knows."""
    der = x509.load_pem_x509_csr(request(node).encode()).public_bytes(Encoding.DER)
    strange = der.replace(bytes.fromhex(before), bytes.fromhex(after), 1)
    assert strange != der
    lines = base64.encodebytes(strange).decode()
    wanted = f"-----BEGIN CERTIFICATE REQUEST-----\n{lines}-----END CERTIFICATE REQUEST-----\n"
    message = {"name": "mac1", "address": "10.0.0.2", "secret": "", "versions": versions(), "request": wanted}
    assert b"does not understand" in spoken(join_server, json.dumps(message).encode() + b"\n")
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"admitted": {"a": 1}, "removed": {}}'])
def test_members_that_cannot_be_read_let_nobody_back_in(head, node, join_server, text):
    enter(node, MAC1, invite(head, join_server.address))
    way, fresh = remembered(node), invite(head, join_server.address)
    assert way is not None
    remove(head, "mac1")
    before = head.members_file.read_text()
    head.members_file.write_text(text)
    for found in (way.way_back, fresh):
        with pytest.raises(ClusterError, match="cannot tell who belongs to the cluster"):
            enter(node, MAC1, found)
    with pytest.raises(ClusterError, match="cannot tell who belongs to the cluster"):
        ask_news(node, "mac1", way.way_back, "")
    with pytest.raises(ClusterError, match=r"members.json cannot be read"):
        remove(head, "mac1")
    assert head.members_file.read_text() == text, "nothing is written over it"
    head.members_file.write_text(before)
    with pytest.raises(NodeRemoved):
        ask_news(node, "mac1", way.way_back, "")
    assert enter(node, MAC1, fresh).ray == RAY, "the invitation has not been used up"


def test_what_is_no_takeover_state_is_not_taken_for_one(tmp_path):
    home = made(tmp_path)
    assert kept_takeover_state(home) is None and members(home) == Members()
    for text in ("", "{}", "[]", '{"head": 1}'):
        home.takeover_state_file.write_text(text)
        assert kept_takeover_state(home) is None
    keep_takeover_state(home, TakeoverState("mac0", {"models": []}).to_text())
    found = kept_takeover_state(home)
    assert found is not None and found[0].head == "mac0"
    assert stat.S_IMODE(home.takeover_state_file.stat().st_mode) == 0o600


def test_a_machine_that_has_left_knows_the_way_back_and_no_secrets(tmp_path):
    home, other = made(tmp_path), Member("mac2", "10.0.0.3", "o" * 43)
    renounce_takeover_state(home)
    assert kept_takeover_state(home) is None, "it was told nothing"
    config = {"models": [{"name": "m", "source": "s"}]}
    known = Members({other.fingerprint: other}, {"r" * 43: "mac3"})
    told = TakeoverState("mac0", config, known, keys="the keys", certificate="the pem", certificate_key="the key")
    keep_takeover_state(home, told.to_text())
    renounce_takeover_state(home)
    assert "the key" not in home.takeover_state_file.read_text()
    assert stat.S_IMODE(home.takeover_state_file.stat().st_mode) == 0o600
    last = Membership("10.0.0.1:6380", "f" * 43, "mac1", "10.0.0.2")
    assert [way.join_server for way in ways_back(home, last)] == ["10.0.0.1:6380", "10.0.0.3:6380"]


def test_a_join_server_keeps_its_port_from_start_to_start(head):
    first = known_join_server(head, MAC0, 0, versions())
    first.close()
    again = known_join_server(head, MAC0, 0, versions())
    assert again.address == first.address
    # Somebody else has it meanwhile: then machines have to be told, but the cluster starts.
    other = known_join_server(head, MAC0, 0, versions())
    assert other.address != first.address
    with pytest.raises(PortInUse):
        known_join_server(head, MAC0, int(first.address.rpartition(":")[2]), versions())
    again.close()
    other.close()
    head.join_server_file.write_text('{"port": "odd"}')
    known_join_server(head, MAC0, 0, versions()).close()
    head.join_server_file.write_text('{"port": 99999999}')
    known_join_server(head, MAC0, 0, versions()).close()
