"""Forms MLX's own group of all ranks, by which they exchange sums.

MLX reads from the environment where the ranks are, has no time limit, and keeps one group for the whole life of a
process. So each group has new processes, and a keeper ends one that waits for too long.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlx.core as mx

from .....cluster.config.stages import Split
from .....cluster.environment import set_during
from .....cluster.errors import ModelLoadError
from ..link.connection import Address
from .ranks import Ranks

Gather = Callable[[bytes], bytes]
"""Returns the bytes of all ranks in their order, given those of this one; all have the same number."""

PACKAGES = {
    "jaccl": "it needs macOS 26.2 or later, Thunderbolt 5, and RDMA, which `rdma_ctl enable` enables in recovery mode",
    "nccl": "it needs NVIDIA cards and Satchel's packages for CUDA",
    "ring": "it is not in this build of MLX",
}
"""What is missing if a backend is."""


def refuse_missing(split: Split) -> None:
    """Raises `ModelLoadError` if this machine's MLX does not have the backend of a split."""
    backend = split.backend or ""
    if not mx.distributed.is_available(backend):
        raise ModelLoadError(f"MLX on this machine has no backend {backend}: {PACKAGES[backend]}")


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Gives a free port that nobody else gets meanwhile. The backend that listens on it takes it after this."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


def join(ranks: Ranks, split: Split, addresses: Sequence[Address], gather: Gather) -> None:
    """Forms the group; returns once all ranks have. No other thread of this process runs meanwhile.

    Args:
        split: says by which backend.
        addresses: where each rank may listen.
        gather: exchanges what `jaccl` must know of its connections.

    Raises:
        RuntimeError: it cannot be formed, as MLX says. Some errors of NCCL end the process.
    """
    with ExitStack() as stack:
        variables = {"MLX_RANK": str(ranks.rank())}
        more = {}
        if split.backend == "ring":
            hosts = [[f"{host}:{port}"] for host, port in addresses]
            variables["MLX_HOSTFILE"] = stack.enter_context(_file(hosts))
        elif split.backend == "nccl":
            host, port = addresses[0]
            variables |= {"MLX_WORLD_SIZE": str(ranks.size()), "NCCL_HOST_IP": host, "NCCL_PORT": str(port)}
        else:
            variables["MLX_IBV_DEVICES"] = stack.enter_context(_file(split.rdma))
            # Without it MLX would open a port that anybody may connect to.
            more["all_gather_factory"] = lambda rank, size: lambda data, nbytes: gather(bytes(data)[:nbytes])
        stack.enter_context(set_during(**variables))
        group = mx.distributed.init(strict=True, backend=split.backend or "", **more)
    ranks.connect(group)
    meet(group)


def meet(group: mx.distributed.Group) -> None:
    """Adds a number of every rank: the first sum makes the backend's connections."""
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))


@contextmanager
def _file(value: object) -> Iterator[str]:
    handle, path = tempfile.mkstemp(suffix=".json")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        yield path
    finally:
        Path(path).unlink()
