"""Starts Ray on a node, the head or another: `python -m satchel.cluster.bring_up.ray_node`, in a session of its own.

Reads one JSON object from standard input (`RaySpec`), starts Ray, writes one JSON object to standard output
(`RayReport`) and becomes the keeper (`keeper.py`), which ends the session when its parent goes.

Why not `ray start`: see `patches.start_ray_node`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..environment import is_macos
from ..patches import start_ray_node
from ..processes import ProcessMark, UnixSession, end_session
from .keeper import keep_logs

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
        ahead: arguments of a Python program that prepares the node while Ray starts; none for no program.
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
    ahead: Sequence[str] = ()


@dataclass(frozen=True)
class RayReport:
    """What was started: the address for drivers, and the essential processes."""

    address: str
    essential_pids: list[int]


def start_ray(spec: RaySpec) -> RayReport:
    """Starts the raylet, and the control store if there is no cluster to join; waits until they answer."""
    address, processes = start_ray_node(
        head=spec.head,
        register_s=REGISTER_S,
        node_ip_address=spec.address,
        node_name=spec.name,
        temp_dir=spec.temp_dir,
        object_store_memory=spec.object_store_bytes,
        num_cpus=spec.cpus,
        # MLX uses the GPU, and Ray is not to count it: on a Mac it would start a program to look for one.
        num_gpus=0 if is_macos() else None,
        resources={spec.resource: RESOURCE_AMOUNT},
    )
    return RayReport(address=address, essential_pids=processes)


def main() -> None:
    """Starts Ray, reports, and becomes the keeper."""
    spec = RaySpec(**json.loads(sys.stdin.buffer.readline()))
    os.umask(0o077)
    if spec.ahead:
        # It belongs to this session and ends with it. Nobody reads what it says: replicas find the same errors.
        with suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-P", *spec.ahead],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
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
