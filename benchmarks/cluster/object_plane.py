"""Ray's object plane: bytes from one raylet's objects into another's, on this machine.

    python -m benchmarks.cluster.object_plane FOLDER

Each question is a number of bytes, and the answer the seconds until an array of as many, which is new on one node, is
in the hands of an actor on the other. See `worker.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from satchel.cluster import environment
from satchel.cluster.bring_up.ray_node import RayReport, RaySpec
from satchel.cluster.connection import connect_ray_address
from satchel.cluster.home import Home, ensure_token, prepare_home

from .worker import answer

OBJECT_STORE_BYTES = 2**30
NODE_END_S = 20.0


@contextmanager
def raylet(name: str, home: Home, head: str | None) -> Iterator[tuple[str, str]]:
    """A Ray node that ends with this process. Yields the cluster's address and the node's folder."""
    folder = tempfile.mkdtemp(prefix="satchel-", dir=environment.short_temporary_root())
    spec = RaySpec(name, "127.0.0.1", name, head, f"{folder}/ray", folder, str(home.ray_logs), OBJECT_STORE_BYTES, 1)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "satchel.cluster.bring_up.ray_node"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment.child_environment(home),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write((json.dumps(asdict(spec)) + "\n").encode())
        process.stdin.flush()
        yield RayReport(**json.loads(process.stdout.readline())).address, spec.temp_dir
    finally:
        # Its keeper ends all of them.
        process.stdin.close()
        process.wait(NODE_END_S)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def serve() -> None:
    """Answer, from the driver that is connected."""
    import ray

    @ray.remote(num_cpus=0, resources={"source": 1})
    class Source:
        def put(self, nbytes: int) -> list[ray.ObjectRef]:
            import numpy as np

            return [ray.put(np.random.default_rng().integers(0, 256, nbytes, np.uint8))]

    @ray.remote(num_cpus=0, resources={"target": 1})
    class ObjectTarget:
        def get(self, held: list[ray.ObjectRef]) -> tuple[float, int]:
            import time

            begun = time.perf_counter()
            found = ray.get(held[0])
            return time.perf_counter() - begun, found.nbytes

    source, target = Source.remote(), ObjectTarget.remote()

    def move(nbytes: int) -> float:
        # Inside a list a reference is not fetched before the call.
        seconds, came = ray.get(target.get.remote(ray.get(source.put.remote(nbytes))))
        assert came == nbytes
        return seconds

    move(2**20)
    answer(move)


def main() -> None:
    home = Home(Path(sys.argv[1]))
    prepare_home(home)
    ensure_token(home)
    with raylet("source", home, None) as (address, folder), raylet("target", home, address):
        connect_ray_address(address, home, temp_dir=folder)
        serve()


if __name__ == "__main__":
    main()
