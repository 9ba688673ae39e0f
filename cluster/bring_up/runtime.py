"""Starts a cluster on this machine, and ends it without leaving anything behind.

One server process owns one home. It holds the home's lock, starts Ray in a session of its own, so that Ctrl-C in a
terminal reaches the server and not Ray, and records what it started before anybody can kill it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from .. import environment
from ..config.config import Config, Timeouts
from ..config.nodes import Node
from ..config.timing import USUAL
from ..connection import NAMESPACE, ClusterRecord, connect_ray, satchel_version, versions
from ..devices.cards import card_of, found_cards
from ..errors import ClusterError, NotRunning
from ..home import Home, HomeLock, ensure_token, prepare_home, read_json, write_private_json
from ..incidents import Kind, note_incident_aside
from ..processes import ProcessMark, UnixSession, end_session, raise_open_files
from ..trust.admission import Admission
from ..trust.join_server import JoinServer, known_join_server
from ..trust.takeover_state import TakeoverState
from .heartbeats import HeartbeatListener
from .mac import stay_awake
from .ray_node import RayReport, RaySpec

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""Small: KV bytes never pass Ray's object store."""

_HEAD_START_TIMEOUT_S = 120.0
_NOTE_PROCESSES_S = 15.0
_STOP_GRACE_S = 1.5
_STOP_KILL_S = 3.0


def clean_up_after_killed_run(home: Home) -> None:
    """Ends the processes that a killed server left running and removes its folder. The home's lock must be held.

    Raises:
        ClusterError: a process cannot be ended.
    """
    data = read_json(home.session_file)
    if data is not None:
        session = UnixSession.from_dict(data)
        remaining = end_session(session, grace_s=0.0) if session is not None else []
        if remaining:
            raise ClusterError(f"processes {remaining} of the previous run cannot be ended; end them first")
        folder = Path(str(data.get("private_dir", "")))
        if folder.name.startswith("satchel-") and folder.is_dir() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    home.session_file.unlink(missing_ok=True)
    home.cluster_file.unlink(missing_ok=True)
    home.served_config_file.unlink(missing_ok=True)


class LocalCluster:
    """Ray on this machine, for one server. Call `start` once; `stop` may be called repeatedly, from any thread.

    Args:
        node: this machine.
        port: the join port if this machine is the head; 0 takes the last one again if it is free.
        silent_s: a process of Satchel without a heartbeat for this long is ended.
        heartbeat_s: the interval of heartbeats.
        ahead: arguments of a Python program that prepares the node while Ray starts; none for no program.
    """

    def __init__(
        self,
        home: Home,
        *,
        cpus: int | None = None,
        ahead: Sequence[str] = (),
        node: Node | None = None,
        port: int = 0,
        silent_s: float = Timeouts().silent_s,
        heartbeat_s: float = USUAL.heartbeat_s,
    ) -> None:
        self._home = home
        self._silent_s, self._heartbeat_s = silent_s, heartbeat_s
        self._listener: HeartbeatListener | None = None
        self._noted_at = self._polled_at = 0.0
        self._cpus, self._ahead = cpus, ahead
        self._node = node or Node(name="local")
        self._port = port
        self._lock = HomeLock(home)
        self._admission: Admission | None = None
        self._join_server: JoinServer | None = None
        self._head: subprocess.Popen[bytes] | None = None
        self._awake: subprocess.Popen[bytes] | None = None
        self._session: UnixSession | None = None
        self._private_dir: Path | None = None
        self._record: ClusterRecord | None = None
        self._card = ""
        self._connected = False
        self._guard = threading.Lock()
        self._stopping = False

    @property
    def home(self) -> Home:
        return self._home

    @property
    def record(self) -> ClusterRecord:
        """The record of the running cluster.

        Raises:
            NotRunning: it has not been started, or has been stopped.
        """
        if self._record is None:
            raise NotRunning("the cluster is not running")
        return self._record

    def start(self, admission: Admission | None = None, meanwhile: Callable[[], None] = lambda: None) -> ClusterRecord:
        """Takes the home, cleans up after a killed run, starts Ray and connects this process to it.

        Takes about eight seconds on two cores. If it fails, nothing is left behind.

        Args:
            admission: to the cluster to join; None starts a cluster, with a join server for others.
            meanwhile: called while Ray starts, in Ray's environment: for imports.

        Raises:
            HomeInUse: another server uses the home.
            PortInUse: the join port is taken.
            ConfigError: the node's card does not exist here.
            ClusterError: Ray does not start.
        """
        if self._node.device is not None:
            self._card = card_of(self._node.device, found_cards()).uuid
        prepare_home(self._home)
        self._lock.acquire()
        raise_open_files()
        if self._node.keep_awake:
            self._awake = stay_awake(os.getpid())
        try:
            clean_up_after_killed_run(self._home)
            self._admission = admission
            ensure_token(self._home)
            if admission is None:
                self._join_server = known_join_server(self._home, self._node, self._port, versions())
            self._launch_head()
            # The imports take seconds, while Ray starts.
            environment.enter_ray_environment(self._home, one_machine=self._node.is_loopback)
            import ray  # noqa: F401

            meanwhile()
            report = self._await_head()
            if self._join_server is not None:
                self._join_server.open(report.address)
            self._record = self._describe(report)
            write_private_json(self._home.cluster_file, asdict(self._record))
            connect_ray(self._record)
            self._connected = True
        except BaseException:
            self.stop()
            raise
        self.note_processes()
        return self._record

    def lead_with(self, takeover_state: Callable[[], TakeoverState]) -> None:
        """Sends the cluster's machines the takeover state from now on."""
        if self._join_server is not None:
            self._join_server.takeover_state = takeover_state

    def publish_endpoint(self, url: str, certificate: str | None = None) -> ClusterRecord:
        """Records the endpoint's URL and the file with its certificate for other processes."""
        self._record = replace(self.record, endpoint_url=url, certificate=certificate)
        write_private_json(self._home.cluster_file, asdict(self._record))
        return self._record

    def go_by(self, config: Config) -> None:
        """Uses the times from the config of the cluster that this machine has joined."""
        self._silent_s, self._heartbeat_s = config.timeouts.silent_s, config.timing.heartbeat_s
        if self._listener is not None:
            self._listener.go_by(self._silent_s, self._heartbeat_s)

    def tend(self) -> None:
        """Ends processes without heartbeats, and records the present processes from time to time. Call it several times
        a second while the cluster runs."""
        now = time.monotonic()
        if self._listener is not None and self._session is not None:
            self._listener.listen(self._session.sid)
            if now - self._polled_at >= self._heartbeat_s:
                self._polled_at = now
                self._listener.poll(self._session.sid)
        if now - self._noted_at >= _NOTE_PROCESSES_S:
            self._noted_at = now
            self.note_processes()

    def note_processes(self) -> None:
        """Records Ray's present processes, so that a later run can end them. Call it after starting actors."""
        with self._guard:
            if self._session is not None and not self._stopping:
                self._session = self._session.refreshed()
                try:
                    self._write_session()
                except ClusterError as error:
                    # On a full disk the older record stays, and the server goes on.
                    _log.warning("the processes are not noted: %s", error.message)

    def failure(self) -> str | None:
        """Returns why the cluster has ended, in a sentence; None while it runs."""
        if self._head is None or self._stopping or self._head.poll() is None:
            return None
        return f"Ray ended by itself; what it logged is in {self._home.ray_logs}"

    def stop(self, *, abandon: bool = False) -> None:
        """Ends every process of the cluster, removes its files and frees the home. Takes at most 8 s.

        Args:
            abandon: kill at once, and do not disconnect this process: another of its threads may still use Ray, which
                ends a process that calls it after a disconnection. The caller ends the process next.
        """
        with self._guard:
            first = not self._stopping
            self._stopping = True
            if not first:
                return
            if self._join_server is not None:
                self._join_server.close()
            if self._connected and not abandon:
                _disconnect_ray()
            self._end_processes(grace_s=0.0 if abandon else _STOP_GRACE_S)
            if self._listener is not None:
                self._listener.close()
            if self._awake is not None:
                self._awake.terminate()
                self._awake.wait()
            if self._private_dir is not None:
                shutil.rmtree(self._private_dir, ignore_errors=True)
            if self._lock.is_held:
                self._home.cluster_file.unlink(missing_ok=True)
                self._home.served_config_file.unlink(missing_ok=True)
                self._home.session_file.unlink(missing_ok=True)
            self._record = None
            self._lock.release()

    def _launch_head(self) -> None:
        with self._guard:
            if self._stopping:
                raise ClusterError("stopped while starting")
            self._private_dir = Path(tempfile.mkdtemp(prefix="satchel-", dir=environment.short_temporary_root()))
            # Ray makes its own folder accessible to everyone; the one around it stays private.
            spec = RaySpec(
                name=self._node.name,
                address=self._node.address,
                resource=self._node.resource,
                head=self._admission.ray if self._admission is not None else None,
                temp_dir=str(self._private_dir / "ray"),
                private_dir=str(self._private_dir),
                logs_dir=str(self._home.ray_logs),
                object_store_bytes=OBJECT_STORE_BYTES,
                cpus=self._cpus,
                ahead=self._ahead,
            )
            heartbeats = self._private_dir / "heartbeats"
            self._listener = HeartbeatListener(heartbeats, self._silent_s, self._heartbeat_s, self._note)
            log = os.open(self._home.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._head = subprocess.Popen(
                    [sys.executable, "-P", "-m", "satchel.cluster.bring_up.ray_node"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._private_dir,
                    env=environment.child_environment(
                        self._home, one_machine=self._node.is_loopback, heartbeats=heartbeats, card=self._card
                    ),
                    start_new_session=True,
                )
            finally:
                os.close(log)
            mark = ProcessMark.of(self._head.pid)
            self._session = UnixSession(self._head.pid, (mark,) if mark is not None else ())
            self._write_session()
            assert self._head.stdin is not None
            try:
                self._head.stdin.write((json.dumps(asdict(spec)) + "\n").encode())
                self._head.stdin.flush()
            except BrokenPipeError:
                raise ClusterError("Ray did not start" + _last_words(self._home.log_file)) from None

    def _note(self, kind: Kind, text: str) -> None:
        _log.warning("%s", text)
        note_incident_aside(self._home, kind, text)

    def _write_session(self) -> None:
        if self._session is not None:
            data = {**self._session.to_dict(), "private_dir": str(self._private_dir)}
            write_private_json(self._home.session_file, data)

    def _await_head(self) -> RayReport:
        assert self._head is not None and self._head.stdout is not None
        deadline = time.monotonic() + _HEAD_START_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._head.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ClusterError(f"Ray did not start within {_HEAD_START_TIMEOUT_S:.0f} s")
            part = os.read(self._head.stdout.fileno(), 65536)
            if not part:
                raise ClusterError("Ray did not start" + _last_words(self._home.log_file))
            line += part
        return RayReport(**json.loads(line))

    def _joined_at(self) -> str:
        """Returns the join server's address, this machine's own or the one that admitted it."""
        if self._join_server is not None:
            return self._join_server.address
        return self._admission.join_server if self._admission is not None else ""

    def _describe(self, report: RayReport) -> ClusterRecord:
        me = ProcessMark.of(os.getpid())
        assert me is not None and self._session is not None and self._private_dir is not None
        return ClusterRecord(
            address=report.address,
            home=str(self._home.root),
            namespace=NAMESPACE,
            version=satchel_version(),
            endpoint_url=None,
            pid=me.pid,
            pid_created_s=me.created_s,
            temp_dir=str(self._private_dir / "ray"),
            ray_sid=self._session.sid,
            node=self._node.name,
            join_server=self._joined_at(),
            joined=self._admission is not None,
        )

    def _end_processes(self, *, grace_s: float) -> None:
        if self._session is None or self._head is None:
            return
        if self._head.stdin is not None:
            # Tells the keeper that this end is intended. If the keeper has ended, the flush of what is left fails.
            with suppress(BrokenPipeError):
                self._head.stdin.close()
        # Once Ray runs, its parent is the keeper. It ends last, so that it can reap its children.
        spare = self._head.pid if self._record is not None else None
        end_session(self._session, grace_s=grace_s, kill_s=_STOP_KILL_S, spare=spare)
        if self._head.stdout is not None:
            self._head.stdout.close()
        try:
            self._head.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait(timeout=1.0)


def _disconnect_ray() -> None:
    import ray

    # Ray waits forever for a cluster that has died.
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(timeout=1.5)


def _last_words(log: Path) -> str:
    """Returns the last line of Ray's start-up log as the end of a sentence, or nothing."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    lines = [line for line in lines if line]
    return f": {lines[-1]} (more in {log})" if lines else ""
