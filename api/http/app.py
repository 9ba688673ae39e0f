"""The HTTP application: OpenAI's routes over any `Backend`. It knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...cluster.audit import Audit
from ...cluster.config import Config
from ...cluster.errors import InvalidRequest, ModelNotFound, SatchelError, Unavailable
from ...cluster.keys import KeyRing
from ..agents.memory import AgentMemory
from ..generation.backend import Backend, NodeState
from ..generation.callers import Caller
from ..generation.remembered import HEADER
from ..generation.requests import ChatRequest, CompletionRequest, agent_key
from ..generation.streams import Answer, Event, Finished, TextStream, Usage, abort_all, collect_all, interleave
from ..openai.answers import DONE, ChatChunks, CompletionChunks, chat_body, completion_body, error_event, model_body
from ..openai.bodies import ChatBody, CompletionBody, ForkBody, GenerationBody, InjectBody
from ..text.pipeline import CallArguments, CallBegun, ReasoningDelta
from ..text.row_text import TextDelta
from ..views.generation import Generator
from .agent_routes import AgentRoutes
from .browser import BrowserGuard, Hosts
from .cluster_routes import ClusterRoutes, MoveBody
from .exchange import (
    BodyReader,
    CancelOnDisconnect,
    Refused,
    RequestContext,
    add_error_handlers,
    header_text,
    log_failure,
)
from .guard import KeyGuard, require_admin
from .metrics import CONTENT_TYPE, AgentMetrics, Metrics

_log = logging.getLogger(__name__)

T = TypeVar("T")
Body = TypeVar("Body", bound=GenerationBody)

HEADERS_WAIT_S = 5.0
"""How long a stream's headers wait for its first event, so that an early failure becomes an HTTP error."""

_PROBE_TIMEOUT_S = 10.0
_NODES_TIMEOUT_S = 2.0


def create_app(
    backend: Backend,
    config: Config,
    *,
    generator: Generator | None = None,
    memory: AgentMemory | None = None,
    keys: KeyRing | None = None,
    audit: Audit | None = None,
    certified: Callable[[], Sequence[str]] = tuple,
    refused: Refused = lambda why: None,
) -> FastAPI:
    """Makes the application, one per event loop.

    Args:
        keys: the valid keys; None allows everybody.
        audit: records administrators' actions and refused keys.
        generator: to share the pipeline (its tokenizers, its agents' memory) with others on the same loop.
        certified: returns the names of the endpoint's certificate.
        memory: the agents' memory if no `generator` is given; None for none.
        refused: called with the reason if a request is refused for lack of capacity.
    """
    app = FastAPI(title="Satchel", version=_version(), redirect_slashes=False)
    endpoint = _Routes(backend, config, generator or Generator(backend, config, memory=memory), Metrics(), refused)
    add_error_handlers(app)
    app.add_middleware(KeyGuard, keys=keys, audit=audit)
    if origins := [origin.lower() for origin in config.endpoint.origins]:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(BrowserGuard, hosts=Hosts(config.endpoint, certified), origins=origins)
    app.add_middleware(RequestContext, metrics=endpoint.metrics)

    def route(path: str, handler: Any, method: str = "GET", body: type[BaseModel] | None = None) -> None:
        extra = None
        if body is not None:
            schema = body.model_json_schema()
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, handler, methods=[method], response_model=None, openapi_extra=extra)

    route("/v1/chat/completions", endpoint.chat_completions, "POST", ChatBody)
    route("/v1/completions", endpoint.completions, "POST", CompletionBody)
    route("/v1/models", endpoint.list_models)
    route("/v1/models/{model_id:path}", endpoint.get_model)
    route("/health", endpoint.health)
    route("/metrics", endpoint.show_metrics)
    agents = AgentRoutes(endpoint.generator, endpoint.bodies, audit)
    route("/v1/agents", agents.list_agents)
    route("/v1/agents/{agent_id}", agents.get_agent)
    route("/v1/agents/{agent_id}", agents.forget, "DELETE")
    route("/v1/agents/{agent_id}/inject", agents.inject, "POST", InjectBody)
    route("/v1/agents/{agent_id}/fork", agents.fork, "POST", ForkBody)
    route("/v1/agents/{agent_id}/release", agents.release, "POST")
    route("/v1/agents/{agent_id}/move", agents.move, "POST", MoveBody)
    route("/v1/cache", agents.clear_cache, "DELETE")
    route("/v1/cache/stats", agents.cache_stats)
    cluster = ClusterRoutes(backend, endpoint.generator.memory)
    route("/v1/cluster", cluster.show)
    route("/v1/cluster/agents/{agent_id}", cluster.where)
    route("/v1/cluster/decisions/{request_id:path}", cluster.explain)
    return app


def _version() -> str:
    try:
        return version("satchel")
    except PackageNotFoundError:
        return "0"


class _Routes:
    """Handlers for OpenAI's routes, health and metrics."""

    def __init__(
        self, backend: Backend, config: Config, generator: Generator, metrics: Metrics, refused: Refused
    ) -> None:
        self._backend = backend
        self._config = config
        self.generator = generator
        self.metrics = metrics
        if generator.memory is not None:
            metrics.registry.register(AgentMetrics(generator.memory))
        self.bodies = BodyReader(config, refused)

    async def chat_completions(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        body, agent = await self._read(request, ChatBody)
        caller: Caller = request.state.caller
        chat = replace(body.request(agent, request.state.request_id, _waited_s(request)), caller=caller)
        if body.stream:
            return _EventStream(self, chat, include_usage=body.include_usage)
        streams, answers = await self._answer(request, chat)
        body = chat_body(streams[0].model.name, answers, streams[0].remembered)
        return JSONResponse(body, headers=self.headers(streams))

    async def completions(self, request: Request) -> Response:
        """Continues one or several texts."""
        body, agent = await self._read(request, CompletionBody)
        caller: Caller = request.state.caller
        completion = replace(body.request(agent, request.state.request_id, _waited_s(request)), caller=caller)
        if body.stream:
            return _EventStream(self, completion, include_usage=body.include_usage)
        streams, answers = await self._answer(request, completion)
        return JSONResponse(completion_body(streams[0].model.name, answers), headers=self.headers(streams))

    async def list_models(self, request: Request) -> Response:
        """Lists every loaded model that the caller may use, the default first."""
        caller: Caller = request.state.caller
        models = [model for model in await _probe(self._backend.models()) if caller.may_use(model.name)]
        return JSONResponse({"object": "list", "data": [model_body(model) for model in models]})

    async def get_model(self, request: Request, model_id: str) -> Response:
        """Shows one model."""
        caller: Caller = request.state.caller
        for model in await _probe(self._backend.models()):
            if model.name == model_id and caller.may_use(model_id):
                return JSONResponse(model_body(model))
        raise ModelNotFound(f"the model {model_id!r} does not exist", param="model")

    async def health(self, request: Request) -> Response:
        """Responds 200 if a replica of every served model answers, else 503. `disk_errors` gives by node why no KV is
        kept on disk now; serving does not need it. Callers who are no administrators see only the status."""
        caller: Caller = request.state.caller
        models, nodes = await asyncio.gather(_probe(self._backend.health()), self._nodes())
        closed = {node.name: node.disk_error for node in nodes if node.disk_error}
        more: dict[str, Any] = {"models": models} if caller.admin else {}
        if closed and caller.admin:
            more["disk_errors"] = closed
        if models and all(models.values()):
            return JSONResponse({"status": "ok", **more})
        return JSONResponse({"status": "unavailable", **more}, status_code=503, headers={"Retry-After": "1"})

    async def _nodes(self) -> list[NodeState]:
        """Returns the nodes; none if they are not known in time, because health and metrics must not fail for them."""
        try:
            return await asyncio.wait_for(self._backend.nodes(), _NODES_TIMEOUT_S)
        except (SatchelError, TimeoutError):
            return []

    async def show_metrics(self, request: Request) -> Response:
        """Shows metrics in Prometheus' text format. For administrators."""
        require_admin(request.state.caller)
        stats, nodes = await asyncio.gather(_probe(self._backend.stats()), self._nodes())
        text = self.metrics.render(stats, self._backend.failovers, nodes)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, str]:
        """Returns the body and the agent's id."""
        continues = _continues(request)
        body = await self.bodies.read(request, kind)
        if continues:
            body.agent_continue = True
            body.check()
        return body, _agent(request, body.agent_id)

    async def _answer(
        self, request: Request, work: ChatRequest | CompletionRequest
    ) -> tuple[list[TextStream], list[Answer]]:
        async with CancelOnDisconnect(request.receive):
            streams = await self.start(work)
            answers = await collect_all(streams)
        self.observe(streams, request.state.arrived)
        return streams, answers

    async def start(self, work: ChatRequest | CompletionRequest) -> list[TextStream]:
        if isinstance(work, ChatRequest):
            return await self.generator.start_chats(work)
        return await self.generator.start_completion(work)

    def headers(self, streams: Sequence[TextStream]) -> dict[str, str]:
        """Returns headers with nodes, replicas and reasons of the rows, each value once, and with what is missing in
        the agent's memory, as far as known."""
        replicas = dict.fromkeys(stream.replica for stream in streams)
        nodes = dict.fromkeys(stream.node for stream in streams if stream.node)
        reasons = dict.fromkeys(stream.why for stream in streams)
        memory = [stream.remembered.header for stream in streams if stream.remembered and stream.remembered.header]
        headers = {"x-satchel-node": nodes, "x-satchel-replica": replicas, "x-satchel-why": reasons, HEADER: memory}
        return {name: header_text(", ".join(values)) for name, values in headers.items() if values}

    def observe(self, streams: Sequence[TextStream], arrived: float) -> None:
        """Records times to first token; `arrived` is by `time.perf_counter`."""
        for stream in streams:
            if stream.first_event_at is not None:
                self.metrics.first_token(stream.model.name, stream.first_event_at - arrived)


class _EventStream(Response):
    """An answer as server-sent events.

    Everything from queueing the row to stopping it happens in one coroutine, the call of this response, so that no
    cancellation can leave a running row behind.
    """

    def __init__(self, endpoint: _Routes, work: ChatRequest | CompletionRequest, *, include_usage: bool) -> None:
        # Not Response's own initializer: that one sets a Content-Length.
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        self._endpoint = endpoint
        self._work = work
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with CancelOnDisconnect(receive):
                streams = await self._endpoint.start(self._work)
                try:
                    await self._stream(streams, send, scope["state"]["request_id"])
                finally:
                    self._endpoint.observe(streams, scope["state"]["arrived"])
                    await abort_all(streams)
        except ClientDisconnect:
            _log.debug("the client of request %s went away", scope["state"]["request_id"])

    async def _stream(self, streams: list[TextStream], send: Send, request_id: str) -> None:
        async with aclosing(interleave(streams)) as events:
            first = asyncio.create_task(anext(events))
            try:
                await asyncio.wait({first}, timeout=HEADERS_WAIT_S)
                if first.done():
                    first.result()
                headers = {**self._endpoint.headers(streams), "X-Accel-Buffering": "no"}
                self.headers.update(headers)
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with aclosing(self._chunks(streams, first, events, request_id)) as chunks:
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                # The generator cannot be closed while a task is inside it.
                if not first.done():
                    first.cancel()
                    await asyncio.wait({first})

    async def _chunks(
        self,
        streams: list[TextStream],
        first: asyncio.Task[tuple[int, Event]],
        events: AsyncGenerator[tuple[int, Event], None],
        request_id: str,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the body of a streamed answer: the last of its four generators, which encodes events as bytes."""
        kind = ChatChunks if isinstance(self._work, ChatRequest) else CompletionChunks
        chunks = kind(streams[0].model.name, self._include_usage)
        total = Usage(0, 0, 0)
        try:
            if start := chunks.start(len(streams)):
                yield start
            item = await first
            while item is not None:
                index, event = item
                if isinstance(event, TextDelta):
                    yield chunks.text(index, event)
                elif isinstance(event, Finished):
                    total = total + event.usage
                    yield chunks.finish(index, event.reason, streams[index].remembered)
                elif isinstance(event, ReasoningDelta):
                    yield chunks.reasoning(index, event.text)
                elif isinstance(event, CallBegun):
                    yield chunks.call_begun(index, event)
                elif isinstance(event, CallArguments):
                    yield chunks.call_arguments(index, event)
                elif not event.begun:
                    yield chunks.tool_call(index, event)
                item = await anext(events, None)
        except SatchelError as error:
            log_failure(_log, f"request {request_id} in mid-stream", error, told=False)
            yield error_event(error)
            return
        except Exception:
            _log.exception("request %s failed in mid-stream", request_id)
            yield error_event(SatchelError(f"internal error in request {request_id}"))
            return
        if self._include_usage:
            yield chunks.usage(total)
        yield DONE


async def _probe(answer: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(answer, _PROBE_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"the cluster did not answer within {_PROBE_TIMEOUT_S:.0f} s") from None


def _waited_s(request: Request) -> float:
    """Seconds since the request arrived."""
    return time.perf_counter() - request.state.arrived


def _continues(request: Request) -> bool:
    """Returns whether the header asks to append to the agent's transcript."""
    given = request.headers.get("x-agent-continue", "0").lower()
    if given not in ("0", "1", "false", "true"):
        raise InvalidRequest("X-Agent-Continue must be 0 or 1", param="X-Agent-Continue")
    return given in ("1", "true")


def _agent(request: Request, given: str | None) -> str:
    """Returns the agent's id from header or body; "" for none."""
    ids = [("X-Agent-ID", value) for value in request.headers.getlist("x-agent-id")]
    if given is not None:
        ids.append(("agent_id", given))
    for name, value in ids:
        if not value:
            raise InvalidRequest(f"{name} is empty", param=name)
        try:
            agent_key(value)
        except InvalidRequest as error:
            raise InvalidRequest(error.message.replace("agent_id", name, 1), param=name) from None
    if len({value for _, value in ids}) > 1:
        raise InvalidRequest("X-Agent-ID and agent_id name different agents", param="agent_id")
    return ids[0][1] if ids else ""
