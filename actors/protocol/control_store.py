"""Ray's control store, asked with a time limit, which Ray's own functions for it do not take.

Every function waits, about a millisecond: call them from a thread, not from an event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.exceptions import RaySystemError

from ...cluster.connection import NAMESPACE
from ...cluster.patches import control_store_client

ANSWER_S = 5.0
"""How long an answer may take."""

_NAMESPACE = NAMESPACE.encode()


@dataclass(frozen=True)
class RayNode:
    """A node as Ray knows it.

    Attributes:
        node_id: Ray's, as hexadecimal digits.
        address, port: where its Ray process listens.
        resources: the names of what it offers.
    """

    node_id: str
    address: str
    port: int
    resources: frozenset[str]


def ray_nodes() -> list[RayNode]:
    """Returns the nodes that Ray takes for alive.

    Raises:
        RayError: the store does not answer in time, or this process belongs to no cluster.
    """
    known = _client().get_all_node_info(timeout=ANSWER_S)
    return [
        RayNode(node_id.hex(), node.node_manager_address, node.node_manager_port, frozenset(node.resources_total))
        for node_id, node in known.items()
        # Protobuf's first value: ALIVE.
        if node.state == 0
    ]


def get(key: str) -> bytes | None:
    """Returns the value of a key, None if there is none. Raises as `ray_nodes`."""
    return _client().internal_kv_get(key.encode(), _NAMESPACE, ANSWER_S)


def put(key: str, value: str, *, overwrite: bool = True) -> bool:
    """Stores a value. Returns whether the key had one already, which stays unless `overwrite`. Raises as
    `ray_nodes`."""
    return _client().internal_kv_put(key.encode(), value.encode(), overwrite, _NAMESPACE, ANSWER_S) == 0


def delete(key: str) -> bool:
    """Removes a key. Returns whether it was there. Raises as `ray_nodes`."""
    return bool(_client().internal_kv_del(key.encode(), False, _NAMESPACE, ANSWER_S))


def holds(key: str) -> bool:
    """Returns whether the key has a value. Raises as `ray_nodes`."""
    return bool(_client().internal_kv_exists(key.encode(), _NAMESPACE, ANSWER_S))


def keys(prefix: str) -> list[str]:
    """Returns the keys that begin with `prefix`. Raises as `ray_nodes`."""
    return [key.decode() for key in _client().internal_kv_keys(prefix.encode(), _NAMESPACE, ANSWER_S)]


def _client() -> Any:
    client = control_store_client()
    if client is None:
        raise RaySystemError("this process is not connected to a cluster")
    return client
