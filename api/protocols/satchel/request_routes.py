"""The routes under `/v1/requests`: what runs, and aborting it."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.audit import Audit
from ....cluster.errors import RequestNotFound
from ...http.adding import add_route
from ...http.auditing import note
from ...http.guard import tenant_of
from ...pipeline.running import RunningSequences
from ...requests.callers import Caller
from ...views.requests import running_views


class RequestRoutes:
    """Handlers for running requests. A caller sees and aborts only its own; an administrator can name another tenant
    with `?tenant=NAME`, or `*` for all."""

    def __init__(self, running: RunningSequences, audit: Audit | None = None) -> None:
        self._running = running
        self._audit = audit

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/requests", self.list_requests)
        add_route(app, "DELETE", "/v1/requests/{request_id:path}", self.abort)

    async def list_requests(self, request: Request) -> Response:
        """Lists the answers that are being computed for clients of this endpoint, the oldest first."""
        tenant = tenant_of(request, every=True)
        shown = running_views(self._running.of(tenant), tenants=not tenant)
        return JSONResponse({"object": "list", "data": shown})

    async def abort(self, request: Request, request_id: str) -> Response:
        """Aborts a running request: the `request_id` of a response, or the `id` of one of its answers."""
        caller: Caller = request.state.caller
        tenant = tenant_of(request, every=True)
        count = self._running.stop(request_id, tenant)
        if not count:
            raise RequestNotFound(f"no request {request_id!r} runs here", param="request_id")
        if tenant != caller.tenant:
            note(self._audit, request, "request aborted", aborted=request_id[:200])
        return JSONResponse({"id": request_id, "object": "request.aborted", "aborted": count})
