"""The actor of the pool: what `Pool` decides, done with Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from ...cluster.config.config import Config, Model
from ...cluster.config.nodes import Node
from ...cluster.errors import InvalidRequest, ModelLoadError, NoAnswer, SatchelError
from ...cluster.placement import place
from ...cluster.telemetry.process import begin_telemetry
from ..protocol import registry
from ..protocol.clients import PoolClient, ReplicaClient
from ..protocol.names import POOL
from ..protocol.pool_messages import PooledModel
from ..protocol.replica_messages import ReplicaStats
from ..rpc.client import actor_class
from ..rpc.shell import answers
from ..start import (
    Replicas,
    Report,
    differing,
    end_replicas,
    forget_replicas,
    infos_of,
    kill,
    known_replicas,
    on_node,
    present_nodes,
    start_replicas,
    wait_until_ready,
)
from ..supervision.watchdog import Watchdog
from .needs import weights_bytes
from .pool import LoadLost, Pool, View

logger = logging.getLogger(__name__)

PRESENT_S = 1.0
"""How often a load checks whether its nodes are present."""


def start_pool(config: Config) -> None:
    """Starts the pool on the head, if the config has models that come and go."""
    if any(model.load == "request" for model in config.models):
        actor_class(PoolActor).options(name=POOL, **on_node(config.machines[0])).remote(config)


class PoolActor:
    """The actor that loads and unloads models. Named `pool` in the cluster's namespace. It is called through
    `PoolClient`, which says what its methods do."""

    def __init__(self, config: Config) -> None:
        begin_telemetry(POOL, config.logs, config.traces)
        self._pool = Pool(ReplicaWork(config))
        loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(POOL, poll_s=config.timing.heartbeat_s)
        self._watchdog.watch("event loop", loop.call_soon_threadsafe)
        self._watchdog.start()
        self._running = loop.create_task(self._pool.run())

    @answers(PoolClient.ensure)
    async def ensure(self, name: str, wait_s: float) -> PooledModel:
        return await self._pool.ensure(name, wait_s)

    @answers(PoolClient.unload)
    async def unload(self, name: str) -> None:
        self._pool.unload(name)

    @answers(PoolClient.give_room)
    async def give_room(self, nodes: Sequence[str], wait_s: float) -> bool:
        return await self._pool.give_room(nodes, wait_s)

    @answers(PoolClient.models)
    async def models(self) -> list[PooledModel]:
        return self._pool.models()


class ReplicaWork:
    """`pool.Work` with replicas of a running cluster."""

    def __init__(self, config: Config) -> None:
        self._config, self._timing = config, config.timing

    async def look(self) -> View:
        entries, nodes = await asyncio.to_thread(lambda: (registry.entries(), present_nodes(self._config)))
        placed = [replica for entry in entries for replica in entry.replicas]
        answers = await asyncio.gather(*map(self._ask, placed))
        found = dict(zip(placed, answers, strict=True))
        return View(
            entries,
            {name: self._memory_bytes_max(node) for name, node in nodes.items()},
            {name: one for name, one in found.items() if isinstance(one, ReplicaStats)},
            {name: one for name, one in found.items() if not isinstance(one, ReplicaStats) and one is not None},
        )

    async def _ask(self, name: str) -> ReplicaStats | tuple[str, float | None] | SatchelError | None:
        """Returns a replica's figures; if its model is not loaded, what it does, or why it cannot be loaded; None if it
        does not answer."""
        replica, wait_s = ReplicaClient(name, self._timing), self._timing.brief_answer_s
        try:
            progress = await replica.progress().within(wait_s)
            if progress.ready:
                return await replica.stats().within(wait_s)
            return progress.what, progress.fraction
        except NoAnswer:
            return None
        except SatchelError as error:
            return error

    def _memory_bytes_max(self, node: Node) -> int | None:
        own = node.memory_bytes_max
        return self._config.scheduling.memory_bytes_max if own is None else own

    async def need(self, model: Model) -> int:
        return await asyncio.to_thread(weights_bytes, model)

    async def load(self, model: Model, placed: Mapping[str, str], report: Report) -> None:
        """As `Work.load`."""
        nodes = await asyncio.to_thread(present_nodes, self._config)
        if lost := [node for node in placed.values() if node not in nodes]:
            raise LoadLost(f"the node {lost[0]} is away")
        where = {replica: nodes[name] for replica, name in placed.items()}
        try:
            replicas = await asyncio.to_thread(start_replicas, model, self._config, where)
        except InvalidRequest as error:
            # Left over from a pool before this one.
            await self._end(placed)
            raise LoadLost(error.message) from error
        try:
            await self._until_ready(replicas, where, report)
            for sentence in differing(await infos_of(replicas, self._timing)):
                logger.warning("%s", sentence)
            # Not in a thread: a cancellation must not come between the entries and this coroutine.
            for replica, node in placed.items():
                registry.place(model, replica, node)
        except BaseException as error:
            kill(replicas)
            if isinstance(error, Exception):
                await forget_replicas(replicas, self._timing)
            raise

    async def _until_ready(self, replicas: Replicas, where: Mapping[str, Node], report: Callable[..., None]) -> None:
        """Waits until the replicas have loaded their model.

        Raises:
            LoadLost: one died, or its node was lost.
            ModelLoadError: one cannot load it, or not in time.
        """
        ready = asyncio.ensure_future(wait_until_ready(replicas, self._config.timeouts.model_load_s, report))
        try:
            while not ready.done():
                await asyncio.wait({ready}, timeout=PRESENT_S)
                present = await asyncio.to_thread(present_nodes, self._config)
                if lost := [node.name for node in where.values() if node.name not in present]:
                    raise LoadLost(f"the node {lost[0]} is away")
            ready.result()
        except ModelLoadError as error:
            if isinstance(error.__cause__, NoAnswer):
                raise LoadLost(error.message) from error
            raise
        finally:
            ready.cancel()
            await asyncio.wait({ready})

    async def unload(self, replicas: Sequence[str]) -> None:
        """As `Work.unload`."""
        for replica in replicas:
            await asyncio.to_thread(registry.unplace, replica)
        timeouts = self._config.timeouts
        # Every request ends by its deadline.
        await end_replicas(await self._known(replicas), self._timing, timeouts.request_s + timeouts.drain_s)

    async def _end(self, replicas: Mapping[str, str]) -> None:
        """Ends replicas at once."""
        known = await self._known(list(replicas))
        kill(known)
        await forget_replicas(known, self._timing)

    async def _known(self, replicas: Sequence[str]) -> dict[str, ReplicaClient]:
        """Returns those that Ray knows."""
        return await asyncio.to_thread(known_replicas, replicas, self._timing)

    async def leftovers(self, model: Model) -> list[str]:
        """As `Work.leftovers`."""
        nodes = await asyncio.to_thread(present_nodes, self._config)
        try:
            names = list(place(model, list(nodes)))
        except SatchelError:
            return []
        return list(await self._known(names))
