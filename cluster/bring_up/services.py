"""Service definitions that keep Satchel running: a launchd agent or daemon, or a systemd unit.

Texts only: nothing here writes a file or starts anything. Both restart the server if it fails, and not after an orderly
end.
"""

from __future__ import annotations

import hashlib
import plistlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..processes import OPEN_FILES

STOP_S = 90
"""How long an orderly end may take before the manager kills: answers are finished first."""

RETRY_S = 15

_GUARDED = ("Desktop", "Documents", "Downloads", "Library/CloudStorage", "Library/Mobile Documents")


@dataclass(frozen=True)
class Service:
    """One process that the service manager keeps running.

    Attributes:
        name: unique among this user's services, such as `satchel-serve`.
        description: one line.
        command: the program, by its full path, and its arguments.
        folder: its working directory; relative paths in a config begin there.
        log: the file for its output, if the manager keeps no journal.
        variables: environment variables that it needs.
    """

    name: str
    description: str
    command: tuple[str, ...]
    folder: Path
    log: Path
    variables: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Checks that every part can be written into a service file.

        Raises:
            ConfigError: a part cannot, or the program is not named by its full path.
        """
        values = [value for _, value in self.variables]
        for part in (self.name, self.description, *self.command, str(self.folder), str(self.log), *values):
            if any(ord(character) < 32 or ord(character) == 127 for character in part):
                raise ConfigError(f"{part!r} has characters that no service's file can have")
        if not Path(self.command[0]).is_absolute():
            raise ConfigError(f"the program {self.command[0]!r} is not named by its full path")


def service_name(role: str, home: Path, default_home: Path) -> str:
    """Returns the name of the service with this role (`serve` or `join`); a home other than the default adds a hash."""
    if home == default_home:
        return f"satchel-{role}"
    return f"satchel-{role}-{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"


def launchd_path(service: Service, user_home: Path) -> Path:
    return user_home / "Library" / "LaunchAgents" / f"{service.name}.plist"


def launchd_plist(service: Service, user: str = "") -> bytes:
    """Returns the property list of a launchd agent (see `man launchd.plist`).

    Args:
        user: the one as whom a daemon runs, which starts before anybody logs in; "" for an agent.

    Raises:
        ConfigError: a part cannot be written into it.
    """
    service.check()
    return plistlib.dumps(
        {
            **({"UserName": user} if user else {}),
            **({"EnvironmentVariables": dict(service.variables)} if service.variables else {}),
            "Label": service.name,
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RETRY_S,
            "ExitTimeOut": STOP_S,
            # Without it macOS throttles its use of the processor and the disk.
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "StandardOutPath": str(service.log),
            "StandardErrorPath": str(service.log),
        }
    )


def launchd_advice(service: Service, path: Path, uid: int) -> list[str]:
    """Returns how to start it, how to remove it, and where its output is."""
    return [
        f"Start it, now and at every login:  launchctl bootstrap gui/{uid} {shlex.quote(str(path))}",
        # With the file there it would start again at the next login.
        f"Stop it for good:                  launchctl bootout gui/{uid}/{service.name} && rm {shlex.quote(str(path))}",
        f"What it says:                      {service.log}",
    ]


def daemon_advice(service: Service, written: Path) -> list[str]:
    """Returns how an administrator starts a launchd daemon whose property list lies at `written`."""
    path = Path("/Library/LaunchDaemons") / f"{service.name}.plist"
    put = f"sudo install -o root -g wheel -m 600 {shlex.quote(str(written))} {path}"
    return [
        f"Start it, now and at every start:  {put} && sudo launchctl bootstrap system {path}",
        f"Stop it for good:                  sudo launchctl bootout system/{service.name} && sudo rm {path}",
        f"What it says:                      {service.log}",
    ]


def guarded_paths(service: Service, user_home: Path) -> list[str]:
    """Returns the paths in its definition that macOS asks the user about before a program may read them: some folders
    of the user, and disks that are not the Mac's own. For a service nobody is asked, and it gets `Operation not
    permitted`."""
    guarded = [*(user_home / folder for folder in _GUARDED), Path("/Volumes")]
    paths = dict.fromkeys([str(service.folder), *service.command, *(value for _, value in service.variables)])
    return [path for path in paths if any(Path(path).is_relative_to(folder) for folder in guarded)]


def systemd_path(service: Service, user_home: Path) -> Path:
    return user_home / ".config" / "systemd" / "user" / f"{service.name}.service"


def systemd_unit(service: Service) -> str:
    """Returns the text of a systemd user unit (see `man systemd.service`).

    Raises:
        ConfigError: a part cannot be written into it.
    """
    service.check()
    program, *arguments = service.command
    # systemd expands variables in the arguments, but not in the program's path.
    command = [_quoted(program), *(_quoted(argument).replace("$", "$$") for argument in arguments)]
    variables = [f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.variables]
    return f"""\
[Unit]
Description={service.description.replace("%", "%%")}

[Service]
Type=exec
ExecStart={" ".join(command)}
WorkingDirectory={str(service.folder).replace("%", "%%")}
{"".join(variables)}Restart=on-failure
RestartSec={RETRY_S}
TimeoutStopSec={STOP_S}
# Only the server is asked to end: it finishes the running answers and ends Ray itself.
KillMode=mixed

[Install]
WantedBy=default.target
"""


def systemd_advice(service: Service) -> list[str]:
    """Returns how to start it, how to remove it, and where its output is."""
    start = f"systemctl --user daemon-reload && systemctl --user enable --now {service.name}"
    return [
        f"Start it, now and at every login:  {start}",
        "Keep it while nobody is logged in: loginctl enable-linger",
        f"Stop it for good:                  systemctl --user disable --now {service.name}",
        f"What it says:                      journalctl --user -u {service.name}",
    ]


def _quoted(word: str) -> str:
    """The word as systemd reads it back: in quotes, with its own characters and specifiers escaped."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
