"""The endpoint's keys in the home: made once, shown once, and read by the endpoint as soon as they change."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from satchel.api.cli.main import app
from satchel.cluster import audit as audit_module
from satchel.cluster import keys as keys_module
from satchel.cluster.audit import Audit
from satchel.cluster.bring_up.ports import check_endpoint
from satchel.cluster.config.config import Endpoint
from satchel.cluster.errors import ClusterError, ConfigError, KeysDamaged
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyLimits, KeyRing, create_key, owner_key, read_keys, revoke_key, write_owner_key


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    prepare_home(home)
    return home


def test_the_file_has_no_secret_and_belongs_to_this_user(home: Home):
    key, secret = create_key(home, "ann", requests_per_minute=5, memory_bytes_max="1 MiB")
    text = home.keys_file.read_text()
    assert secret.startswith(f"sk-satchel-{key.id}-") and secret.split("-", 3)[3] not in text
    assert stat.S_IMODE(home.keys_file.stat().st_mode) == 0o600
    assert read_keys(home) == (key,)
    assert key.limits == KeyLimits(requests_per_minute=5, memory_bytes_max=2**20) and not key.admin


def test_a_ring_knows_a_key_at_once_and_forgets_a_revoked_one_at_once(home: Home):
    ring = KeyRing(home, required=False)
    assert ring.is_open
    key, secret = create_key(home, "ann")
    assert not ring.is_open
    assert ring.remembered(secret) is None, "its first look takes scrypt"
    assert ring.check(secret) == key and ring.remembered(secret) == key
    wrong = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    assert ring.check(wrong) is None and ring.remembered(wrong) is False
    revoke_key(home, "ann")
    assert ring.remembered(secret) is False and ring.check(secret) is None
    assert not ring.is_open, "who revokes the last key does not open the join server"
    _, newer = create_key(home, "ann")
    assert ring.check(newer) and not ring.check(secret)


@pytest.mark.parametrize("secret", ["", "sk-satchel-", "sk-openai", "sk-satchel-zzzzzzzz-" + "a" * 43, "ä" * 60])
def test_what_is_no_key_costs_nothing(home: Home, secret: str, monkeypatch: pytest.MonkeyPatch):
    create_key(home, "ann")
    monkeypatch.setattr(keys_module, "_digest", lambda *_: pytest.fail("computed"))
    ring = KeyRing(home, required=False)
    assert ring.remembered(secret) is False and ring.check(secret) is None


def test_a_wrong_secret_is_computed_once(home: Home, monkeypatch: pytest.MonkeyPatch):
    key, _ = create_key(home, "ann")
    ring = KeyRing(home, required=False)
    computed: list[str] = []
    digest = keys_module._digest
    monkeypatch.setattr(keys_module, "_digest", lambda secret, salt: computed.append(secret) or digest(secret, salt))
    wrong = f"sk-satchel-{key.id}-{'x' * 43}"
    assert [ring.check(wrong) for _ in range(3)] == [None] * 3 and computed == [wrong]


def test_the_owner_has_a_key_that_every_start_makes_anew(home: Home):
    create_key(home, "ann")
    ring = KeyRing(home, required=False)
    write_owner_key(home)
    first = owner_key(home)
    found = ring.remembered(first)
    assert found and found.admin and found.name == "default"
    write_owner_key(home)
    assert ring.remembered(first) is False and ring.remembered(owner_key(home))
    assert stat.S_IMODE(home.owner_key_file.stat().st_mode) == 0o600


def test_a_damaged_file_lets_nobody_in_but_the_owner(home: Home):
    _, secret = create_key(home, "ann")
    write_owner_key(home)
    home.keys_file.write_text("{")
    ring = KeyRing(home, required=False)
    assert not ring.is_open and ring.check(secret) is None and ring.remembered(owner_key(home))
    with pytest.raises(KeysDamaged):
        read_keys(home)
    with pytest.raises(KeysDamaged):
        create_key(home, "bob")
    assert home.keys_file.read_text() == "{", "what may be mended is not overwritten"


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "é", "x" * 65, "a\n"])
def test_a_name_is_a_name(home: Home, name: str):
    with pytest.raises(ConfigError):
        create_key(home, name)


@pytest.mark.parametrize("limits", [{"rows_max": 0}, {"requests_per_minute": -1}, {"memory_bytes_max": "much"}])
def test_a_limit_is_a_limit(home: Home, limits: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        create_key(home, "ann", **limits)


@pytest.mark.parametrize("limit", ["memory_bytes_max", "disk_bytes_max"])
def test_whoever_runs_the_server_keeps_what_there_is_room_for(home: Home, limit: str):
    """Its own requests come without a key, so a limit would come and go."""
    with pytest.raises(ConfigError, match="whoever runs the server"):
        create_key(home, "default", admin=False, **{limit: "1 MiB"})
    create_key(home, "default", rows_max=1)


def test_there_is_one_valid_key_of_a_name(home: Home):
    create_key(home, "ann")
    for name in ("ann", "Ann"):
        with pytest.raises(ConfigError, match="already"):
            create_key(home, name)
    revoke_key(home, "ann")
    with pytest.raises(ConfigError, match="no key"):
        revoke_key(home, "ann")
    create_key(home, "ann")


def test_strangers_are_listened_to_only_with_keys(home: Home):
    wide = Endpoint(listen="0.0.0.0")
    with pytest.raises(ClusterError, match="satchel keys create"):
        check_endpoint(wide, home)
    for loopback in ("127.0.0.1", "::1", "localhost"):
        check_endpoint(Endpoint(listen=loopback), home)
    assert not KeyRing(home, required=True).is_open
    create_key(home, "ann")
    check_endpoint(wide, home)
    revoke_key(home, "ann")
    with pytest.raises(ClusterError):
        check_endpoint(wide, home)


def test_the_command_line_shows_a_key_once(home: Home):
    run = CliRunner()
    made = run.invoke(app, ["keys", "create", "ann", "--rows", "2", "--model", "m", "--home", str(home.root)])
    secret = made.stdout.strip()
    assert made.exit_code == 0 and KeyRing(home, required=False).check(secret)
    (listed,) = json.loads(run.invoke(app, ["keys", "list", "--json", "--home", str(home.root)]).stdout)
    assert listed["name"] == "ann" and listed["limits"]["rows_max"] == 2 and listed["limits"]["models"] == ["m"]
    assert not {"salt", "digest"} & set(listed)
    assert run.invoke(app, ["keys", "revoke", "ann", "--home", str(home.root)]).exit_code == 0
    assert KeyRing(home, required=False).check(secret) is None
    lines = [json.loads(line) for line in home.audit_file.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["key created", "key revoked"]


def test_the_command_line_goes_back_to_no_keys(home: Home):
    run = CliRunner()
    _, secret = create_key(home, "ann")
    ring, wide = KeyRing(home, required=False), KeyRing(home, required=True)
    assert ring.check(secret) and not ring.is_open
    assert run.invoke(app, ["keys", "remove", "--home", str(home.root)]).exit_code == 1 and not ring.is_open
    assert run.invoke(app, ["keys", "remove", "--all", "--home", str(home.root)]).exit_code == 0
    assert ring.is_open and read_keys(home) is None
    assert not wide.is_open and not wide.check(secret), "strangers are not let in"
    assert run.invoke(app, ["keys", "remove", "--all", "--home", str(home.root)]).exit_code == 1
    lines = [json.loads(line) for line in home.audit_file.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["all keys removed"]
    home.keys_file.write_text("damaged")
    assert run.invoke(app, ["keys", "remove", "--all", "--home", str(home.root)]).exit_code == 0 and ring.is_open


def test_the_audit_is_bounded_and_a_full_disk_ends_nothing(home: Home, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    audit = Audit(home, lambda: now[0])
    for _ in range(25):
        audit.note_refusal("key refused", host="h")
    now[0] = 101.0
    audit.note_refusal("key refused", host="h")
    lines = [json.loads(line) for line in home.audit_file.read_text().splitlines()]
    assert len(lines) == 11 and lines[-1]["left_out"] == 15
    monkeypatch.setattr(audit_module, "BYTES_MAX", 100)
    audit.note("a")
    audit.note("b")
    assert home.audit_file.read_text().count("\n") == 2
    assert home.audit_file.with_name("audit.log.1").read_text().count("\n") == 11
    monkeypatch.setattr(audit_module.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    audit.note("c")
