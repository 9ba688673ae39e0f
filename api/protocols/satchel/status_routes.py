"""The routes for models, health and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.errors import NoReplica, SatchelError
from ...http.adding import TEXT, add_route
from ...http.answering import Answering, probe
from ...http.guard import require_admin
from ...http.metrics import CONTENT_TYPE, Metrics
from ...requests.backend import Backend, ListedModel, NodeState
from ...requests.callers import Caller
from ...views.cluster import disk_errors
from ..openai.answers import model_body, state_body, unloaded_body

_NODES_TIMEOUT_S = 2.0


class StatusRoutes:
    """Handlers for models, health and metrics."""

    def __init__(self, backend: Backend, answering: Answering, metrics: Metrics) -> None:
        self._backend = backend
        self._answering = answering
        self._metrics = metrics

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/models", self.list_models)
        add_route(app, "GET", "/v1/models/{model_id:path}", self.get_model)
        add_route(app, "GET", "/health", self.health)
        add_route(app, "GET", "/metrics", self.show_metrics, answers=(TEXT,))

    async def list_models(self, request: Request) -> Response:
        """Lists every model that the caller may use and that is loaded, or comes and goes, the default first."""
        listed = await self._answering.listed(request)
        return JSONResponse({"object": "list", "data": await self._described(request, listed)})

    async def get_model(self, request: Request, model_id: str) -> Response:
        """Shows one model: the one that would answer a request for that name."""
        model = await self._answering.named(request, model_id)
        shown = await self._described(request, [model])
        if not shown:
            raise NoReplica(f"the model {model.name!r} is still loading", param="model")
        return JSONResponse(shown[0])

    async def _described(self, request: Request, listed: list[ListedModel]) -> list[dict[str, Any]]:
        """Returns the entries of models, without those that have not been loaded yet and are not loaded on request."""
        models, states = await asyncio.gather(self._answering.models(request), probe(self._backend.pool_states()))
        known = {model.info.name: model for model in models}

        async def described(model: ListedModel) -> dict[str, Any]:
            served = known.get(model.name)
            if served is None:
                return unloaded_body(model) | state_body(model, states.get(model.name))
            notes = await self._answering.generator.template_notes(served)
            body = model_body(served, [*served.info.notes, *notes])
            return body | state_body(model, states.get(model.name))

        shown = (described(model) for model in listed if model.name in known or model.comes_and_goes)
        return await asyncio.gather(*shown)

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
