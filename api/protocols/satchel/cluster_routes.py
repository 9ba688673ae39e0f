"""The routes under `/v1/cluster`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.audit import Audit
from ....cluster.detached import detached
from ....cluster.errors import Unavailable
from ...agents.memory import AgentMemory
from ...http.adding import add_route
from ...http.auditing import note
from ...http.error_shapes import openai_error
from ...http.guard import require_admin, tenant_of
from ...requests.backend import Backend
from ...requests.callers import Caller
from ...requests.requests import agent_key
from ...views.cluster import AGENTS_MAX, TokenRates, cluster_view

VIEW_S = 12.0
"""The time limit of all calls for one view together."""

FRESH_S = 1.0
"""How long a view is reused, so that frequent requests do not load the cluster."""


class ClusterRoutes:
    """Handlers for the state of nodes and replicas, and for routing decisions. For administrators."""

    def __init__(self, backend: Backend, memory: AgentMemory | None, audit: Audit | None = None) -> None:
        self._backend = backend
        self._audit = audit
        self._store = memory.store if memory is not None else None
        self._rates = TokenRates(time.monotonic)
        self._views: dict[str | None, tuple[float, asyncio.Task[dict[str, Any]]]] = {}
        """By tenant, None for a view without agents: the start of the view and its task."""

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/cluster", self.show)
        add_route(app, "GET", "/v1/cluster/agents/{agent_id}", self.where)
        add_route(app, "DELETE", "/v1/cluster/nodes/{name}", self.remove_node)
        add_route(app, "GET", "/v1/cluster/decisions/{request_id:path}", self.explain)

    async def show(self, request: Request, agents: Annotated[int, Query(ge=0, le=AGENTS_MAX)] = AGENTS_MAX) -> Response:
        """Shows nodes, replicas and at most `agents` of the caller's agents, or of `?tenant=NAME`, or `*` for all."""
        caller: Caller = request.state.caller
        require_admin(caller)
        # Shielded, because other requests may wait for the same view.
        view = await asyncio.shield(self.view(tenant_of(request, every=True) if agents else None))
        shown = view["agents"][:agents]
        if len(shown) < len(view["agents"]):
            view = {**view, "agents": shown, "agents_count": len(shown), "agents_has_more": True}
        return JSONResponse(view)

    async def machines(self) -> dict[str, Any]:
        """Returns the view without agents.

        Raises:
            Unavailable: the cluster does not answer.
        """
        return await asyncio.shield(self.view(None))

    def view(self, tenant: str | None) -> asyncio.Task[dict[str, Any]]:
        """Returns the task of the current or a fresh view, else starts one; None for a view without agents."""
        begun_at, task = self._views.get(tenant, (0.0, None))
        if task is None or (task.done() and time.monotonic() - begun_at > FRESH_S):
            task = detached(self._look(tenant))
            self._views = {
                name: view
                for name, view in self._views.items()
                if not view[1].done() or time.monotonic() - view[0] <= FRESH_S
            }
            self._views[tenant] = time.monotonic(), task
        return task

    async def _look(self, tenant: str | None) -> dict[str, Any]:
        store = None if tenant is None else self._store
        try:
            async with asyncio.timeout(VIEW_S):
                return await cluster_view(self._backend, store, self._rates, tenant=tenant or "")
        except TimeoutError:
            raise Unavailable(f"the cluster did not answer within {VIEW_S:.0f} s") from None

    async def where(self, request: Request, agent_id: str) -> Response:
        """Shows the node of an agent's primary, and the nodes of its secondaries."""
        caller: Caller = request.state.caller
        require_admin(caller)
        key = agent_key(agent_id, tenant_of(request))
        if self._store is None:
            raise Unavailable("this endpoint keeps no agents' memory", retry_after_s=None)
        place = await self._store.where(key)
        found = {"home": place.home, "alive": place.alive, "epoch": place.epoch, "copies": place.copies}
        return JSONResponse({"id": agent_id, "object": "agent.place", **found})

    async def remove_node(self, request: Request, name: str) -> Response:
        """Removes a machine that has joined. If it is up, it hands its agents over and leaves."""
        require_admin(request.state.caller)
        up = await self._backend.remove_node(name)
        self._views.clear()
        note(self._audit, request, "node removed", node=name)
        return JSONResponse({"object": "node", "name": name, "removed": True, "leaves": up})

    async def explain(self, request: Request, request_id: str) -> Response:
        """Shows why a recent request was routed as it was."""
        require_admin(request.state.caller)
        decision = await self._backend.explain(request_id)
        if decision is None:
            message = f"no decision about request {request_id!r} is remembered"
            return JSONResponse(openai_error(404, message, code="decision_not_found", param="request_id"), 404)
        return JSONResponse({"object": "decision", "id": request_id, **decision})
