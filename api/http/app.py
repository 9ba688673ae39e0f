"""The HTTP application: OpenAI's and Anthropic's routes over any `Backend`. It knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from ...cluster.audit import Audit
from ...cluster.config import Config
from ...cluster.errors import SatchelError, Unavailable
from ...cluster.keys import KeyRing
from ..agents.memory import AgentMemory
from ..anthropic.bodies import CountBody, MessagesBody
from ..generation.backend import Backend, NodeState
from ..generation.callers import Caller
from ..generation.streams import TextStream, Usage
from ..openai.answers import (
    AnswerStyle,
    ChatChunks,
    CompletionChunks,
    best_answers,
    chat_body,
    completion_body,
    model_body,
    system_fingerprint,
)
from ..openai.bodies import ChatBody, CompletionBody, ForkBody, GenerationBody, InjectBody
from ..openai.token_bodies import DetokenizeBody, TokenizeBody
from ..responses.bodies import InputTokensBody, ResponseBody
from ..responses.conversations import ConversationBody
from ..views.generation import Generator
from .agent_routes import AgentRoutes
from .answering import Answering, continues
from .browser import BrowserGuard, Hosts
from .cluster_routes import ClusterRoutes, MoveBody
from .conversation_routes import ConversationRoutes
from .error_shapes import MESSAGES
from .event_stream import EventStream
from .exchange import BodyReader, Refused, RequestContext, add_error_handlers
from .guard import KeyGuard, require_admin
from .message_routes import MessageRoutes
from .metrics import CONTENT_TYPE, AgentMetrics, Metrics
from .paths import Paths, heads_of
from .response_routes import ResponseRoutes
from .token_routes import TokenRoutes

T = TypeVar("T")
Body = TypeVar("Body", bound=GenerationBody)

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
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(BrowserGuard, hosts=Hosts(config.endpoint, certified), origins=origins)
    app.add_middleware(RequestContext, metrics=endpoint.metrics)

    def route(
        path: str, handler: Any, method: str = "GET", body: type[BaseModel] | None = None, *, shown: bool = True
    ) -> None:
        extra = None
        if body is not None:
            schema = body.model_json_schema()
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(
            path, handler, methods=[method], response_model=None, openapi_extra=extra, include_in_schema=shown
        )
        if method == "GET":
            app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)

    route("/v1/chat/completions", endpoint.chat_completions, "POST", ChatBody)
    route("/v1/completions", endpoint.completions, "POST", CompletionBody)
    tokens = TokenRoutes(endpoint.answering)
    route("/v1/tokenize", tokens.tokenize, "POST", TokenizeBody)
    route("/v1/detokenize", tokens.detokenize, "POST", DetokenizeBody)
    messages = MessageRoutes(endpoint.answering)
    for path, handler, body in (
        (MESSAGES, messages.messages, MessagesBody),
        (f"{MESSAGES}/count_tokens", messages.count_tokens, CountBody),
    ):
        route(path, handler, "POST", body)
    route("/", messages.greet, "HEAD", shown=False)
    responses = ResponseRoutes(endpoint.answering, config.endpoint.responses_bytes_max)
    route("/v1/responses", responses.create, "POST", ResponseBody)
    route("/v1/responses/input_tokens", responses.input_tokens, "POST", InputTokensBody)
    route("/v1/responses/{response_id}", responses.show)
    route("/v1/responses/{response_id}", responses.delete, "DELETE")
    route("/v1/responses/{response_id}/cancel", responses.cancel, "POST")
    route("/v1/responses/{response_id}/input_items", responses.input_items)
    conversations = ConversationRoutes(endpoint.answering)
    route("/v1/conversations", conversations.create, "POST", ConversationBody)
    route("/v1/conversations/{conversation_id}", conversations.show)
    route("/v1/conversations/{conversation_id}", conversations.update, "POST", ConversationBody)
    route("/v1/conversations/{conversation_id}", conversations.delete, "DELETE")
    route("/v1/conversations/{conversation_id}/items", conversations.items)
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
    # The outermost, because all others look at the path.
    app.add_middleware(Paths, heads=heads_of(app.routes))
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
        self._version = _version()
        self.generator = generator
        self.metrics = metrics
        if generator.memory is not None:
            metrics.registry.register(AgentMetrics(generator.memory))
        self.bodies = BodyReader(config, refused)
        self.answering = Answering(generator, config, metrics, self.bodies)

    async def chat_completions(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        body, agent = await self._read(request, ChatBody)
        chat = self.answering.complete(request, body.request(agent), any_model=False)
        functions = body.has_functions
        if body.stream:
            return EventStream(
                self.answering,
                chat,
                lambda streams: ChatChunks(streams[0].model.name, self._style(body, streams, functions=functions)),
            )
        streams, answers = await self.answering.answer(request, chat)
        style = self._style(body, streams, functions=functions)
        shown = chat_body(streams[0].model.name, answers, streams[0].remembered, style)
        return JSONResponse(shown, headers=self.answering.headers(chat, streams))

    async def completions(self, request: Request) -> Response:
        """Continues one or several texts."""
        body, agent = await self._read(request, CompletionBody)
        work = self.answering.complete(request, body.request(agent), any_model=False)
        if body.stream:
            return EventStream(
                self.answering,
                work,
                lambda streams: CompletionChunks(streams[0].model.name, self._style(body, streams)),
            )
        streams, answers = await self.answering.answer(request, work)
        usage = sum((answer.usage for answer in answers), Usage(0, 0, 0))
        if body.rows > body.choices:
            answers = best_answers(answers, body.rows, body.choices)
        if body.logprobs is None:
            answers = [replace(answer, logprobs=None) for answer in answers]
        shown = completion_body(streams[0].model.name, answers, self._style(body, streams), usage)
        return JSONResponse(shown, headers=self.answering.headers(work, streams))

    def _style(self, body: GenerationBody, streams: Sequence[TextStream], *, functions: bool = False) -> AnswerStyle:
        return AnswerStyle(
            fingerprint=system_fingerprint(streams[0].model, self._version),
            functions=functions,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    async def list_models(self, request: Request) -> Response:
        """Lists every loaded model that the caller may use, the default first."""
        caller: Caller = request.state.caller
        models = [model for model in await _probe(self._backend.models()) if caller.may_use(model.name)]
        return JSONResponse({"object": "list", "data": [model_body(model) for model in models]})

    async def get_model(self, request: Request, model_id: str) -> Response:
        """Shows one model: the one that would answer a request for that name."""
        caller: Caller = request.state.caller
        lenient = self.answering.takes_any(any_model=False)
        model = await _probe(self.generator.served(model_id, caller, any_model=lenient))
        return JSONResponse(model_body(model))

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
        goes_on = continues(request)
        body = await self.bodies.read(request, kind)
        if goes_on:
            body.agent_continue = True
            body.check()
        whose = self.answering.whose(
            request,
            agent_id=body.agent_id,
            cache_salt=body.cache_salt,
            conversation=body.conversation,
            prompt_cache_key=body.prompt_cache_key,
            metadata=body.metadata,
        )
        return body, whose.agent


async def _probe(answer: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(answer, _PROBE_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"the cluster did not answer within {_PROBE_TIMEOUT_S:.0f} s") from None
