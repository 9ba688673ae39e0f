"""The backend over Ray: asks the router, reads the replicas' frames, and hands each row (`rows.py`) its tokens.

One `RayBackend` lives on one event loop. Its `ReplicaConnection` to a replica is a *consumer* there: it asks for one
frame after the other, each with the new tokens of all its rows. Rows of a consumer whose lease ran out are removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import psutil
import ray
from cachetools import FIFOCache
from ray.exceptions import RayError

from ...actors.protocol import control_store, registry
from ...actors.protocol.block_ids import is_shared, scope_of
from ...actors.protocol.calls import Call
from ...actors.protocol.clients import ReplicaClient, RouterClient
from ...actors.protocol.media_ids import embeddings_needed
from ...actors.protocol.messages import GenerateRequest, MediaSpan, ModelInfo, PoolingRequest, ReplicaStats, RowUpdate
from ...actors.protocol.router_messages import Chain, Decision, NodeReport, RouteRequest, RowLeft
from ...actors.start import forget_node
from ...cluster.config import Config
from ...cluster.environment import default_home
from ...cluster.errors import (
    ActorLost,
    ActorSilent,
    InvalidRequest,
    NoAnswer,
    NodeNotFound,
    NoReplica,
    ReplicaDied,
    ReplicaLost,
)
from ...cluster.timing import USUAL
from ...cluster.trust.members import remove as remove_members
from ..generation.backend import NodeState, ServedModel, Vectors
from ..views.cluster import SeenNodes, node_states
from .locator import AgentLocator
from .pooling import RayPooling
from .rows import RayGeneration, called
from .served import DetachedTasks, ServedModels, detached
from .split import Prefill, may_split

logger = logging.getLogger(__name__)

SENT_MAX = 4096

LATE_S = 0.5
"""A time limit that comes this much later than it was set shows that its process stood still."""


class ReplicaConnection:
    """A connection to one replica: its client, the rows running there, and the task that reads its frames.

    Args:
        node: the replica's node, "" if unknown.
    """

    def __init__(self, backend: RayBackend, replica: str, node: str) -> None:
        self.replica = replica
        self.node = node
        self._frame_silence_s = backend.config.timing.frame_silence_s
        self.client = ReplicaClient(replica, backend.config.timing)
        # A new id each time: the next link does not read what a broken one left at a living replica.
        self.consumer = f"consumer-{uuid.uuid4().hex}"
        self.rows: dict[str, tuple[RayGeneration | Prefill, int]] = {}
        self.broken = asyncio.Event()
        self.heard = False
        """Whether it has answered."""
        self.died = False
        """Whether its process has ended, according to Ray."""
        self.probation = asyncio.Lock()
        """Held by the one suspect row (`rows.py`) that is tried there."""
        self.sent = SentPictures()
        self._backend = backend
        self._reading = detached(self._read())

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self.client.abort(request_ids)
        except NoAnswer:
            logger.debug("replica %s was lost before the abort", self.replica)

    async def _read(self) -> None:
        reason, number, lost = "it forgot this consumer", 0, False
        try:
            while True:
                asked = time.monotonic()
                frame = await self.client.next_frame(self.consumer, number)
                if frame is None:
                    break
                self.heard = True
                number += 1
                for update in frame.rows:
                    self._deal(update)
        except Exception as error:
            # Any error: rows that nobody reads must not wait. If the time limit itself came late, this process stood
            # still, as on a Mac that slept, and the silence says nothing about the replica.
            reason = type(error.__cause__ or error).__name__
            late_s = time.monotonic() - asked - self._frame_silence_s
            lost = not isinstance(error, ActorSilent) or late_s < LATE_S
            self.died = isinstance(error, ActorLost)
        self._backend.unlink(self, lost)
        self._break(reason)

    def _deal(self, update: RowUpdate) -> None:
        row, placement = self.rows.get(update.request_id, (None, 0))
        if row is None:
            return
        if update.finish is None:
            row.put(placement, update)
            return
        del self.rows[update.request_id]
        row.put(placement, update)
        left = RowLeft(self.replica, update.request_id)
        self._backend.release(row.left(left) if isinstance(row, RayGeneration) else left)

    def _break(self, reason: str) -> None:
        """Aborts all rows at the replica and has each continue elsewhere."""
        rows, self.rows = self.rows, {}
        logger.warning("the link to replica %s broke (%s); %d rows go on elsewhere", self.replica, reason, len(rows))
        self._backend.background(self.abort(list(rows)))
        self.broken.set()
        kind = ReplicaDied if self.died else ReplicaLost
        for row, placement in rows.values():
            row.put(placement, kind(f"replica {self.replica} was lost"))

    def close(self) -> None:
        """Stops reading."""
        self._reading.cancel()


class RayBackend:
    """`backend.Backend` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self, config: Config, locator: AgentLocator | None = None) -> None:
        self.config = config
        self._locator = locator or AgentLocator(config)
        self.failovers = 0
        self._links: dict[str, ReplicaConnection] = {}
        self._model_ids: dict[str, list[bytes]] = {}
        self._served = ServedModels(self.info, config.timing)
        self._router = RouterClient(config.timing)
        self._background = DetachedTasks()

    async def models(self) -> list[ServedModel]:
        return await self._served.models()

    async def names(self) -> list[str]:
        """Returns the name of every served model, loaded or not, the default first."""
        return [entry.model.name for entry in await self._served.entries()]

    async def generate(
        self, model: ServedModel, request: GenerateRequest, *, cache_salt: str = "", beside: str = ""
    ) -> RayGeneration:
        name = request.agent.partition("/")[2]
        scope = scope_of(self.config.share, request.tenant, name, request.request_id, cache_salt)
        most = self.config.timeouts.request_s
        bounded = replace(request, deadline_s=min(request.deadline_s, most), reusable=is_shared(scope))
        generation = RayGeneration(self, await called(bounded, model.model_id, scope), beside, scope)
        await generation.start()
        return generation

    async def pool(self, model: ServedModel, request: PoolingRequest) -> Vectors:
        """As `Backend.pool`."""
        return await RayPooling(self, request).run()

    async def health(self) -> dict[str, bool]:
        """Returns for every served model whether a replica answers and the model's description is known here."""
        known = {model.name for model in await self.models()}
        stats = await self.stats()
        answering = {stat.model for stat in stats if stat.answers}
        return {name: name in known and name in answering for name in await self.names()}

    async def stats(self) -> list[ReplicaStats]:
        placed = await self._placed()

        async def ask(name: str, model: str, node: str) -> ReplicaStats:
            try:
                stats = await ReplicaClient(name, self.config.timing).stats()
            except NoAnswer:
                return ReplicaStats(name, model, answers=False, node=node)
            return replace(stats, node=stats.node or node)

        return await asyncio.gather(*(ask(name, *where) for name, where in placed.items()))

    async def pids(self) -> dict[str, int]:
        names = list(await self._placed())
        infos = await asyncio.gather(*map(self.info, names))
        return {name: info.pid for name, info in zip(names, infos, strict=True) if info is not None}

    async def nodes(self) -> list[NodeState]:
        """As `Backend.nodes`.

        Raises:
            NoReplica: Ray's control store does not answer.
        """
        reports, seen = await asyncio.gather(self._reports(), self._seen())
        return node_states(self.config.machines, seen, reports)

    async def remove_node(self, name: str) -> bool:
        """As `Backend.remove_node`."""
        if name in {machine.name for machine in self.config.machines}:
            raise InvalidRequest(f"{name} is in the cluster's config: take it out there", param="name")
        known = next((node for node in await self.nodes() if node.name == name), None)
        members = await asyncio.to_thread(remove_members, default_home(), name)
        if known is None and not members:
            raise NodeNotFound(f"there is no node {name!r}", param="name")
        if known is not None and known.up:
            return True
        await asyncio.to_thread(forget_node, name)
        self._tell(self._router.lose_node(name))
        return False

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        decision = await self._router.explain(request_id)
        if decision is None:
            return None
        return asdict(decision if decision.node else replace(decision, node=await self._placed_on(decision.replica)))

    async def close(self) -> None:
        """Stops reading, and aborts the rows still running."""
        self._served.close()
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        for link in links:
            await link.abort(list(link.rows))

    # For RayGeneration and ReplicaConnection.

    def model_ids(self, model: str) -> Sequence[bytes]:
        """Returns the ids that a model's replicas had at its last routing; nodes may compute differently."""
        return self._model_ids.get(model, ())

    async def route(
        self, request: GenerateRequest, exclude: Sequence[str], beside: str, others: Sequence[GenerateRequest] = ()
    ) -> Decision:
        """Returns the router's decision.

        Args:
            others: the same request for replicas with other model ids.

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
        )
        return await self.decide(message)

    async def decide(self, message: RouteRequest) -> Decision:
        """Returns the router's decision. Raises as `route`."""
        try:
            decision = await self._router.route(message)
        except NoAnswer as error:
            raise NoReplica(error.message, retry_after_s=error.retry_after_s) from error
        self._model_ids[message.model] = decision.model_ids
        if not decision.node:
            # The replica has not reported its node yet.
            decision = replace(decision, node=await self._placed_on(decision.replica))
        return decision

    def lose(self, replica: str) -> None:
        """Tells the router that a call to the replica failed."""
        self._tell(self._router.lose(replica))

    def release(self, left: RowLeft) -> None:
        """Tells the router that the request no longer loads the replica: it was refused, or has ended."""
        self._tell(self._router.release(left))

    def link(self, decision: Decision) -> ReplicaConnection:
        """Returns the connection to the replica, opened on first use."""
        replica = decision.replica
        link = self._links.get(replica)
        if link is None:
            link = self._links[replica] = ReplicaConnection(self, replica, decision.node)
        return link

    def unlink(self, link: ReplicaConnection, lost: bool) -> None:
        """Drops a broken link. If the replica seems `lost`, tells the router and checks its node."""
        self._links.pop(link.replica, None)
        if not lost:
            return
        self.lose(link.replica)
        if link.node:
            self.background(self._check(link.node))

    async def _check(self, node: str) -> None:
        """Checks the node: if it has ended, nothing else there is asked."""
        await self._locator.check(node)

    async def node_lives(self, node: str) -> bool:
        """Returns whether the node still runs, as far as can be told now."""
        return await self._locator.check(node)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which must not raise, as a task of its own."""
        self._background.begin(work)

    def _tell(self, call: Call[None]) -> None:
        async def tell() -> None:
            # A router that restarts has lost this state anyway.
            with suppress(NoAnswer):
                await call

        self.background(tell())

    async def _placed_on(self, replica: str) -> str:
        """Returns the replica's node according to the registry, "" if unknown."""
        with suppress(NoReplica):
            return (await self._placed()).get(replica, ("", ""))[1]
        return ""

    async def _placed(self) -> dict[str, tuple[str, str]]:
        """Returns model and node of every served replica, by its id."""
        entries = await self._served.entries()
        return {name: (entry.model.name, node) for entry in entries for name, node in entry.replicas.items()}

    async def info(self, replica: str) -> ModelInfo | None:
        """Returns the replica's description of its model; None if not loaded, or without an answer in time."""
        with suppress(NoAnswer):
            return await ReplicaClient(replica, self.config.timing).info()
        return None

    async def _reports(self) -> list[NodeReport]:
        """Returns the router's reports of the nodes; none while it restarts."""
        try:
            return await self._router.nodes()
        except NoAnswer:
            return []

    async def _seen(self) -> SeenNodes:
        try:
            async with asyncio.timeout(self.config.timing.answer_s):
                return await asyncio.to_thread(_seen_nodes)
        except (RayError, RuntimeError, TimeoutError) as error:
            raise NoReplica("the cluster's control store does not answer now", retry_after_s=2.0) from error


def _seen_nodes() -> SeenNodes:
    """Returns Ray's view of the nodes, and the memory of the machine on which this process runs."""
    own, alive, here = ray.get_runtime_context().get_node_id(), [], ""
    for node in control_store.ray_nodes():
        alive += node.resources
        if node.node_id == own:
            here = next((name for name in node.resources if name.startswith("satchel-node-")), "")
    return SeenNodes(registry.nodes(), frozenset(alive), here, psutil.virtual_memory().available)


def _pictures_of(request: GenerateRequest) -> list[tuple[bytes, int, int, bool]]:
    """Returns `RouteRequest.pictures` of a request."""
    spans = [(one.start, len(one.tokens)) for one in request.media]
    needed = embeddings_needed(request.root_id, request.prompt, spans)
    return [(*each, bool(one.pixels)) for each, one in zip(needed, request.media, strict=True)]


def cluster_config() -> Config:
    """Returns the config of the running cluster that Ray is connected to.

    Raises:
        NoReplica: no router runs there.
    """
    try:
        return RouterClient(USUAL).config().wait()
    except NoAnswer as error:
        raise NoReplica("no Satchel router runs in this Ray cluster") from error


class SentPictures:
    """The latest `SENT_MAX` pictures whose pixels were sent to one replica."""

    def __init__(self) -> None:
        self._sent: FIFOCache[tuple[bytes, bytes], None] = FIFOCache(SENT_MAX)

    def without(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request without the pixels that have been sent; the same object if it has none of those."""
        if not any(self._knows(request, one) for one in request.media):
            return request
        return replace(
            request, media=[replace(one, pixels=[]) if self._knows(request, one) else one for one in request.media]
        )

    def note(self, request: GenerateRequest) -> None:
        """Records that the replica has received all of the request's pictures."""
        for one in request.media:
            if one.pixels:
                self._sent[request.root_id, one.key] = None

    def forget(self, request: GenerateRequest) -> None:
        """Forgets the request's pictures, some of which the replica lacks."""
        for one in request.media:
            self._sent.pop((request.root_id, one.key), None)

    def _knows(self, request: GenerateRequest, one: MediaSpan) -> bool:
        return bool(one.pixels) and (request.root_id, one.key) in self._sent
