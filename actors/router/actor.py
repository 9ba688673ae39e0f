"""The router actor: a thin shell around `Policy`. It sees ids and sizes, never tokens."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

from ...cluster.config import Config
from ...cluster.errors import NoReplica
from ..messages import Decision, ReplicaReport, RouteRequest, decode, encode
from .policy import Policy

DECISIONS_KEPT = 1000


class RouterActor:
    """Chooses a replica for each request. Named `router` in the cluster's namespace.

    Methods take and return `satchel.actors.messages` as bytes where a message is named.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        routing = config.routing
        self._policy = Policy(
            timeout_s=routing.replica_timeout_s,
            sticky_penalty_s_max=routing.sticky_penalty_s_max,
            rule=routing.policy,
        )
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._observing = asyncio.Lock()

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
            # A replica that comes with 100,000 blocks holds nobody up: requests are routed between the parts.
            parts = self._policy.observe_in_parts(message, time.monotonic())
            complete = next(parts)
            for _ in parts:
                await asyncio.sleep(0)
        return complete

    async def lose(self, replica: str) -> None:
        """Say that a call to `replica` failed: it is avoided until it reports again."""
        self._policy.lose(replica)

    async def release(self, replica: str, request_id: str) -> None:
        """Say that the request is no load on `replica`: it was refused, or has ended before a report mentioned it."""
        self._policy.release(replica, request_id)

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a recent request went where it did: replica, reason, and by candidate the cost terms in seconds.

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
