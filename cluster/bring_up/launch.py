"""Starts the other nodes of a cluster from its head: by ssh, or as processes here if they have loopback addresses.

Each runs `satchel join`, reads its order from standard input, and leaves when that closes, so nothing stays behind
however the server ends. A node that ends is restarted with growing pauses.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import environment
from ..config.nodes import Node
from ..errors import ClusterError
from ..home import Home
from ..trust.invitations import Invitation

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 2.0
RETRY_MAX_S = 60.0
STEADY_S = 60.0
"""After a node has run this long, its restart pause is reset."""

KILL_S = 3.0
SSH_CONFIG_S = 5.0

LINE_BYTES_MAX = 16_384
"""A longer line of a node's output is split."""

SSH_FAILED = 255
NOT_RUN = (126, 127)
"""A shell's exit status if the command is not executable, or not found."""

INSTALLED_INTO = "PATH=$PATH:$HOME/.local/bin:/opt/homebrew/bin"
"""Where uv, pipx and Homebrew put commands. A shell that ssh starts does not look there on a Mac."""

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")

SENTENCE = "satchel: "
"""The beginning of the sentence in which a command reports its failure."""

_OF_RAY = re.compile(r"\s*(\x1b|\(raylet\)|\[[0-9-]+ [0-9:,]+ [A-Z] )")
"""Output of Ray's libraries, which is skipped: a node reports in sentences what happened."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class JoinOrder:
    """The order that a node reads from its standard input: one line of JSON."""

    invitation: Invitation
    node: Node

    def to_line(self) -> bytes:
        data = {"invitation": self.invitation.to_text(), "node": asdict(self.node)}
        return json.dumps(data).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> JoinOrder:
        """Reads what `to_line` wrote.

        Raises:
            ValueError: the line is no order.
        """
        try:
            data = json.loads(line)
            return JoinOrder(Invitation.from_text(str(data["invitation"])), Node(**data["node"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no order to join: {error}") from None


def command_of(node: Node, home: Home) -> list[str]:
    """Returns the command line that starts a node's process from here."""
    if node.ssh is None:
        own = node.home or str(home.root / "nodes" / node.name)
        return [
            sys.executable,
            "-P",
            "-m",
            "satchel.api.cli",
            "join",
            "--ordered",
            "--home",
            str(Path(own).expanduser()),
        ]
    words = [*shlex.split(node.command), "join", "--ordered"]
    if node.home is not None:
        words += ["--home", node.home]
    line = shlex.join(words)
    if "/" not in words[0]:
        line = f'env "{INSTALLED_INTO}" {line}'
    return [*SSH, node.ssh, "--", line]


def advice_on(node: Node, status: int) -> str | None:
    """Returns what to do if ssh or the command failed; None if the node itself says what is wrong.

    Args:
        status: the exit status of ssh: its own if it cannot connect, else that of the command.
    """
    if node.ssh is None:
        return None
    if status == SSH_FAILED:
        return f"`ssh {node.ssh}` has to work from here, without a question"
    if status in NOT_RUN:
        return f"`command` in the config has to say where Satchel is on {node.name}"
    return None


def unresolved(nodes: Iterable[Node]) -> list[str]:
    """Returns a sentence for each node whose host has no address now. It may get one later, as a Mac that is off does
    when it is switched on. Asks ssh's config for the host's name, which takes a moment; connects to nothing."""
    found = []
    for node in nodes:
        if node.ssh is None or (host := _host_of(node.ssh)) is None:
            continue
        try:
            socket.getaddrinfo(host, None)
        except (socket.gaierror, UnicodeError) as error:
            called = f"{host} (ssh: {node.ssh})" if host != node.ssh else host
            found.append(f"the host {called} of node {node.name} is not found: {getattr(error, 'strerror', error)}")
    return found


def _host_of(ssh: str) -> str | None:
    """Returns the name that ssh would look up here; None if another machine or program does, or there is no ssh."""
    try:
        told = subprocess.run(["ssh", "-G", ssh], capture_output=True, text=True, timeout=SSH_CONFIG_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    options: dict[str, str] = {}
    for line in told.stdout.splitlines():
        name, _, value = line.partition(" ")
        options[name] = value
    if any(options.get(other, "none") != "none" for other in ("proxyjump", "proxycommand")):
        return None
    return options.get("hostname")


@dataclass
class _Launched:
    node: Node
    ready: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None
    last: str = ""


class Launcher:
    """The supervisor of the other nodes: starts them, and restarts those that end. Thread-safe.

    Args:
        invite: makes an invitation; each start of a node takes a new one.
        say: called with a sentence on each change.
        leave_s: how long they may take to leave: `timing.node_leave_s`.
    """

    def __init__(
        self, nodes: tuple[Node, ...], home: Home, invite: Callable[[], Invitation], say: Say, leave_s: float
    ) -> None:
        self._leave_s = leave_s
        self._home = home
        self._invite = invite
        self._say = say
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._launched = [_Launched(node) for node in nodes]
        self._threads = [
            threading.Thread(target=self._keep, args=(launched,), name=f"node {launched.node.name}", daemon=True)
            for launched in self._launched
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> list[str]:
        """Waits until all nodes are ready. Returns those that are not after `timeout_s`, each with its last line."""
        ends = time.monotonic() + timeout_s
        late = []
        for launched in self._launched:
            if not launched.ready.wait(max(0.0, ends - time.monotonic())):
                late.append(f"{launched.node.name}: {launched.last or 'it has said nothing'}")
        return late

    def stop(self) -> None:
        """Lets all nodes leave, for at most `leave_s`, then ends the rest."""
        with self._starting:
            # From here on no node is started.
            self._stopping.set()
        running = [launched.process for launched in self._launched if launched.process is not None]
        for process in running:
            _close_input(process)
        ends = time.monotonic() + self._leave_s
        for process in running:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                # The other nodes must be ended too, even if this one hangs.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_S)

    def _keep(self, launched: _Launched) -> None:
        name, pause_s = launched.node.name, 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._run(launched)
            except (OSError, ClusterError) as error:
                launched.last = f"it cannot be started: {error}"
            came_up = launched.ready.is_set()
            launched.ready.clear()
            if self._stopping.is_set():
                return
            if time.monotonic() - started > STEADY_S:
                pause_s = 0.0
            pause_s = min(max(2 * pause_s, RETRY_FIRST_S), RETRY_MAX_S)
            what, why = "is gone" if came_up else "has not come up", launched.last or "without a word"
            self._say(f"Node {name} {what} ({why}); it is started again in {pause_s:.0f} s")
            self._stopping.wait(pause_s)

    def _run(self, launched: _Launched) -> None:
        order = JoinOrder(self._invite(), launched.node)
        with self._starting:
            if self._stopping.is_set():
                return
            process = launched.process = subprocess.Popen(
                command_of(launched.node, self._home),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment.snapshot(), "PYTHONUNBUFFERED": "1"},
            )
        assert process.stdin is not None and process.stdout is not None
        # If it has ended already, its output says why.
        with suppress(OSError):
            process.stdin.write(order.to_line())
            process.stdin.flush()
        # Its own sentence says more than the output of libraries after it.
        said = False
        while raw := process.stdout.readline(LINE_BYTES_MAX):
            line = raw.decode(errors="replace").strip()
            if line == READY:
                # Lines from before it was ready do not explain a later end.
                launched.last, said = "", False
                self._say(f"Node {launched.node.name} is ready")
                launched.ready.set()
            elif line:
                logger.info("%s: %s", launched.node.name, line)
                if line.startswith(SENTENCE):
                    launched.last, said = line.removeprefix(SENTENCE), True
                elif not said and not _OF_RAY.match(line):
                    launched.last = line
        advice = advice_on(launched.node, process.wait())
        if advice is not None and not launched.ready.is_set():
            launched.last = f"{launched.last}: {advice}" if launched.last else advice
        _close_input(process)


READY = "ready"
"""The line that a node prints once its replicas answer."""


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    # Closing flushes, which fails if the node has ended.
    with suppress(OSError):
        process.stdin.close()
