"""The actors' names, and how to find them."""

from __future__ import annotations

from typing import Any

import ray

from ..cluster.config import Model
from ..cluster.runtime import NAMESPACE

ROUTER = "router"
KV_STORE = "kv_store"


def replica_names(model: Model) -> list[str]:
    """The ids of a model's replicas."""
    return [f"{model.slug}-{index}" for index in range(model.replicas)]


def replica_actor_name(replica: str) -> str:
    return f"replica:{replica}"


def actor_handle(name: str) -> Any:
    """The handle of a running actor, by name.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)
