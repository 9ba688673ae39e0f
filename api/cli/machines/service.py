"""Background servers and nodes: `satchel up`, `down`, `leave` and `install-service`."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ....cluster.bring_up.ports import check_port_free
from ....cluster.bring_up.services import (
    Service,
    daemon_advice,
    guarded_paths,
    launchd_advice,
    launchd_path,
    launchd_plist,
    service_name,
    systemd_advice,
    systemd_path,
    systemd_unit,
)
from ....cluster.config.config import Config
from ....cluster.connection import ClusterRecord, find_cluster
from ....cluster.environment import is_macos, snapshot
from ....cluster.errors import ClusterError, ConfigError, HomeInUse, NotRunning
from ....cluster.home import Home, expanded, prepare_home, read_json, write_private
from ....cluster.node_keeper import find_keeper
from ....cluster.processes import ProcessMark

POLL_S = 0.1
AT_ONCE_S = 0.6
"""A pause between two signals, so that they count as two."""

LOG_LINE_BYTES_MAX = 4096

PASSED_ON = ("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "SATCHEL_OPENBLAS")
"""Variables of this shell that a service gets too: where models are kept, and with whose rights they are read."""

_WHEN_READY = ("Ready: ", "Models: ", "Try it:", "  curl ", "    -d ", "Ctrl-C ")

Say = Callable[[str], None]


def log_file(home: Home) -> Path:
    """Returns the path of a background server's output."""
    return home.run / "server.log"


def satchel_command(*arguments: str) -> list[str]:
    """Returns a command line of this installation."""
    return [sys.executable, "-P", "-m", "satchel.api.cli", *arguments]


def up(command: Sequence[str], config: Config, home: Home, say: Say) -> ClusterRecord:
    """Starts the server in the background and waits until it is ready; an interrupted wait ends it.

    Args:
        command: the server's command line.
        config: the one that it will serve.
        say: called with each line that the server prints while it starts.

    Raises:
        HomeInUse: a server runs already.
        PortInUse: the endpoint's port is taken.
        ClusterError: it did not start; the message is the server's.
    """
    with suppress(NotRunning):
        record = find_cluster(home)
        raise HomeInUse(f"a server runs on {home.root} already (process {record.pid}); `satchel down` ends it")
    check_port_free(config.endpoint.listen, config.endpoint.port)
    prepare_home(home)
    log = log_file(home)
    write_private(log, "")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**snapshot(), "PYTHONUNBUFFERED": "1"},
        )
    try:
        return _await_ready(process, home, log, say)
    except BaseException:
        # Otherwise the server would keep running unnoticed.
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        raise


def _await_ready(process: subprocess.Popen[bytes], home: Home, log: Path, say: Say) -> ClusterRecord:
    partial = b""
    with log.open("rb") as lines:
        while True:
            ended = process.poll() is not None
            with suppress(NotRunning):
                record = find_cluster(home)
                if record.pid == process.pid and record.endpoint_url is not None:
                    return record
            while line := lines.readline(LOG_LINE_BYTES_MAX):
                partial += line
                if partial.endswith(b"\n") or len(partial) > LOG_LINE_BYTES_MAX:
                    _pass_on(partial.decode(errors="replace").rstrip(), say)
                    partial = b""
            if ended:
                raise ClusterError(_last_error(log) or f"the server ended while it started; see {log}")
            time.sleep(POLL_S)


def _pass_on(line: str, say: Say) -> None:
    # Its error is raised as an exception, and its lines about being ready apply only to a foreground server.
    if line and not line.startswith(("satchel: ", *_WHEN_READY)):
        say(line)


def _last_error(log: Path) -> str:
    """Returns the last error message of a failed command, "" if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("satchel: ") for line in reversed(lines) if line.startswith("satchel: ")), "")


def down(home: Home, *, at_once: bool, wait_s: float, say: Say) -> None:
    """Shuts down the home's server and everything that it has started, and waits until it is gone.

    Args:
        at_once: do not let it finish running requests.

    Raises:
        NotRunning: none runs.
        ClusterError: this is a node of another server's cluster, or the server is still there after `wait_s`.
    """
    record = _running(home, "no server runs on")
    if record.joined:
        raise ClusterError(f"{record.node} has joined the cluster at {record.address}; `satchel leave` ends that")
    say(f"Ending the server on {home.root} (process {record.pid})" + ("" if at_once else "; running requests finish"))
    end_process(ProcessMark(record.pid, record.pid_created_s), wait_s, at_once=at_once)
    say("Stopped")


def leave(home: Home, *, wait_s: float, say: Say) -> None:
    """Ends this machine's node, and waits until its process is gone.

    Raises:
        NotRunning: no node runs on the home.
        ClusterError: it is the head, its head started it, or it is still running after `wait_s`.
    """
    if (keeper := find_keeper(home)) is not None:
        say(f"{keeper.name} is leaving the cluster at {keeper.join_server}")
        end_process(keeper.mark, wait_s)
        say("Gone")
        return
    record = _running(home, "no node runs on")
    if not record.joined:
        raise ClusterError(
            f"{record.node} is the head of its cluster and cannot leave it; `satchel down` ends the cluster"
        )
    if _is_kept(record.pid):
        raise ClusterError(
            f"{record.node} was started by its head, which would start it again; take it out of the config there"
        )
    say(f"{record.node} is leaving the cluster at {record.address}")
    end_process(ProcessMark(record.pid, record.pid_created_s), wait_s)
    say("Gone")


def _running(home: Home, otherwise: str) -> ClusterRecord:
    """Returns the record of the server or node that runs on the home.

    Raises:
        NotRunning: none runs, or it is still starting; the message begins with `otherwise`.
    """
    try:
        return find_cluster(home)
    except NotRunning:
        session = read_json(home.session_file)
        if session is not None and read_json(home.cluster_file) is None:
            raise NotRunning(f"{otherwise} {home.root} yet; one may be starting, then try again in a moment") from None
        raise NotRunning(f"{otherwise} {home.root}") from None


def _is_kept(pid: int) -> bool:
    """Returns whether a node's process was started by a head."""
    try:
        return "--ordered" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def end_process(mark: ProcessMark, wait_s: float, *, at_once: bool = False) -> None:
    """Asks a process to shut down, and waits until it is gone.

    Raises:
        ClusterError: it belongs to another user, or is still there after `wait_s`.
    """
    ends = time.monotonic() + wait_s
    _ask_to_end(mark)
    if at_once:
        time.sleep(AT_ONCE_S)
        _ask_to_end(mark)
    while mark.is_alive():
        if time.monotonic() > ends:
            raise ClusterError(f"process {mark.pid} is still ending after {wait_s:g} s")
        time.sleep(POLL_S)


def _ask_to_end(mark: ProcessMark) -> None:
    """Sends SIGTERM to the process, if it is alive.

    Raises:
        ClusterError: it belongs to another user.
    """
    if not mark.is_alive():
        return
    try:
        os.kill(mark.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise ClusterError(f"process {mark.pid} belongs to another user") from None


def head_service(config: Path, home: Home) -> Service:
    """Returns the service that serves a config on this machine, started in this folder."""
    command = satchel_command("serve", "--config", str(expanded(config).absolute()), "--home", str(home.root))
    return _service("serve", "Satchel: the server of a cluster", command, home)


def node_service(join_server: str, name: str, own_address: str, home: Home) -> Service:
    """Returns the service that makes this machine a node of the cluster whose join server (`HOST:PORT`) admitted it."""
    command = satchel_command("join", join_server, "--name", name)
    command += ["--home", str(home.root), *(["--address", own_address] if own_address else [])]
    return _service("join", f"Satchel: node {name} of a cluster", command, home)


def _service(role: str, description: str, command: list[str], home: Home) -> Service:
    name = service_name(role, home.root, expanded("~") / ".satchel")
    variables = tuple((name, value) for name in PASSED_ON if (value := snapshot().get(name)))
    program, *arguments = command
    # Homebrew removes the folder of a version when it installs the next one; its link stays.
    program = re.sub(r"/Cellar/([^/]+)/[^/]+/", r"/opt/\1/", program)
    return Service(name, description, (program, *arguments), Path.cwd(), home.run / "service.log", variables)


def install(service: Service, home: Home, *, daemon: bool = False, only_print: bool, say: Say) -> None:
    """Writes the file for the machine's service manager, or only prints it. Nothing is started.

    Args:
        daemon: whether launchd starts it without a login. The file is then put in its place by an administrator.

    Raises:
        ConfigError: an argument cannot be expressed in that file, or a daemon of launchd is wanted elsewhere.
        ClusterError: the file cannot be written.
    """
    if daemon and not is_macos():
        raise ConfigError(
            "--daemon is for macOS; with systemd `loginctl enable-linger` starts services without a login"
        )
    if daemon:
        path = home.run / f"{service.name}.plist"
        text, advice = launchd_plist(service, getpass.getuser()).decode(), daemon_advice(service, path)
    elif is_macos():
        path = launchd_path(service, expanded("~"))
        text, advice = launchd_plist(service).decode(), launchd_advice(service, path, os.getuid())
    else:
        path = systemd_path(service, expanded("~"))
        text, advice = systemd_unit(service), systemd_advice(service)
    if only_print:
        say(text.rstrip("\n"))
        return
    prepare_home(home)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"cannot make {path.parent}: {error.strerror or error}") from None
    known = path.exists()
    write_private(path, text)
    say(f"{'Replaced' if known else 'Written'}: {path}")
    for line in advice:
        say(line)
    if is_macos() and (guarded := guarded_paths(service, expanded("~"))):
        say(f"macOS lets no service read {', '.join(guarded)}: move that, or allow Full Disk Access (System Settings >")
        say(f"Privacy & Security) to {os.path.realpath(service.command[0])}")
