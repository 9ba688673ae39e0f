"""The other machines of a cluster, started from its head: by ssh, or as processes here where they are this machine.

Each runs `satchel join`, told what it must know on its standard input, and leaves when that closes: whatever becomes
of the server, nothing stays behind. A node that ends is started again, later and later.
"""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import environment
from ..config import Home
from ..errors import ClusterError
from ..nodes import Node
from ..trust.invitations import Invitation

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 2.0
RETRY_MAX_S = 60.0
STEADY_S = 60.0
"""A node that stayed for so long is started again as soon as one that has ended for the first time."""

KILL_S = 3.0

LINE_BYTES_MAX = 16_384
"""Of what a node says, a longer line is taken in parts."""

SSH_FAILED = 255
NOT_RUN = (126, 127)
"""A shell's exit status where there is no such command, or it may not be run."""

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")

Say = Callable[[str], None]


@dataclass(frozen=True)
class JoinOrder:
    """What a node reads on its standard input: one line of JSON."""

    invitation: Invitation
    node: Node

    def to_line(self) -> bytes:
        data = {"invitation": self.invitation.to_text(), "node": asdict(self.node)}
        return json.dumps(data).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> JoinOrder:
        """
        Raises:
            ValueError: it is none.
        """
        try:
            data = json.loads(line)
            return JoinOrder(Invitation.from_text(str(data["invitation"])), Node(**data["node"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no order to join: {error}") from None


def command_of(node: Node, home: Home) -> list[str]:
    """How a node's process is started from here."""
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
    return [*SSH, node.ssh, "--", shlex.join(words)]


def advice_on(node: Node, status: int) -> str | None:
    """What to do where the way to the node is at fault; None where it is not, and the node says what is.

    Args:
        status: the exit status of ssh: its own where it does not get there, else that of the command.
    """
    if node.ssh is None:
        return None
    if status == SSH_FAILED:
        return f"`ssh {node.ssh}` has to work from here, without a question"
    if status in NOT_RUN:
        return f"`command` in the config has to say where Satchel is on {node.name}"
    return None


@dataclass
class _Launched:
    node: Node
    ready: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None
    last: str = ""


class Launcher:
    """Keeps nodes up. All methods may be called from any thread.

    Args:
        invite: makes an invitation, for each start of a node a new one.
        say: gets what becomes of them.
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
        """Wait until all nodes are ready; those that are not after `timeout_s`, each with what it said last."""
        ends = time.monotonic() + timeout_s
        late = []
        for launched in self._launched:
            if not launched.ready.wait(max(0.0, ends - time.monotonic())):
                late.append(f"{launched.node.name}: {launched.last or 'it has said nothing'}")
        return late

    def stop(self) -> None:
        """Let all nodes leave, at most `leave_s`, and end those that do not."""
        with self._starting:
            # From here on nothing is started that nobody ends.
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
                # The other nodes have to be ended too, whatever holds this one.
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
        # Where it has ended, it says why.
        with suppress(OSError):
            process.stdin.write(order.to_line())
            process.stdin.flush()
        while raw := process.stdout.readline(LINE_BYTES_MAX):
            line = raw.decode(errors="replace").strip()
            if line == READY:
                # No reason for its end, whenever that comes.
                launched.last = ""
                self._say(f"Node {launched.node.name} is ready")
                launched.ready.set()
            elif line:
                launched.last = line.removeprefix("satchel: ")
                logger.info("%s: %s", launched.node.name, line)
        advice = advice_on(launched.node, process.wait())
        if advice is not None and not launched.ready.is_set():
            launched.last = f"{launched.last}: {advice}" if launched.last else advice
        _close_input(process)


READY = "ready"
"""What a node says once its replicas answer."""


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    # What was written last may not have arrived.
    with suppress(OSError):
        process.stdin.close()
