"""The backend over Ray: models, answers, vectors and the state of the cluster, for everything that serves requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import RayError

from ...actors.protocol import control_store, registry
from ...actors.protocol.block_ids import is_shared, scope_of
from ...actors.protocol.clients import ReplicaClient, RouterClient
from ...actors.protocol.pool_messages import PooledModel
from ...actors.protocol.registry import ServedEntry
from ...actors.protocol.replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
)
from ...actors.protocol.router_messages import Decisions, NodeReport
from ...actors.protocol.speech_messages import SpeechPiece, SpeechRequest
from ...actors.start import forget_node
from ...cluster.config.config import Config
from ...cluster.config.timing import USUAL
from ...cluster.devices.available_memory import node_available_bytes
from ...cluster.environment import default_home
from ...cluster.errors import (
    InvalidRequest,
    NoAnswer,
    NodeNotFound,
    NoReplica,
    SatchelError,
)
from ...cluster.trust.members import remove as remove_members
from ..requests.backend import ImageAnswer, ListedModel, NodeState, ServedModel, SpeechAnswer, Vectors
from ..requests.loading import Loading
from ..views.cluster import SeenNodes, node_states
from .images import RayImage
from .locator import AgentLocator
from .pooling import RayPooling
from .routing import Routing
from .sequences import RayGeneration, called
from .speech import RaySpeech


class RayBackend:
    """`backend.Backend` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self, config: Config, locator: AgentLocator | None = None) -> None:
        self.config = config
        self.routing = Routing(config, locator or AgentLocator(config))

    @property
    def failovers(self) -> int:
        return self.routing.failovers

    async def models(self) -> list[ServedModel]:
        return await self.routing.served.models()

    async def listed(self) -> list[ListedModel]:
        """As `Backend.listed`."""
        return [model for entry in await self.routing.served.entries() for model in _listed(entry)]

    async def load(self, name: str, loading: Loading) -> None:
        """As `Backend.load`."""
        name = await self.routing.served.replicas_of(name)
        if not await self.routing.pool.is_loaded(name):
            await self.routing.pool.load(name, loading)

    async def unload(self, name: str) -> None:
        """As `Backend.unload`."""
        await self.routing.pool.unload(await self.routing.served.replicas_of(name))

    async def pool_states(self) -> dict[str, PooledModel]:
        """As `Backend.pool_states`."""
        states, entries = await self.routing.pool.states(), await self.routing.served.entries()
        adapters = {name: entry.model.name for entry in entries for name in entry.model.adapters}
        return states | {name: replace(states[own], name=name) for name, own in adapters.items() if own in states}

    async def generate(
        self,
        model: ServedModel,
        request: GenerateRequest,
        *,
        cache_salt: str = "",
        beside: str = "",
        loading: Loading | None = None,
    ) -> RayGeneration:
        scope = self._scope(request, cache_salt)
        most = self.config.timeouts.request_s
        bounded = replace(request, deadline_s=min(request.deadline_s, most), reusable=is_shared(scope))
        made = await called(bounded, model.info.model_id, scope)
        generation = RayGeneration(self.routing, made, beside, scope, loading)
        await generation.start()
        return generation

    async def prepare(self, replica: str, model_id: bytes, request: GenerateRequest) -> None:
        """As `Backend.prepare`."""
        scope = self._scope(request)
        if is_shared(scope):
            made = await called(request, model_id, scope)
            await ReplicaClient(replica, self.config.timing).prepare(made)

    def _scope(self, request: GenerateRequest, cache_salt: str = "") -> str:
        """Returns who may reuse the KV of a request."""
        name = request.agent.partition("/")[2]
        return scope_of(self.config.share, request.tenant, name, request.request_id, cache_salt)

    async def pool(self, model: ServedModel, request: PoolingRequest) -> Vectors:
        """As `Backend.pool`."""
        return await RayPooling(self.routing, request).run()

    async def make_image(
        self, model: ServedModel, request: ImageRequest, told: Callable[[ImageUpdate], None]
    ) -> ImageAnswer:
        """As `Backend.make_image`."""
        return await RayImage(self.routing, request, told).run()

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        """As `Backend.do_speech`."""
        return await RaySpeech(self.routing, request, told).run()

    async def health(self) -> dict[str, bool]:
        """Returns, for every served model, whether a replica answers and the model's description is known here. One
        that comes and goes is healthy while it is not loaded."""
        known = {model.info.name for model in await self.models()}
        stats = await self.stats()
        answering = {stat.model for stat in stats if stat.answers}
        return {
            model.name: _rests(model) or (model.name in known and model.replicas_of in answering)
            for model in await self.listed()
        }

    async def stats(self) -> list[ReplicaStats]:
        placed = await self.routing.placed()

        async def ask(name: str, model: str, node: str) -> ReplicaStats:
            try:
                stats = await ReplicaClient(name, self.config.timing).stats()
            except NoAnswer:
                return ReplicaStats(name, model, answers=False, node=node)
            return replace(stats, node=stats.node or node)

        return await asyncio.gather(*(ask(name, *where) for name, where in placed.items()))

    async def pids(self) -> dict[str, int]:
        names = list(await self.routing.placed())
        infos = await asyncio.gather(*map(self.routing.info, names))
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
            raise InvalidRequest(f"{name} is in the cluster's config: remove it there", param="name")
        known = next((node for node in await self.nodes() if node.name == name), None)
        members = await asyncio.to_thread(remove_members, default_home(), name)
        if known is None and not members:
            raise NodeNotFound(f"there is no node {name!r}", param="name")
        if known is not None and known.up:
            return True
        await asyncio.to_thread(forget_node, name)
        self.routing.tell(self.routing.router.lose_node(name))
        return False

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        decision = await self.routing.router.explain(request_id)
        if decision is None:
            return None
        return asdict(
            decision if decision.node else replace(decision, node=await self.routing.placed_on(decision.replica))
        )

    async def decisions(self, after: int, most: int) -> Decisions:
        found = await self.routing.router.decisions(after, most)
        placed = {name: node for name, (_, node) in (await self.routing.placed()).items()}
        named = [
            each if each.why.node else replace(each, why=replace(each.why, node=placed.get(each.why.replica, "")))
            for each in found.decisions
        ]
        return replace(found, decisions=named)

    async def loading(self, replicas: Sequence[str]) -> dict[str, ReplicaProgress]:
        async def ask(name: str) -> ReplicaProgress | None:
            try:
                return await ReplicaClient(name, self.config.timing).progress()
            except NoAnswer:
                return None
            except SatchelError as error:
                return ReplicaProgress(f"it cannot be loaded: {error.message}", None, False)

        found = await asyncio.gather(*map(ask, replicas))
        return {name: each for name, each in zip(replicas, found, strict=True) if each is not None and not each.ready}

    async def close(self) -> None:
        """Stops reading, and aborts the sequences still running."""
        await self.routing.close()

    async def _reports(self) -> list[NodeReport]:
        """Returns the router's reports of the nodes; none while it restarts."""
        try:
            return await self.routing.router.nodes()
        except NoAnswer:
            return []

    async def _seen(self) -> SeenNodes:
        try:
            async with asyncio.timeout(self.config.timing.answer_s):
                return await asyncio.to_thread(_seen_nodes)
        except (RayError, RuntimeError, TimeoutError) as error:
            raise NoReplica("the cluster's control store does not answer now", retry_after_s=2.0) from error


def _listed(entry: ServedEntry) -> list[ListedModel]:
    """Returns a model and its adapters."""
    model = entry.model
    own = ListedModel(model.name, model.aliases, entry.comes_and_goes, bool(entry.replicas), model.source)
    adapters = model.adapters.items()
    return [own, *(replace(own, name=name, aliases=(), source=source, parent=own.name) for name, source in adapters)]


def _rests(model: ListedModel) -> bool:
    return model.comes_and_goes and not model.loaded


def _seen_nodes() -> SeenNodes:
    """Returns Ray's view of the nodes, and the memory of the one on which this process runs."""
    own, alive, here = ray.get_runtime_context().get_node_id(), [], ""
    for node in control_store.ray_nodes():
        alive += node.resources
        if node.node_id == own:
            here = next((name for name in node.resources if name.startswith("satchel-node-")), "")
    return SeenNodes(registry.nodes(), frozenset(alive), here, node_available_bytes())


def cluster_config() -> Config:
    """Returns the config of the running cluster that Ray is connected to.

    Raises:
        NoReplica: no router runs there.
    """
    try:
        return RouterClient(USUAL).config().wait()
    except NoAnswer as error:
        raise NoReplica("no Satchel router runs in this Ray cluster") from error
