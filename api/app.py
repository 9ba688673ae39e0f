"""The HTTP application: the routes of all protocols, over any `Backend`. It knows nothing of Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..cluster.audit import Audit
from ..cluster.config.config import Config, Endpoint
from ..cluster.keys import KeyRing
from .agents.memory import AgentMemory
from .batches.routes import BatchRoutes
from .batches.runner import BatchRunner
from .http.adding import describe_bodies
from .http.answering import Answering
from .http.browser import BrowserGuard, Hosts
from .http.exchange import BodyReader, Refused, RequestContext, add_error_handlers
from .http.guard import KeyGuard
from .http.metrics import Metrics
from .http.paths import Paths, heads_of
from .page.routes import PageRoutes
from .pipeline.embedding import Embedder
from .pipeline.generation import Generator
from .pipeline.images import ImageMaker
from .pipeline.speech import SpeechMaker
from .protocols.anthropic.routes import MessageRoutes
from .protocols.ollama.routes import OllamaRoutes
from .protocols.openai.audio_routes import AudioRoutes
from .protocols.openai.embedding_routes import EmbeddingRoutes
from .protocols.openai.image_routes import ImageRoutes
from .protocols.openai.routes import OpenAIRoutes
from .protocols.openai.token_routes import TokenRoutes
from .protocols.responses.conversation_routes import ConversationRoutes
from .protocols.responses.routes import ResponseRoutes
from .protocols.satchel.agent_routes import AgentRoutes
from .protocols.satchel.cluster_routes import ClusterRoutes
from .protocols.satchel.live_routes import LiveRoutes
from .protocols.satchel.model_routes import ModelRoutes
from .protocols.satchel.request_routes import RequestRoutes
from .protocols.satchel.status_routes import StatusRoutes
from .requests.backend import Backend


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
    batches: Path | None = None,
) -> FastAPI:
    """Makes the application, one per event loop. Call its `state.end_streams` before its server closes: streams of
    events have no other end.

    Args:
        keys: the valid keys; None allows everybody.
        audit: records administrators' actions and refused keys.
        generator: to share the pipeline (its tokenizers, its agents' memory) with others on the same loop.
        certified: returns the names of the endpoint's certificate.
        memory: the agents' memory if no `generator` is given; None for none.
        refused: called with the reason if a request is refused for lack of capacity.
        batches: the folder of uploaded files and batches, which run while the application does; None for none.
    """
    generator = generator or Generator(backend, config, memory=memory)
    metrics = Metrics(generator)
    answering, embedder = Answering(generator, config, BodyReader(config, refused)), Embedder(generator)
    openai, embeddings = OpenAIRoutes(answering, _version()), EmbeddingRoutes(answering, embedder)
    responses = ResponseRoutes(answering, config.endpoint)
    cluster = ClusterRoutes(backend, generator.memory, audit)
    live = LiveRoutes(backend, generator.running, cluster.machines, _version())
    runner = None
    if batches is not None:
        handlers = {
            "/v1/chat/completions": openai.chat_completions,
            "/v1/completions": openai.completions,
            "/v1/embeddings": embeddings.embeddings,
            "/v1/responses": responses.create,
        }
        runner = BatchRunner(batches, config, handlers, keys)
    # The description is shown without a CDN (`page/`).
    app = FastAPI(
        title="Satchel",
        version=_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=_background(live, runner),
    )
    app.state.end_streams = live.close
    add_error_handlers(app)
    app.add_middleware(KeyGuard, keys=keys, audit=audit)
    _guard_browsers(app, config.endpoint, certified)
    app.add_middleware(RequestContext, metrics=metrics)
    for routes in (
        openai,
        TokenRoutes(answering),
        embeddings,
        ImageRoutes(answering, ImageMaker(generator), config.endpoint),
        AudioRoutes(answering, SpeechMaker(generator)),
        MessageRoutes(answering),
        responses,
        ConversationRoutes(answering),
        OllamaRoutes(answering, embedder),
        ModelRoutes(backend, answering, audit),
        StatusRoutes(backend, metrics),
        AgentRoutes(generator, answering.bodies, audit, keys),
        cluster,
        live,
        RequestRoutes(generator.running, audit),
        PageRoutes(),
        *([] if runner is None else [BatchRoutes(runner, answering.bodies, config.endpoint)]),
    ):
        routes.add_to(app)
    describe_bodies(app)
    # The outermost one, because all others look at the path.
    app.add_middleware(Paths, heads=heads_of(app.routes))
    return app


def _background(live: LiveRoutes, runner: BatchRunner | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Returns what runs while the application does."""

    @asynccontextmanager
    async def background(app: FastAPI) -> AsyncIterator[None]:
        async with live.sampling(), nullcontext() if runner is None else runner.running():
            yield

    return background


def _guard_browsers(app: FastAPI, endpoint: Endpoint, certified: Callable[[], Sequence[str]]) -> None:
    """Lets only pages of the endpoint itself and of `endpoint.origins` use the application."""
    if origins := [origin.lower() for origin in endpoint.origins]:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(BrowserGuard, hosts=Hosts(endpoint, certified), origins=origins)


@cache
def _version() -> str:
    try:
        return version("satchel")
    except PackageNotFoundError:
        return "0"
