"""The cluster that the test session shares, from inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ray_node import RaySpec
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.connection import NAMESPACE, connect_ray, find_cluster
from satchel.cluster.errors import HomeInUse
from satchel.cluster.home import Home
from satchel.cluster.processes import ProcessMark, UnixSession


class Probe:
    def connect(self, cluster: LocalCluster | None = None) -> tuple[int, str]:
        """What an actor does to find the cluster that it lives in."""
        import ray

        return os.getsid(0), ray.get_runtime_context().namespace

    def threads(self) -> set[str]:
        """Names of this process's threads, as Linux cuts them."""
        return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def test_the_record_finds_the_cluster(cluster: LocalCluster) -> None:
    import ray

    assert find_cluster(cluster.home) == cluster.record
    connect_ray(cluster.record)
    sid, namespace = ray.get(ray.remote(Probe).remote().connect.remote(), timeout=60)
    assert (sid, namespace) == (cluster.record.ray_sid, NAMESPACE)
    assert cluster.failure() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_call_is_noted_for_a_dashboard(cluster: LocalCluster) -> None:
    """The control store would keep 100,000 of them, some 300 MB."""
    import ray

    connect_ray(cluster.record)
    threads = ray.get(ray.remote(Probe).remote().threads.remote(), timeout=60)
    assert not {name for name in threads if name.startswith("task_event")}


def test_an_endpoint_is_published(cluster: LocalCluster) -> None:
    cluster.publish_endpoint("http://127.0.0.1:1")
    assert find_cluster(cluster.home).endpoint_url == "http://127.0.0.1:1"


def test_a_call_after_its_process_left_the_cluster_starts_no_other(cluster: LocalCluster) -> None:
    """Ray would start one by itself, and the caller would wait for it for minutes."""
    program = """
import sys
from pathlib import Path
from satchel.cluster.home import Home
from satchel.cluster.connection import connect_ray, find_cluster

connect_ray(find_cluster(Home(Path(sys.argv[1]))))
import ray
from satchel.actors.rpc.client import ActorRef
from satchel.cluster.errors import NoAnswer

left = ray.remote(type("Left", (), {"ping": lambda self: b""})).options(num_cpus=0).remote()
assert ray.get(left.ping.remote(), timeout=60) == b""
ray.shutdown()
try:
    ActorRef("left", "left", handle=left).call(lambda actor: actor.ping.remote(), bytes, 5).wait()
except NoAnswer:
    assert not ray.is_initialized()
    print("no answer")
"""
    told = subprocess.run([sys.executable, "-c", program, str(cluster.home.root)], capture_output=True, text=True)
    assert told.stdout.strip() == "no answer", told.stderr


def test_the_home_is_taken(cluster: LocalCluster) -> None:
    with pytest.raises(HomeInUse):
        LocalCluster(cluster.home).start()
    assert find_cluster(cluster.home) == cluster.record
    assert cluster.failure() is None


def test_a_note_of_processes_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk does not end a server: it goes on with the older note."""
    cluster = LocalCluster(Home(tmp_path / "no such folder"))
    mark = ProcessMark.of(os.getpid())
    assert mark is not None
    cluster._session = UnixSession(os.getsid(0), (mark,))
    cluster.note_processes()
    assert "not noted" in caplog.text


def test_a_start_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    """Of Ray's processes the first may run already when another one does not start."""
    started = tmp_path / "started"
    program = f"""
import pathlib, subprocess
from satchel.cluster.bring_up import ray_node

def start_ray(spec):
    logs = pathlib.Path(spec.private_dir, "ray", "session_1_1", "logs")
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("why")
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pathlib.Path({str(started)!r}).write_text(str(child.pid))
    raise RuntimeError("the second one does not start")

ray_node.start_ray = start_ray
ray_node.main()
"""
    spec = RaySpec("n", "127.0.0.1", "r", None, str(tmp_path / "ray"), str(tmp_path), str(tmp_path / "kept"), 1)
    failed = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(asdict(spec)) + "\n",
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert failed.returncode == 1 and "the second one does not start" in failed.stderr
    assert (tmp_path / "kept" / "raylet.out").read_text() == "why"
    # Dead, or dead and not collected.
    mark = ProcessMark.of(int(started.read_text()))
    assert mark is None or not mark.is_alive()


MEANWHILE = """
import json, os, sys
from pathlib import Path
import psutil
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.home import Home

def meanwhile():
    import ray
    found["connected"] = ray.is_initialized()
    found["ray set up"] = os.environ["RAY_AUTH_MODE"]

found = {}
program = "import os, pathlib, time; pathlib.Path(%r).write_text(str(os.getpid())); time.sleep(600)" % sys.argv[2]
cluster = LocalCluster(Home(Path(sys.argv[1])), cpus=2, ahead=["-c", program])
sid = cluster.start(meanwhile=meanwhile).ray_sid
pid = int(Path(sys.argv[2]).read_text())
found["in the session"] = os.getsid(pid) == sid
cluster.stop()
found["left"] = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
print(json.dumps(found))
"""


def test_what_is_done_while_ray_starts(tmp_path: Path) -> None:
    """The program that prepares a node ends with the cluster, however long it takes."""
    run = subprocess.run(
        [sys.executable, "-c", MEANWHILE, str(tmp_path / "home"), str(tmp_path / "pid")],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {"connected": False, "ray set up": "token", "in the session": True, "left": False}
