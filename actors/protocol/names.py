"""Names of the actors."""

from __future__ import annotations

ROUTER = "router"
POOL = "pool"
PLANNER = "planner"


def store_actor_name(node: str) -> str:
    return f"kv_store:{node}"


def replica_actor_name(replica: str) -> str:
    return f"replica:{replica}"
