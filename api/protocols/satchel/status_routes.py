"""The routes for health and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.errors import SatchelError
from ...http.adding import TEXT, add_route
from ...http.answering import probe
from ...http.guard import require_admin
from ...http.metrics import CONTENT_TYPE, Metrics
from ...requests.backend import Backend, NodeState
from ...requests.callers import Caller
from ...views.cluster import disk_errors

_NODES_TIMEOUT_S = 2.0


class StatusRoutes:
    """Handlers for health and metrics."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/health", self.health)
        add_route(app, "GET", "/metrics", self.show_metrics, answers=(TEXT,))

    async def health(self, request: Request) -> Response:
        """Responds 200 if a replica of every served model answers, else 503. `disk_errors` says, by node, why KV cannot
        be written to disk now; serving does not need that. Callers who are not administrators see only the status."""
        caller: Caller = request.state.caller
        models, nodes = await asyncio.gather(probe(self._backend.health()), self._nodes())
        closed = disk_errors(nodes)
        more: dict[str, Any] = {"models": models} if caller.admin else {}
        if closed and caller.admin:
            more["disk_errors"] = closed
        if models and all(models.values()):
            return JSONResponse({"status": "ok", **more})
        return JSONResponse({"status": "unavailable", **more}, status_code=503, headers={"Retry-After": "1"})

    async def _nodes(self) -> list[NodeState]:
        """Returns the nodes; none if they are not known in time, because health and metrics must not fail because of
        them."""
        try:
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                return await self._backend.nodes()
        except (SatchelError, TimeoutError):
            return []

    async def show_metrics(self, request: Request) -> Response:
        """Shows metrics in Prometheus' text format. For administrators."""
        require_admin(request.state.caller)
        stats, nodes = await asyncio.gather(probe(self._backend.stats()), self._nodes())
        text = self._metrics.render(stats, self._backend.failovers, nodes)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})
