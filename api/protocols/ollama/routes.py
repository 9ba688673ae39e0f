"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.errors import ModelBusy, SatchelError
from ...http.adding import JSON, NDJSON, add_route
from ...http.answering import Answering, probe
from ...http.error_shapes import OLLAMA, error_response
from ...http.event_stream import EventStream
from ...http.exchange import CancelOnDisconnect
from ...pipeline.embedding import Embedder, Embeddings
from ...pipeline.streams import TextStream
from ...requests.backend import ServedModel
from .answers import Part, answer_body, embed_json, embeddings_json, message_part, response_part, whole_body
from .bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
    ends_at_once,
)
from .events import LINES, AnswerLines, failed_line, waiting
from .models import VERSION, ModelFacts, listed_body, model_facts, running_body, shown_body

_FILES = "the models of a server are in its config; `satchel models load` adds one while it runs"
_NOT_DONE = (
    ("POST", "push", _FILES),
    ("POST", "create", _FILES),
    ("POST", "copy", _FILES),
    ("DELETE", "delete", _FILES),
    ("POST", "blobs/{digest}", _FILES),
    ("HEAD", "blobs/{digest}", _FILES),
)
_NOT_IMPLEMENTED = 501


class OllamaRoutes:
    """Handlers for Ollama's routes: chats, texts, embeddings and models."""

    def __init__(self, answering: Answering, embedder: Embedder) -> None:
        self._answering = answering
        self._embedder = embedder

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`, including those that only refuse."""
        add_route(app, "POST", f"{OLLAMA}/chat", self.chat, OllamaChatBody, answers=(JSON, NDJSON))
        add_route(app, "POST", f"{OLLAMA}/generate", self.generate, OllamaGenerateBody, answers=(JSON, NDJSON))
        add_route(app, "POST", f"{OLLAMA}/embed", self.embed, OllamaEmbedBody)
        add_route(app, "POST", f"{OLLAMA}/embeddings", self.embeddings, OllamaEmbeddingsBody)
        add_route(app, "POST", f"{OLLAMA}/show", self.show, OllamaShowBody)
        add_route(app, "POST", f"{OLLAMA}/pull", self.pull, OllamaPullBody, answers=(JSON, NDJSON))
        add_route(app, "GET", f"{OLLAMA}/tags", self.tags)
        add_route(app, "GET", f"{OLLAMA}/ps", self.running)
        add_route(app, "GET", f"{OLLAMA}/version", self.version)
        for method, path, why in _NOT_DONE:
            add_route(app, method, f"{OLLAMA}/{path}", _not_done(why), shown=False)

    async def chat(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        return await self._answer(request, await self._answering.read(request, OllamaChatBody), message_part)

    async def generate(self, request: Request) -> Response:
        """Answers a prompt, or continues a text."""
        return await self._answer(request, await self._answering.read(request, OllamaGenerateBody), response_part)

    async def _answer(self, request: Request, body: OllamaChatBody | OllamaGenerateBody, part: Part) -> Response:
        whose = self._answering.whose(request, agent_id=body.agent_id)
        if body.loads:
            unloads = await self._load(request, body)
            return JSONResponse(answer_body(body.model, part("", "", ()), "unload" if unloads else "load"))
        asked = replace(body.request(whose.agent), model=await self._named(body.model))
        work = self._answering.complete(request, asked, whose, any_model=False)
        arrived = request.state.arrived
        if body.streams:

            def lines(streams: Sequence[TextStream]) -> AnswerLines:
                return AnswerLines(body.model, part, arrived)

            return EventStream(self._answering, work, lines, failed_line, LINES, waiting)
        (stream,), (answer,) = await self._answering.answer(request, work)
        shown = whole_body(body.model, part, answer, stream, arrived)
        return JSONResponse(shown, headers=self._answering.headers(work, [stream]))

    async def _load(
        self,
        request: Request,
        body: OllamaChatBody | OllamaGenerateBody | OllamaEmbedBody | OllamaEmbeddingsBody,
    ) -> bool:
        """Loads the model of a request that asks for nothing else, or unloads it. Returns whether it unloads it, which
        only administrators may."""
        name, caller = await self._named(body.model), request.state.caller
        model = await self._answering.named(request, name)
        if not (model.comes_and_goes and caller.admin and ends_at_once(body.keep_alive)):
            await self._answering.loaded(request, name)
            return False
        # While others wait for it, it stays.
        with suppress(ModelBusy):
            await probe(self._answering.generator.backend.unload(model.name))
        return True

    async def embed(self, request: Request) -> Response:
        """Embeds one or several texts."""
        body = await self._answering.bodies.read(request, OllamaEmbedBody)
        made, headers = await self._embedded(request, body)
        shown = await asyncio.to_thread(embed_json, body.model, made, request.state.arrived)
        return Response(shown, headers=headers, media_type="application/json")

    async def embeddings(self, request: Request) -> Response:
        """Embeds one text; the older form."""
        body = await self._answering.bodies.read(request, OllamaEmbeddingsBody)
        made, headers = await self._embedded(request, body)
        return Response(embeddings_json(made), headers=headers, media_type="application/json")

    async def _embedded(
        self, request: Request, body: OllamaEmbedBody | OllamaEmbeddingsBody
    ) -> tuple[Embeddings | None, dict[str, str]]:
        """Returns the embeddings that a body asks for, None if it only asks to load the model; and the answer's
        headers."""
        if body.loads:
            await self._load(request, body)
            return None, {}
        asked = replace(body.request(), model=await self._named(body.model))
        work = self._answering.complete(request, asked, any_model=False)
        async with CancelOnDisconnect(request.receive):
            made = await self._embedder.embed(work)
        return made, self._answering.placed(work, [made])

    async def show(self, request: Request) -> Response:
        """Shows one model and its capabilities."""
        body = await self._answering.bodies.read(request, OllamaShowBody)
        model = await self._served(request, body.wanted)
        facts = await asyncio.to_thread(model_facts, model.info.folder, model.info.files_id)
        text = await self._answering.generator.text_model(model)
        return JSONResponse(shown_body(model, facts, text))

    async def pull(self, request: Request) -> Response:
        """Says that a served model is here, as Ollama does: programs pull their model before they use it. Others are
        refused."""
        body = await self._answering.bodies.read(request, OllamaPullBody)
        name = await self._named(body.wanted)
        if not any(name in (model.name, *model.aliases) for model in await self._answering.listed(request)):
            return await _not_done(f"{name!r} is not served, and {_FILES}")(request)
        done = {"status": "success"}
        return JSONResponse(done) if body.stream is False else Response(json.dumps(done) + "\n", media_type=NDJSON)

    async def tags(self, request: Request) -> Response:
        """Lists every loaded model that the caller may use, the default first."""
        return await self._list(request, listed_body)

    async def running(self, request: Request) -> Response:
        """Lists those of them that are in memory."""
        listed = await probe(self._answering.generator.backend.listed())
        return await self._list(request, running_body, {model.name for model in listed if model.loaded})

    async def version(self, request: Request) -> Response:
        """Shows the version of Ollama whose API this is."""
        return JSONResponse({"version": VERSION})

    async def _list(
        self,
        request: Request,
        body: Callable[[ServedModel, ModelFacts], dict[str, Any]],
        names: Collection[str] | None = None,
    ) -> Response:
        models = await self._answering.models(request)
        if names is not None:
            models = [model for model in models if model.info.name in names]

        def shown() -> list[dict[str, Any]]:
            return [body(model, model_facts(model.info.folder, model.info.files_id)) for model in models]

        return JSONResponse({"models": await asyncio.to_thread(shown)})

    async def _served(self, request: Request, name: str) -> ServedModel:
        return await self._answering.served(request, await self._named(name))

    async def _named(self, name: str) -> str:
        """Returns the served name of the model that Ollama's clients call `name`."""
        listed = await probe(self._answering.generator.backend.listed())
        names = {known for model in listed for known in (model.name, *model.aliases)}
        return name if name in names else name.removesuffix(":latest")


def _not_done(why: str) -> Any:
    async def refuse(request: Request) -> Response:
        error = SatchelError(f"{request.method} {request.url.path} is not supported: {why}")
        return error_response(request.scope, error, status=_NOT_IMPLEMENTED)

    return refuse
