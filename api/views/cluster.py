"""The cluster as clients see it: shared by the HTTP routes and the Python handles. Independent of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...actors.protocol.replica_messages import ReplicaProgress
from ...actors.protocol.router_messages import NodeEntry, NodeReport
from ...cluster.config.nodes import Node
from ...cluster.errors import SatchelError
from ..agents.store import Store
from ..requests.backend import Backend, NodeState, ReplicaStats
from .agents import agent_id_of
from .models import model_views, stage_views

AGENTS_MAX = 1000
"""The most agents in one view of the cluster."""

RATE_OVER_S = 0.5
"""The shortest time over which tokens per second are measured. A reading older than `RATE_AGE_S` is not used."""

RATE_AGE_S = 10.0

FULL = "its disk is full"


@dataclass(frozen=True)
class SeenNodes:
    """The nodes in Ray's control store.

    Attributes:
        joined: nodes that joined and have not left.
        resources: Ray resource names of all live machines; each node has its own while it lives.
        here: the resource of the machine on which this was read, "" if it is not in the cluster.
        memory_free_bytes: of that node.
    """

    joined: tuple[NodeEntry, ...]
    resources: frozenset[str]
    here: str
    memory_free_bytes: int


def node_states(machines: Sequence[Node], seen: SeenNodes, described: Iterable[NodeReport]) -> list[NodeState]:
    """Returns the nodes: first those of the config, in its order, then others that joined. Omits nodes that left, even
    if the router still reports them.

    Args:
        described: the router's reports.
    """
    addresses = {node.name: node.address for node in machines}
    links = {node.name: tuple((str(link.address), str(link.kind)) for link in node.data_links) for node in machines}
    for entry in seen.joined:
        # The address with which it joined is newer than the config.
        addresses[entry.name], links[entry.name] = entry.address, entry.links
    cards = {entry.name: entry.card for entry in seen.joined}
    reports = {each.name: each for each in described}
    states = []
    for name, address in addresses.items():
        resource = f"satchel-node-{name}"
        # Ray takes much longer than the router to notice that a machine is gone.
        report = reports.get(name) or NodeReport(name, resource in seen.resources)
        states.append(
            NodeState(
                name=name,
                address=address,
                links=links[name],
                up=report.alive,
                rates=report.links,
                memory_free_bytes=seen.memory_free_bytes if resource == seen.here else report.memory_free_bytes,
                disk_bytes=report.used_bytes,
                disk_free_bytes=None if report.free_bytes < 0 else report.free_bytes,
                disk_full=report.disk_full,
                disk_error=report.disk_error,
                agents_let_go=report.agents_let_go,
                joules=report.joules,
                blocks=report.blocks,
                agents=report.agents,
                draining=report.draining,
                card=cards.get(name, ""),
            )
        )
    return states


def disk_errors(nodes: Iterable[NodeState]) -> dict[str, str]:
    """Returns, by node, why KV cannot be written to its disk now. A full disk is included; its KV is still read."""
    return {node.name: node.disk_error or FULL for node in nodes if node.disk_error or node.disk_full}


class TokenRates:
    """Tokens per second by replica, from two readings of the replicas' totals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reading = asyncio.Lock()
        self._read_at = 0.0
        self._totals: dict[str, int] = {}

    async def read(
        self, read: Callable[[], Awaitable[list[ReplicaStats]]]
    ) -> tuple[list[ReplicaStats], dict[str, float]]:
        """Returns the replicas' statistics and tokens per second. Takes `RATE_OVER_S` if a busy replica has no recent
        reading."""
        async with self._reading:
            return await self._read(read)

    async def _read(
        self, read: Callable[[], Awaitable[list[ReplicaStats]]]
    ) -> tuple[list[ReplicaStats], dict[str, float]]:
        stats = await read()
        now = self._clock()
        working = {each.replica for each in stats if each.running}
        if working and not (working <= self._totals.keys() and RATE_OVER_S <= now - self._read_at <= RATE_AGE_S):
            self._keep(stats, now)
            await asyncio.sleep(RATE_OVER_S)
            stats = await read()
            now = self._clock()
        past_s = max(now - self._read_at, 1e-9)
        rates = {
            # A restarted replica counts from 0.
            each.replica: max(0.0, (each.generated_tokens_total - self._totals[each.replica]) / past_s)
            for each in stats
            if each.answers and each.replica in self._totals and past_s <= RATE_AGE_S
        }
        self._keep(stats, now)
        return stats, {each.replica: rates.get(each.replica, 0.0) for each in stats if each.answers}

    def _keep(self, stats: Iterable[ReplicaStats], now: float) -> None:
        self._read_at = now
        self._totals = {each.replica: each.generated_tokens_total for each in stats if each.answers}


async def cluster_view(backend: Backend, store: Store | None, rates: TokenRates, *, tenant: str) -> dict[str, Any]:
    """Returns nodes, models, replicas, and the tenant's first agents in the order of their ids.

    Args:
        store: the agents' store; None leaves agents out.
        tenant: whose agents, "" for those of all tenants.

    Raises:
        Unavailable: the control store does not answer. If the agents' store does not, agents are left out.
    """
    nodes, models, (stats, tokens_per_s), pids = await asyncio.gather(
        backend.nodes(), model_views(backend), rates.read(backend.stats), backend.pids()
    )
    silent = [each.replica for each in stats if not each.answers]
    loading = await backend.loading(silent) if silent else {}
    return {
        "object": "cluster",
        "nodes": node_views(nodes, stats),
        "models": models,
        "replicas": [
            {**_replica_view(each, stats, pids, tokens_per_s), **_progress_view(each, loading.get(each.replica))}
            for each in stats
        ],
        **await _agents_view(store, tenant, nodes),
    }


def node_views(nodes: Sequence[NodeState], stats: Iterable[ReplicaStats]) -> list[dict[str, Any]]:
    """Returns the nodes with their replicas' totals."""
    replicas = list(stats)
    return [_node_view(node, nodes, [each for each in replicas if each.node == node.name]) for node in nodes]


def _node_view(node: NodeState, nodes: Sequence[NodeState], replicas: Sequence[ReplicaStats]) -> dict[str, Any]:
    return {
        "name": node.name,
        "address": node.address,
        "addresses": [{"address": address, "kind": kind} for address, kind in node.links],
        "up": node.up or any(each.answers for each in replicas),
        # Add replicas that are loading, have failed or do not answer.
        "waits_for": [each.replica for each in replicas if not each.answers],
        "draining": node.draining,
        "replicas": [each.replica for each in replicas],
        # KV is pulled over the other node's fastest link.
        "links": [
            {
                "from": other.name,
                "kind": other.links[0][1] if other.links else None,
                "bytes_per_s": node.rates.get(other.name),
            }
            for other in nodes
            if other is not node
        ],
        "card": node.card or None,
        "memory_free_bytes": node.memory_free_bytes,
        "disk_free_bytes": node.disk_free_bytes,
        "disk_full": node.disk_full,
        "disk_error": node.disk_error or None,
        "agents_let_go": node.agents_let_go,
        "joules": dict(node.joules),
        "tiers": {"memory_bytes": sum(each.prefix_bytes for each in replicas), "disk_bytes": node.disk_bytes},
        "agents": node.agents,
    }


def _replica_view(
    stats: ReplicaStats, every: Iterable[ReplicaStats], pids: Mapping[str, int], tokens_per_s: Mapping[str, float]
) -> dict[str, Any]:
    rate = tokens_per_s.get(stats.replica)
    return {
        "id": stats.replica,
        "node": stats.node,
        "pid": pids.get(stats.replica),
        "model": stats.model,
        "model_id": stats.model_id or None,
        "folder": stats.folder or None,
        "weights_bytes": stats.weights_bytes or None,
        "idle_s": round(stats.idle_s, 1),
        # Replicas with different settings do not share KV.
        "differs": _differing(stats, every),
        "up": stats.answers,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens_per_s": None if rate is None else round(rate, 1),
        "decoding": stats.decoding or None,
        "multiplying": stats.multiplying or None,
        "proving": {"what": stats.proving, "since": int(stats.proving_since)} if stats.proving else None,
        "stages": stage_views(stats.stages),
        "adapters": list(stats.adapters),
        "slots": {"running": stats.slots_running, "kept": stats.slots_kept, "free": stats.slots_free},
        "memory_bytes": stats.memory_bytes,
        "memory_bytes_max": stats.memory_bytes_max,
    }


def _progress_view(stats: ReplicaStats, loading: ReplicaProgress | None) -> dict[str, Any]:
    """Returns what the replica does until it answers, and what it has done since it was started."""
    totals = {
        "requests": stats.requests_total,
        "prompt_tokens": stats.prompt_tokens_total,
        "cached_tokens": stats.cached_tokens_total,
        "generated_tokens": stats.generated_tokens_total,
    }
    return {
        "loading": {"what": loading.what, "fraction": loading.fraction} if loading is not None else None,
        "totals": totals if stats.answers else None,
    }


def _differing(stats: ReplicaStats, every: Iterable[ReplicaStats]) -> dict[str, str]:
    """Returns the replica's computation settings that differ among the replicas of its model."""
    # Until its self-test has ended, a model computes in another way on every node.
    others = [each.computing for each in every if each.model == stats.model and each.model_id and not each.proving]
    if stats.proving:
        return {}
    return {name: value for name, value in stats.computing.items() if any(other.get(name) != value for other in others)}


async def _agents_view(store: Store | None, tenant: str, nodes: Sequence[NodeState]) -> dict[str, Any]:
    unknown = {"agents": [], "agents_count": None, "agents_has_more": False}
    if store is None:
        return unknown
    try:
        found = await store.agents(tenant, f"{tenant}/" if tenant else "", AGENTS_MAX + 1)
        keys = [each.agent for each in found[:AGENTS_MAX]]
        places = await store.places(keys)
    except SatchelError:
        # Without agents: clients need the nodes and replicas most if something does not answer.
        return unknown
    only = nodes[0].name if len(nodes) == 1 else None
    shown = []
    for key in keys:
        place = places.get(key)
        home = (place.home if place else "") or only
        owner = {} if tenant else {"tenant": key.partition("/")[0]}
        shown.append({"id": agent_id_of(key), **owner, "home": home, "copies": place.copies if place else []})
    return {"agents": shown, "agents_count": len(shown), "agents_has_more": len(found) > AGENTS_MAX}
