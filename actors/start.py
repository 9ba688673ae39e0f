"""Starts and ends a cluster's actors, and models in a running cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from ..cluster.config.config import Config, Model
from ..cluster.config.nodes import Node
from ..cluster.config.stages import GroupPlan, Stage
from ..cluster.config.timing import Timing
from ..cluster.connection import NAMESPACE, satchel_version
from ..cluster.devices.cards import card_of, found_cards
from ..cluster.environment import default_home
from ..cluster.errors import ActorSilent, InvalidRequest, ModelLoadError, NoAnswer, NoRoom, Unavailable
from ..cluster.placement import place
from .kv_store.actor import KVStoreActor
from .model_files.identity.adapter_infos import all_files
from .protocol import control_store, registry
from .protocol.clients import PoolClient, ReplicaClient, RouterClient
from .protocol.names import ROUTER, replica_actor_name, store_actor_name
from .protocol.replica_messages import ModelInfo, ReplicaStats
from .replica.actor import ReplicaActor
from .router.actor import RouterActor
from .rpc.client import actor_class, actor_handle

logger = logging.getLogger(__name__)

POLL_S = 0.1
FLUSH_S = 0.3
"""Time to send the last tokens after the last sequence has ended."""

NAME_FREE_S = 10.0
"""How long Ray may take to free the names of replicas that were ended."""

Report = Callable[[str, float | None], None]
Replicas = Mapping[str, ReplicaClient]

T = TypeVar("T")

_OPTIONS = {"namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}
"""Ray restarts actors without a limit, but never retries a call: the consumer resumes a lost generation itself."""


def start_actors(config: Config) -> dict[str, ReplicaClient]:
    """Starts the cluster's router, and the head's store and replicas. Returns the head's replicas by id.

    Replicas load in the background; see `wait_until_ready`. Those of other nodes start when their nodes join.
    """
    machines = config.machines
    actor_class(RouterActor).options(name=ROUTER, **on_node(machines[0])).remote(config)
    names = [node.name for node in machines]
    for model in map(located, config.models):
        registry.add(model)
        # The planner places those that may be divided, once their nodes are there.
        if model.load == "start" and model.split is None:
            for replica, node in place(model, names).items():
                registry.place(model, replica, node)
    return start_node(config, machines[0])


def start_node(config: Config, node: Node) -> dict[str, ReplicaClient]:
    """Starts what runs on this node, where this is called; takes over actors that have come back with it.

    Returns:
        Its replicas by id; they load in the background.
    """
    links = tuple((link.address, link.kind) for link in node.data_links)
    home = str(default_home().root)
    card = "" if node.device is None else card_of(node.device, found_cards()).describe()
    entry = registry.NodeEntry(node.name, node.address, links, satchel_version(), home, time.time(), card)
    registry.add_node(entry)
    config = replace(config, disk_bytes_max=node.disk_bytes_max or config.disk_bytes_max)
    store = actor_class(KVStoreActor).options(name=store_actor_name(node.name), get_if_exists=True, **on_node(node))
    store.remote(config, node)
    known = {machine.name for machine in config.machines}
    served = registry.entries()
    if node.name not in known:
        # A machine that the config does not name gets the models that run on every node.
        for entry in served:
            everywhere = entry.model.replicas is None and not entry.model.nodes and not entry.comes_and_goes
            everywhere = everywhere and entry.model.split is None
            if everywhere and node.name not in entry.replicas.values():
                for replica in place(entry.model, [node.name], taken=entry.replicas):
                    registry.place(entry.model, replica, node.name)
        served = registry.entries()
    here = {replica: entry for entry in served for replica, where in entry.replicas.items() if where == node.name}
    return {
        replica: start_replica(
            replica, entry.model, config, node, _plan_of(entry.stages.get(replica, ()), config), get_if_exists=True
        )
        for replica, entry in here.items()
    }


def _plan_of(stages: Sequence[Stage], config: Config) -> GroupPlan | None:
    """Returns the plan of a divided model's replica; None if it is not divided."""
    if not stages:
        return None
    nodes = known_nodes(config)
    return GroupPlan(tuple(stages), tuple(nodes[stage.node] for stage in stages))


def on_node(node: Node) -> dict[str, Any]:
    """Options of an actor that belongs to a node: it waits for that node, and comes back with it."""
    return {**_OPTIONS, "resources": {node.resource: 1}}


def start_replica(
    replica: str, model: Model, config: Config, node: Node, plan: GroupPlan | None = None, **more: Any
) -> ReplicaClient:
    """Starts one replica; of a divided model its leader, which starts the others.

    Raises:
        ValueError: it runs already, unless `more` has `get_if_exists`.
    """
    options = actor_class(ReplicaActor).options(name=replica_actor_name(replica), **on_node(node), **more)
    started = options.remote(replica, model, config.scheduling, node, config.timing, config.logs, config.traces, plan)
    return ReplicaClient(replica, config.timing, started)


def located(model: Model) -> Model:
    """Returns the model with absolute folders: actors have another working directory."""

    def full(source: str | None) -> str | None:
        if source is None or source.startswith("~"):
            return source
        return str(Path(source).absolute()) if Path(source).is_dir() else source

    adapters = {name: full(source) or "" for name, source in model.adapters.items()}
    return replace(model, source=full(model.source) or "", adapter=full(model.adapter), adapters=adapters)


def start_replicas(model: Model, config: Config, placed: Mapping[str, Node]) -> dict[str, ReplicaClient]:
    """Starts the replicas of a model on present nodes. Returns them by id; they load in the background.

    Raises:
        InvalidRequest: a replica of that name runs already; those that were started are ended.
    """
    replicas: dict[str, ReplicaClient] = {}
    for name, node in placed.items():
        try:
            replicas[name] = start_replica(name, model, config, node)
        except ValueError:
            kill(replicas)
            what = f"a replica {name} runs already: somebody else loads {model.name!r}, or it has just been unloaded"
            raise InvalidRequest(f"{what}; try again in a moment", param="name") from None
    return replicas


def kill(replicas: Replicas) -> None:
    """Ends replicas for good."""
    for replica in replicas.values():
        # Ray does not know a replica that has ended.
        with suppress(ValueError):
            ray.kill(replica.actor.find(), no_restart=True)


async def wait_until_ready(replicas: Replicas, timeout_s: float, report: Report) -> None:
    """Waits until every replica has loaded its model.

    Args:
        report: called with the present activity and the fraction done, None if unknown.

    Raises:
        ModelLoadError: one cannot load, has died, or takes longer than `timeout_s`.
    """
    ends = time.monotonic() + timeout_s
    waiting = dict(replicas)
    while waiting:
        for name, replica in list(waiting.items()):
            try:
                progress = await replica.progress().within(min(60.0, timeout_s))
            except ActorSilent:
                continue
            except NoAnswer as error:
                why = "perhaps memory ran out, or the library's code for it crashes on this machine"
                raise ModelLoadError(f"replica {name} died while its model was being loaded; {why}") from error
            if progress.ready:
                del waiting[name]
            else:
                report(f"{name}: {progress.what}", progress.fraction)
        if waiting and time.monotonic() > ends:
            raise ModelLoadError(f"{', '.join(waiting)} did not load within {timeout_s:.0f} s")
        if waiting:
            await asyncio.sleep(POLL_S)


async def compare_models(replicas: Replicas, timing: Timing) -> list[str]:
    """Compares the models that these replicas have loaded with those of other replicas of the same names.

    Returns:
        A sentence on each that computes differently: it shares agents' transcripts with the others, but not KV.

    Raises:
        ModelLoadError: one has other files, so it can share nothing.
    """
    sentences: list[str] = []
    for entry in await asyncio.to_thread(registry.entries):
        found = await infos_of(find_replicas([entry], timing), timing)
        # The older replicas come first, so the new ones are compared with them.
        sentences += differing({name: found[name] for name in sorted(found, key=lambda name: name in replicas)})
    return sentences


def differing(infos: Mapping[str, ModelInfo]) -> list[str]:
    """Returns a sentence on every replica of one model that computes differently from the first one.

    Args:
        infos: each replica's description of its model, by replica.

    Raises:
        ModelLoadError: one has other files.
    """
    sentences: list[str] = []
    first = next(iter(infos.values()), None)
    for info in infos.values():
        assert first is not None
        names = _differences(all_files(info), all_files(first))
        if names:
            raise ModelLoadError(
                f"{info.name!r} is another model on {info.node} than on {first.node}: "
                f"{', '.join(names)} differ{'s' if len(names) == 1 else ''}"
            )
        names = _differences(info.computing, first.computing)
        # Before its self-test has ended, a model's settings differ on every node.
        if names and not (info.proving or first.proving):
            how = "; ".join(f"{name}: {info.computing.get(name)}, {first.computing.get(name)}" for name in names)
            sentences.append(
                f"{info.replica} on {info.node} computes differently from {first.replica} on {first.node} "
                f"({how}): they share agents' transcripts, but not KV"
            )
    return sentences


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


async def infos_of(replicas: Replicas, timing: Timing) -> dict[str, ModelInfo]:
    """Returns the models of those replicas that have loaded and answer in time."""
    answers = await _each(replica.info().within(timing.brief_answer_s) for replica in replicas.values())
    infos = zip(replicas, answers, strict=True)
    return {name: info for name, info in infos if info is not None and not isinstance(info, NoAnswer)}


def leave_node(replicas: Replicas, node: Node, timing: Timing, drain_s: float, for_good: bool) -> None:
    """Drains the node's replicas, for at most `drain_s`, and ends what runs there.

    Args:
        for_good: whether the node and its replicas are also removed from the registry.
    """
    asyncio.run(drain(replicas, drain_s, timing, leaves=True))
    if for_good:
        _unregister(node.name)
    kill(replicas)
    _kill_store(node.name)


def forget_node(name: str) -> None:
    """Removes a node that is down from the registry, and the actors that wait for it to come back."""
    replicas = _unregister(name)
    for replica in replicas:
        with suppress(ValueError):
            ray.kill(actor_handle(replica_actor_name(replica)), no_restart=True)
    _kill_store(name)


def _unregister(node: str) -> list[str]:
    """Removes a node and its replicas from the registry. Returns the replicas."""
    registry.remove_node(node)
    placed = [replica for entry in registry.entries() for replica, where in entry.replicas.items() if where == node]
    for replica in placed:
        registry.unplace(replica)
    return placed


def _kill_store(node: str) -> None:
    with suppress(ValueError):
        ray.kill(actor_handle(store_actor_name(node)), no_restart=True)


async def load_model(model: Model, config: Config, report: Report, check: Callable[[ModelInfo], None]) -> None:
    """Serves one more model in the running cluster: starts its replicas, waits for them, then registers them. If it has
    no room, models that come and go are unloaded for it.

    Args:
        check: raises if no request could use the model as a replica has loaded it.

    On any error or cancellation the replicas are ended. If the caller is killed, they end by themselves after
    `timing.unwanted_s`.

    Raises:
        InvalidRequest: the name is taken, or the model may be divided.
        ModelLoadError: the model cannot be loaded, or not within `timeouts.model_load_s`, or has other files somewhere.
    """
    model = located(model)
    if model.split is not None:
        raise InvalidRequest("only the config can divide a model among nodes", param="split")
    await asyncio.to_thread(registry.check_name, model)
    nodes = await asyncio.to_thread(present_nodes, config)
    free = await _memory_free_bytes(config.timing)
    placed = {replica: nodes[name] for replica, name in place(model, list(nodes), free_bytes=free).items()}
    while True:
        try:
            return await _load_on(placed, model, config, report, check)
        except NoRoom:
            report(f"making room for {model.name}", None)
            if not await _room_given({node.name for node in placed.values()}, config):
                raise
            await forget_replicas(placed, config.timing)


async def _room_given(nodes: Collection[str], config: Config) -> bool:
    """Returns whether the pool has unloaded a model on one of the nodes."""
    try:
        return await PoolClient(config.timing).give_room(sorted(nodes), config.timeouts.request_s)
    except Unavailable:
        # There may be no pool.
        return False


async def _load_on(
    placed: Mapping[str, Node],
    model: Model,
    config: Config,
    report: Report,
    check: Callable[[ModelInfo], None],
) -> None:
    """Raises as `load_model`, and `NoRoom`."""
    replicas = await asyncio.to_thread(start_replicas, model, config, placed)
    try:
        await wait_until_ready(replicas, config.timeouts.model_load_s, report)
        infos = await infos_of(replicas, config.timing)
        for sentence in differing(infos):
            logger.warning("%s", sentence)
        for info in [*infos.values()][:1]:
            await asyncio.to_thread(check, info)
        # Not in a thread: a cancellation must not come between the entries and this coroutine.
        registry.add(model)
        for replica, node in placed.items():
            registry.place(model, replica, node.name)
    except BaseException:
        kill(replicas)
        raise


async def _memory_free_bytes(timing: Timing) -> dict[str, int]:
    """Free memory in bytes by node, as their stores have reported; empty if the router does not answer."""
    try:
        nodes = await RouterClient(timing).nodes().within(timing.brief_answer_s)
    except NoAnswer:
        return {}
    return {node.name: node.memory_free_bytes for node in nodes if node.memory_free_bytes is not None}


def present_nodes(config: Config) -> dict[str, Node]:
    """Returns the present nodes by name, the head first; those that the config does not name come last."""
    alive = {name for node in control_store.ray_nodes() for name in node.resources}
    return {name: node for name, node in known_nodes(config).items() if node.resource in alive}


def known_nodes(config: Config) -> dict[str, Node]:
    """Returns the nodes of the config and those that have joined, by name, in the order of `present_nodes`."""
    known = {node.name: node for node in config.machines}
    for entry in registry.nodes():
        known.setdefault(entry.name, Node(name=entry.name, address=entry.address))
    return known


async def unload_model(name: str, config: Config, report: Report | None = None) -> None:
    """Stops serving a model: new requests do not find it, running ones have `timeouts.drain_s` to finish, then its
    replicas end.

    Args:
        report: called with the current step and None, once no new request finds the model.

    Raises:
        ModelNotFound: no such model.
        InvalidRequest: it is the only one.
    """
    entry = await asyncio.to_thread(registry.remove, name)
    if report is not None:
        report(f"Finishing what runs on {name}", None)
    replicas = await asyncio.to_thread(find_replicas, [entry], config.timing)
    # A process with a cached registry still sends requests here for a moment.
    await asyncio.sleep(2 * config.timing.registry_s)
    await end_replicas(replicas, config.timing, config.timeouts.drain_s)


async def end_replicas(replicas: Replicas, timing: Timing, drain_s: float) -> None:
    """Drains replicas, for at most `drain_s`, ends them, and waits until their names are free."""
    try:
        await drain(replicas, drain_s, timing)
    finally:
        kill(replicas)
    await forget_replicas(replicas, timing)


def find_replicas(entries: Iterable[registry.ServedEntry], timing: Timing) -> dict[str, ReplicaClient]:
    """Returns the models' replicas by id, without those that Ray does not know."""
    names = [name for entry in entries for name in entry.replicas]
    found = known_replicas(names, timing)
    for name in names:
        if name not in found:
            logger.warning("there is no replica %s", name)
    return found


def known_replicas(names: Iterable[str], timing: Timing) -> dict[str, ReplicaClient]:
    """Returns those of these replicas that Ray knows, by id."""
    replicas = {}
    for name in names:
        with suppress(ValueError):
            replicas[name] = ReplicaClient(name, timing, actor_handle(replica_actor_name(name)))
    return replicas


async def drain(replicas: Replicas, timeout_s: float, timing: Timing, *, leaves: bool = False) -> None:
    """Refuses new requests and waits for the running ones, at most `timeout_s`; then ends the rest.

    Args:
        leaves: whether only the replicas' node leaves: the ended sequences fail over to other replicas.
    """
    ends, answer_s = time.monotonic() + timeout_s, timing.brief_answer_s
    await _each(replica.drain().within(answer_s) for replica in replicas.values())
    while time.monotonic() < ends - FLUSH_S:
        if not any(map(_is_at_work, await _each(replica.stats().within(answer_s) for replica in replicas.values()))):
            break
        await asyncio.sleep(POLL_S)
    else:
        await _each(replica.drain(end_sequences=True, leaves=leaves).within(answer_s) for replica in replicas.values())
    await asyncio.sleep(FLUSH_S)


def _is_at_work(stats: ReplicaStats | NoAnswer) -> bool:
    """A replica that does not answer in time may still be busy; one that died is not."""
    if isinstance(stats, NoAnswer):
        return isinstance(stats, ActorSilent)
    return bool(stats.running or stats.waiting or stats.unwritten_bytes)


async def _each(calls: Iterable[Awaitable[T]]) -> list[T | NoAnswer]:
    """Makes calls at the same time. Returns the answers in order, or why there is none."""

    async def ask(call: Awaitable[T]) -> T | NoAnswer:
        try:
            return await call
        except NoAnswer as error:
            return error

    return await asyncio.gather(*map(ask, calls))


async def forget_replicas(replicas: Collection[str], timing: Timing) -> None:
    """Tells the router that the replicas are gone, and waits until Ray has freed their names."""
    ends = time.monotonic() + NAME_FREE_S
    try:
        router = RouterClient(timing)
        for name in replicas:
            await router.lose(name).within(timing.brief_answer_s)
    except NoAnswer:
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
