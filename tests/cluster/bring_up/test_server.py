"""`satchel serve` as a process, with a stub in place of the models: starting, stopping, dying, and what others see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.connection import ClusterRecord, find_cluster
from satchel.cluster.home import Home, read_json
from satchel.cluster.processes import UnixSession, end_session, session_members

STUB = Path(__file__).with_name("stub_server.py")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


def wait_for(what: Callable[[], object], timeout_s: float, why: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


class Server:
    """One `satchel serve` in a session of its own, like a terminal's."""

    def __init__(self, folder: Path, *, deploy_s: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        self.home = Home(folder / "home")
        self.port = free_port()
        self.output = folder / "output"
        command = [sys.executable, str(STUB), "serve", "--port", str(self.port), "--home", str(self.home.root)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, "STUB_DEPLOY_S": str(deploy_s)},
            )

    def says(self, text: str) -> bool:
        return text in self.output.read_text()

    def wait_until_ready(self) -> ClusterRecord:
        wait_for(lambda: self.says("    -d ") or self.process.poll() is not None, START_TIMEOUT_S, "not ready")
        assert self.process.poll() is None, self.output.read_text()
        return find_cluster(self.home)

    def wait_until_launched(self) -> UnixSession:
        """Until Ray's first process has been written down."""
        wait_for(self.home.session_file.exists, START_TIMEOUT_S, "Ray was not launched")
        return self.session()

    def session(self) -> UnixSession:
        session = UnixSession.from_dict(read_json(self.home.session_file) or {})
        assert session is not None
        return session

    def health(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as response:
            return response.status

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)
        data = read_json(self.home.session_file)
        session = UnixSession.from_dict(data) if data is not None else None
        if session is not None:
            end_session(session, grace_s=0.0)
        if data is not None:
            shutil.rmtree(data["private_dir"], ignore_errors=True)


def satchel(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "satchel.api.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that no test stops. At the end it is killed alone: its keeper must end everything else."""
    server = Server(tmp_path_factory.mktemp("shared"))
    try:
        record = server.wait_until_ready()
        session = server.session()
        yield server
        server.process.kill()
        server.process.wait(timeout=10)
        wait_for(lambda: session.members() == [], 15.0, "the keeper did not end the session")
        wait_for(lambda: not Path(record.temp_dir).parent.exists(), 5.0, "the keeper did not remove the folder")
    finally:
        server.clean_up()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, on one home, that are gone after the test however it ends."""
    with ExitStack() as stack:

        def start(**options: float) -> Server:
            server = Server(tmp_path, **options)
            stack.callback(server.clean_up)
            return server

        yield start


def assert_nothing_left(server: Server, session: UnixSession, private_dir: Path, *more: str) -> None:
    assert session_members(session.sid) == []
    assert not private_dir.exists()
    assert sorted(path.name for path in server.home.run.iterdir()) == sorted(
        ["lock", "logs", "owner_key", "ray.log", "ray_token", *more]
    )


def test_the_views_show_the_running_server(shared: Server) -> None:
    home = ("--home", str(shared.home.root))
    short, table = satchel("status", *home), satchel("status", "--long", *home)
    assert short.returncode == 0 and "recall: 3 running" in short.stdout and short.stdout.count("\n") == 3
    assert table.returncode == 0 and "stub-0" in table.stdout and "recall" in table.stdout
    status = json.loads(satchel("status", "--json", *home).stdout)
    assert status["status"] == "ok" and status["pid"] == shared.process.pid
    assert status["replicas"]["stub-0"]["vllm:num_requests_running"] == 3
    assert status["replicas"]["stub-0"]["node"] == "local" and status["nodes"][0]["memory_free_bytes"] == 12.3e9
    assert "12 GB" in table.stdout and "4.6 MB" in table.stdout
    assert "recall" in satchel("models", *home).stdout
    assert json.loads(satchel("models", "--json", *home).stdout)[0]["id"] == "recall"


def test_chat_streams_an_answer(shared: Server) -> None:
    home = ("--home", str(shared.home.root))
    assert satchel("chat", *home, "--agent", "ada", "hello").stdout == "ada said hello\n"
    assert satchel("chat", *home, "--agent", "ada", stdin="one\n\ntwo\n").stdout == "ada said one\nada said two\n"
    refused = satchel("chat", *home, "--model", "other", "hello")
    assert refused.returncode == 1
    assert refused.stderr == "satchel: the endpoint answered 404: no such model\n"


def test_a_second_server_is_refused(shared: Server) -> None:
    second = satchel("serve", "--home", str(shared.home.root), "--port", str(free_port()))
    assert second.returncode == 1
    assert f"is in use by the server with process id {shared.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert shared.health() == 200


def test_a_busy_port_is_refused_before_anything_starts(shared: Server, tmp_path: Path) -> None:
    second = satchel("serve", "--home", str(tmp_path / "other"), "--port", str(shared.port))
    assert second.returncode == 1 and second.stdout == ""
    assert second.stderr.startswith(f"satchel: port {shared.port} is in use; choose another with --port")
    assert not (tmp_path / "other").exists()


def test_nobody_connects_without_the_token(shared: Server) -> None:
    record = find_cluster(shared.home)
    token = shared.home.token_file.read_text().strip()

    def ask(*metadata: tuple[str, str]) -> grpc.StatusCode:
        with grpc.insecure_channel(record.address) as channel:
            call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            try:
                call(b"", timeout=10, metadata=metadata)
            except grpc.RpcError as error:
                return error.code()  # pyright: ignore[reportAttributeAccessIssue]
            return grpc.StatusCode.OK

    assert ask() == grpc.StatusCode.UNAUTHENTICATED
    assert ask(("authorization", "Bearer " + "0" * 64)) == grpc.StatusCode.UNAUTHENTICATED
    assert ask(("authorization", f"Bearer {token}")) == grpc.StatusCode.OK


def test_what_the_server_keeps_is_private(shared: Server) -> None:
    record = find_cluster(shared.home)
    assert stat.S_IMODE(Path(record.temp_dir).parent.stat().st_mode) == 0o700
    for path in shared.home.run.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_interrupt_ends_everything_and_a_neighbour_lives_on(shared: Server, launch: Callable[..., Server]) -> None:
    """Two homes run side by side. Ctrl-C reaches the whole group of the terminal, and twice under make."""
    server = launch()
    record = server.wait_until_ready()
    session = server.session()
    assert len(session.members()) >= 6
    assert server.health() == shared.health() == 200
    os.killpg(server.process.pid, signal.SIGINT)
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(timeout=STOP_TIMEOUT_S) == 0
    assert server.says("drained") and server.says("Stopped")
    assert_nothing_left(server, session, Path(record.temp_dir).parent)
    assert shared.health() == 200


def test_after_kill_nine_the_next_server_starts_at_once(launch: Callable[..., Server]) -> None:
    """Everything that could clean up is killed, so the next server must. That one then ends when Ray dies under it."""
    killed = launch()
    first = killed.wait_until_ready()
    session = killed.session()
    killed.process.kill()
    # One of Ray's processes is left to the next server.
    for mark in session.witnesses[:-1]:
        # Some end by themselves when the server has gone.
        with suppress(ProcessLookupError):
            os.kill(mark.pid, signal.SIGKILL)
    killed.process.wait(timeout=10)
    again = launch()
    second = again.wait_until_ready()
    assert session.members() == [] and not Path(first.temp_dir).parent.exists()
    assert again.health() == 200
    session = again.session()
    # By its program: process numbers start again from the bottom on a machine that has run for long.
    names = {psutil.Process(pid).name(): pid for pid in session.members()}
    programs = [psutil.Process(pid).cmdline() for pid in session.members()]
    assert not [it for it in programs if "DashboardAgent" in str(it)], "a raylet ends with it, and nobody needs it"
    os.kill(names["gcs_server"], signal.SIGKILL)
    assert again.process.wait(timeout=STOP_TIMEOUT_S) == 1
    assert again.says("satchel: the endpoint is gone: Ray ended by itself")
    assert (again.home.ray_logs / "raylet.out").stat().st_size > 0, "what might tell why is kept"
    assert_nothing_left(again, session, Path(second.temp_dir).parent, again.home.ray_logs.name)


@pytest.mark.parametrize("moment", ["Ray starts", pytest.param("models load", marks=pytest.mark.slow)])
def test_a_signal_while_starting_ends_everything(moment: str, launch: Callable[..., Server]) -> None:
    server = launch(deploy_s=60.0)
    session = server.wait_until_launched()
    if moment == "models load":
        wait_for(lambda: server.says("Loading recall"), START_TIMEOUT_S, "no deployment")
    private_dir = Path(str((read_json(server.home.session_file) or {})["private_dir"]))
    server.process.terminate()
    assert server.process.wait(timeout=STOP_TIMEOUT_S) == 0, server.output.read_text()
    assert_nothing_left(server, session, private_dir)
