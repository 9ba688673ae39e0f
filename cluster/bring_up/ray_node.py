"""Starts Ray on a node, the head or another: `python -m satchel.cluster.bring_up.ray_node`, in a session of its own.

Reads one JSON object from standard input (`RaySpec`), starts Ray, writes one JSON object to standard output
(`RayReport`) and becomes the keeper (`keeper.py`), which ends the session when its parent goes.

Why not `ray start`: it turns 127.0.0.1 into the machine's outward address and listens on all interfaces, it
always starts a Ray Client server and an API server that nothing here uses, and it takes twice the time (17 s against
8 s on two cores). Of Ray's internals this uses the `Node` class, at the version that pyproject.toml pins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..processes import ProcessMark, UnixSession, end_session
from .keeper import keep_logs

_STAND_IN = "/bin/sh -c cat"
"""The command in place of an agent, whatever options Ray adds: it waits on its input until its raylet has ended."""
_AGENT = "--dashboard_agent_command"
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NOBODYS_PORT = "1"

RESOURCE_AMOUNT = 1_000_000
"""The amount of a node's own resource; every actor takes one unit."""
REGISTER_S = 90.0
"""How long a node may take to register. Ray allows 30 s, which a busy machine exceeds."""


@dataclass(frozen=True)
class RaySpec:
    """What to start.

    Attributes:
        name: of the node.
        address: of this machine, on which Ray listens.
        resource: the Ray resource that only this node has, for placing actors.
        head: the address of the cluster to join (`host:port`); None starts one.
        temp_dir: Ray's folder. Short: Ray makes sockets below it.
        private_dir: the folder to remove when the session ends; `temp_dir` is inside it.
        logs_dir: where Ray's logs go if it ends by itself.
        object_store_bytes: size of the shared memory for objects.
        cpus: how many CPUs Ray may count on; None takes the machine's.
    """

    name: str
    address: str
    resource: str
    head: str | None
    temp_dir: str
    private_dir: str
    logs_dir: str
    object_store_bytes: int
    cpus: int | None = None


@dataclass(frozen=True)
class RayReport:
    """What was started: the address for drivers, and the processes that the cluster cannot do without."""

    address: str
    essential_pids: list[int]


def start_ray(spec: RaySpec) -> RayReport:
    """Starts the raylet, and the control store if there is no cluster to join; waits until they answer."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Starts none: it serves the dashboard and job submission, and takes four seconds and 120 MB."""

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            """Starts the raylet without the dashboard's agent. The agent serves metrics and job submission, which
            nothing here uses, and a raylet ends with it. The raylet requires a command for the agent, and waits for the
            files with its ports. The other agent stays: it makes the `runtime_env` of users' own tasks."""
            start = services.start_ray_process

            def start_alone(command: list[str], kind: str, **options: Any) -> Any:
                alone = [f"{_AGENT}={_STAND_IN}" if part.startswith(f"{_AGENT}=") else part for part in command]
                return start(alone, kind, **options)

            for port in _AGENT_PORTS:
                Path(self.get_session_dir_path(), f"{port}_{self.node_id}").write_text(_NOBODYS_PORT)
            services.start_ray_process = start_alone
            try:
                super().start_raylet(*arguments, **named)
            finally:
                services.start_ray_process = start

        def start_ray_processes(self) -> None:
            """Also waits until the node is registered, for longer than Ray would."""
            super().start_ray_processes()
            ends = time.monotonic() + REGISTER_S
            while time.monotonic() < ends and not self.dead_processes():
                try:
                    services.get_node(self.gcs_address, self._node_id)
                    return
                except RuntimeError:
                    time.sleep(0.1)

    node = LeanNode(
        RayParams(
            gcs_address=spec.head,
            node_ip_address=spec.address,
            node_name=spec.name,
            temp_dir=spec.temp_dir,
            object_store_memory=spec.object_store_bytes,
            num_cpus=spec.cpus,
            resources={spec.resource: RESOURCE_AMOUNT},
            gcs_server_port=0 if spec.head is None else None,
            dashboard_host="127.0.0.1",
            dashboard_agent_listen_port=0,
            include_dashboard=False,
            # Ray annotates it as a string by mistake.
            include_log_monitor=False,  # pyright: ignore[reportArgumentType]
            no_monitor=True,
        ),
        head=spec.head is None,
        shutdown_at_exit=False,
        spawn_reaper=False,
    )
    address = node.address if spec.head is None else spec.head
    assert address is not None
    processes = [entry.process.pid for group in node.all_processes.values() for entry in group]
    return RayReport(address=address, essential_pids=processes)


def main() -> None:
    """Starts Ray, reports, and becomes the keeper."""
    spec = RaySpec(**json.loads(sys.stdin.buffer.readline()))
    os.umask(0o077)
    try:
        report = start_ray(spec)
    except BaseException:
        # Part of Ray may run already. While its leader lives, a session's number is not reused.
        me = ProcessMark.of(os.getpid())
        assert me is not None
        end_session(UnixSession(me.pid, (me,)), grace_s=0.0, spare=me.pid)
        keep_logs(Path(spec.private_dir), Path(spec.logs_dir))
        raise
    print(json.dumps(asdict(report)), flush=True)
    arguments = [spec.private_dir, spec.logs_dir, *map(str, report.essential_pids)]
    # Replacing the program keeps the process and takes a fifth of the memory.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "satchel.cluster.bring_up.keeper", *arguments])


if __name__ == "__main__":
    main()
