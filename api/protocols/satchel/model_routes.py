"""The routes under `/v1/models`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.audit import Audit
from ....cluster.errors import NoReplica
from ...http.adding import add_route
from ...http.answering import Answering, probe
from ...http.auditing import note
from ...http.guard import require_admin
from ...requests.backend import Backend, ListedModel
from ...requests.callers import Caller
from ...views.models import model_state
from ..openai.answers import model_body, unloaded_body


class ModelRoutes:
    """Handlers for models: what is served, and loading and unloading those that come and go."""

    def __init__(self, backend: Backend, answering: Answering, audit: Audit | None = None) -> None:
        self._backend = backend
        self._answering = answering
        self._audit = audit

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/models", self.list_models)
        add_route(app, "GET", "/v1/models/{model_id:path}", self.get_model)
        add_route(app, "POST", "/v1/models/{model_id:path}/load", self.load)
        add_route(app, "POST", "/v1/models/{model_id:path}/unload", self.unload)

    async def list_models(self, request: Request) -> Response:
        """Lists every model that the caller may use and that is loaded, or comes and goes, the default first, as OpenAI
        and as Anthropic do, on one page."""
        shown = await self._described(request, await self._answering.listed(request))
        names = [each["id"] for each in shown] or [None]
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": shown} | page)

    async def get_model(self, request: Request, model_id: str) -> Response:
        """Shows one model: the one that would answer a request for that name."""
        model = await self._answering.named(request, model_id)
        shown = await self._described(request, [model])
        if not shown:
            raise NoReplica(f"the model {model.name!r} is still loading", param="model")
        return JSONResponse(shown[0])

    async def load(self, request: Request, model_id: str) -> Response:
        """Loads a model that comes and goes, and shows it once it is loaded. The load goes on if the client
        disconnects. For administrators."""
        model = await self._exactly(request, model_id)
        if not model.loaded:
            note(self._audit, request, "model loaded", model=model.name)
        await self._answering.loaded(request, model.name)
        return await self.get_model(request, model.name)

    async def unload(self, request: Request, model_id: str) -> Response:
        """Begins to unload a model that comes and goes, and shows it. Its running requests finish first. It stays in
        the list, and is loaded again when a request names it. For administrators."""
        model = await self._exactly(request, model_id)
        await probe(self._backend.unload(model.name))
        note(self._audit, request, "model unloaded", model=model.name)
        (shown,) = await self._described(request, [model])
        return JSONResponse(shown)

    async def _exactly(self, request: Request, model_id: str) -> ListedModel:
        """Returns the model of that name or alias, never the default one instead, for an administrator.

        Raises:
            NotAllowed: the caller is none.
            ModelNotFound: there is no such model.
        """
        caller: Caller = request.state.caller
        require_admin(caller)
        return await probe(self._answering.generator.named(model_id, caller))

    async def _described(self, request: Request, listed: list[ListedModel]) -> list[dict[str, Any]]:
        """Returns the entries of models, without those that have not been loaded yet and are not loaded on request."""
        models, states = await asyncio.gather(self._answering.models(request), probe(self._backend.pool_states()))
        known = {model.info.name: model for model in models}

        async def described(model: ListedModel) -> dict[str, Any]:
            served = known.get(model.name)
            if served is None:
                return unloaded_body(model) | model_state(model, states.get(model.name))
            notes = await self._answering.generator.template_notes(served)
            body = model_body(served, [*served.info.notes, *notes])
            return body | model_state(model, states.get(model.name))

        shown = (described(model) for model in listed if model.name in known or model.comes_and_goes)
        return await asyncio.gather(*shown)
