"""`satchel join`: keeps this machine in a cluster until it leaves, or until the head removes it.

The node is a process of its own (`join.py`), because Ray ends a process that has lost its cluster. This process does
not use Ray: it restarts the node's process after it has ended, and finds the cluster's present head.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from ....cluster import environment
from ....cluster.bring_up.launch import LINE_BYTES_MAX, READY, RETRY_FIRST_S, RETRY_MAX_S, SENTENCE, JoinOrder
from ....cluster.config.config import Logs
from ....cluster.config.nodes import Node
from ....cluster.errors import ClusterError, SatchelError
from ....cluster.home import Home, HomeLock, prepare_home, write_private
from ....cluster.node_keeper import note_keeper
from ....cluster.telemetry.logs import begin_logs
from ....cluster.trust.admission import knock
from ....cluster.trust.invitations import Invitation, remembered
from ....cluster.trust.takeover_state import ways_back
from ..progress import print_error
from ..serve import POLL_S, StopSignals, leave
from .join import REMOVED

LOOK_S = 2.0
"""Seconds between searches for a lost cluster."""

READ_S = 5.0
LEAVE_S = 60.0
"""A node that does not leave within this time is ended."""


def invited(where: str | None, home: Home) -> Invitation:
    """Returns the invitation of `satchel join`'s argument: an invitation's text, or None or HOST:PORT for the cluster
    that this machine was in.

    Raises:
        ClusterError: the text is neither an invitation nor an address, or this machine has joined no cluster yet.
    """
    if where is not None and "#" in where:
        try:
            return Invitation.from_text(where)
        except ValueError as error:
            raise ClusterError(f"{where.partition('#')[0]}#… is {error}") from None
    if where is not None:
        _host(where)
    last = remembered(home)
    if last is None:
        raise ClusterError("this machine has joined no cluster yet: `satchel invite` on a head says what to type here")
    return Invitation(where or last.join_server, last.fingerprint)


def named_node(name: str | None, address: str, invitation: Invitation, home: Home) -> Node:
    """Returns this machine as a node. Without `name` it is called as in its last cluster.

    Raises:
        ClusterError: as `own_node`.
    """
    last = remembered(home)
    if last is not None:
        name = name or last.name or None
        # The machine may have another address by now.
        address = address or (last.address if _is_own(last.address) else "")
    return own_node(name, address, invitation.join_server)


def own_node(name: str | None, address: str, head: str) -> Node:
    """Returns this machine as a node that is not in the config.

    Raises:
        ClusterError: the name or the head's address (`host:port`) is invalid, or there is no route to the head.
    """
    host = _host(head)
    if not address:
        # Finds the local address of the route to the head; nothing is sent.
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                address = str(probe.getsockname()[0])
        except OSError as error:
            raise ClusterError(f"there is no way to {host}: {error.strerror or error}") from None
    name = name or re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:63]
    try:
        return Node(name=name, address=address)
    except ValueError:
        raise ClusterError(f"{name!r} at {address!r} is no node: a name has letters, digits and dashes") from None


def _host(head: str) -> str:
    """Returns the host of `HOST:PORT`.

    Raises:
        ClusterError: the text is not of that form.
    """
    host, _, port = head.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ClusterError(
            f"{head!r} is neither an invitation, as `satchel invite` on the head prints it, nor the address of a "
            "cluster, HOST:PORT"
        )
    return host


def _is_own(address: str) -> bool:
    """Returns whether this machine has that address now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return bool(address)


def stay(invitation: Invitation, node: Node, home: Home) -> NoReturn:
    """Joins, stays, and ends the process: with exit code 0 after the node has left or was removed, else with 1 and a
    sentence.

    Raises:
        HomeInUse: another process keeps the home's machine in a cluster.
    """
    prepare_home(home)
    lock = HomeLock(home, home.node_lock_file)
    lock.acquire()
    begin_logs("join", Logs(), home, terminal=True)
    signals = StopSignals()
    signals.install()
    note_keeper(home, node.name, invitation.join_server)
    try:
        code = _Stay(invitation, node, home, signals).run()
    except SatchelError as error:
        print_error(error)
        code = 1
    home.node_file.unlink(missing_ok=True)
    lock.release()
    leave(code)


class NodeProcess:
    """One run of the node in a process of its own, which ends when this one does.

    Args:
        quiet: whether to hide what it prints before it is ready.

    Attributes:
        ready: set once its replicas answer.
        last: its last sentence, which says why it ended, "" for none.

    Raises:
        ClusterError: its log cannot be written, or no process can be started.
    """

    def __init__(self, order: JoinOrder, home: Home, *, quiet: bool) -> None:
        self.ready = threading.Event()
        self.last = ""
        self._quiet = quiet
        write_private(home.node_log_file, "")
        try:
            with home.node_log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    node_command(home),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={**environment.snapshot(), "PYTHONUNBUFFERED": "1"},
                )
        except OSError as error:
            raise ClusterError(f"the node's process does not start: {error.strerror or error}") from None
        assert self._process.stdin is not None
        # If the process has already ended, its output says why.
        with suppress(OSError):
            self._process.stdin.write(order.to_line())
            self._process.stdin.flush()
        self._reading = threading.Thread(target=self._read, name="node", daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while raw := self._process.stdout.readline(LINE_BYTES_MAX):
            line = raw.decode(errors="replace").rstrip()
            if line == READY:
                self.ready.set()
            elif line.startswith(SENTENCE):
                self.last = line.removeprefix(SENTENCE)
            elif line and (self.ready.is_set() or not self._quiet):
                _say(line)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def leave(self, signals: StopSignals) -> None:
        """Asks the node to leave. After a second signal, or after `LEAVE_S`, it is killed."""
        self._process.terminate()
        ends = time.monotonic() + LEAVE_S
        while self.is_alive() and time.monotonic() < ends and not signals.at_once:
            time.sleep(POLL_S)
        if self.is_alive():
            self._process.kill()

    def wait(self) -> int:
        """Returns its exit code once it has ended and all of its output was read."""
        code = self._process.wait()
        self._reading.join(READ_S)
        assert self._process.stdin is not None
        # Closing flushes, which fails if the node did not read its input.
        with suppress(OSError):
            self._process.stdin.close()
        return code


class _Stay:
    """One machine's stay in a cluster, across losses of the cluster and changes of its head."""

    def __init__(self, invitation: Invitation, node: Node, home: Home, signals: StopSignals) -> None:
        self._invitation, self._node, self._home, self._signals = invitation, node, home, signals
        self._joined = self._tried = False
        self._pause_s = RETRY_FIRST_S
        self._told = ""

    def run(self) -> int:
        """Returns the exit code.

        Raises:
            ClusterError: the first attempt to join failed.
        """
        name, last = self._node.name, ""
        for invitation in self._ways():
            self._tried = True
            try:
                process = NodeProcess(self._order(invitation), self._home, quiet=self._joined)
            except ClusterError as error:
                # For example a full disk, which may have room again.
                if not self._joined:
                    raise
                self._say_not_back(error.message)
                continue
            self._await(process, invitation)
            code = process.wait()
            if code == 0 or self._signals.stop:
                return 0
            if code == REMOVED:
                if not self._joined:
                    raise ClusterError(process.last)
                _say(f"{name} is no node of its cluster any more: {process.last}")
                return 0
            last = process.last or f"its process ended with code {code}; its output is in {self._home.node_log_file}"
            if process.ready.is_set():
                _say(f"{name} has lost the cluster at {invitation.join_server}: {last}")
                _say(f"{name} joins again by itself as soon as the cluster answers; `satchel leave` ends that")
                self._told = last
            elif self._joined:
                self._say_not_back(last)
        if self._joined:
            _say("Left, while the cluster did not answer")
            return 0
        raise ClusterError(last)

    def _say_not_back(self, why: str) -> None:
        if why != self._told:
            _say(f"{self._node.name} is not back yet: {why}")
        self._told = why

    def _order(self, invitation: Invitation) -> JoinOrder:
        node = self._node
        if self._joined and not node.is_loopback and not _is_own(node.address):
            # The machine may have no address at the moment; then it keeps the old one.
            with suppress(ClusterError):
                node = self._node = own_node(node.name, "", invitation.join_server)
        return JoinOrder(invitation, node)

    def _await(self, process: NodeProcess, invitation: Invitation) -> None:
        """Waits until the process has ended; after a signal, asks it to leave."""
        noted = False
        while process.is_alive() and not self._signals.stop:
            time.sleep(POLL_S)
            if process.ready.is_set() and not noted:
                noted = True
                self._note_joined(invitation.join_server)
        if process.is_alive():
            process.leave(self._signals)

    def _note_joined(self, join_server: str) -> None:
        name = self._node.name
        _say(
            f"{name} is back in the cluster at {join_server}"
            if self._joined
            else f"{name} has joined {join_server}; Ctrl-C leaves"
        )
        self._joined, self._told, self._pause_s = True, "", RETRY_FIRST_S
        # If the disk is full, the older note stays; it names the same process.
        with suppress(ClusterError):
            note_keeper(self._home, name, join_server)

    def _ways(self) -> Iterator[Invitation]:
        """Yields invitations to try, one after the other: each once before the machine has joined, and for ever after
        that."""
        yield self._invitation
        if not self._joined and self._invitation.secret:
            return
        while not self._signals.stop:
            self._tried = False
            last = remembered(self._home)
            for way in [] if last is None else ways_back(self._home, last):
                was_tried = not self._joined and way.join_server == self._invitation.join_server
                if not was_tried and not self._signals.stop and knock(way.join_server) == "open":
                    yield way.way_back
            if not self._joined:
                return
            self._wait(self._pause_s if self._tried else LOOK_S)
            if self._tried:
                self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)

    def _wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not self._signals.stop:
            time.sleep(POLL_S)


def node_command(home: Home) -> list[str]:
    """Returns the command line of the node's process."""
    return [sys.executable, "-P", "-m", "satchel.api.cli", "join", "--kept", "--home", str(home.root)]


def _say(line: str) -> None:
    # The reader of the output may have gone away (`| head`); the node stays.
    with suppress(OSError):
        print(line, flush=True)
