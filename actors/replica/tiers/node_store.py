"""What a replica has of its node: a share of the memory, and the store actor."""

from __future__ import annotations

from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from ....cluster.config import Scheduling
from ....cluster.errors import Unavailable, from_wire
from ....cluster.nodes import Node
from ....cluster.timing import Timing
from ...protocol.handles import actor_handle, store_actor_name

KV_MEMORY_FRACTION = 0.25
"""Of a machine's memory, what its replicas may use for decoding rows where the config names no figure."""


def kv_bytes_max(node: Node, scheduling: Scheduling, neighbours: int) -> int:
    """One replica's share of this machine's memory for the KV of decoding rows, where so many run."""
    if node.kv_bytes_max is not None:
        return node.kv_bytes_max // neighbours
    return scheduling.kv_bytes_max or int(psutil.virtual_memory().total * KV_MEMORY_FRACTION / neighbours)


class NodeStore:
    """The store actor of a node, as `disk_tier.StoreCaller`."""

    def __init__(self, node: str, timing: Timing) -> None:
        self._timing = timing
        self._actor = store_actor_name(node)

    def call(self, method: str, *arguments: Any) -> Any:
        timeout_s = self._timing.answer_s + (self._timing.pull_s if method == "pull" else 0.0)
        try:
            answer: Any = ray.get(getattr(actor_handle(self._actor), method).remote(*arguments), timeout=timeout_s)
        except (RayError, ValueError, TimeoutError) as error:
            raise Unavailable(f"the store does not answer: {type(error).__name__}") from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]
