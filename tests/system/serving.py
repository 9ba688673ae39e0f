"""A real `satchel serve`, for tests that end it or kill its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from satchel.cluster.connection import ClusterRecord
from satchel.cluster.home import Home
from satchel.cluster.processes import session_members

COMMAND = [sys.executable, "-m", "satchel.api.cli"]
RECALL = {"name": "satchel/recall", "source": "embedded:recall"}


_found: list[bytes] = []
"""What self-tests of this process' servers have found, the last of all of them."""


def give_findings(home: Path) -> None:
    """Lets servers on a new `home` know what self-tests of earlier ones have found, as after a first start there."""
    if _found and not (known := Home(home).trials_file).exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_bytes(_found[-1])


def take_findings(home: Path) -> None:
    """Keeps what self-tests on `home` have found for later servers."""
    if (known := Home(home).trials_file).exists():
        _found[:] = [known.read_bytes()]


AS_ON_A_MAC = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"]
"""Programs begin with macOS's limit of open files."""


@contextmanager
def serving(home: Path, *arguments: str, ready_s: float = 240.0) -> Iterator[subprocess.Popen[bytes]]:
    """A server on `home`, ready to answer, in a session of its own; ended in order afterwards if it still runs."""
    give_findings(home)
    output = (home / "output").open("w")
    process = subprocess.Popen(
        [*AS_ON_A_MAC, *COMMAND, "serve", "--home", str(home), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        ends = time.monotonic() + ready_s
        while not _is_ready((home / "output").read_text()):
            assert process.poll() is None and time.monotonic() < ends, (home / "output").read_text()
            time.sleep(0.1)
        take_findings(home)
        yield process
    finally:
        output.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def _is_ready(said: str) -> bool:
    """Whether a server has said how it is tried, the last that it says, to the end."""
    tried = said.partition("Try it:\n")[2]
    return tried.endswith("\n") and not tried.endswith("\\\n")


@contextmanager
def serving_recall(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """As `serving`, with the text model alone: tests that show no pictures need not start the one that sees."""
    config = home / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"models": [RECALL]}))
    with serving(home, "--config", str(config), "--port", str(port)) as process:
        yield process


def kill_everything(server_pid: int) -> None:
    """The server, its Ray and all actors, as a power cut would."""
    members = [member for sid in sessions_of(server_pid) for member in session_members(sid)]
    os.kill(server_pid, signal.SIGKILL)
    for member in members:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue


def listens_at(record: ClusterRecord) -> set[str]:
    """The addresses at which processes of a running node accept connections."""
    processes = [psutil.Process(pid) for pid in (record.pid, *session_members(record.ray_sid))]
    sockets = [each for process in processes for each in process.net_connections("tcp")]
    return {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN}


def sessions_of(server_pid: int) -> set[int]:
    """The Unix sessions of the server's children; Ray leads one of its own."""
    return {os.getsid(child.pid) for child in psutil.Process(server_pid).children()} | {os.getsid(server_pid)}
