"""The actors' names, and how to find them."""

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
    """The handle of a running actor, by name.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)
