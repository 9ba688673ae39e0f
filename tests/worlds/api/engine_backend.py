"""A backend that computes: a replica's engine on its own thread, with its part of the disk tier, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from satchel.actors.protocol.block_ids import is_shared, scope_of
from satchel.actors.protocol.pool_messages import PooledModel
from satchel.actors.protocol.replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    SequenceUpdate,
)
from satchel.actors.protocol.router_messages import Decisions
from satchel.actors.protocol.speech_messages import SpeechPiece, SpeechRequest
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.api.agents.memory import AgentMemory
from satchel.api.app import create_app
from satchel.api.pipeline.generation import Generator
from satchel.api.ray_backend.sequences import called
from satchel.api.requests.backend import (
    ImageAnswer,
    ListedModel,
    NodeState,
    ReplicaStats,
    ServedModel,
    SpeechAnswer,
    Vectors,
)
from satchel.api.requests.loading import Loading
from satchel.cluster.config.config import Config
from satchel.cluster.errors import NodeNotFound, SatchelError
from tests.worlds.api.served_models import served_model

from ..direct import carried
from .remembering import LocalStore


@asynccontextmanager
async def remembering_app(config: Config, folder: Path) -> AsyncIterator[FastAPI]:
    """The application over an engine with the first model of `config`, with agents' memory and KV in `folder`."""
    store = LocalStore(config, folder)
    backend = EngineBackend(config, store)
    await backend.begin()
    generator = Generator(backend, config, memory=AgentMemory(store.asked))
    app = create_app(backend, config, generator=generator)
    app.state.backend, app.state.generator = backend, generator
    yield app
    await backend.at_rest()
    await backend.end()
    store.actor.close()


class EngineGeneration:
    def __init__(self, backend: EngineBackend, request: GenerateRequest) -> None:
        self.replica, self.node, self.why, self.move_to = "tiny#0", "local", "test: the only one", ""
        self.model_id = request.model_id
        self.updates: asyncio.Queue[SequenceUpdate] = asyncio.Queue()
        self._backend, self._id = backend, request.request_id

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        while True:
            update = await self.updates.get()
            yield update
            if update.finish is not None:
                return

    async def abort(self) -> None:
        self._backend.engine.abort((self._id,))


class EngineBackend:
    """Serves the config's first model, a shipped one. Start it with `begin` on the event loop that uses it."""

    def __init__(self, config: Config, store: LocalStore) -> None:
        self.config, self.store = config, store
        self.failovers = 0
        self._sequences: dict[str, EngineGeneration] = {}

    async def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        ready: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        self.engine = await asyncio.wrap_future(ready)

    def _run(self, ready: Future[Engine]) -> None:
        try:
            engine = self._made()
        except BaseException as error:
            ready.set_exception(error)
            raise
        ready.set_result(engine)
        engine.run()

    def _made(self) -> Engine:
        source = str(models.EMBEDDED / self.config.models[0].source.removeprefix("embedded:"))
        # With fast numerics the self-test at load takes longer than the rest of the load.
        how: dict[str, Any] = {"numerics": "reproducible", "progress": lambda what, fraction: None}
        loaded = models.load(source, context_tokens_max=None, **how)
        self.disk = DiskTier(loaded.spec, loaded.model_id, carried("local", self._carry, self._loop))
        return Engine(loaded, self.config.scheduling, 2**30, self._take, self.disk)

    async def _carry(self, method: str, asked: bytes, timeout_s: float) -> bytes:
        return await getattr(self.store.actor, method)(asked)

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for update in updates.get("test", []):
            self._loop.call_soon_threadsafe(self._sequences[update.request_id].updates.put_nowait, update)

    async def end(self) -> None:
        self.engine.stop()
        await asyncio.to_thread(self._thread.join, 30)

    async def at_rest(self) -> None:
        """Waits until the KV that sequences left is on disk, or never will be."""
        while self.engine.active or self.disk.waiting_bytes or self.engine.memory._writers:
            await asyncio.sleep(0.01)

    async def on_thread(self, work: Any) -> Any:
        """Calls `work` on the engine's thread, and returns its result."""
        done: Future[Any] = Future()
        self.engine.call(lambda: done.set_result(work()))
        return await asyncio.wrap_future(done)

    async def listed(self) -> list[ListedModel]:
        return [ListedModel(self.config.models[0].name)]

    async def load(self, name: str, loading: Loading) -> None:
        return None

    async def unload(self, name: str) -> None:
        return None

    async def pool_states(self) -> dict[str, PooledModel]:
        return {}

    async def models(self) -> list[ServedModel]:
        loaded = self.engine.loaded
        return [
            served_model(
                name=self.config.models[0].name,
                model_id=loaded.model_id,
                files_id=loaded.identity.files_id,
                folder=loaded.folder,
                context_tokens=loaded.context_tokens,
                vocabulary_size=loaded.vocabulary_size,
                embedding=loaded.embedding,
            )
        ]

    async def make_image(
        self, model: ServedModel, request: ImageRequest, told: Callable[[ImageUpdate], None]
    ) -> ImageAnswer:
        raise AssertionError("no model here makes images")

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        raise AssertionError("no model here does speech")

    async def nodes(self) -> list[NodeState]:
        return []

    async def stats(self) -> list[ReplicaStats]:
        return []

    async def health(self) -> dict[str, bool]:
        return {self.config.models[0].name: True}

    async def pids(self) -> dict[str, int]:
        return {}

    async def remove_node(self, name: str) -> bool:
        raise NodeNotFound(f"there is no node {name!r}")

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        return None

    async def decisions(self, after: int, most: int) -> Decisions:
        return Decisions("router", 0)

    async def loading(self, replicas: Sequence[str]) -> dict[str, ReplicaProgress]:
        return {}

    async def pool(self, model: ServedModel, request: PoolingRequest) -> Vectors:
        answer: Future[PooledTexts | SatchelError] = Future()
        self.engine.pool(request, answer.set_result)
        pooled = await asyncio.wrap_future(answer)
        if isinstance(pooled, SatchelError):
            raise pooled
        return Vectors(pooled, "tiny#0", "local", "test: the only one")

    async def prepare(self, replica: str, model_id: bytes, request: GenerateRequest) -> None:
        self.engine.prepare_prompt(await called(request, model_id, self._scope(request)))

    def _scope(self, request: GenerateRequest, cache_salt: str = "") -> str:
        name = request.agent.partition("/")[2]
        return scope_of(self.config.share, request.tenant, name, request.request_id, cache_salt)

    async def generate(
        self,
        model: ServedModel,
        request: GenerateRequest,
        *,
        cache_salt: str = "",
        beside: str = "",
        loading: Loading | None = None,
    ) -> EngineGeneration:
        scope = self._scope(request, cache_salt)
        request = replace(request, consumer="test", reusable=is_shared(scope))
        request = await called(request, model.info.model_id, scope)
        generation = self._sequences[request.request_id] = EngineGeneration(self, request)
        known, embeddings = await asyncio.to_thread(self.engine.look_up, request)
        grammar = await asyncio.to_thread(self.engine.grammar_of, request)
        accepted: Future[SatchelError | None] = Future()
        self.engine.submit(request, accepted.set_result, known, embeddings, grammar)
        if (refusal := await asyncio.wrap_future(accepted)) is not None:
            raise refusal
        return generation
