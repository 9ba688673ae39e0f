"""Python handles: agents and actors of a running cluster, from a script, a notebook, or inside Ray tasks and actors.

Every `Cluster` has one background event loop, so the same object serves any number of threads and event loops, and the
synchronous forms work without one.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import numpy as np
from pydantic import JsonValue

from ...actors.model_files.source import default_name
from ...actors.protocol import registry
from ...actors.protocol.clients import ReplicaClient, RouterClient
from ...actors.protocol.replica_messages import ModelInfo
from ...actors.start import Report, find_replicas, infos_of, load_model, unload_model
from ...cluster.config.config import Config, Model, parse_model
from ...cluster.config.timing import USUAL
from ...cluster.environment import default_home
from ...cluster.errors import InvalidRequest, NoAnswer, NoReplica, NotRunning
from ...cluster.keys import OWNER
from ..agents.memory import AgentMemory
from ..agents.satchel_files import check_new, opened_satchel, write_new
from ..agents.satchels import packed, unpacked
from ..pipeline.embedding import Embedder, RankedDocument
from ..pipeline.generation import Generator
from ..pipeline.streams import Answer, TextStream
from ..pipeline.vectors import EmbeddingRequest, RankingRequest
from ..protocols.openai.messages import read_messages
from ..ray_backend.dispatch import RayBackend
from ..ray_backend.locator import AgentLocator
from ..ray_backend.model_pool import ModelPool
from ..ray_backend.store import RayStore
from ..requests.loading import Loading
from ..requests.options import GenerationOptions, make_options
from ..requests.remembered import Remembered
from ..requests.requests import ChatRequest, CompletionRequest, agent_key
from ..text.answers.logprobs import ShownToken
from ..text.model import load_text_model
from ..views.agents import agent_page
from ..views.cluster import node_views
from .agent import Agent
from .background import BackgroundLoop, blocking, on_loop
from .driver import connect_driver
from .mapping import Data, Dataset, Prompt, Row, map_batch, map_rows
from .watch import ServerWatch

Client = TypeVar("Client", RouterClient, ReplicaClient)


@dataclass(frozen=True)
class Reply:
    """A finished answer. Lengths are in tokens; `cached_tokens` is how many of the prompt's tokens were not computed
    again. `reasoning` is the reasoning before the answer; `logprobs` has one entry per token if requested. `node` is
    the replica's node, "" if unknown. `remembered` says how the turn was stored in the agent's memory, None without an
    agent."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    replica: str
    why: str
    reasoning: str = ""
    logprobs: list[ShownToken] | None = None
    node: str = ""
    remembered: Remembered | None = None

    def __str__(self) -> str:
        return self.text


def connect(home: str | os.PathLike[str] | None = None, address: str | None = None) -> Cluster:
    """Connects to a running cluster. If this process is still connected to a cluster that has ended, it disconnects
    first.

    Args:
        home: the server's SATCHEL_HOME; by default the environment variable, else `~/.satchel`. Not needed inside a Ray
            task or actor of the cluster.
        address: the Ray address (`host:port`) instead of the one recorded in `home`. The token and, between machines,
            the certificates come from `home`, which must have joined the cluster once.

    Raises:
        NotRunning: no server runs there.
        ClusterError: this process is connected to another cluster, which runs.
    """
    return Cluster(connect_driver(home, address))


class Cluster:
    """A running cluster. Get one from `connect`; close it, or use it as a context manager.

    If its server ends, all waiting and all later calls raise `NotRunning`; then `connect` makes a new `Cluster`.

    Attributes:
        config: the config with which the cluster was started.
    """

    def __init__(self, watch: ServerWatch | None = None) -> None:
        # Chats use MLX on a worker thread. MLX has state of the thread that imports it, and aborts the process if that
        # thread ends at exit. So it is imported here, on the main thread, which ends last.
        importlib.import_module("mlx_lm.tokenizer_utils")
        self._loop = BackgroundLoop(watch)
        try:
            self.config = self._loop.run(_config())
            self._generator = self._loop.run(self._make_generator())
        except BaseException:
            self._loop.close()
            raise
        self._embedder = Embedder(self._generator)

    async def _make_generator(self) -> Generator:
        locator = AgentLocator(self.config)
        return Generator(
            RayBackend(self.config, locator),
            self.config,
            memory=AgentMemory(
                RayStore(locator, self.config.timing), copy_wait_s=self.config.copy_wait_s, timing=self.config.timing
            ),
        )

    @property
    def router(self) -> RouterClient:
        """The router. Each of its methods is a call: `await cluster.router.alive("qwen")`, or without an event loop
        `cluster.router.alive("qwen").wait()`."""
        return self._watched(RouterClient(self.config.timing))

    @on_loop
    async def notes(self, name: str) -> list[str]:
        """Returns one sentence for each way in which a model is not served as configured, with the reason, from all
        replicas that answer in time."""
        entries = [entry for entry in await asyncio.to_thread(registry.entries) if entry.model.name == name]
        infos = await infos_of(find_replicas(entries, self.config.timing), self.config.timing)
        return list(dict.fromkeys(note for info in infos.values() for note in info.notes))

    notes_sync = blocking(notes)

    def replicas(self) -> dict[str, ReplicaClient]:
        """The replicas by id; their methods are calls, as the router's are."""
        found = find_replicas(self._loop.run(asyncio.to_thread(registry.entries)), self.config.timing)
        return {name: self._watched(replica) for name, replica in found.items()}

    def _watched(self, client: Client) -> Client:
        """Makes the client's calls raise `NotRunning` if the server is lost."""
        client.actor.on_no_answer = self._loop.check
        return client

    @on_loop
    async def load(
        self,
        source: str,
        *,
        name: str | None = None,
        adapter: str | None = None,
        adapters: Mapping[str, str] | None = None,
        replicas: int = 1,
        context_tokens_max: int | None = None,
        dtype: str = "auto",
        self_test: bool = True,
        kv: str | None = None,
        report: Report | None = None,
    ) -> str:
        """Serves one more model, until the server stops, and returns its name once it answers.

        Args:
            source: a Hub id (`owner/name`, `owner/name@revision`), a folder, or `embedded:NAME`. Or the name or an
                alias of a model that comes and goes: it is loaded, as a request would; it has no other arguments.
            name: its name for clients; by default the Hub id, or the folder's name.
            adapter: a LoRA or DoRA adapter as mlx-lm writes them, a folder or a Hub id.
            adapters: LoRA adapters that requests may name (`Model.adapters`): folders or Hub ids by name.
            self_test: whether it runs its self-test (`Model.self_test`).
            kv: the format of cached KV (`Model.kv`).
            report: called with the current step and the fraction done, None if unknown.

        Raises:
            ConfigError: an argument is out of range.
            InvalidRequest: the name is taken.
            ModelLoadError: the model cannot be loaded; none of its replicas runs then.
        """
        model = _model(
            source,
            name=name,
            adapter=adapter,
            adapters=dict(adapters) if adapters else None,
            replicas=replicas,
            context_tokens_max=context_tokens_max,
            dtype=dtype,
            self_test=self_test,
            kv=kv,
        )
        plain = _model(source, replicas=1)
        if model == plain and (pooled := await self._pool.pooled(source)) is not None:
            await self._pool.load(pooled, Loading(), report)
            return pooled
        await load_model(model, self.config, report or _say_nothing, _check_text)
        self._backend.routing.served.refresh()
        return model.name

    load_sync = blocking(load)

    @on_loop
    async def unload(self, name: str, *, report: Report | None = None) -> None:
        """Unloads a model, and returns once it has ended. Its running requests finish first. One that comes and goes
        stays in the list, and is loaded again when a request names it or an alias of it. Another one is removed.

        Args:
            report: called with the current step and None, once no new request can use the model.

        Raises:
            ModelNotFound: no such model is served.
            ModelBusy: it comes and goes, and requests wait for it.
            InvalidRequest: it does not come and go, and is the only one.
        """
        pooled = await self._pool.pooled(name)
        if pooled is None:
            await unload_model(name, self.config, report)
            return
        await self._pool.unload(pooled)
        (report or _say_nothing)(f"Finishing what runs on {pooled}", None)
        await self._pool.until_unloaded(pooled)

    unload_sync = blocking(unload)

    @on_loop
    async def remove(self, name: str, *, report: Report | None = None) -> None:
        """Stops serving a model, until the server starts again. Its running requests have `timeouts.drain_s` to finish.

        Args:
            report: as of `unload`.

        Raises:
            ModelNotFound: no such model is served.
            InvalidRequest: it is the only one.
        """
        await unload_model(name, self.config, report)

    remove_sync = blocking(remove)

    def agent(self, agent_id: str, *, model: str = "", system: str | None = None) -> Agent:
        """Returns a handle of the agent `agent_id`, whose transcript the cluster keeps.

        Args:
            model: which model answers; "" is the default one.
            system: the system message of a new transcript.

        Raises:
            InvalidRequest: not an agent id (1 to 128 of `A-Z a-z 0-9 . _ : @ -`).
        """
        return Agent(self._generator, self._loop, agent_id, model, system)

    @on_loop
    async def agents(self, *, limit: int = 20, after: str = "") -> list[dict[str, JsonValue]]:
        """Returns the cluster's agents in the order of their ids, each as `Agent.info`.

        Args:
            limit: how many, at most 100.
            after: the id after which the list continues.
        """
        page = await agent_page(self._memory.store, self._generator.backend, OWNER, limit, after)
        return page["data"]

    agents_sync = blocking(agents)

    @on_loop
    async def pack(self, agent: str, path: str | os.PathLike[str], *, passphrase: str | None = None) -> int:
        """Packs an agent into a new file, as `satchel agents pack` does, and returns its length in bytes. Only on the
        head's machine.

        Args:
            passphrase: encrypts the file.

        Raises:
            AgentNotFound: the agent is unknown.
            InvalidRequest: the file exists already, or the passphrase is empty.
            DiskFull, RequestTooLarge, Unavailable: it cannot be packed now, or not on this machine.
            SatchelError: the file cannot be written.
        """
        file, secret = Path(path), None if passphrase is None else _secret(passphrase)
        await asyncio.to_thread(check_new, file)
        found = await packed(self._memory, agent_key(agent))
        with found.file:
            await asyncio.to_thread(write_new, file, found.read(), secret)
        return file.stat().st_size

    pack_sync = blocking(pack)

    @on_loop
    async def unpack(
        self,
        path: str | os.PathLike[str],
        *,
        agent: str | None = None,
        replace: bool = False,
        passphrase: str | None = None,
    ) -> dict[str, JsonValue]:
        """Unpacks an agent from a file, as `satchel agents unpack` does. Only on the head's machine.

        Args:
            agent: a new id instead of the one that it was packed with.
            replace: whether an agent of that id is replaced.

        Returns:
            The answer of `PUT /v1/agents/{id}/satchel`: `id`, `branches`, `replaced`, and in `kv` how many `entries`
            `of` how many were unpacked, and `why_not` all.

        Raises:
            InvalidRequest: the file cannot be read, or is encrypted and there is no passphrase.
            InvalidSatchel: it is not a satchel, is incomplete, or has another passphrase.
            AgentExists: there is already an agent of that id.
            DiskFull, RequestTooLarge, MemoryFull, Unavailable: it cannot be unpacked now, or not on this machine.
        """
        with ExitStack() as stack:
            # In a thread: opening an encrypted file takes a while.
            opened = opened_satchel(Path(path), lambda: _secret(passphrase))
            found = await asyncio.to_thread(stack.enter_context, opened)

            async def save(take: Callable[[bytes], Awaitable[object]]) -> None:
                while piece := await asyncio.to_thread(next, found.pieces, b""):
                    await take(piece)

            key = agent_key(found.agent if agent is None else agent)
            # A caller with a handle can run code in the cluster anyway.
            return await unpacked(self._memory, key, save, found.nbytes, replace=replace, trusted=True, limits={})

    unpack_sync = blocking(unpack)

    @on_loop
    async def nodes(self) -> list[dict[str, JsonValue]]:
        """Returns the machines of the cluster, the head first, as `GET /v1/cluster` does: their names, addresses,
        whether they are up, replicas, links with measured bytes per second, free memory, KV in memory and on disk.

        Raises:
            Unavailable: the control store does not answer.
        """
        return node_views(*await asyncio.gather(self._backend.nodes(), self._backend.stats()))

    nodes_sync = blocking(nodes)

    @on_loop
    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, object]],
        *,
        model: str = "",
        agent: str = "",
        **options: Unpack[GenerationOptions],
    ) -> Reply:
        """Answers one prompt: a string is continued as it is, a list of messages is a conversation.

        Args:
            agent: the agent whose memory is used and extended; "" for none.
            options: `GenerationOptions`, such as temperature, seed, max_tokens, stop, logprobs.

        Raises:
            RequestError: the request is invalid.
            Unavailable: no replica accepts it now.
        """
        chosen = make_options(**options)
        if isinstance(prompt, str):
            work = CompletionRequest(prompt, model=model, agent=agent, options=chosen)
            (stream,) = await self._generator.start_completion(work)
        else:
            messages = await asyncio.to_thread(read_messages, prompt)
            stream = await self._generator.start_chat(ChatRequest(messages, model=model, agent=agent, options=chosen))
        return _reply(stream, await stream.collect())

    generate_sync = blocking(generate)

    @overload
    async def map(
        self,
        rows: Data,
        prompt: Prompt,
        *,
        model: str = "",
        at_once: int = 16,
        **options: Unpack[GenerationOptions],
    ) -> Data: ...

    @overload
    async def map(
        self,
        rows: Iterable[Row],
        prompt: Prompt,
        *,
        model: str = "",
        at_once: int = 16,
        **options: Unpack[GenerationOptions],
    ) -> list[dict[str, object]]: ...

    @on_loop
    async def map(
        self,
        rows: Iterable[Row] | Data,
        prompt: Prompt,
        *,
        model: str = "",
        at_once: int = 16,
        **options: Unpack[GenerationOptions],
    ) -> list[dict[str, object]] | Data:
        """Answers a prompt for every row, with the lowest priority: the rows are computed while nothing else is.

        Args:
            rows: dictionaries, in any iterable that ends, or a Ray Dataset. Of a Dataset this returns another one,
                which is computed when it is read (`map_batches`).
            prompt: a format string with the rows' columns, or a function that returns a text or messages.
            at_once: how many rows are asked at the same time.
            options: as of `generate`.

        Returns:
            The rows in order with `answer`, `finish_reason`, `prompt_tokens`, `completion_tokens`, `cached_tokens` and
            `error`, which is None or says why there is no answer.

        Raises:
            KeyError: the prompt names a column that a row does not have.
        """
        if isinstance(rows, Dataset):
            how = {"connect": connect, "home": str(default_home().root), "prompt": prompt, "at_once": at_once}
            given = {"model": model, **options}
            return rows.map_batches(map_batch, batch_size=4 * at_once, fn_kwargs={**how, "options": given})
        generate = partial(inspect.unwrap(Cluster.generate), self)
        return await map_rows(generate, rows, prompt, at_once=at_once, model=model, **options)

    map_sync = blocking(map)

    @on_loop
    async def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> np.ndarray:
        """Returns the embeddings of texts, `(texts, dimensions)` float32; of one text `(dimensions,)`.

        Args:
            dimensions: how many numbers of an embedding are returned, None for all.

        Raises:
            RequestError: the request is invalid, or the model does not support embeddings.
            Unavailable: no replica accepts it now.
        """
        given = texts if isinstance(texts, str) else list(texts)
        made = await self._embedder.embed(EmbeddingRequest(given, dimensions, model=model))
        return made.vectors[0] if isinstance(texts, str) else made.vectors

    embed_sync = blocking(embed)

    @on_loop
    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str = "", top_n: int | None = None
    ) -> list[RankedDocument]:
        """Returns documents by their relevance for a query, the most relevant first.

        Args:
            top_n: how many, None for all.

        Raises:
            RequestError, Unavailable: as `embed`.
        """
        made = await self._embedder.rank(RankingRequest(query, list(documents), top_n, model=model))
        return made.documents

    rerank_sync = blocking(rerank)

    @property
    def _memory(self) -> AgentMemory:
        assert self._generator.memory is not None
        return self._generator.memory

    @property
    def _pool(self) -> ModelPool:
        return self._backend.routing.pool

    @property
    def _backend(self) -> RayBackend:
        backend = self._generator.backend
        assert isinstance(backend, RayBackend)
        return backend

    def close(self) -> None:
        """Aborts the sequences still running for this handle; calls that wait for one raise `NotRunning`. Ray stays
        connected."""
        with suppress(NotRunning):
            self._loop.run(self._generator.loader.close())
            self._loop.run(self._backend.close())
        self._loop.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _config() -> Config:
    """
    Raises:
        NoReplica: no router runs in the Ray cluster.
    """
    try:
        return await RouterClient(USUAL).config()
    except NoAnswer as error:
        raise NoReplica("no Satchel router runs in this Ray cluster") from error


def _model(source: str, *, name: str | None = None, **fields: Any) -> Model:
    return parse_model(source=source, name=default_name(source) if name is None else name, **fields)


def _secret(passphrase: str | None) -> bytes:
    """
    Raises:
        InvalidRequest: there is none, or it is empty.
    """
    if not passphrase:
        raise InvalidRequest("the satchel needs a passphrase" if passphrase is None else "the passphrase is empty")
    return passphrase.encode()


def _check_text(info: ModelInfo) -> None:
    """Checks that the tokenizer of a model of text loads, if its files are on this machine.

    Raises:
        ModelLoadError: its tokenizer does not load.
    """
    if Path(info.folder).is_dir() and info.makes_text:
        load_text_model(info.folder, name=info.name, trusted=info.trust_remote_code)


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
        node=stream.node,
        remembered=stream.remembered,
    )


__all__ = ["Agent", "Cluster", "RankedDocument", "Reply", "connect"]
