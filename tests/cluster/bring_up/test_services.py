"""What service managers are told: read back as they read it, it is the command that was meant."""

from __future__ import annotations

import plistlib
import stat
import sys
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from satchel.api.cli.machines import service as cli_service
from satchel.api.cli.main import app
from satchel.cluster.bring_up.services import (
    Service,
    launchd_advice,
    launchd_plist,
    service_name,
    systemd_advice,
    systemd_unit,
)
from satchel.cluster.config.nodes import Node
from satchel.cluster.connection import versions
from satchel.cluster.errors import ConfigError
from satchel.cluster.home import Home, ensure_token, prepare_home
from satchel.cluster.trust.invitations import Invitation, invite, remember, remembered
from satchel.cluster.trust.join_server import JoinServer

COMMAND = ("/opt/my python/bin/python", "-P", "serve", "--config", '/a b/$HOME/50%/"q"\\x.yaml', "it's", "")
SERVICE = Service("satchel-serve", "Satchel at 100%", COMMAND, Path("/srv/a b%"), Path("/home/me/run/service.log"))


def unit(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def as_systemd_reads(line: str) -> list[str]:
    """The words of an ExecStart: quotes and escapes, then specifiers, then, but for the program, variables."""
    words: list[str] = []
    rest = line.strip()
    while rest:
        assert rest[0] == '"', "every word is quoted"
        word, index = "", 1
        while rest[index] != '"':
            if rest[index] == "\\":
                index += 1
                assert rest[index] in '\\"'
            word += rest[index]
            index += 1
        rest = rest[index + 1 :]
        assert not rest or rest[0] == " "
        rest = rest.lstrip(" ")
        assert "%" not in word.replace("%%", ""), "a specifier"
        word = word.replace("%%", "%")
        if words:
            assert "$" not in word.replace("$$", ""), "a variable"
            word = word.replace("$$", "$")
        words.append(word)
    return words


def test_a_unit_starts_the_very_command() -> None:
    found = unit(systemd_unit(SERVICE))
    assert as_systemd_reads(found["Service"]["ExecStart"]) == list(COMMAND)
    assert found["Service"]["WorkingDirectory"] == "/srv/a b%%"
    assert found["Unit"]["Description"] == "Satchel at 100%%"


def test_a_unit_restarts_what_fails_and_asks_only_the_server_to_end() -> None:
    found = unit(systemd_unit(SERVICE))
    assert (
        dict(found["Service"]).items()
        >= {
            "Restart": "on-failure",
            "KillMode": "mixed",
            "TimeoutStopSec": "90",
        }.items()
    )
    assert found["Install"]["WantedBy"] == "default.target"


def test_a_property_list_starts_the_very_command() -> None:
    found = plistlib.loads(launchd_plist(SERVICE))
    assert found["ProgramArguments"] == list(COMMAND)
    assert (found["Label"], found["WorkingDirectory"]) == ("satchel-serve", "/srv/a b%")
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"] is True
    assert found["SoftResourceLimits"] == {"NumberOfFiles": 10_240}
    assert found["StandardOutPath"] == found["StandardErrorPath"] == "/home/me/run/service.log"


@pytest.mark.parametrize("text", [systemd_unit, launchd_plist])
@pytest.mark.parametrize("part", ["a\nExecStart=/bin/rm", "a\x00b", "\x7f"])
def test_what_would_be_another_line_is_refused(text, part: str) -> None:
    for broken in (
        replace(SERVICE, command=("/bin/x", part)),
        replace(SERVICE, folder=Path("/" + part)),
        replace(SERVICE, description=part),
    ):
        with pytest.raises(ConfigError):
            text(broken)
    with pytest.raises(ConfigError, match="full path"):
        text(replace(SERVICE, command=("python",)))


def test_homes_have_services_of_their_own() -> None:
    usual = Path("/home/me/.satchel")
    assert service_name("serve", usual, usual) == "satchel-serve"
    others = {service_name(role, Path(home), usual) for role in ("serve", "join") for home in ("/a", "/b")}
    assert len(others) == 4 and all(name.startswith("satchel-") for name in others)


def test_the_advice_names_the_service() -> None:
    launchd = "\n".join(launchd_advice(SERVICE, Path("/Users/a b/x.plist"), 501))
    assert "launchctl bootstrap gui/501 '/Users/a b/x.plist'" in launchd and "bootout gui/501/satchel-serve" in launchd
    systemd = "\n".join(systemd_advice(SERVICE))
    assert "systemctl --user enable --now satchel-serve" in systemd and "enable-linger" in systemd


class Desk:
    """A user's home with a config, and the command line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "my config.yaml"
        self.config.write_text("models: [{name: a, source: b}]")
        self.home = folder / "a home"

    def install(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["install-service", *arguments, "--home", str(self.home)])

    def refusal(self, *arguments: str) -> str:
        result = self.install(*arguments)
        assert result.exit_code == 1 and isinstance(result.exception, Exception), result.output
        assert not self.written()
        return str(result.exception)

    def written(self) -> list[Path]:
        return [path for name in ("Library", ".config") for path in (self.folder / name).rglob("*") if path.is_file()]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_service, "is_macos", lambda: False)
    return Desk(tmp_path)


def test_the_head_is_installed_as_a_unit(desk: Desk) -> None:
    result = desk.install("my config.yaml")
    (path,) = desk.written()
    assert result.exit_code == 0 and f"Written: {path}" in result.output and "systemctl --user" in result.output
    assert path.parent == desk.folder / ".config/systemd/user" and stat.S_IMODE(path.stat().st_mode) == 0o600
    words = as_systemd_reads(unit(path.read_text())["Service"]["ExecStart"])
    assert words[1:] == ["-P", "-m", "satchel.api.cli", "serve", "--config", str(desk.config), "--home", str(desk.home)]
    assert "Replaced" in desk.install("my config.yaml").output and desk.written() == [path]


def test_a_node_is_installed_as_a_launchd_agent(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_service, "is_macos", lambda: True)
    head = Home(desk.folder / "head")
    prepare_home(head)
    ensure_token(head)
    join_server = JoinServer(head, Node(name="mac0"), 0, versions())
    join_server.open("127.0.0.1:6379")
    try:
        invitation = invite(head, join_server.address)
        result = desk.install("--join", invitation.to_text(), "--name", "mac1", "--address", "127.0.0.1")
    finally:
        join_server.close()
    (path,) = desk.written()
    assert result.exit_code == 0 and "launchctl bootstrap" in result.output
    again = remembered(Home(desk.home))
    assert again is not None and again.join_server == join_server.address, "it has been let in already"
    assert path.parent == desk.folder / "Library/LaunchAgents"
    words = plistlib.loads(path.read_bytes())["ProgramArguments"]
    assert words[4:6] == ["join", join_server.address] and "127.0.0.1" in words
    assert invitation.secret.encode() not in path.read_bytes()


def test_a_service_outlives_an_upgrade_by_homebrew(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/homebrew/Cellar/satchel/0.1.0/libexec/bin/python")
    assert (
        'ExecStart="/opt/homebrew/opt/satchel/libexec/bin/python" ' in desk.install("my config.yaml", "--print").output
    )


def test_printing_writes_nothing(desk: Desk) -> None:
    result = desk.install("my config.yaml", "--print")
    assert result.exit_code == 0 and unit(result.output)["Service"]["Type"] == "exec"
    assert desk.written() == [] and not desk.home.exists()


def test_wrong_services_are_refused(desk: Desk) -> None:
    node = ("--join", "10.0.0.1:1", "--name", "mac1")
    assert "give what the service runs" in desk.refusal()
    assert "give what the service runs" in desk.refusal("my config.yaml", *node)
    assert "missing.yaml" in desk.refusal("missing.yaml")
    assert "--name" in desk.refusal("my config.yaml", "--name", "mac1")
    assert "--name" in desk.refusal("--join", "10.0.0.1:1")
    assert "satchel invite" in desk.refusal(*node), "it has not been let in there"
    assert "satchel invite" in desk.refusal("--join", "10.0.0.1:1#secret", "--name", "mac1")
    prepare_home(Home(desk.home))
    remember(Home(desk.home), Invitation("10.0.0.1:1", "f" * 43), Node(name="mac1", address="127.0.0.1"))
    for address in ("h", "h:", ":1", "h:0", "h:65536", "h:1e3", "h:" + "9" * 5000):
        assert "HOST:PORT" in desk.refusal("--join", address, "--name", "mac1")
    assert "is no node" in desk.refusal("--join", "10.0.0.1:1", "--name", "Mac 1")
    assert "is no node" in desk.refusal(*node, "--address", "nowhere")


def test_what_macos_lets_no_service_read_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_service, "is_macos", lambda: True)
    monkeypatch.setenv("HF_HOME", "/models")
    assert "Full Disk Access" not in desk.install("my config.yaml").output
    (desk.folder / "Documents").mkdir()
    there = desk.config.rename(desk.folder / "Documents" / "my config.yaml")
    monkeypatch.setenv("HF_HOME", "/Volumes/models")
    for daemon in ([], ["--daemon"]):
        said = desk.install("Documents/my config.yaml", *daemon).output
        assert f"lets no service read {there}, /Volumes/models: " in said and "Full Disk Access" in said


def test_a_daemon_is_written_for_an_administrator(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd starts it without a login, and then macOS lets it reach the local network."""
    assert "enable-linger" in desk.refusal("my config.yaml", "--daemon")
    monkeypatch.setattr(cli_service, "is_macos", lambda: True)
    monkeypatch.setenv("HF_HOME", "/models")
    result = desk.install("my config.yaml", "--daemon")
    (path,) = (desk.home / "run").glob("*.plist")
    found = plistlib.loads(path.read_bytes())
    assert result.exit_code == 0 and "/Library/LaunchDaemons" in result.output and not desk.written()
    assert found["UserName"] and found["EnvironmentVariables"]["HF_HOME"] == "/models"
