from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from satchel.cluster.bring_up.ports import check_port_free, free_port
from satchel.cluster.bring_up.runtime import clean_up_after_killed_run
from satchel.cluster.config.config import parse_config
from satchel.cluster.connection import find_cluster, served_config
from satchel.cluster.errors import ClusterError, HomeInUse, NotRunning, PortInUse
from satchel.cluster.home import Home, HomeLock, ensure_token, prepare_home, read_json, write_private_json
from satchel.cluster.processes import ProcessMark, UnixSession, end_session


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    prepare_home(home)
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_a_home_is_private(home: Home) -> None:
    write_private_json(home.cluster_file, {"a": 1})
    token = ensure_token(home)
    assert mode(home.root) == mode(home.run) == 0o700
    assert mode(token) == mode(home.cluster_file) == 0o600
    assert len(token.read_text()) >= 32
    assert ensure_token(home).read_text() == token.read_text()
    assert read_json(home.cluster_file) == {"a": 1}
    assert sorted(path.name for path in home.run.iterdir()) == ["cluster.json", "ray_token"]


def test_a_home_that_is_too_open_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    prepare_home(Home(tmp_path))
    assert mode(tmp_path) == 0o700


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"cannot use .*file"):
        prepare_home(Home(tmp_path / "file"))


def test_a_locked_home_names_its_holder_and_the_kernel_frees_it(home: Home) -> None:
    program = (
        "import sys, pathlib; from satchel.cluster.home import Home, HomeLock\n"
        "lock = HomeLock(Home(pathlib.Path(sys.argv[1]))); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(home.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(HomeInUse, match=rf"process id {holder.pid};"):
            HomeLock(home).acquire()
        holder.kill()
        lock = HomeLock(home)
        lock.acquire()
        assert lock.is_held
        lock.release()
        lock.release()


def test_a_cluster_that_is_not_there_is_said_plainly(home: Home) -> None:
    with pytest.raises(NotRunning, match=r"no server runs on .*satchel serve"):
        find_cluster(home)
    write_private_json(home.cluster_file, {"some": "thing"})
    with pytest.raises(NotRunning, match="another version"):
        find_cluster(home)
    texts = dict.fromkeys(("address", "home", "namespace", "version", "endpoint_url", "temp_dir"), "x")
    # Process 1 lives, but was not created in 1970.
    write_private_json(home.cluster_file, {**texts, "pid": 1, "pid_created_s": 1.0, "ray_sid": 1})
    with pytest.raises(NotRunning, match=r"\(process 1\) has died"):
        find_cluster(home)


def test_the_config_of_the_running_server_is_found_and_no_other(home: Home) -> None:
    """So the doctor checks what is served. A node has none of its own, a server that has died no longer."""
    config = parse_config({"models": [{"name": "m", "source": "a/b"}], "timeouts": {"request_s": 7}})
    write_private_json(home.served_config_file, asdict(config))
    assert served_config(home) is None
    texts = dict.fromkeys(("address", "home", "namespace", "version", "endpoint_url", "temp_dir"), "x")
    record = {**texts, "pid": os.getpid(), "pid_created_s": psutil.Process().create_time(), "ray_sid": 1}
    for given, found in (({}, config), ({"joined": True}, None), ({"pid_created_s": 1.0}, None)):
        write_private_json(home.cluster_file, {**record, **given})
        assert served_config(home) == found


def sleeper() -> subprocess.Popen[bytes]:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


def test_a_session_is_ended_with_all_its_members() -> None:
    with sleeper() as leader:
        mark = ProcessMark.of(leader.pid)
        assert mark is not None
        session = UnixSession(leader.pid, (mark,))
        assert UnixSession.from_dict(session.to_dict()) == session
        assert end_session(session, grace_s=0.0) == []
        leader.wait(timeout=20)
        assert session.members() == []
        assert not mark.is_alive()


def test_a_stranger_with_a_recorded_number_is_left_alone(home: Home) -> None:
    """Process ids are used again. A record whose creation times do not match proves nothing, so nothing is ended."""
    with sleeper() as stranger:
        mark = ProcessMark.of(stranger.pid)
        assert mark is not None
        earlier = UnixSession(stranger.pid, (ProcessMark(stranger.pid, mark.created_s - 60.0),))
        write_private_json(home.session_file, {**earlier.to_dict(), "private_dir": str(home.root)})
        clean_up_after_killed_run(home)
        assert mark.is_alive()
        assert home.root.exists(), "a folder that Satchel did not make is not removed"
        assert not home.session_file.exists()
        end_session(UnixSession(stranger.pid, (mark,)), grace_s=0.0)


def test_a_busy_port_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} is in use; choose another with --port"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", free_port())


def test_a_wrong_address_is_said_plainly() -> None:
    with pytest.raises(ClusterError, match="no such address"):
        check_port_free("203.0.113.7", free_port())
    with pytest.raises(ClusterError, match="cannot listen on 'not a host'"):
        check_port_free("not a host", free_port())


def test_no_mark_for_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(timeout=30)
    assert ProcessMark.of(process.pid) is None
    mark = ProcessMark.of(os.getpid())
    assert mark is not None and mark.is_alive()
