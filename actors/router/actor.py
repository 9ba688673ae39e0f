"""The router actor: a thin shell around `Policy`. It sees ids and sizes, never tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from ...cluster.config.config import Config
from ...cluster.environment import default_home
from ...cluster.errors import NoReplica
from ...cluster.incidents import note_incident_aside
from ...cluster.telemetry.context import Value, span
from ...cluster.telemetry.process import begin_telemetry
from ..protocol import registry
from ..protocol.clients import RouterClient
from ..protocol.names import ROUTER
from ..protocol.router_messages import (
    AgentPlace,
    Decision,
    Decisions,
    Explanation,
    MadeDecision,
    NodeReport,
    Places,
    ReplicaReport,
    RouteRequest,
    SequenceLeft,
    StoreReport,
)
from ..rpc.local import LocalAddress, LocalServer
from ..rpc.shell import answers
from ..supervision.watchdog import Watchdog
from .places import Whereabouts
from .policy import Policy
from .splitting import Rules

DECISIONS_KEPT = 1000
LISTED_MAX = 200
WATCH_S = 1.0
LOST_LOOKS = 3
"""A node that is silent at this many checks in a row becomes an incident."""


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A decision in the list of the latest; `about` has no ids of blocks and pictures."""

    number: int
    at_s: float
    about: RouteRequest
    decision: Decision


class RouterActor:
    """The actor that chooses a replica for each request. Named `router` in the cluster's namespace.

    It is called through `RouterClient`, which says what its methods do.

    A restarted router learns everything from reports. Until every node has reported, or the timeout of a lost node has
    passed, it does not say that an agent is unknown or that its primary is gone.

    Args:
        joined: the nodes that are expected to report; None asks the registry.
    """

    def __init__(self, config: Config, joined: Iterable[str] | None = None) -> None:
        self._config = config
        routing = config.routing
        self._policy = Policy(
            timeout_s=routing.replica_timeout_s,
            sticky_penalty_s_max=routing.sticky_penalty_s_max,
            rule=routing.policy,
            timing=config.timing,
            split=Rules(routing.split_tokens_min, routing.split_gain_min) if routing.split else None,
            energy_delay_s_max=routing.energy_delay_s_max if routing.prefer == "energy" else None,
        )
        # `explain` searches it from the latest on, which a library's cache does not offer.
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._left: dict[str, SequenceLeft] = {}
        """How the sequences of those decisions went."""
        self._incarnation = uuid.uuid4().hex
        self._numbered = 0
        self._latest: OrderedDict[str, _Numbered] = OrderedDict()
        """The latest decisions by sequence, in the order of their numbers."""
        self._observing = asyncio.Lock()
        self._unheard = set(_joined() if joined is None else joined)
        self._listens_until = time.monotonic() + routing.replica_timeout_s
        self._silent: dict[str, int] = {}
        if joined is None and ray.is_initialized():
            begin_telemetry(ROUTER, config.logs, config.traces)
            loop = asyncio.get_running_loop()
            self._watchdog = Watchdog(ROUTER, poll_s=config.timing.heartbeat_s)
            self._watchdog.watch("event loop", loop.call_soon_threadsafe)
            self._watchdog.start()
            self._watching = loop.create_task(self._watch_nodes())

        self._near = LocalServer(self, "route", "release", "report", "store_report")

    @answers(RouterClient.local_address)
    async def local_address(self) -> LocalAddress:
        return await self._near.address()

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for incident in self._look_at_nodes(self._policy.members.node_views(time.monotonic())):
                note_incident_aside(default_home(), "node", incident)

    def _look_at_nodes(self, nodes: Iterable[dict[str, Any]]) -> list[str]:
        """Returns the incidents of nodes that fell silent or report again. Drained nodes may fall silent."""
        incidents = []
        for node in nodes:
            name, looks = node["name"], self._silent.get(node["name"], 0)
            if node["alive"]:
                if looks >= LOST_LOOKS:
                    incidents.append(f"the store of node {name} reports again")
                self._silent.pop(name, None)
            elif not node["draining"]:
                self._silent[name] = looks + 1
                if looks + 1 == LOST_LOOKS:
                    incidents.append(f"the store of node {name} has not reported for {node['seen_s']:.0f} s")
        return incidents

    @answers(RouterClient.route)
    async def route(self, request: RouteRequest) -> Decision:
        decision = self._policy.route(request, time.monotonic())
        asyncio.get_running_loop().call_soon(self._policy.members.settle)
        if decision is None:
            raise NoReplica(f"no replica of {request.model} answers now", retry_after_s=2.0)
        span().set(_attributes(decision))
        self._decisions[request.request_id] = decision
        self._left.pop(request.request_id, None)
        if len(self._decisions) > DECISIONS_KEPT:
            self._left.pop(self._decisions.popitem(last=False)[0], None)
        # Without the lists of ids, which may be long.
        about = replace(request, block_ids=[], pictures=[], others=[])
        self._number(_Numbered(0, time.time(), about, decision))
        return decision

    def _number(self, entry: _Numbered) -> None:
        """Makes a decision the latest one."""
        self._numbered += 1
        sequence = entry.about.request_id
        self._latest[sequence] = replace(entry, number=self._numbered)
        self._latest.move_to_end(sequence)
        if len(self._latest) > LISTED_MAX:
            self._latest.popitem(last=False)

    @answers(RouterClient.report)
    async def report(self, report: ReplicaReport) -> bool:
        async with self._observing:
            return await _in_parts(self._policy.members.observe_in_parts(report, time.monotonic()))

    @answers(RouterClient.store_report)
    async def store_report(self, report: StoreReport) -> bool:
        async with self._observing:
            complete = await _in_parts(self._policy.members.observe_store_in_parts(report, time.monotonic()))
        if complete:
            self._unheard.discard(report.node)
        return complete

    @answers(RouterClient.lose)
    async def lose(self, replica: str) -> None:
        self._policy.members.lose(replica)

    @answers(RouterClient.lose_node)
    async def lose_node(self, node: str) -> None:
        # At first only reports of new processes count.
        self._policy.members.lose_node(node, time.monotonic())
        self._unheard.discard(node)

    @answers(RouterClient.release)
    async def release(self, left: SequenceLeft) -> None:
        self._policy.members.release(left.replica, left.request_id)
        decision = self._decisions.get(left.request_id)
        if decision is not None and decision.replica == left.replica:
            self._left[left.request_id] = left
            if (entry := self._latest.get(left.request_id)) is not None:
                # Those who have seen it get it again, with what it took.
                self._number(entry)

    @answers(RouterClient.explain)
    async def explain(self, request_id: str) -> Explanation | None:
        # A sequence's id is its request's id and a random part.
        of_it = f"{request_id}/"
        sequence = next(
            (
                sequence
                for sequence in reversed(self._decisions)
                if sequence == request_id or sequence.startswith(of_it)
            ),
            None,
        )
        return None if sequence is None else self._explained(sequence, self._decisions[sequence])

    @answers(RouterClient.decisions)
    async def decisions(self, after: int, most: int) -> Decisions:
        found = [each for each in self._latest.values() if each.number > after][-most:] if most > 0 else []
        made = [
            MadeDecision(
                each.number,
                each.about.request_id,
                each.about.agent,
                each.about.model,
                each.about.prompt_tokens,
                each.at_s,
                self._explained(each.about.request_id, each.decision),
            )
            for each in found
        ]
        return Decisions(self._incarnation, self._numbered, made)

    def _explained(self, sequence: str, decision: Decision) -> Explanation:
        left = self._left.get(sequence)
        if left is None or left.replica != decision.replica:
            left = SequenceLeft(decision.replica, sequence)
        return Explanation(
            decision.replica,
            decision.why,
            decision.cached_tokens,
            decision.node,
            decision.pull_from,
            decision.pull_tokens,
            costs_s={
                name: {term: seconds[position] for term, seconds in decision.costs_s.items()}
                for position, name in enumerate(decision.candidates)
            },
            prefill_on=decision.prefill_on,
            split_costs_s=decision.split_costs_s,
            actual_cached_tokens=left.cached_tokens,
            actual_first_token_s=left.first_token_s,
            actual_disk_tokens=left.disk_tokens,
            energy_j=dict(zip(decision.candidates, decision.energy_j, strict=False)),
        )

    async def config(self) -> Config:
        return self._config

    @answers(RouterClient.alive)
    async def alive(self, model: str) -> list[str]:
        return self._policy.members.alive(model, time.monotonic())

    @answers(RouterClient.places)
    async def places(self, agents: Sequence[str]) -> Places:
        alive = frozenset(self._policy.members.alive_nodes(time.monotonic()))
        unheard = self._awaited()
        known = ((agent, self._policy.members.where(agent)) for agent in agents)
        claimed = [_place(agent, place, alive) for agent, place in known if place is not None]
        return Places([place for place in claimed if place.alive or not unheard], unheard)

    def _awaited(self) -> list[str]:
        """Returns the nodes that must still report."""
        return sorted(self._unheard) if time.monotonic() < self._listens_until else []

    @answers(RouterClient.moved)
    async def moved(self, agent: str, node: str, epoch: int) -> None:
        self._policy.members.places.moved(agent, node, epoch)

    @answers(RouterClient.agents_on)
    async def agents_on(self, node: str) -> list[str]:
        return self._policy.members.places.agents_on(node)

    @answers(RouterClient.nodes)
    async def nodes(self) -> list[NodeReport]:
        heard = [NodeReport(**node) for node in self._policy.members.node_views(time.monotonic())]
        names = {node.name for node in heard}
        return heard + [NodeReport(name, True) for name in self._awaited() if name not in names]


def _attributes(decision: Decision) -> dict[str, Value | None]:
    """Returns a decision as attributes of its span: with the cost terms of the chosen replica, in seconds."""
    chosen = decision.candidates.index(decision.replica) if decision.replica in decision.candidates else None
    costs = (
        {} if chosen is None else {f"satchel.cost_s.{term}": each[chosen] for term, each in decision.costs_s.items()}
    )
    return {
        "satchel.replica": decision.replica,
        "satchel.node": decision.node or None,
        "satchel.why": decision.why,
        "satchel.candidates": len(decision.candidates),
        "satchel.cached_tokens": decision.cached_tokens,
        "satchel.pull_from": decision.pull_from or None,
        "satchel.prefill_on": decision.prefill_on or None,
        **costs,
    }


def _joined() -> list[str]:
    """Returns the nodes that have joined; none outside a cluster."""
    return [entry.name for entry in registry.nodes()] if ray.is_initialized() else []


def _place(agent: str, place: Whereabouts, alive: frozenset[str]) -> AgentPlace:
    copies = [node for node in place.copies if node in alive]
    return AgentPlace(agent, place.node, place.node in alive, place.epoch, copies)


async def _in_parts(parts: Iterator[bool]) -> bool:
    """Takes a report in parts, between which requests are routed: it may have 100,000 blocks."""
    complete = next(parts)
    for _ in parts:
        await asyncio.sleep(0)
    return complete
