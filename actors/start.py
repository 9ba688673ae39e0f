"""Starts the actors of a cluster, and models in a running one; ends what was started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from ..cluster.config import Config, Home, Model, Scheduling
from ..cluster.errors import InvalidRequest, ModelLoadError, from_wire
from ..cluster.runtime import NAMESPACE
from . import registry
from .handles import KV_STORE, ROUTER, actor_handle, replica_actor_name, replica_names
from .kv_store.actor import KVStoreActor
from .replica.actor import ReplicaActor
from .router.actor import RouterActor

logger = logging.getLogger(__name__)

KV_MEMORY_FRACTION = 0.25
"""Of the machine's memory, what its replicas may use for decoding rows where the config names no figure."""

POLL_S = 0.1
ANSWER_S = 2.0
FLUSH_S = 0.3
"""After the last row has ended: time for its last tokens to leave."""

NAME_FREE_S = 10.0

Report = Callable[[str, float | None], None]
Handles = Mapping[str, Any]

_AT_WORK = ("running", "waiting", "unwritten_bytes")
"""What a replica's stats say of work that is not done."""

_OPTIONS = {"namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}
"""Actors restart by themselves for ever, but a call to one is never repeated by Ray: a generation that was lost is
taken up by whoever asked for it."""


def start_actors(config: Config, home: Home) -> dict[str, Any]:
    """Start the router, the store of this node and every replica, and return the replicas' handles by id.

    Replicas load in the background; see `wait_until_ready`.
    """
    ray.remote(RouterActor).options(name=ROUTER, **_OPTIONS).remote(config)
    ray.remote(KVStoreActor).options(name=KV_STORE, **_OPTIONS).remote(config, str(home.kv))
    kv_bytes = kv_bytes_max(config.scheduling, sum(model.replicas for model in config.models))
    replicas: dict[str, Any] = {}
    for model in map(located, config.models):
        registry.add(model)
        replicas |= start_replicas(model, config.scheduling, kv_bytes)
    return replicas


def kv_bytes_max(scheduling: Scheduling, replicas: int) -> int:
    """One replica's share of the memory for KV, where so many run."""
    return scheduling.kv_bytes_max or int(psutil.virtual_memory().total * KV_MEMORY_FRACTION / replicas)


def located(model: Model) -> Model:
    """The model with its folders said in full: actors run in another folder."""

    def full(source: str | None) -> str | None:
        if source is None or source.startswith("~"):
            return source
        return str(Path(source).absolute()) if Path(source).is_dir() else source

    return replace(model, source=full(model.source) or "", adapter=full(model.adapter))


def start_replicas(model: Model, scheduling: Scheduling, kv_bytes: int) -> dict[str, Any]:
    """Start the replicas of a model: handles by id. They load in the background.

    Raises:
        InvalidRequest: one of that name runs already. None was started then.
    """
    replicas: dict[str, Any] = {}
    for name in replica_names(model):
        actor = ray.remote(ReplicaActor).options(name=replica_actor_name(name), **_OPTIONS)
        try:
            replicas[name] = actor.remote(name, model, scheduling, kv_bytes)
        except ValueError:
            kill(replicas)
            what = f"a replica {name} runs already: somebody else loads {model.name!r}, or it has just been unloaded"
            raise InvalidRequest(f"{what}; try again in a moment", param="name") from None
    return replicas


def kill(replicas: Handles) -> None:
    """End replicas for good."""
    for handle in replicas.values():
        ray.kill(handle, no_restart=True)


async def wait_until_ready(replicas: Handles, timeout_s: float, report: Report) -> None:
    """Wait until every replica has loaded its model.

    Args:
        report: called with what is going on and the fraction done, None where unknown.

    Raises:
        ModelLoadError: one cannot load, has died, or takes longer than `timeout_s`.
    """
    ends = time.monotonic() + timeout_s
    waiting = dict(replicas)
    while waiting:
        for name, handle in list(waiting.items()):
            try:
                progress = await asyncio.wait_for(handle.progress.remote(), min(60.0, timeout_s))
            except TimeoutError:
                continue
            except RayError as error:
                what = f"replica {name} died while its model was being loaded; perhaps memory ran out"
                raise ModelLoadError(what) from error
            if progress["error"]:
                raise from_wire(progress["error"])
            if progress["ready"]:
                del waiting[name]
            else:
                report(f"{name}: {progress['what']}", progress["fraction"])
        if waiting and time.monotonic() > ends:
            raise ModelLoadError(f"{', '.join(waiting)} did not load within {timeout_s:.0f} s")
        if waiting:
            await asyncio.sleep(POLL_S)


async def load_model(model: Model, config: Config, report: Report) -> None:
    """Serve one more model in the running cluster: start its replicas, wait for them, then tell everybody.

    Whatever goes wrong, and if the caller is cancelled, what was started is ended. Where the caller is killed, the
    replicas notice that nobody wants them and end by themselves.

    Raises:
        InvalidRequest: the name is taken.
        ModelLoadError: the model cannot be loaded, or not within `timeouts.model_load_s`.
    """
    model = located(model)
    running = sum(entry.model.replicas for entry in await asyncio.to_thread(registry.check_name, model))
    kv_bytes = kv_bytes_max(config.scheduling, running + model.replicas)
    replicas = await asyncio.to_thread(start_replicas, model, config.scheduling, kv_bytes)
    try:
        await wait_until_ready(replicas, config.timeouts.model_load_s, report)
        # Not in a thread: a cancellation must not come between the entry and knowing of it.
        registry.add(model)
    except BaseException:
        kill(replicas)
        raise


async def unload_model(name: str, drain_s: float) -> None:
    """Serve a model no more: new requests do not find it, running ones have `drain_s` to finish, its replicas end.

    Raises:
        ModelNotFound: no such model.
        InvalidRequest: it is the only one.
    """
    model = await asyncio.to_thread(registry.remove, name)
    replicas = await asyncio.to_thread(find_replicas, [model])
    try:
        # Whoever has read the registry just before still sends requests here for a moment.
        await asyncio.sleep(2 * registry.READ_S)
        await drain(replicas, drain_s)
    finally:
        kill(replicas)
    await _forget(replicas)


def find_replicas(models: list[Model]) -> dict[str, Any]:
    """The handles of the models' replicas by id, without those that Ray does not know."""
    replicas = {}
    for name in (name for model in models for name in replica_names(model)):
        try:
            replicas[name] = actor_handle(replica_actor_name(name))
        except ValueError:
            logger.warning("there is no replica %s", name)
    return replicas


async def drain(replicas: Handles, timeout_s: float) -> None:
    """Refuse new requests and wait for the running ones, at most `timeout_s`; what still runs then is ended."""
    ends = time.monotonic() + timeout_s
    await _call_each(replicas, "drain")
    while time.monotonic() < ends - FLUSH_S:
        answers = await _call_each(replicas, "stats")
        # One that does not answer in time may still be busy.
        if not any(answer is None or any(map(answer.get, _AT_WORK)) for answer in answers):
            break
        await asyncio.sleep(POLL_S)
    else:
        await _call_each(replicas, "drain", True)
    await asyncio.sleep(FLUSH_S)


async def _call_each(replicas: Handles, method: str, *arguments: Any) -> list[Any]:
    """The answers of the replicas that live; None from one that does not answer in time."""

    async def call(handle: Any) -> Any:
        return await asyncio.wait_for(getattr(handle, method).remote(*arguments), ANSWER_S)

    answers = await asyncio.gather(*map(call, replicas.values()), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, RayError | TimeoutError):
            raise answer
    # A replica that died has nothing left to drain.
    return [
        None if isinstance(answer, TimeoutError) else answer for answer in answers if not isinstance(answer, RayError)
    ]


async def _forget(replicas: Handles) -> None:
    """Tell the router, and wait until the names are free again."""
    ends = time.monotonic() + NAME_FREE_S
    try:
        router = await asyncio.to_thread(actor_handle, ROUTER)
        for name in replicas:
            await asyncio.wait_for(router.lose.remote(name), ANSWER_S)
    except (RayError, ValueError, TimeoutError):
        logger.warning("the router does not answer; it will miss the replicas' reports")
    for name in replicas:
        while time.monotonic() < ends and await asyncio.to_thread(_is_known, name):
            await asyncio.sleep(POLL_S)


def _is_known(replica: str) -> bool:
    try:
        actor_handle(replica_actor_name(replica))
    except ValueError:
        return False
    return True
