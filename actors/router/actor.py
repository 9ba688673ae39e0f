"""The router actor: a thin shell around `Policy`. It sees ids and sizes, never tokens."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import ray

from ...cluster.config import Config
from ...cluster.environment import default_home
from ...cluster.errors import NoReplica
from ...cluster.incidents import note_incident_aside
from .. import registry
from ..handles import ROUTER
from ..messages import Decision, ReplicaReport, RouteRequest, StoreReport, decode, encode
from ..watchdog import Watchdog
from .places import Place
from .policy import Policy

DECISIONS_KEPT = 1000
WATCH_S = 1.0
LOST_LOOKS = 3
"""A node that is silent in so many looks, one after the other, is written down."""


class RouterActor:
    """Chooses a replica for each request. Named `router` in the cluster's namespace.

    Methods take and return `satchel.actors.messages` as bytes where a message is named.

    One that was started again learns all that it knew from the reports. Until every node has reported, or was silent
    for as long as one that is lost, it does not say that nobody knows an agent, nor that its home is gone.

    Args:
        joined: the nodes that are to report; None asks the registry.
    """

    def __init__(self, config: Config, joined: Iterable[str] | None = None) -> None:
        self._config = config
        routing = config.routing
        self._policy = Policy(
            timeout_s=routing.replica_timeout_s,
            sticky_penalty_s_max=routing.sticky_penalty_s_max,
            rule=routing.policy,
        )
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._observing = asyncio.Lock()
        self._unheard = set(_joined() if joined is None else joined)
        self._listens_until = time.monotonic() + routing.replica_timeout_s
        self._silent: dict[str, int] = {}
        if joined is None and ray.is_initialized():
            loop = asyncio.get_running_loop()
            self._watchdog = Watchdog(ROUTER)
            self._watchdog.watch("event loop", loop.call_soon_threadsafe)
            self._watchdog.start()
            self._watching = loop.create_task(self._watch_nodes())

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for what in self._look_at_nodes(self._policy.nodes(time.monotonic())):
                note_incident_aside(default_home(), "node", what)

    def _look_at_nodes(self, nodes: Iterable[dict[str, Any]]) -> list[str]:
        """What is to be written down of nodes that are silent, or were. Those that were asked to leave may be."""
        said = []
        for node in nodes:
            name, looks = node["name"], self._silent.get(node["name"], 0)
            if node["alive"]:
                if looks >= LOST_LOOKS:
                    said.append(f"the store of node {name} reports again")
                self._silent.pop(name, None)
            elif not node["draining"]:
                self._silent[name] = looks + 1
                if looks + 1 == LOST_LOOKS:
                    said.append(f"the store of node {name} has not reported for {node['seen_s']:.0f} s")
        return said

    async def route(self, request: bytes) -> bytes | dict[str, Any]:
        """A `Decision` for a `RouteRequest`, reserving its load; or an error on the wire (`NoReplica`)."""
        message = decode(RouteRequest, request)
        decision = self._policy.route(message, time.monotonic())
        asyncio.get_running_loop().call_soon(self._policy.settle)
        if decision is None:
            return NoReplica(f"no replica of {message.model} answers now", retry_after_s=2.0).to_wire()
        self._decisions[message.request_id] = decision
        if len(self._decisions) > DECISIONS_KEPT:
            self._decisions.popitem(last=False)
        return encode(decision)

    async def report(self, report: bytes) -> bool:
        """Take a `ReplicaReport`. False asks the replica for a full one."""
        message = decode(ReplicaReport, report)
        async with self._observing:
            return await _in_parts(self._policy.observe_in_parts(message, time.monotonic()))

    async def store_report(self, report: bytes) -> bool:
        """Take a `StoreReport`. False asks the store for a full one."""
        message = decode(StoreReport, report)
        async with self._observing:
            complete = await _in_parts(self._policy.observe_store_in_parts(message, time.monotonic()))
        if complete:
            self._unheard.discard(message.node)
        return complete

    async def lose(self, replica: str) -> None:
        """Say that a call to `replica` failed: it is avoided until it reports again."""
        self._policy.lose(replica)

    async def lose_node(self, node: str) -> None:
        """Say that a whole node is gone: its replicas and its disk are avoided until they report again.

        Only new processes are believed at first: other reports may have left before the loss.
        """
        self._policy.lose_node(node, time.monotonic())
        self._unheard.discard(node)

    async def release(self, replica: str, request_id: str) -> None:
        """Say that the request is no load on `replica`: it was refused, or has ended before a report mentioned it."""
        self._policy.release(replica, request_id)

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a recent request went where it did: replica, node, reason, what was to be pulled from which other node,
        and by candidate the cost terms in seconds.

        Args:
            request_id: the `x-request-id` of a response.
        """
        # A row's id is its request's id and a random part.
        found = (row for row in reversed(self._decisions) if row == request_id or row.startswith(f"{request_id}/"))
        row = next(found, None)
        if row is None:
            return None
        decision = self._decisions[row]
        return {
            "replica": decision.replica,
            "why": decision.why,
            "cached_tokens": decision.cached_tokens,
            "node": decision.node,
            "pull_from": decision.pull_from,
            "pull_tokens": decision.pull_tokens,
            "costs_s": {
                name: {term: seconds[position] for term, seconds in decision.costs_s.items()}
                for position, name in enumerate(decision.candidates)
            },
        }

    async def config(self) -> Config:
        """The config that the cluster was started with."""
        return self._config

    async def alive(self, model: str) -> list[str]:
        """Names of the replicas of `model` that reported lately."""
        return self._policy.alive(model, time.monotonic())

    async def where(self, agent: str) -> dict[str, Any] | None:
        """As `places`, of one agent."""
        return (await self.places([agent]))[0]

    async def places(self, agents: list[str]) -> list[dict[str, Any] | None]:
        """Where agents' memory is, in their order; None for those that no store has said it knows.

        Args:
            agents: their keys, `tenant/agent_id`.

        Returns:
            `home`: its home node, "" where no node that is known is; `alive`: whether that node's store reported
            lately; `epoch`: the highest home epoch that was heard; `copies`: other nodes that have a copy, the newest
            first, those whose stores are silent left out. Where that is not known yet, `unheard` has the nodes that are
            still to say which agents they have.
        """
        alive = frozenset(self._policy.alive_nodes(time.monotonic()))
        unheard = self._awaited()
        found = [_place_view(self._policy.where(agent), alive) for agent in agents]
        unsure = {"home": "", "alive": False, "epoch": 0, "copies": [], "unheard": unheard}
        return [unsure if unheard and not (place and place["alive"]) else place for place in found]

    def _awaited(self) -> list[str]:
        """The nodes that are still to report."""
        return sorted(self._unheard) if time.monotonic() < self._listens_until else []

    async def moved(self, agent: str, node: str, epoch: int) -> None:
        """The agent's home is there since `epoch`: its next turn need not wait for the node's report."""
        self._policy.places.moved(agent, node, epoch)

    async def agents_on(self, node: str) -> list[str]:
        """Keys of the agents whose home the node is."""
        return self._policy.places.agents_on(node)

    async def nodes(self) -> list[dict[str, Any]]:
        """Every node whose store has reported, by name; of those that are still to do so `name` and `alive` alone.

        Returns:
            `name`, `alive`, `seen_s` (how long ago it reported), `draining`, `disk_full`, `disk_error` (why no KV is
            kept on its disk, "" where it is), `agents_let_go` (how many had to make room since its store was started),
            `used_bytes`, `free_bytes` (-1 where not known), `memory_free_bytes` of its machine (None where not known),
            `blocks` on its disk,
            `agents` that it has as home or copy, `replicas` (names) and `links` (bytes a second by the node that it
            pulled from, as measured).
        """
        heard = self._policy.nodes(time.monotonic())
        names = {node["name"] for node in heard}
        return heard + [{"name": name, "alive": True} for name in self._awaited() if name not in names]


def _joined() -> list[str]:
    """The nodes that have joined; none outside a cluster."""
    return [entry.name for entry in registry.nodes()] if ray.is_initialized() else []


def _place_view(place: Place | None, alive: frozenset[str]) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "home": place.node,
        "alive": place.node in alive,
        "epoch": place.epoch,
        "copies": [node for node in place.copies if node in alive],
    }


async def _in_parts(parts: Iterator[bool]) -> bool:
    """Take a report. One with 100,000 blocks holds nobody up: requests are routed between its parts."""
    complete = next(parts)
    for _ in parts:
        await asyncio.sleep(0)
    return complete
