"""The endpoint's certificate: made on demand, refused before anything starts where it cannot be used, and replaced."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from satchel.api.cli.main import app
from satchel.api.cli.serve import for_clients
from satchel.cluster.bring_up.doctor import check_tls
from satchel.cluster.bring_up.ports import check_endpoint
from satchel.cluster.config.config import Endpoint, Tls, load_config
from satchel.cluster.errors import ClusterError, ConfigError
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.incidents import incidents
from satchel.cluster.trust import self_signed
from satchel.cluster.trust.endpoint_certificate import check_certificate, read_certificate, server_context
from satchel.cluster.trust.self_signed import checked_host, make_certificate, own_tls
from satchel.cluster.trust.shown_certificate import ShownCertificate
from tests.authority import CLIENT, Issued, authority, key_pem, new_key, pem, write_pair

NOW = datetime.now(UTC)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    prepare_home(home)
    return home


@pytest.fixture(scope="module")
def root() -> Issued:
    return authority()


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """Both sides of one, in memory; the client's side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [near, far]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert not waiting
    return near


def test_a_certificate_is_made_that_clients_take_who_are_given_it(home: Home):
    made = make_certificate(home, ["Box.example.org", "10.0.0.7", "fd00::1", "[::2]", "*.lab.example.org"])
    tls = own_tls(home)
    assert {"localhost", "127.0.0.1", "::1", "box.example.org", "10.0.0.7", "fd00::1", "::2"} <= set(made.names)
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (tls.certificate, tls.key)] == [0o600, 0o600]
    assert check_certificate(tls, datetime.now(UTC)) == (made, []) and made.is_self_signed
    # What clients do by default, and with the strictness of Python 3.13.
    for flags in (0, ssl.VERIFY_X509_STRICT, ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN):
        client = ssl.create_default_context(cafile=tls.certificate)
        client.verify_flags |= flags
        for name in ("localhost", "::1", "10.0.0.7", "box.example.org", "a.lab.example.org"):
            handshake(server_context(tls), client, name)
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'example"):
            handshake(server_context(tls), client, "example.com")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(tls), ssl.create_default_context(), "localhost")


def test_macs_have_a_name_in_their_own_network(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(self_signed, "is_macos", lambda: True)
    for name in ("Anns-Mac", "anns-mac.local"):
        monkeypatch.setattr(self_signed.socket, "gethostname", lambda name=name: name)
        assert set(self_signed.own_names()) == {"localhost", "127.0.0.1", "::1", name.lower(), "anns-mac.local"}
    monkeypatch.setattr(self_signed.socket, "gethostname", lambda: "no name_at all")
    assert self_signed.own_names() == ["localhost", "127.0.0.1", "::1"]


def test_a_valid_one_is_replaced_only_if_that_is_asked_for(home: Home):
    first = make_certificate(home, ["box.example.org"], days=400)
    key = home.endpoint_key_file.read_bytes()
    with pytest.raises(ClusterError, match=r"is valid until .*--renew"):
        make_certificate(home, [])
    assert read_certificate(first.path) == first
    second = make_certificate(home, [], renew=True)
    assert second.sha256 != first.sha256 and home.endpoint_key_file.read_bytes() == key
    assert "box.example.org" in second.names, "it is for whom it was for before"
    assert "box.example.org" not in make_certificate(home, ["other.example.org"], renew=True).names
    home.endpoint_key_file.write_text("broken")
    with pytest.raises(ClusterError, match=r"is no key: .*remove .*endpoint\.key$"):
        make_certificate(home, [])
    home.endpoint_key_file.unlink()
    third = make_certificate(home, [])
    assert (
        home.endpoint_key_file.read_bytes() != key and check_certificate(own_tls(home), datetime.now(UTC))[0] == third
    )


def test_one_that_has_expired_is_replaced_without_asking(home: Home, root: Issued):
    write_pair(home.tls, root.issue(["old.example.org"], days=(-9, -1)).pem, key_pem(new_key()), name="endpoint")
    assert "old.example.org" in make_certificate(home, []).names


@pytest.mark.parametrize(
    "wrong", ["", "http://box", "box:8000", "a b", "-a", "a..b", "x" * 64, "1.2.3", "*", "*.*.a", "::g"]
)
def test_what_is_no_host_is_refused(wrong: str):
    with pytest.raises(ConfigError, match="neither the name of a host nor an address"):
        checked_host(wrong)


def test_hosts_are_written_as_certificates_have_them():
    names = {"BOX.": "box", "München.example": "xn--mnchen-3ya.example", "FD00:0::1": "fd00::1", "mac1": "mac1"}
    assert {given: checked_host(given) for given in names} == names


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
@pytest.mark.parametrize("depth", [0, 1])
def test_certificates_of_authorities_work_with_those_that_signed_them(
    tmp_path: Path, root: Issued, kind: str, depth: int
):
    above = root.intermediate() if depth else root
    issued = above.issue(["chat.example.org"], key=new_key(kind))
    tls = issued.write(tmp_path)
    found, advice = check_certificate(tls, NOW)
    assert found.names == ("chat.example.org",) and not advice and not found.is_self_signed
    client = ssl.create_default_context(cadata=root.pem)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'other"):
        handshake(server_context(tls), client, "other.example.org")
    near = handshake(server_context(tls), client, "chat.example.org")
    assert near.getpeercert(True) == issued.certificate.public_bytes(Encoding.DER)


def test_keys_in_their_older_form_and_in_the_certificates_file_work(tmp_path: Path, root: Issued):
    issued = root.issue(["chat.example.org"])
    parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    old = parameters + key_pem(issued.key, traditional=True)
    check_certificate(write_pair(tmp_path, issued.pem, old), NOW)
    both = write_pair(tmp_path, issued.pem + old, "")
    check_certificate(Tls(certificate=both.certificate, key=both.certificate), NOW)


def refused(tls: Tls, *, now: datetime = NOW) -> str:
    with pytest.raises(ClusterError) as error:
        check_certificate(tls, now)
    assert error.value.message.count("; ") == 1 and "\n" not in error.value.message, "what, and what to do"
    return error.value.message


def test_files_that_cannot_be_used_are_named(tmp_path: Path, root: Issued):
    issued = root.intermediate().issue(["chat.example.org"])
    good = issued.write(tmp_path)
    away, garbage = str(tmp_path / "away"), tmp_path / "garbage"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n\xff")
    assert f"the certificate {away} is not there" in refused(Tls(certificate=away, key=good.key))
    assert f"the key {away} is not there" in refused(Tls(certificate=good.certificate, key=away))
    assert "Is a directory" in refused(Tls(certificate=str(tmp_path), key=good.key))
    for wrong in (str(garbage), good.key, "/dev/null"):
        assert f"{wrong} has no certificate in PEM form" in refused(Tls(certificate=wrong, key=good.key))
    for wrong in (str(garbage), good.certificate, "/dev/null"):
        assert f"{wrong} has no private key" in refused(Tls(certificate=good.certificate, key=wrong))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_a_key_of_another_certificate_is_refused(tmp_path: Path, root: Issued, kind: str):
    issued = root.intermediate().issue(["chat.example.org"])
    said = refused(write_pair(tmp_path, issued.chain, key_pem(new_key(kind))))
    assert f"the key {tmp_path}/server.key does not belong to the certificate {tmp_path}/server.pem" in said


def test_a_chain_in_the_wrong_order_is_told_from_a_wrong_key(tmp_path: Path, root: Issued):
    issued = root.intermediate().issue(["chat.example.org"])
    said = refused(write_pair(tmp_path, pem(issued.above[0]) + issued.pem, key_pem(issued.key)))
    assert "is not the first; put it before those that signed it" in said


@pytest.mark.parametrize("traditional", [False, True])
def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_passphrase(
    tmp_path: Path, root: Issued, traditional: bool
):
    issued = root.issue(["chat.example.org"])
    text = key_pem(issued.key, passphrase=b"secret", traditional=traditional)
    assert "is encrypted; write one without a passphrase: `openssl pkey" in refused(
        write_pair(tmp_path, issued.pem, text)
    )


def test_dates_uses_and_strength_are_looked_at(tmp_path: Path, root: Issued):
    tls = root.issue(["a.example"], days=(-9, -1)).write(tmp_path)
    assert f"the certificate {tls.certificate} expired on " in refused(tls)
    assert server_context(tls).minimum_version is ssl.TLSVersion.TLSv1_2
    assert "is not valid before " in refused(root.issue(["a.example"], days=(1, 9)).write(tmp_path))
    assert "is not one for servers" in refused(root.issue(["a.example"], uses=CLIENT).write(tmp_path))
    assert "too weak for TLS" in refused(root.issue(["a.example"], key=new_key("small")).write(tmp_path))


def test_what_stops_nothing_is_said(tmp_path: Path, root: Issued, home: Home):
    tls = root.issue([], days=(-1, 3.5)).write(tmp_path)
    Path(tls.key).chmod(0o640)
    soon, nameless, open_key = (each.found for each in check_endpoint(Endpoint(tls=tls), home))
    assert f"{tls.certificate} ends in 3 days, on " in soon and "names no host" in nameless
    assert open_key == f"others may read the key {tls.key}"


def test_the_doctor_looks_at_the_certificate(tmp_path: Path, root: Issued):
    assert check_tls(Endpoint(), NOW) == []
    tls = root.issue(["a.example"], days=(-1, 40.5)).write(tmp_path)
    (fine,) = check_tls(Endpoint(tls=tls), NOW)
    assert (fine.name, fine.result, fine.found) == ("certificate", "ok", "40 days left, for a.example")
    (soon,) = check_tls(Endpoint(tls=tls), NOW + timedelta(days=11))
    assert soon.result == "warn" and "29 days" in soon.found and "satchel cert --renew" in soon.mend
    (over,) = check_tls(Endpoint(tls=tls), NOW + timedelta(days=41))
    assert over.result == "fail" and "expired on" in over.found and "satchel cert --renew" in over.mend
    (other,) = check_tls(Endpoint(tls=write_pair(tmp_path, root.pem, key_pem(new_key()))), NOW)
    assert other.result == "fail" and "does not belong to" in other.found and other.mend


def test_replaced_files_are_taken_and_broken_ones_told_of_once(home: Home, tmp_path: Path, root: Issued):
    first = root.issue(["a.example"])
    tls = first.write(tmp_path)
    shown = ShownCertificate(tls, home)
    context = shown.context
    assert home.shown_certificate_file.read_text() == first.pem
    shown.look()
    assert shown.context is context
    second = root.issue(["b.example"])
    second.write(tmp_path)
    shown.look()
    assert shown.context is not context and shown.certificate.names == ("b.example",)
    assert home.shown_certificate_file.read_text() == second.pem
    context = shown.context
    third = root.issue(["c.example"])
    Path(tls.certificate).write_text(third.pem)
    shown.look()
    assert not incidents(home, 0), "the key may follow"
    for _ in range(3):
        shown.look()
    (told,) = incidents(home, 0)
    assert told.kind == "certificate" and "does not belong to" in told.text and shown.context is context
    Path(tls.key).unlink()
    for _ in range(3):
        shown.look()
    assert len(incidents(home, 0)) == 2 and "is not there" in incidents(home, 0)[-1].text
    assert shown.context is context and home.shown_certificate_file.read_text() == second.pem
    third.write(tmp_path)
    shown.look()
    assert shown.certificate.names == ("c.example",) and home.shown_certificate_file.read_text() == third.pem
    root.issue(["d.example"], days=(-9, -1)).write(tmp_path)
    shown.look()
    shown.look()
    assert shown.certificate.names == ("c.example",) and "expired" in incidents(home, 0)[-1].text


def test_an_endpoint_that_starts_again_goes_on_with_one_that_has_expired(home: Home, tmp_path: Path, root: Issued):
    assert ShownCertificate(root.issue(["a.example"], days=(-9, -1)).write(tmp_path), home).context


def test_clients_are_told_a_name_that_the_certificate_is_for(home: Home, tmp_path: Path, root: Issued):
    url = "https://127.0.0.1:8443"
    assert for_clients("http://127.0.0.1:8000/", Endpoint()) == ("http://127.0.0.1:8000", "")
    make_certificate(home, [])
    own = Endpoint(tls=own_tls(home))
    assert for_clients(url, own) == (url, f"--cacert {home.endpoint_certificate_file} ")
    public = Endpoint(tls=root.issue(["*.example.org", "10.0.0.7", "chat.example.org"]).write(tmp_path))
    assert for_clients(url, public) == ("https://chat.example.org:8443", "")
    assert for_clients("https://10.0.0.7:8443", public) == ("https://10.0.0.7:8443", "")
    star = Endpoint(tls=root.issue(["*.example.org"]).write(tmp_path))
    assert for_clients(url, star) == (url, "")


def test_paths_may_begin_with_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "config.yaml"
    model = "models: [{name: m, source: embedded:recall}]\n"
    config.write_text(model + "endpoint:\n  tls: {certificate: ~/a.pem, key: /b.key}\n")
    assert load_config(config).endpoint.tls == Tls(certificate=f"{tmp_path}/a.pem", key="/b.key")
    for wrong in ("a.pem", "~nobody-of-this-name/a.pem"):
        config.write_text(model + f"endpoint: {{tls: {{certificate: {wrong}, key: /b.key}}}}\n")
        with pytest.raises(ConfigError, match=r"endpoint\.tls\.certificate"):
            load_config(config)


def test_the_command_says_what_goes_into_the_config_and_that_works(tmp_path: Path):
    home = tmp_path / "a home: with, odd {letters} ümlaut"
    run = CliRunner().invoke(app, ["cert", "--home", str(home), "--host", "box.example.org", "--days", "100"])
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    at = lines.index("  endpoint:")
    config = tmp_path / "config.yaml"
    config.write_text(
        "models: [{name: m, source: embedded:recall}]\n" + "\n".join(line[2:] for line in lines[at : at + 2])
    )
    tls = load_config(config).endpoint.tls
    assert tls is not None and tls == own_tls(Home(home))
    found, _ = check_certificate(tls, datetime.now(UTC))
    assert lines[0] == f"SHA-256 fingerprint: {found.sha256}" and len(found.sha256) == 95
    assert found.days_left(datetime.now(UTC)) == 99 and "box.example.org" in found.names
    assert "BEGIN" not in run.output
    again = CliRunner().invoke(app, ["cert", "--home", str(home)])
    assert again.exit_code == 1 and isinstance(again.exception, ClusterError)
    json = CliRunner().invoke(app, ["cert", "--home", str(home), "--renew", "--json"])
    assert '"sha256"' in json.stdout and '"box.example.org"' in json.stdout
    assert CliRunner().invoke(app, ["cert", "--home", str(home), "--days", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["cert", "--home", str(home), "--days", "4000"]).exit_code == 2
