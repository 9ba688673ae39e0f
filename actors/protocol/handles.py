"""Names and handles of the actors."""

from __future__ import annotations

from typing import Any

import ray

from ...cluster.connection import NAMESPACE

ROUTER = "router"


def store_actor_name(node: str) -> str:
    return f"kv_store:{node}"


def replica_actor_name(replica: str) -> str:
    return f"replica:{replica}"


def actor_handle(name: str) -> Any:
    """Returns the handle of a running actor.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)
