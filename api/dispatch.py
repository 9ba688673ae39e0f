"""The backend over Ray: route, submit, read the stream, and go on elsewhere when a replica is lost.

One `RayBackend` lives on one event loop and is one *consumer*: each replica sends it a single stream with all its
rows' tokens, and it renews a lease there, so that the rows of a process that dies are taken out.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from ..actors.handles import ROUTER, actor_handle, replica_actor_name, replica_names
from ..actors.kv_store.blocks import block_ids, root_id, scope_of
from ..actors.messages import Decision, Frame, GenerateRequest, RouteRequest, RowUpdate, Sampling, decode, encode
from ..cluster.config import Config
from ..cluster.errors import NoReplica, ReplicaLost, SatchelError, Unavailable, from_wire
from .backend import ReplicaStats, ServedModel

logger = logging.getLogger(__name__)

RENEW_S = 2.0
ANSWER_S = 5.0
"""How long a replica may take to answer a question about itself before it counts as gone."""

ATTEMPTS = 4
"""How many replicas a row is offered to before its refusal is final, and how many it may lose."""

RECOVERY_S = 20.0
"""How long a row whose replica was lost waits for one to go on with; a lone replica restarts in this time."""

RECOVERY_POLL_S = 0.25


class RayGeneration:
    """One row, followed from replica to replica. Implements `backend.Generation`.

    Every submission is a new *placement*; what an earlier one still says is not heard.
    """

    def __init__(self, backend: RayBackend, request: GenerateRequest) -> None:
        self.replica = ""
        self.why = ""
        self._backend = backend
        self._request = request
        self._started = time.monotonic()
        self._updates: asyncio.Queue[tuple[int, RowUpdate | SatchelError]] = asyncio.Queue()
        self._tokens: list[int] = []
        self._placement = 0
        self._losses = 0
        self._link: _Link | None = None
        self._over = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def put(self, placement: int, update: RowUpdate | SatchelError) -> None:
        """Take what a link heard of the row's placement."""
        self._updates.put_nowait((placement, update))

    async def start(self, exclude: Sequence[str] = ()) -> None:
        """Find a replica that takes the row.

        Args:
            exclude: replicas to turn to last.

        Raises:
            SatchelError: the last refusal, when none does.
        """
        tried = list(exclude)
        refusal: SatchelError | None = None
        for _ in range(ATTEMPTS):
            decision = await self._backend.route(self._request, tried)
            if refusal is not None and decision.replica in tried:
                self._backend.release(decision.replica, self.request_id)
                break
            refusal = await self._offer(decision)
            if refusal is None:
                return
            if not isinstance(refusal, Unavailable):
                break
            tried.append(decision.replica)
        assert refusal is not None
        raise refusal

    async def _offer(self, decision: Decision) -> SatchelError | None:
        """None where the replica took the row, else why not."""
        self.replica, self.why = decision.replica, decision.why
        self._placement += 1
        try:
            self._link = link = await self._backend.link(decision.replica)
            link.rows[self.request_id] = (self, self._placement)
            refusal = await link.handle.submit.remote(encode(self._request))
        except asyncio.CancelledError:
            await asyncio.shield(self.abort())
            raise
        except (RayError, ValueError) as error:
            logger.warning("replica %s is lost: %s", decision.replica, type(error).__name__)
            self._unlink()
            self._backend.lose(decision.replica)
            return ReplicaLost(f"replica {decision.replica} was lost")
        if refusal is None:
            return None
        self._unlink()
        self._backend.release(decision.replica, self.request_id)
        return from_wire(refusal)

    def _unlink(self) -> bool:
        """Expect no more updates. False where none were expected."""
        link, self._link = self._link, None
        return link is not None and link.rows.pop(self.request_id, None) is not None

    def __aiter__(self) -> AsyncIterator[RowUpdate]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[RowUpdate]:
        try:
            while not self._over:
                placement, update = await self._updates.get()
                if placement != self._placement:
                    continue
                if isinstance(update, SatchelError):
                    await self._go_on(update)
                    continue
                self._tokens.extend(update.tokens)
                if self._request.generated:
                    # A second replica: the client was told what the first one reused.
                    update = replace(update, cached_tokens=None)
                self._over = update.finish is not None
                yield update
        finally:
            await self.abort()

    async def _go_on(self, loss: SatchelError) -> None:
        """Submit the row to another replica, or to the same one restarted, with the tokens so far in its prompt.

        The noise of sampling is a function of seed and position, so the text goes on as if nothing had happened.
        """
        self._unlink()
        self._losses += 1
        done = len(self._tokens)
        first = self._request
        left = first.sampling.max_tokens - done
        if self._losses > ATTEMPTS or left <= 0:
            raise loss
        prompt = first.prompt + self._tokens
        now = time.monotonic()
        self._request = replace(
            first,
            prompt=prompt,
            block_ids=await asyncio.to_thread(block_ids, first.root_id, prompt),
            sampling=replace(first.sampling, max_tokens=left),
            generated=first.generated + done,
            deadline_s=max(0.1, first.deadline_s - (now - self._started)),
        )
        self._tokens, self._started = [], now
        lost = self.replica
        while True:
            try:
                return await self.start([lost])
            except Unavailable:
                if time.monotonic() - now > RECOVERY_S:
                    raise
            await asyncio.sleep(RECOVERY_POLL_S)

    async def abort(self) -> None:
        """Take the row out wherever it runs. Does nothing for a row that has ended."""
        self._over = True
        link = self._link
        if not self._unlink() or link is None:
            return
        self._backend.release(self.replica, self.request_id)
        await link.abort([self.request_id])


class _Link:
    """This consumer's connection to one replica: its handle, the rows running there, and the reading of the stream."""

    def __init__(self, backend: RayBackend, replica: str, handle: Any) -> None:
        self.replica = replica
        self.handle = handle
        self.rows: dict[str, tuple[RayGeneration, int]] = {}
        self._backend = backend
        self._tasks = [_detached(self._read()), _detached(self._renew())]

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self.handle.abort.remote(request_ids)
        except RayError:
            logger.debug("replica %s was lost before the abort", self.replica)

    async def _read(self) -> None:
        reason = "its stream ended"
        try:
            async for reference in self.handle.stream.remote(self._backend.consumer):
                for update in decode(Frame, await reference).rows:
                    self._deal(update)
        except Exception as error:
            # Whatever it is: rows that nobody reads must not wait.
            reason = type(error).__name__
        self._break(reason)

    def _deal(self, update: RowUpdate) -> None:
        row, placement = self.rows.get(update.request_id, (None, 0))
        if row is None:
            return
        if update.finish is not None:
            del self.rows[update.request_id]
            self._backend.release(self.replica, update.request_id)
        row.put(placement, update)

    async def _renew(self) -> None:
        reason = "it forgot this consumer"
        try:
            renewed = True
            while renewed:
                # First the stream makes this consumer known there.
                await asyncio.sleep(RENEW_S)
                renewed = await asyncio.wait_for(self.handle.renew.remote(self._backend.consumer), ANSWER_S)
        except Exception as error:
            reason = type(error).__name__
        self._break(reason)

    def _break(self, reason: str) -> None:
        """The replica is lost to this consumer: every row there hears of it, and none goes on there unheard."""
        if not self._backend.unlink(self):
            return
        rows, self.rows = self.rows, {}
        logger.warning("the link to replica %s broke (%s); %d rows go on elsewhere", self.replica, reason, len(rows))
        self._backend.background(self.abort(list(rows)))
        for row, placement in rows.values():
            row.put(placement, ReplicaLost(f"replica {self.replica} was lost"))
        self.close()

    def close(self) -> None:
        """Stop reading."""
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()


def _detached(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task with a context of its own.

    Ray notes in the context which request it serves, takes every call made there for the request's child, and cancels
    all of them when the request's client hangs up. What serves many requests must be nobody's child.
    """
    return asyncio.create_task(work, context=contextvars.Context())


class RayBackend:
    """`backend.Backend` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.consumer = f"consumer-{uuid.uuid4().hex}"
        self._links: dict[str, _Link] = {}
        self._opening = asyncio.Lock()
        self._models: dict[str, ServedModel] = {}
        self._router: Any = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def replicas(self) -> dict[str, str]:
        """The model of every configured replica, by the replica's id."""
        return {name: model.name for model in self.config.models for name in replica_names(model)}

    async def models(self) -> list[ServedModel]:
        for model in self.config.models:
            if model.name not in self._models:
                for name in replica_names(model):
                    info = await self._ask(name, "info")
                    if info:
                        self._models[model.name] = _served(info)
                        break
        return [self._models[model.name] for model in self.config.models if model.name in self._models]

    async def generate(
        self,
        model: ServedModel,
        *,
        agent: str,
        prompt: list[int],
        sampling: Sampling,
        request_id: str,
        priority: int = 0,
    ) -> RayGeneration:
        tenant = agent.partition("/")[0] or "default"
        scope = scope_of(self.config.share, tenant, agent.partition("/")[2], request_id)
        root = root_id(model.model_id, scope)
        request = GenerateRequest(
            request_id=request_id,
            consumer=self.consumer,
            model=model.name,
            agent=agent,
            prompt=prompt,
            block_ids=await asyncio.to_thread(block_ids, root, prompt),
            root_id=root,
            sampling=sampling,
            priority=priority,
            deadline_s=self.config.timeouts.request_s,
        )
        generation = RayGeneration(self, request)
        await generation.start()
        return generation

    async def health(self) -> dict[str, bool]:
        stats = await self.stats()
        return {
            model.name: any(stat.answers for stat in stats if stat.model == model.name) for model in self.config.models
        }

    async def stats(self) -> list[ReplicaStats]:
        names = self.replicas
        answers = await asyncio.gather(*(self._ask(name, "stats") for name in names))
        return [
            ReplicaStats(**answer) if answer else ReplicaStats(name, model, answers=False)
            for (name, model), answer in zip(names.items(), answers, strict=True)
        ]

    async def close(self) -> None:
        """End the streams and the rows still running."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
            await link.abort(list(link.rows))

    # For RayGeneration and _Link.

    async def route(self, request: GenerateRequest, exclude: Sequence[str]) -> Decision:
        """The router's decision.

        Raises:
            NoReplica: the router said so, or is itself restarting.
        """
        message = RouteRequest(
            request_id=request.request_id,
            model=request.model,
            agent=request.agent,
            block_ids=request.block_ids,
            prompt_tokens=len(request.prompt),
            exclude=list(exclude),
        )
        try:
            answer = await asyncio.wait_for((await self._get_router()).route.remote(encode(message)), ANSWER_S)
        except (RayError, ValueError, TimeoutError) as error:
            self._router = None
            raise NoReplica("the router does not answer now", retry_after_s=2.0) from error
        if isinstance(answer, dict):
            raise from_wire(answer)
        return decode(Decision, answer)

    def lose(self, replica: str) -> None:
        """Tell the router that a call to the replica failed."""
        self._tell("lose", replica)

    def release(self, replica: str, request_id: str) -> None:
        """Tell the router that the request is no load on the replica: it was refused, or has ended."""
        self._tell("release", replica, request_id)

    async def link(self, replica: str) -> _Link:
        """The connection to a replica, opened on first use.

        Raises:
            ValueError: no such actor.
        """
        async with self._opening:
            link = self._links.get(replica)
            if link is None:
                handle = await asyncio.to_thread(actor_handle, replica_actor_name(replica))
                link = self._links[replica] = _Link(self, replica, handle)
            return link

    def unlink(self, link: _Link) -> bool:
        """Let a broken link go. False where that has been done."""
        if self._links.get(link.replica) is not link:
            return False
        del self._links[link.replica]
        self.lose(link.replica)
        return True

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on its own; it must not raise."""
        task = _detached(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _get_router(self) -> Any:
        if self._router is None:
            self._router = await asyncio.to_thread(actor_handle, ROUTER)
        return self._router

    def _tell(self, method: str, *arguments: Any) -> None:
        async def call() -> None:
            try:
                await getattr(await self._get_router(), method).remote(*arguments)
            except (RayError, ValueError):
                # A router that restarts has forgotten this anyway.
                self._router = None

        self.background(call())

    async def _ask(self, replica: str, method: str) -> dict[str, Any] | None:
        """What the replica answers; None where it does not in time."""
        try:
            handle = await asyncio.to_thread(actor_handle, replica_actor_name(replica))
            return await asyncio.wait_for(getattr(handle, method).remote(), ANSWER_S)
        except (RayError, ValueError, TimeoutError):
            return None


def _served(info: dict[str, Any]) -> ServedModel:
    return ServedModel(
        name=info["name"],
        model_id=info["model_id"],
        folder=info["folder"],
        context_tokens=info["context_tokens"],
        vocabulary_size=info["vocabulary_size"],
        created=info["created"],
    )


def cluster_config() -> Config:
    """The config of the running cluster that Ray is connected to.

    Raises:
        NoReplica: no router runs there.
    """
    try:
        return ray.get(actor_handle(ROUTER).config.remote(), timeout=30)
    except (RayError, ValueError) as error:
        raise NoReplica("no Satchel router runs in this Ray cluster") from error
