"""Claims of a node's replicas, and what a node's memory leaves beside them.

A module of its own, without the libraries of models: a node is asked for its memory before it loads anything.
"""

from __future__ import annotations

import fcntl
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from ....cluster.config.config import Scheduling
from ....cluster.config.nodes import Node
from ..device.device import device_bytes, device_kind
from .budget import MemoryClaim

logger = logging.getLogger(__name__)

PARTS = {"cpu": 1 / 2, "metal": 9 / 10, "cuda": 15 / 16}
"""The share that a node's replicas use, by kind of device: of a machine's memory on a CPU, of Metal's recommended
working set, and of a card's free memory on CUDA, where the rest is for kernels and graphs. Above 95% of Metal's working
set MLX releases its cached buffers at every allocation, so the share is lower than that."""

CLAIM_BYTES = 256


@dataclass(frozen=True)
class Claim(MemoryClaim):
    """A claim as its file has it, with what the device could give when the replica started."""

    device: int = 0


def read_claim(path: Path) -> Claim | None:
    """Returns a claim; None if its replica has ended."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Claim(**json.loads(file.read(CLAIM_BYTES)))
            path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s cannot be read: %s", path, error)
    return None


def unclaimed_bytes(folder: Path, node: Node, scheduling: Scheduling) -> int:
    """Returns what a further model and its KV may use on a node, in bytes: what the config or the device allows,
    without what other replicas need for their models.

    Args:
        folder: as for `ReplicaMemory`.
    """
    claims = [claim for path in folder.glob("*.claim") if (claim := read_claim(path)) is not None]
    most = scheduling.memory_bytes_max if node.memory_bytes_max is None else node.memory_bytes_max
    if most is None:
        most = max([node_bytes(), *(claim.device for claim in claims)])
    return max(0, most - sum(claim.weights + claim.workspace for claim in claims))


def node_bytes() -> int:
    """Returns the bytes that the device can give the replicas of a node, if none of them runs yet."""
    kind, whole = device_kind(), psutil.virtual_memory().total
    if kind == "metal":
        whole = int(mx.device_info().get("max_recommended_working_set_size", device_bytes()))
    elif kind == "cuda":
        whole = device_bytes(free=True)
    return usable_bytes(kind, whole)


def usable_bytes(kind: str, whole: int) -> int:
    """Returns how many of a device's bytes replicas use; `kind` as `device_kind` returns it."""
    return int(whole * PARTS[kind])
