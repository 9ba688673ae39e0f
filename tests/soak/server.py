"""A real `satchel serve` whose parts are killed, on a disk that fills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.bring_up.runtime import clean_up_after_killed_run
from satchel.cluster.home import Home
from satchel.cluster.processes import UnixSession, session_members

COMMAND = (sys.executable, "-P", "-m", "satchel.api.cli")
START_S, END_S = 300.0, 60.0
START_TRIES = 3
MODEL = "satchel/recall"
TITLES = {
    "replica": "ray::ReplicaActor",
    "store": "ray::KVStoreActor",
    "router": "ray::RouterActor",
    "endpoint": "ray::ServeReplica",
}
"""What can be killed alone, by the titles that Ray gives its processes."""

EVERYTHING = "everything"
KILLED = (*TITLES, EVERYTHING)


class SoakServer:
    """One server on one home, started as often as it is killed.

    Args:
        home: its folder.
        settings: of the config beside models and port.
        log: where all its runs print.
    """

    def __init__(self, home: Path, settings: dict[str, Any], log: Path, numerics: str) -> None:
        self.home, self.log = home, log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        models = [{"name": MODEL, "source": "embedded:recall", "replicas": 1, "numerics": numerics}]
        self._config = log.with_suffix(".yaml")
        endpoint = {"listen": "127.0.0.1", "port": self._port}
        self._config.write_text(yaml.safe_dump({"models": models, "endpoint": endpoint, **settings}))
        self._process: subprocess.Popen[bytes] | None = None
        self.failed_starts = 0

    def start(self) -> float:
        """Start and wait until it is ready. Returns how long that took, in seconds. On a busy machine Ray may give up
        while it starts; then once more.

        Raises:
            RuntimeError: it does not become ready.
        """
        began = time.monotonic()
        for left in reversed(range(START_TRIES)):
            try:
                self._start()
                break
            except RuntimeError as error:
                if not left or "Ray did not start" not in str(error):
                    raise
                self.failed_starts += 1
        return time.monotonic() - began

    def _start(self) -> None:
        began = time.monotonic()
        said = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "serve", "--home", str(self.home), "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while b"Ready:" not in (printed := self.log.read_bytes()[said:]):
            if self._process.poll() is not None or time.monotonic() > began + START_S:
                raise RuntimeError(f"the server is not ready: {printed[-1500:].decode(errors='replace')}")
            time.sleep(0.2)

    @property
    def ended(self) -> str | None:
        """What it printed last, where it has ended by itself; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def pid_of(self, kind: str) -> int | None:
        """The process of that kind, where one runs."""
        for pid in self._ray_members():
            with suppress(psutil.Error):
                command = psutil.Process(pid).cmdline()
                if command and command[0].startswith(TITLES[kind]):
                    return pid
        return None

    def kill(self, kind: str) -> int:
        """SIGKILL for the process of that kind, or for everything. Returns how many were killed."""
        if kind == EVERYTHING:
            assert self._process is not None
            pids = [*session_members(os.getsid(self._process.pid)), *self._ray_members()]
        else:
            pids = [pid for pid in (self.pid_of(kind),) if pid is not None]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == EVERYTHING and self._process is not None:
            self._process.wait(END_S)
        return len(pids)

    def stop(self) -> None:
        """End it in order; what is left is killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        clean_up_after_killed_run(Home(self.home))

    def files(self) -> Iterator[tuple[str, bytes]]:
        """All that is in its home, by path there."""
        for path in sorted(self.home.rglob("*")):
            # Files come and go.
            with suppress(OSError):
                if path.is_file():
                    yield str(path.relative_to(self.home)), path.read_bytes()

    def _ray_members(self) -> list[int]:
        try:
            session = UnixSession.from_dict(json.loads((self.home / "run" / "session.json").read_text()))
        except (OSError, ValueError):
            return []
        return session.members() if session is not None else []


class HomeDisk:
    """The file system of a home, which can be filled.

    Attributes:
        bytes_max: of the whole of it; None where it is the machine's own and is not filled.
    """

    def __init__(self, folder: Path, bytes_max: int | None) -> None:
        self.folder, self.bytes_max = folder, bytes_max
        self._filler = folder / "filler"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self) -> int:
        """Take all that is free. Returns the bytes."""
        assert self.bytes_max is not None
        taken = 0
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                taken += file.write(bytes(min(2**20, max(4096, self.free_bytes()))))
        return taken

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def disk_of(folder: Path, bytes_max: int) -> Iterator[HomeDisk]:
    """A file system of that size in memory, where the user may mount one; else the folder as it is."""
    folder.mkdir(parents=True)
    options = f"size={bytes_max},mode=0700"
    mounted = sys.platform == "linux" and os.geteuid() == 0
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", options, "satchel-soak", str(folder)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield HomeDisk(folder, bytes_max if mounted else None)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
