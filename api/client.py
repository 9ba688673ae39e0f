"""Python handles: agents and actors of a running cluster, from a script, a notebook, or inside Ray tasks and actors.

Everything runs on one background event loop a `Cluster`, so the same object serves any number of threads and event
loops, and the synchronous forms work without one.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from ..actors import registry
from ..actors.handles import KV_STORE, ROUTER, actor_handle
from ..actors.start import Report, find_replicas, load_model, unload_model
from ..cluster.config import Home, Model, parse_model
from ..cluster.environment import default_home
from ..cluster.errors import AgentBusy, NotRunning, from_wire
from ..cluster.runtime import connect_ray, connect_ray_address, find_cluster
from .background import BackgroundLoop, Feed
from .dispatch import RayBackend, cluster_config
from .generation import Generator
from .logprobs import ShownToken
from .options import make_options
from .requests import ChatRequest, CompletionRequest, agent_key
from .streams import Answer, Finished, TextDelta, TextStream

T = TypeVar("T")

RENEW_TURN_S = 20.0


@dataclass(frozen=True)
class Reply:
    """A finished answer. Lengths are tokens; `cached_tokens` of the prompt were not computed again. `reasoning` is what
    a model that thinks said before; `logprobs` has an entry a token where the option asked for them."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    replica: str
    why: str
    reasoning: str = ""
    logprobs: list[ShownToken] | None = None

    def __str__(self) -> str:
        return self.text


def connect(home: str | os.PathLike[str] | None = None, address: str | None = None) -> Cluster:
    """Connect to a running cluster.

    Args:
        home: the server's SATCHEL_HOME; by default the environment's, else `~/.satchel`. Inside a Ray task or actor of
            the cluster nothing is needed.
        address: the Ray address (`host:port`) instead of the one that `home` records; the token is `home`'s.

    Raises:
        NotRunning: no server runs there.
    """
    if not ray.is_initialized():
        where = Home(Path(home).expanduser().absolute()) if home is not None else default_home()
        if address is None:
            connect_ray(find_cluster(where))
        else:
            connect_ray_address(address, where.token_file)
    return Cluster()


class Cluster:
    """A running cluster. Get one from `connect`; close it, or use it as a context manager.

    Attributes:
        config: what the cluster was started with.
    """

    def __init__(self) -> None:
        self.config = cluster_config()
        self._loop = BackgroundLoop()
        self._generator = self._loop.run(self._make_generator())

    async def _make_generator(self) -> Generator:
        return Generator(RayBackend(self.config), self.config)

    @property
    def router(self) -> Any:
        """The router's actor handle; its methods are those of `satchel.actors.router.actor.RouterActor`."""
        return actor_handle(ROUTER)

    def replicas(self) -> dict[str, Any]:
        """Actor handles by replica id; their methods are those of `satchel.actors.replica.actor.ReplicaActor`."""
        return find_replicas([entry.model for entry in registry.entries()])

    async def load(
        self,
        source: str,
        *,
        name: str | None = None,
        adapter: str | None = None,
        replicas: int = 1,
        context_tokens_max: int | None = None,
        dtype: str = "auto",
        report: Report | None = None,
    ) -> str:
        """Serve one more model, and return its name once it answers. It is gone when the server stops.

        Args:
            source: a Hub id (`owner/name`, `owner/name@revision`), a folder, or `embedded:NAME`.
            name: what clients call it; by default the Hub id, or the folder's name.
            adapter: a LoRA or DoRA adapter as mlx-lm writes them, a folder or a Hub id.
            report: called with what is going on and the fraction done, None where unknown.

        Raises:
            ConfigError: an argument is out of range.
            InvalidRequest: the name is taken.
            ModelLoadError: the model cannot be loaded; nothing of it runs then.
        """
        model = _model(
            source, name=name, adapter=adapter, replicas=replicas, context_tokens_max=context_tokens_max, dtype=dtype
        )
        return await self._loop.wait(self._load(model, report))

    def load_sync(self, source: str, *, report: Report | None = None, **options: Any) -> str:
        """`load` for code without an event loop."""
        return self._loop.run(self._load(_model(source, **options), report))

    async def _load(self, model: Model, report: Report | None) -> str:
        await load_model(model, self.config, report or _say_nothing)
        return model.name

    async def unload(self, name: str) -> None:
        """Serve a model no more. Its running requests have `timeouts.drain_s` to finish.

        Raises:
            ModelNotFound: no such model is served.
            InvalidRequest: it is the only one.
        """
        await self._loop.wait(unload_model(name, self.config.timeouts.drain_s))

    def unload_sync(self, name: str) -> None:
        """`unload` for code without an event loop."""
        self._loop.run(unload_model(name, self.config.timeouts.drain_s))

    def agent(self, agent_id: str, *, model: str = "", system: str | None = None) -> Agent:
        """The agent `agent_id`, whose transcript the cluster keeps.

        Args:
            model: which model answers; "" is the default one.
            system: a system message that a new transcript begins with.

        Raises:
            InvalidRequest: not an agent id (1 to 128 of `A-Z a-z 0-9 . _ : @ -`).
        """
        return Agent(self, agent_id, model, system)

    async def generate(self, prompt: str | Sequence[Any], *, model: str = "", agent: str = "", **options: Any) -> Reply:
        """Answer one prompt: a string is continued as it stands, a list of messages is a conversation.

        Args:
            agent: the agent id to route and remember by; "" for none.
            options: the fields of `api.options.Options`, such as temperature, seed, max_tokens, stop, logprobs.

        Raises:
            RequestError: what is wrong with the request.
            Unavailable: no replica takes it now.
        """
        return await self._loop.wait(self._generate(prompt, model, agent, options))

    def generate_sync(self, prompt: str | Sequence[Any], *, model: str = "", agent: str = "", **options: Any) -> Reply:
        """`generate` for code without an event loop."""
        return self._loop.run(self._generate(prompt, model, agent, options))

    async def _generate(self, prompt: str | Sequence[Any], model: str, agent: str, options: dict[str, Any]) -> Reply:
        chosen = make_options(**options)
        if isinstance(prompt, str):
            work = CompletionRequest(prompt, model=model, agent=agent, options=chosen)
            (stream,) = await self._generator.start_completion(work)
        else:
            stream = await self._generator.start_chat(ChatRequest(prompt, model=model, agent=agent, options=chosen))
        return _reply(stream, await stream.collect())

    @property
    def _backend(self) -> RayBackend:
        backend = self._generator.backend
        assert isinstance(backend, RayBackend)
        return backend

    def close(self) -> None:
        """Stop reading; rows still running for this handle end, and whoever waits for one gets `NotRunning`. Ray stays
        connected."""
        with suppress(NotRunning):
            self._loop.run(self._backend.close())
        self._loop.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Agent:
    """One agent: each turn continues its transcript, which lives in the cluster and outlives this handle.

    Turns of one agent run one after the other, whoever asks.
    """

    def __init__(self, cluster: Cluster, agent_id: str, model: str, system: str | None) -> None:
        self.agent_id = agent_id
        self._cluster = cluster
        self._key = agent_key(agent_id)
        self._model = model
        self._system = system

    async def ask(self, text: str, **options: Any) -> str:
        """Say `text` and return the whole answer. Options as in `Cluster.generate`.

        Raises:
            AgentBusy: an earlier turn of this agent takes longer than `timeouts.turn_wait_s`.
        """
        return await self._cluster._loop.wait(self._ask(text, options))

    def ask_sync(self, text: str, **options: Any) -> str:
        """`ask` for code without an event loop."""
        return self._cluster._loop.run(self._ask(text, options))

    async def chat(self, text: str, **options: Any) -> AsyncIterator[str]:
        """Say `text` and yield the answer as it comes. A turn left early is not remembered."""
        loop = self._cluster._loop
        feed = await loop.wait(self._start_feed(text, options))
        try:
            while (piece := await loop.wait(feed.next())) is not None:
                yield piece
        finally:
            await loop.wait(feed.close())

    def chat_sync(self, text: str, **options: Any) -> Iterator[str]:
        """`chat` for code without an event loop."""
        loop = self._cluster._loop
        feed = loop.run(self._start_feed(text, options))
        try:
            while (piece := loop.run(feed.next())) is not None:
                yield piece
        finally:
            loop.run(feed.close())

    async def _start_feed(self, text: str, options: dict[str, Any]) -> Feed:
        return Feed(self._turn(text, options), self._cluster.config.endpoint.unread_tokens_max)

    async def transcript(self) -> list[dict[str, Any]]:
        """What was said so far, as OpenAI messages."""
        return await self._cluster._loop.wait(self._call("messages"))

    def transcript_sync(self) -> list[dict[str, Any]]:
        return self._cluster._loop.run(self._call("messages"))

    async def _call(self, method: str, *arguments: Any) -> Any:
        store = await asyncio.to_thread(actor_handle, KV_STORE)
        return await getattr(store, method).remote(self._key, *arguments)

    async def _ask(self, text: str, options: dict[str, Any]) -> str:
        async with aclosing(self._turn(text, options)) as pieces:
            return "".join([piece async for piece in pieces])

    async def _turn(self, text: str, options: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Take the agent's turn, answer, commit both messages. Any other way out leaves the transcript as it was."""
        turn = uuid.uuid4().hex
        renewing = asyncio.create_task(self._renew(turn))
        committed = False
        try:
            begun = await self._call("begin", turn)
            if "kind" in begun:
                raise from_wire(begun)
            new = [{"role": "user", "content": text}]
            if self._system is not None and not begun["messages"]:
                new.insert(0, {"role": "system", "content": self._system})
            request = ChatRequest(
                [*begun["messages"], *new], model=self._model, agent=self.agent_id, options=make_options(**options)
            )
            stream = await self._cluster._generator.start_chat(request)
            answer = ""
            async with aclosing(aiter(stream)) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        answer += event.text
                        yield event.text
                    elif isinstance(event, Finished):
                        new.append({"role": "assistant", "content": answer})
            committed = await self._call("commit", turn, begun["epoch"], new)
            if not committed:
                raise AgentBusy(f"agent {self.agent_id} was changed by somebody else during this turn")
        finally:
            renewing.cancel()
            if not committed:
                await self._call("abandon", turn)

    async def _renew(self, turn: str) -> None:
        while True:
            await asyncio.sleep(RENEW_TURN_S)
            try:
                await self._call("renew", turn)
            except RayError:
                # The store restarts; the commit will tell.
                continue


def _model(source: str, *, name: str | None = None, **fields: Any) -> Model:
    return parse_model(source=source, name=_default_name(source) if name is None else name, **fields)


def _default_name(source: str) -> str:
    """The Hub id without its revision, or the folder's name."""
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source.removeprefix("embedded:").partition("@")[0]


def _say_nothing(what: str, fraction: float | None) -> None:
    return None


def _reply(stream: TextStream, answer: Answer) -> Reply:
    return Reply(
        text=answer.text,
        finish_reason=answer.reason,
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
        cached_tokens=answer.usage.cached_tokens,
        replica=stream.replica,
        why=stream.why,
        reasoning=answer.reasoning,
        logprobs=answer.logprobs,
    )


__all__ = ["Agent", "Cluster", "Reply", "connect"]
