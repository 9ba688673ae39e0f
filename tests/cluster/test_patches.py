"""What is changed of Ray, and used of its insides, fits the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from ray._private import services, worker
from ray._private.node import Node
from ray.exceptions import RayError
from ray.serve._private import replica

from satchel.actors.protocol import control_store
from satchel.cluster import patches
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.connection import connect_ray
from satchel.cluster.processes import session_members


def run(program: str, cluster: LocalCluster) -> list[str]:
    """Runs a program in a process that knows nothing of Ray or the cluster but its home; returns the lines it prints.
    `record()` returns what connects to the cluster."""
    before = """
import sys
from pathlib import Path

def record():
    from satchel.cluster.home import Home
    from satchel.cluster.connection import find_cluster

    return find_cluster(Home(Path(sys.argv[1])))
"""
    command = [sys.executable, "-c", before + program, str(cluster.home.root)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_a_node_starts_without_what_nothing_uses(cluster: LocalCluster) -> None:
    assert cluster.record is not None
    commands = [psutil.Process(pid).cmdline() for pid in session_members(cluster.record.ray_sid)]
    (raylet,) = (words for words in commands if words and words[0].endswith("/raylet"))
    assert f"{patches._AGENT}={patches._STAND_IN}" in raylet
    assert not [words for words in commands if "DashboardAgent" in str(words) or "dashboard.py" in str(words)]


def test_rays_programs_are_where_they_are_looked_for() -> None:
    assert patches.ray_programs() == [services.GCS_SERVER_EXECUTABLE, services.RAYLET_EXECUTABLE]


def test_a_node_waits_until_it_is_registered_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything of Ray's that starts processes left out."""
    asked: list[float] = []

    def get_node(*_: object) -> None:
        asked.append(time.monotonic())
        if len(asked) < 4:
            raise RuntimeError("not yet")

    def made(self: Node, *_: object, **__: object) -> None:
        self._node_id, self.all_processes = "a", {}
        self.start_ray_processes()

    monkeypatch.setattr(Node, "__init__", made)
    monkeypatch.setattr(Node, "start_ray_processes", lambda self: None)
    monkeypatch.setattr(Node, "dead_processes", lambda self: [])
    monkeypatch.setattr(Node, "gcs_address", "127.0.0.1:1")
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    assert patches.start_ray_node(head="127.0.0.1:1", register_s=30.0) == ("127.0.0.1:1", [])
    assert len(asked) == 4
    asked.clear()
    patches.start_ray_node(head="127.0.0.1:1", register_s=0.05)
    assert len(asked) == 1


def test_a_driver_connects_through_the_node_of_its_folder(cluster: LocalCluster) -> None:
    assert cluster.record is not None
    program = """
from ray._private import services

plain = services.get_node_to_connect_for_driver
services.get_node_to_connect_for_driver = lambda *given, **named: print(named["temp_dir"]) or plain(*given, **named)
from satchel.cluster.connection import connect_ray

connect_ray(record())
"""
    assert run(program, cluster) == [cluster.record.temp_dir]


def test_ray_that_was_imported_before_sees_the_settings_of_the_cluster(cluster: LocalCluster) -> None:
    """The cluster asks for a token, of which Ray reads at its import that there is none."""
    program = """
import ray
from satchel.cluster.connection import connect_ray

connect_ray(record())
print(ray.is_initialized())
"""
    assert run(program, cluster) == ["True"]


def test_the_control_store_has_values_and_nodes(cluster: LocalCluster) -> None:
    assert cluster.record is not None
    connect_ray(cluster.record)
    key = uuid.uuid4().hex
    assert control_store.get(key) is None and not control_store.holds(key)
    assert not control_store.put(key, "one") and control_store.put(key, "two", overwrite=False)
    assert control_store.get(key) == b"one" and control_store.holds(key) and control_store.keys(key[:30]) == [key]
    assert control_store.delete(key) and control_store.get(key) is None
    (node,) = control_store.ray_nodes()
    assert node.port > 0 and node.address in cluster.record.address and len(node.resources) >= 2


def test_a_control_store_that_is_silent_is_an_error(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time limit the questions would be answered, once it speaks again."""
    assert cluster.record is not None
    connect_ray(cluster.record)
    monkeypatch.setattr(control_store, "ANSWER_S", 0.3)
    processes = map(psutil.Process, session_members(cluster.record.ray_sid))
    (store,) = (each for each in processes if each.name() == "gcs_server")
    speaks_again = threading.Timer(30, store.resume)
    store.suspend()
    speaks_again.start()
    try:
        for ask in (control_store.ray_nodes, lambda: control_store.get("key")):
            with pytest.raises(RayError):
                ask()
    finally:
        speaks_again.cancel()
        store.resume()


def test_without_a_cluster_there_is_no_control_store(cluster: LocalCluster) -> None:
    program = "from satchel.cluster.patches import control_store_client\nprint(control_store_client())"
    assert run(program, cluster) == ["None"]


class Listener:
    """What Ray Serve's replicas give their ports to."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def add_insecure_port(self, address: str) -> int:
        self.addresses.append(address)
        return 7

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int:
        return self.add_insecure_port(address)


def test_ray_listens_no_more_for_errors_of_a_cluster_that_has_ended() -> None:
    asked = threading.Event()
    subscriber = SimpleNamespace(subscribe=lambda: None, poll=lambda: (asked.set(), None))
    job = SimpleNamespace(binary=bytes)
    driver: Any = SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=job)
    stopped = worker.global_worker.threads_stopped
    listener = threading.Thread(target=worker.listen_error_messages, args=(driver, stopped), daemon=True)
    try:
        listener.start()
        assert asked.wait(30) and listener.is_alive()
        patches.rest_ray_listener()
        listener.join(30)
        assert not listener.is_alive()
    finally:
        stopped.clear()


def test_ray_serve_listens_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "add_port_to_grpc_server"
    monkeypatch.setattr(replica, name, getattr(replica, name))
    patches.keep_ray_serve_on_this_machine()
    listener = Listener()
    assert getattr(replica, name)(listener, "[::]:0") == 7 and listener.addresses == ["127.0.0.1:0"]
    assert name in replica.Replica._on_initialized.__code__.co_names, "replicas bind their port by another name"
