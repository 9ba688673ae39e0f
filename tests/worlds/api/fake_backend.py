"""A backend that plays scripts, and requests to the application over it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from satchel.actors.protocol.pool_messages import PooledModel
from satchel.actors.protocol.replica_messages import (
    EmbeddingInfo,
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    Sampling,
    SequenceUpdate,
    TokenLogprobs,
)
from satchel.actors.protocol.router_messages import Decisions
from satchel.actors.protocol.speech_messages import SpeechPiece, SpeechRequest
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
from satchel.api.text.model import TextModel
from satchel.cluster.errors import NodeNotFound, NoReplica
from tests.worlds.api.served_models import served_model

DIMENSIONS = 8
QUEUED_S, PREFILL_S = 0.25, 0.5
"""How long each sequence waits for its place, and from there for its first token."""
CONTEXT_TOKENS = 1000
EMBEDS = EmbeddingInfo(DIMENSIONS, "last", True, False, "")


class FakeGeneration:
    """Plays a script: updates are yielded, exceptions raised, events waited for, numbers slept."""

    def __init__(self, request_id: str, script: list[Any], replica: str, sampling: Sampling) -> None:
        self.sampling = sampling
        self.replica = replica
        self.node = ""
        self.why = "test: scripted"
        self.move_to = ""
        self.model_id = b""
        self.request_id = request_id
        self.script = script
        self.aborts = 0
        self.aborted = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, float):
                await asyncio.sleep(item)
            elif self.sampling.logprobs is not None and item.logprobs is None:
                top = self.sampling.logprobs
                yield replace(item, logprobs=[FakeBackend.logprobs_of(token, top) for token in item.tokens])
            else:
                yield item

    async def abort(self) -> None:
        self.aborts += 1
        # An abort that takes a while shows whether it survives the cancellation of its caller.
        await asyncio.sleep(0.01)
        self.aborted.set()


class FakeBackend:
    """Records its calls and plays one script for each sequence; the last script is repeated."""

    def __init__(self, text: TextModel, served: list[ServedModel]) -> None:
        self.text = text
        self.served = served
        self.configured = [model.info.name for model in served]
        self.entries: dict[str, ListedModel] = {}
        """Entries of models that come and go, or have aliases."""
        self.states: dict[str, PooledModel] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.generations: list[FakeGeneration] = []
        self.scripts: deque[list[Any]] = deque()
        self.refusal: BaseException | None = None
        self.answering: dict[str, bool] = {model.info.name: True for model in served}
        self.replicas: list[ReplicaStats] = []
        self.machines = [NodeState("local", "127.0.0.1", (("127.0.0.1", "ethernet"),), True)]
        self.placed: dict[str, str] = {}
        self.move_to = ""
        self.computes_as = b""
        """The model id of the replica where sequences run; if empty, that of the served model."""
        self.processes: dict[str, int] = {}
        self.explained: dict[str, dict[str, Any]] = {}
        self.made: Decisions | None = Decisions("router", 0)
        """The router's decisions; None if it does not answer."""
        self.progress: dict[str, ReplicaProgress] = {}
        self.prepared: list[tuple[str, GenerateRequest]] = []
        self.pooled: list[PoolingRequest] = []
        self.pooling: asyncio.Event | None = None
        """The event that requests for vectors wait for; None for none."""
        self.failovers = 0
        self.asked = 0
        self.say("Hello there")

    def sequence(self, text: str, *, finish: str = "stop", cached: int = 0, step: int = 1) -> list[Any]:
        tokens = self.text.tokenizer.encode(text)
        cuts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        updates = [SequenceUpdate("row", cut) for cut in cuts] + [SequenceUpdate("row", [], finish=finish)]
        first = replace(updates[0], cached_tokens=cached, queued_s=QUEUED_S, prefill_s=PREFILL_S)
        return [first, *updates[1:]]

    def say(self, *texts: str, **how: Any) -> None:
        self.scripts = deque(self.sequence(text, **how) for text in texts)

    def play(self, *items: Any) -> None:
        self.scripts = deque([list(items)])

    @staticmethod
    def logprobs_of(token: int, top: int) -> TokenLogprobs:
        """Returns a token's logprobs if the request asks for them; different for different tokens."""
        drawn = -0.25 - token / 1024
        return drawn, [(token + i, drawn - i) for i in range(top)]

    async def listed(self) -> list[ListedModel]:
        return [self.entries.get(name, ListedModel(name)) for name in self.configured]

    async def load(self, name: str, loading: Loading) -> None:
        self.loads.append(name)
        await self.loader(name, loading)

    async def loader(self, name: str, loading: Loading) -> None:
        """Loads a model that comes and goes; tests replace it."""

    async def unload(self, name: str) -> None:
        self.unloads.append(name)

    async def pool_states(self) -> dict[str, PooledModel]:
        return self.states

    async def models(self) -> list[ServedModel]:
        return self.served

    async def generate(
        self,
        model: ServedModel,
        request: GenerateRequest,
        *,
        cache_salt: str = "",
        beside: str = "",
        loading: Loading | None = None,
    ) -> FakeGeneration:
        given = {field.name: getattr(request, field.name) for field in fields(request)}
        self.requests.append({**given, "cache_salt": cache_salt, "beside": beside})
        if self.refusal is not None:
            raise self.refusal
        script = self.scripts.popleft() if len(self.scripts) > 1 else self.scripts[0]
        generation = FakeGeneration(
            request.request_id, script, f"{model.info.name}#{len(self.generations) % 2}", request.sampling
        )
        generation.node = self.placed.get(generation.replica, "")
        generation.move_to = self.move_to
        generation.model_id = self.computes_as or model.info.model_id
        self.generations.append(generation)
        return generation

    async def prepare(self, replica: str, model_id: bytes, request: GenerateRequest) -> None:
        self.prepared.append((replica, request))

    async def pool(self, model: ServedModel, request: PoolingRequest) -> Vectors:
        """Returns vectors made from the texts' tokens, so that equal texts have equal vectors."""
        self.pooled.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.pooling is not None:
            await self.pooling.wait()
        if request.logprobs is not None:
            rows = np.concatenate([self.logprobs_in(text, request.logprobs) for text in request.texts])
            return Vectors(PooledTexts(rows.shape[1], rows.astype("<f4").tobytes()), f"{model.info.name}#0")
        made = np.concatenate([self.vector_of(text, request) for text in request.texts])
        pooled = PooledTexts(len(made) // len(request.texts), made.astype("<f4").tobytes())
        return Vectors(pooled, f"{model.info.name}#0", "mac0", "test: the first")

    @staticmethod
    def logprobs_in(text: list[int], top: int) -> np.ndarray:
        """Returns logprobs as `logprobs_of` has them."""
        found = [FakeBackend.logprobs_of(token, top) for token in text[1:]]
        rows = [[own, *(token for token, _ in best), *(value for _, value in best)] for own, best in found]
        return np.array(rows).reshape(len(found), 1 + 2 * top)

    @staticmethod
    def vector_of(text: list[int], request: PoolingRequest) -> np.ndarray:
        if request.score:
            return np.array([len(text) / 8 - 4])
        made = np.bincount([token % DIMENSIONS for token in text], minlength=DIMENSIONS).astype(float)
        return made / np.linalg.norm(made)

    async def make_image(
        self, model: ServedModel, request: ImageRequest, told: Callable[[ImageUpdate], None]
    ) -> ImageAnswer:
        raise AssertionError("no model here makes images")

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        raise AssertionError("no model here does speech")

    async def health(self) -> dict[str, bool]:
        return self.answering

    async def stats(self) -> list[ReplicaStats]:
        self.asked += 1
        return self.replicas

    async def pids(self) -> dict[str, int]:
        return self.processes

    async def nodes(self) -> list[NodeState]:
        return self.machines

    async def remove_node(self, name: str) -> bool:
        node = next((node for node in self.machines if node.name == name), None)
        if node is None:
            raise NodeNotFound(f"there is no node {name!r}")
        self.machines = [each for each in self.machines if each is not node]
        return node.up

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.explained.get(request_id)

    async def decisions(self, after: int, most: int) -> Decisions:
        if self.made is None:
            raise NoReplica("the router does not answer now")
        new = [each for each in self.made.decisions if each.number > after][-most:]
        return replace(self.made, decisions=new)

    async def loading(self, replicas: Sequence[str]) -> dict[str, ReplicaProgress]:
        return {name: self.progress[name] for name in replicas if name in self.progress}

    @property
    def sampling(self) -> Sampling:
        return self.requests[-1]["sampling"]

    @property
    def prompt(self) -> str:
        return self.text.tokenizer.decode(self.requests[-1]["prompt"])


def events_of(body: str) -> list[Any]:
    """Returns the data of every server-sent event; `[DONE]` stays a string."""
    assert body.endswith("\n\n")
    out: list[Any] = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


class Chat:
    """Shorthand for requests to the two generation routes."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, body: dict[str, Any], *, path: str = "chat/completions", **how: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{path}", json=body, **how)

    async def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        return await self.post({"messages": [{"role": "user", "content": content}], **fields})

    async def stream(self, content: Any = "Hi", **fields: Any) -> list[Any]:
        response = await self.chat(content, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.post({"prompt": prompt, **fields}, path="completions")

    async def complete_stream(self, prompt: Any, **fields: Any) -> list[Any]:
        response = await self.complete(prompt, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)


def tiny_backend(folders: dict[str, Path], text: TextModel) -> FakeBackend:
    """Serves two models with tiny tokenizers."""
    size = len(text.tokenizer.encode("")) + 512
    served = [
        served_model(
            name=name,
            model_id=number * 32,
            files_id=number * 32,
            folder=folders[markers],
            context_tokens=CONTEXT_TOKENS,
            vocabulary_size=size,
            created=created,
            embedding=embedding,
        )
        for name, number, markers, created, embedding in (
            ("satchel/tiny", b"1", "added", 1_700_000_000, EMBEDS),
            ("other", b"2", "none", 1_700_000_001, EmbeddingInfo()),
        )
    ]
    return FakeBackend(text, served)
