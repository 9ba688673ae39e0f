"""Where requests go: the router's decisions, and the connections to the replicas that it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...actors.protocol.clients import ReplicaClient, RouterClient
from ...actors.protocol.media_ids import embeddings_needed
from ...actors.protocol.replica_messages import GenerateRequest, ModelInfo
from ...actors.protocol.router_messages import Chain, Decision, RouteRequest, SequenceLeft
from ...actors.rpc.client import Call
from ...actors.rpc.local import NearActor
from ...cluster.config.config import Config
from ...cluster.detached import DetachedTasks
from ...cluster.errors import ActorSilent, NoAnswer, NoReplica
from ..requests.loading import Loading
from .connection import ReplicaConnection
from .locator import AgentLocator
from .model_pool import ModelPool
from .served import ServedModels


class Routing:
    """Asks the router, tells it what happens to sequences, and has a connection to each replica. Use it on the event
    loop on which it was made.

    Attributes:
        failovers: how many sequences have failed over.
    """

    def __init__(self, config: Config, locator: AgentLocator) -> None:
        self.config = config
        self.failovers = 0
        self.router = RouterClient(config.timing, kind=NearActor)
        self.served = ServedModels(self.info, config.timing)
        self.pool = ModelPool(self.served, config.timing)
        self._locator = locator
        self._links: dict[str, ReplicaConnection] = {}
        self._model_ids: dict[tuple[str, bytes], list[bytes]] = {}
        self._background = DetachedTasks()

    def model_ids(self, request: GenerateRequest) -> Sequence[bytes]:
        """Returns the model ids that the replicas of a request's model had, with its adapter, when one was last routed;
        nodes that compute differently have other ids."""
        return self._model_ids.get((request.model, request.adapter), ())

    async def route(
        self, request: GenerateRequest, exclude: Sequence[str], beside: str, others: Sequence[GenerateRequest] = ()
    ) -> Decision:
        """Returns the router's decision.

        Args:
            others: the same request with the block ids for other model ids.

        Raises:
            NoReplica: the router has none, or is itself restarting.
        """
        message = RouteRequest(
            request_id=request.request_id,
            model=request.model,
            agent=request.agent,
            block_ids=request.block_ids,
            prompt_tokens=len(request.prompt),
            exclude=list(exclude),
            beside=beside,
            near=self._locator.known(request.agent) if request.agent else "",
            pictures=_pictures_of(request),
            model_id=request.model_id,
            others=[Chain(other.model_id, other.block_ids, _pictures_of(other)) for other in others],
            splits=may_split(request) and not exclude,
            adapter=request.adapter,
        )
        return await self.decide(message)

    async def decide(self, message: RouteRequest) -> Decision:
        """Returns the router's decision. Raises as `route`."""
        try:
            decision = await self._decided(message)
        except NoAnswer as error:
            raise NoReplica(error.message, retry_after_s=error.retry_after_s) from error
        self._model_ids[message.model, message.adapter] = decision.model_ids
        if not decision.node:
            # The replica has not reported its node yet.
            decision = replace(decision, node=await self.placed_on(decision.replica))
        return decision

    async def _decided(self, message: RouteRequest) -> Decision:
        """As `decide`. The router hears of a replica that is ready with its next report, and a router whose process has
        ended starts again in seconds: so long the request waits, and clients see nothing of it."""
        timing, began = self.config.timing, time.monotonic()
        waits_s = 2 * timing.report_s
        while True:
            try:
                return await self.router.route(message)
            except (NoAnswer, NoReplica) as error:
                if isinstance(error, ActorSilent):
                    raise
                if isinstance(error, NoAnswer):
                    waits_s = timing.answer_s
                if time.monotonic() - began > waits_s:
                    raise
            await asyncio.sleep(timing.retry_s)

    async def load_again(self, model: str, loading: Loading) -> bool | None:
        """Waits until a model that comes and goes is loaded, after no replica took a request for it.

        Returns:
            Whether it was unloaded; None if it is none of these models.

        Raises:
            ModelLoadError, ModelNotFound, Unavailable: as `ModelPool.load`.
        """
        if not await self.pool.comes_and_goes(model):
            return None
        return await self.pool.load(model, loading)

    async def was_unloaded(self, model: str, replica: str) -> bool:
        """Returns whether a model that comes and goes no longer has this replica: its process was ended on purpose."""
        with suppress(NoReplica):
            if await self.pool.comes_and_goes(model):
                self.served.refresh()
                return replica not in await self.placed()
        return False

    async def recovery_s(self, model: str) -> float:
        """Returns how long a sequence waits for another replica after it has lost its own, in seconds."""
        timing = self.config.timing
        with suppress(NoReplica):
            entries = await self.served.entries()
            if any(entry.stages for entry in entries if entry.model.name == model):
                return timing.group_recovery_s
        return timing.recovery_s

    def lose(self, replica: str) -> None:
        """Tells the router that a call to the replica failed."""
        self.tell(self.router.lose(replica))

    def release(self, left: SequenceLeft) -> None:
        """Tells the router that the request no longer counts as load of the replica: it was refused, or has ended."""
        self.tell(self.router.release(left))

    def link(self, decision: Decision) -> ReplicaConnection:
        """Returns the connection to the replica, opened on first use."""
        replica = decision.replica
        link = self._links.get(replica)
        if link is None:
            link = self._links[replica] = ReplicaConnection(replica, decision.node, self.config.timing, self._unlink)
        return link

    def _unlink(self, link: ReplicaConnection, lost: bool) -> None:
        """Drops a broken link, and aborts its sequences. If the replica seems `lost`, tells the router and checks its
        node."""
        self._links.pop(link.replica, None)
        self.background(link.abort(list(link.sequences)))
        if not lost:
            return
        self.lose(link.replica)
        if link.node:
            # If the node has ended, nothing else on it is asked.
            self.background(self.node_lives(link.node))

    async def node_lives(self, node: str) -> bool:
        """Returns whether the node still runs, as far as can be told now."""
        return await self._locator.check(node)

    def background(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work`, which must not raise, as a task of its own."""
        self._background.begin(work)

    def tell(self, call: Call[None]) -> None:
        """Tells the router something, without a retry."""

        async def told() -> None:
            # A router that restarts has lost this state anyway.
            with suppress(NoAnswer):
                await call

        self.background(told())

    async def close(self) -> None:
        """Stops reading, and aborts the sequences still running."""
        self.served.close()
        self.router.actor.close()
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        for link in links:
            await link.abort(list(link.sequences))

    async def placed_on(self, replica: str) -> str:
        """Returns the replica's node according to the registry, "" if unknown."""
        with suppress(NoReplica):
            return (await self.placed()).get(replica, ("", ""))[1]
        return ""

    async def placed(self) -> dict[str, tuple[str, str]]:
        """Returns model and node of every served replica, by its id."""
        entries = await self.served.entries()
        return {name: (entry.model.name, node) for entry in entries for name, node in entry.replicas.items()}

    async def info(self, replica: str) -> ModelInfo | None:
        """Returns the replica's description of its model; None if not loaded, or without an answer in time."""
        with suppress(NoAnswer):
            return await ReplicaClient(replica, self.config.timing).info()
        return None


def _pictures_of(request: GenerateRequest) -> list[tuple[bytes, int, int, bool]]:
    """Returns a request's pictures in the form of `RouteRequest.pictures`."""
    spans = [(one.start, len(one.tokens)) for one in request.media]
    needed = embeddings_needed(request.root_id, request.prompt, spans)
    return [(*each, bool(one.pixels)) for each, one in zip(needed, request.media, strict=True)]


def may_split(request: GenerateRequest) -> bool:
    """Returns whether a request may be prefilled on one node and decoded on another.

    KV goes from one node's disk to another's, and only agents' KV may be on disk. A request with pictures would need
    its image embeddings sent too. Sequences that share a prefill stay with it, and those that have already generated
    tokens stay where their KV is.
    """
    sampling = request.sampling
    alone = request.choices == 1 and sampling.choice == 0 and not request.generated
    return bool(request.agent) and request.reusable and not request.media and alone and sampling.max_tokens > 0
