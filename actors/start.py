"""Starts the actors of a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from ..cluster.config import Config
from ..cluster.runtime import NAMESPACE
from .handles import KV_STORE, ROUTER, replica_actor_name, replica_names
from .kv_store.actor import KVStoreActor
from .replica.actor import ReplicaActor
from .router.actor import RouterActor

KV_MEMORY_FRACTION = 0.25
"""Of the machine's memory, what its replicas may use for decoding rows where the config names no figure."""


def start_actors(config: Config) -> dict[str, Any]:
    """Start the router, the store and every replica, and return the replicas' handles by id.

    Replicas load in the background; ask their `progress`. Actors restart by themselves for ever, but a call to one is
    never repeated by Ray: a generation that was lost is taken up by whoever asked for it.
    """
    options = {"namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}
    ray.remote(RouterActor).options(name=ROUTER, **options).remote(config)
    ray.remote(KVStoreActor).options(name=KV_STORE, **options).remote(config)
    total = sum(model.replicas for model in config.models)
    budget = config.scheduling.kv_bytes_max or int(psutil.virtual_memory().total * KV_MEMORY_FRACTION / total)
    replicas = {}
    for model in config.models:
        # Actors run in another folder: what is relative here must be said in full there.
        if Path(model.source).is_dir():
            model = replace(model, source=str(Path(model.source).absolute()))
        for name in replica_names(model):
            actor = ray.remote(ReplicaActor).options(name=replica_actor_name(name), **options)
            replicas[name] = actor.remote(name, model, config.scheduling, budget)
    return replicas
