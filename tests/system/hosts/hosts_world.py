"""One cluster on three hosts: mac0 leads, mac1 is started by ssh, and mac2 joins by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from satchel.cluster.bring_up.runtime import clean_up_after_killed_run
from satchel.cluster.connection import ClusterRecord, find_cluster
from satchel.cluster.home import Home
from satchel.cluster.keys import OWNER, create_key
from satchel.cluster.trust.invitations import Invitation

from ..serving import COMMAND, RECALL, give_findings
from . import hosts as namespaces
from . import secure_shell
from .hosts import Host, Talk, hosts, stand_in_ssh, wait_until
from .secure_shell import SecureShell

NODES = ["mac0", "mac1"]
"""Those that the config names."""

ALL = [*NODES, "mac2"]

PORT = 8000
START_S = 150.0
RETURN_S = 90.0
"""For a host that was killed: Ray takes 15 s to notice, and on a busy machine it takes 30 to start."""

LINK_MBIT_S = 1000


class World:
    """The hosts, and what their users can do. The ssh that starts mac1 is a real one where this machine has one."""

    def __init__(self, folder: Path, machines: list[Host]) -> None:
        self.folder = folder
        self.machines = machines
        for node in ALL:
            give_findings(folder / node)
        self.head, self.second, self.third = machines
        # The owner's own agents; without a key the endpoint would not listen beyond this machine.
        _, self.key = create_key(self.home("mac0"), OWNER, admin=True)
        self.talk = Talk(f"http://{self.head.address}:{PORT}", self.key)
        self.deleted: dict[str, str] = {}
        """Agents that were deleted while a node was away, and a word of what they knew."""
        self.no_secure_shell = secure_shell.missing()
        self.secure_shell = None if self.no_secure_shell else SecureShell(folder / "ssh", machines[1:])
        self.programs = self.secure_shell.programs if self.secure_shell else stand_in_ssh(folder / "ssh")
        self.config = folder / "config.yaml"
        nodes = [
            {"name": "mac0", "address": self.head.address},
            {
                "name": "mac1",
                "address": self.second.address,
                "ssh": self.second.name,
                "home": str(folder / "mac1"),
                "command": f"{sys.executable} -P -m satchel.api.cli",
            },
        ]
        endpoint = {"listen": self.head.address, "port": PORT}
        # JSON is YAML.
        self.config.write_text(json.dumps({"models": [RECALL], "nodes": nodes, "endpoint": endpoint}))

    def home(self, node: str) -> Home:
        return Home(self.folder / node)

    @property
    def path(self) -> str:
        """Where programs are looked for, ssh first of all."""
        return f"{self.programs}:{os.environ['PATH']}"

    def begin(self) -> None:
        """Let the machines boot."""
        for machine in self.machines:
            machine.slow(LINK_MBIT_S)
        if self.secure_shell is not None:
            for machine in self.machines[1:]:
                self.secure_shell.start(machine)

    def kill(self, machine: Host) -> None:
        """The power fails, and comes back: nothing of Satchel runs there any more."""
        machine.kill_all()
        if self.secure_shell is not None and machine is not self.head:
            self.secure_shell.start(machine)

    def up(self) -> subprocess.Popen[str]:
        """`satchel up` on the head, which starts mac1 too."""
        return self.satchel(self.head, "up", str(self.config), home="mac0")

    def satchel(self, machine: Host, *words: str, home: str) -> subprocess.Popen[str]:
        """A command on a host."""
        return subprocess.Popen(
            machine.command(*COMMAND, *words, "--home", str(self.home(home).root)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PATH": self.path},
        )

    def whole(self) -> None:
        wait_until(lambda: self.talk.answering() >= set(NODES), RETURN_S)
        wait_until(lambda: self.talk.nodes().items() >= {"mac0": True, "mac1": True}.items(), RETURN_S)

    def invitation(self) -> Invitation:
        """As the head's user asks for it."""
        said = succeeds(self.satchel(self.head, "invite", home="mac0"))
        return Invitation.from_text(said.splitlines()[1].split()[-1].strip("'"))

    def record(self, node: str) -> ClusterRecord:
        """What runs there."""
        return find_cluster(self.home(node))

    def join(self, invitation: str, home: str = "mac2") -> subprocess.Popen[str]:
        """`satchel join` on the third host."""
        return self.satchel(self.third, "join", invitation, "--name", "mac2", home=home)

    def left(self) -> list[str]:
        """What runs on the hosts, beside sshd."""
        names = [Path(f"/proc/{pid}/comm") for machine in self.machines for pid in machine.pids()]
        return [name for name in map(_first_line, names) if name not in ("", "sshd")]

    def end(self) -> None:
        """Whatever became of the cluster: the server gets the time to stop in order."""
        ended(self.satchel(self.head, "down", "--now", "--wait", "30", home="mac0"), 60)


def _first_line(path: Path) -> str:
    """Of a file that may go away."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def ended(process: subprocess.Popen[str], within_s: float) -> str:
    """What the process says until it ends."""
    try:
        said, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        raise AssertionError(f"it does not end; it said: {said}") from None
    return said


def succeeds(process: subprocess.Popen[str], within_s: float = 60.0) -> str:
    """What the process says until it ends in order."""
    said = ended(process, within_s)
    assert process.returncode == 0, said
    return said


def hear(process: subprocess.Popen[str], words: str, within_s: float = RETURN_S) -> None:
    """Wait until the process says that."""
    assert process.stdout is not None
    said = []
    impatient = threading.Timer(within_s, process.kill)
    impatient.start()
    try:
        while not said or words not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], said
    finally:
        impatient.cancel()


@contextmanager
def three_hosts(folders: pytest.TempPathFactory, name: str) -> Iterator[World]:
    """The hosts, with nothing running yet. Skips the test if this machine cannot have any."""
    if (reason := namespaces.missing()) is not None:
        pytest.skip(reason)
    folder = folders.mktemp(name)
    try:
        with hosts(3) as machines:
            world = World(folder, machines)
            try:
                world.begin()
                yield world
            finally:
                world.end()
                if (log := world.home("mac0").run / "server.log").exists():
                    print(log.read_text())
                if world.secure_shell is not None:
                    world.secure_shell.stop()
    finally:
        # Those that were killed have left Ray's folders behind.
        for node in ALL:
            clean_up_after_killed_run(world.home(node))
