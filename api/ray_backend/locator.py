"""Finds the node of an agent's primary: asks the router, caches the answer, and promotes a secondary if a node is lost.

The primary of a new agent is chosen by the agent's name alone, so that all processes choose the same node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cachetools import LRUCache
from ray.exceptions import RayError

from ...actors.kv_store.replication.peers import secondary_nodes
from ...actors.protocol import control_store
from ...actors.protocol.clients import RouterClient
from ...actors.protocol.router_messages import AgentPlace
from ...actors.protocol.store_client import StoreClient
from ...actors.rpc.client import Call
from ...actors.rpc.local import NearActor
from ...cluster.config.config import Config
from ...cluster.config.nodes import Node
from ...cluster.config.timing import Timing
from ...cluster.detached import detached
from ...cluster.errors import ActorSilent, NoAnswer, SatchelError, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

Question = Callable[[StoreClient], Call[T]]
"""A call to the store of an agent's primary, made before it is known which node that is."""

KNOWN_MAX = 10_000
SILENT_READS = 20
"""A store is given up if it is silent in this many successive lists of nodes. That is longer than one operation of a
slow disk. Lists are counted instead of seconds: if the whole machine stood still, the store reports again before the
count is reached."""

FIRST_LOOK_S = 0.2
"""Time until the first check whether the node of an awaited store still runs; later checks come every `nodes_s`. Ray
takes a second to report that a process is gone."""

CONNECT_S = 0.5
"""How long the Ray process of a node may take to accept a connection."""


class AgentLocator:
    """A cache of the router's places, for one event loop. A store that is not the agent's primary raises
    `AgentElsewhere`, which corrects the cache."""

    def __init__(self, config: Config) -> None:
        self._timing = timing = config.timing
        self._router = RouterClient(timing)
        self._head = config.machines[0].name
        self._known: LRUCache[str, str] = LRUCache(KNOWN_MAX)
        self._nodes = {self._head: True}
        self._read_at = -timing.nodes_s
        self._silent_reads: dict[str, int] = {}
        self._stores: dict[str, StoreClient] = {}
        self._promotions: dict[str, asyncio.Task[str]] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        # A turn may wait this long for the one before it, and a move for KV.
        self._answer_s = config.timeouts.turn_wait_s + timing.store_answer_s

    @property
    def head(self) -> str:
        """The node that has the endpoint."""
        return self._head

    def known(self, agent: str) -> str:
        """Returns the node where the agent's memory was last found, "" if unknown."""
        return self._known.get(agent, "")

    def note(self, agent: str, node: str) -> None:
        """Caches the agent's node."""
        self._known[agent] = node

    def forget(self, agent: str) -> None:
        """Drops the agent's node from the cache."""
        self._known.pop(agent, None)

    async def moved(self, agent: str, node: str, epoch: int) -> None:
        """Caches the agent's node and tells the router, which then need not wait for the node's report.

        `epoch` is the one of the move.
        """
        self.note(agent, node)
        try:
            await self._router.moved(agent, node, epoch).within(self._timing.brief_answer_s)
        except Unavailable as error:
            logger.warning("%s", error.message)

    async def alive(self) -> list[str]:
        """Returns the nodes whose stores report; only the head if no node is known."""
        return [name for name, lives in (await self.nodes()).items() if lives] or [self._head]

    async def nodes(self) -> dict[str, bool]:
        """Returns every node that ever reported, with whether its store still reports; if the router does not answer,
        the last known state."""
        if time.monotonic() - self._read_at > self._timing.nodes_s:
            try:
                reports = await self._router.nodes().within(self._timing.brief_answer_s)
            except Unavailable as error:
                logger.warning("%s", error.message)
            else:
                self._nodes = {node.name: node.alive for node in reports}
                self._read_at = time.monotonic()
                silent = [name for name, lives in self._nodes.items() if not lives]
                self._silent_reads = {name: self._silent_reads.get(name, 0) + 1 for name in silent}
        return self._nodes

    async def check(self, node: str) -> bool:
        """Returns whether the node still runs, as far as can be told now. Used if a call to the node failed or takes
        long.

        If it has ended, the router is told, so that no process waits for the node's silence to time out.
        """
        return await _shared(self._checks, node, lambda: self._check(node))

    async def _check(self, node: str) -> bool:
        if not await has_ended(node, self._timing):
            return True
        logger.warning("nothing runs on node %s any more", node)
        try:
            await self._router.lose_node(node).within(self._timing.brief_answer_s)
        except Unavailable as error:
            logger.warning("%s", error.message)
        self._nodes[node] = False
        for agent in [agent for agent, home in self._known.items() if home == node]:
            self.forget(agent)
        return False

    async def locate(self, agent: str) -> str:
        """Returns the node of the agent's primary. If that node is lost, promotes a secondary.

        Raises:
            Unavailable: all nodes with the agent's memory are down.
        """
        if (node := self._known.get(agent)) is not None:
            return node
        place = await self.where(agent)
        if place is None:
            node = secondary_nodes(agent, await self.alive(), 1)[0]
        elif place.alive:
            node = place.home
        elif place.copies:
            node = await _shared(self._promotions, agent, lambda: self._promote(agent, place))
        else:
            lost = place.home or "a node that has left"
            raise Unavailable(f"the memory of agent {agent.partition('/')[2]!r} is on {lost}, which does not answer")
        self.note(agent, node)
        return node

    async def _promote(self, agent: str, place: AgentPlace) -> str:
        for node in place.copies:
            try:
                epoch = await self.ask(node, lambda store: store.promote(agent, place.epoch), self._timing.answer_s)
            except SatchelError as error:
                logger.warning("node %s cannot take over agent %s: %s", node, agent, error.message)
                continue
            logger.warning("agent %s lives on %s now (epoch %d); %s is lost", agent, node, epoch, place.home)
            return node
        raise Unavailable(f"no copy of the memory of agent {agent.partition('/')[2]!r} answers")

    async def where(self, agent: str) -> AgentPlace | None:
        """Returns the agent's place, None if no store knows the agent. A single node needs no router for that.

        Raises:
            Unavailable: the place is not known now.
        """
        try:
            answer = await self._router.places([agent]).within(self._timing.brief_answer_s)
        except Unavailable:
            if len(self._nodes) > 1:
                raise
            return None
        if answer.places:
            return answer.places[0]
        if answer.unheard:
            raise Unavailable(f"node {answer.unheard[0]} has not said yet which agents it has", retry_after_s=1.0)
        return None

    async def places(self, agents: Sequence[str]) -> dict[str, AgentPlace]:
        """Returns the places of several agents, without those that no store knows.

        Raises:
            Unavailable: the router does not answer.
        """
        answer = await self._router.places(agents).within(self._timing.brief_answer_s)
        return {place.agent: place for place in answer.places}

    async def ask(self, node: str, question: Question[T], timeout_s: float | None = None) -> T:
        """Returns the answer of a node's store.

        Raises:
            SatchelError: what the store raised; `Unavailable` if it has died, its node is lost, or the time is up.
        """
        timeout_s = self._answer_s if timeout_s is None else timeout_s
        store = self._stores.get(node)
        if store is None:
            store = self._stores[node] = StoreClient(node, self._timing, kind=NearActor)
        try:
            return await self._while_alive(node, question(store).within(timeout_s), timeout_s)
        except (NoAnswer, TimeoutError) as error:
            store.actor.look_up_again()
            if not isinstance(error, ActorSilent | TimeoutError):
                await self.check(node)
            message = f"the store of agents' memory on {node} does not answer now"
            raise Unavailable(message, retry_after_s=2.0) from error

    async def _while_alive(self, node: str, call: Call[T], timeout_s: float) -> T:
        """Awaits the call while the node runs. Ray takes 14 s to notice that a machine is gone, the router 5.

        Raises:
            NoAnswer: as the call.
            TimeoutError: the node is lost, or the time is up.
        """
        answer = asyncio.ensure_future(call)
        ends = time.monotonic() + timeout_s
        look_s = FIRST_LOOK_S
        try:
            while True:
                left = ends - time.monotonic()
                done, _ = await asyncio.wait({answer}, timeout=min(look_s, max(0.0, left)))
                if done:
                    return answer.result()
                if node not in await self.alive() or not await self.check(node) or time.monotonic() >= ends:
                    raise TimeoutError
                if self._silent_reads.get(node, 0) >= SILENT_READS:
                    # This is the only node, or it counts as alive because the router does not answer.
                    raise TimeoutError
                look_s = self._timing.nodes_s
        finally:
            answer.cancel()


async def _shared(tasks: dict[str, asyncio.Task[T]], key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Returns the result of `work`, run once for all concurrent callers; a caller's cancellation does not end it."""
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = detached(work())
        task.add_done_callback(lambda _: tasks.pop(key, None))
    return await asyncio.shield(task)


async def has_ended(node: str, timing: Timing) -> bool:
    """Returns whether all processes of the cluster on the node have ended. False if that cannot be told now."""
    try:
        async with asyncio.timeout(timing.brief_answer_s):
            ports = await asyncio.to_thread(_ports, Node(name=node).resource)
    except (RayError, RuntimeError, TimeoutError):
        return False
    return all(await asyncio.gather(*(_refuses(host, port) for host, port in ports)))


def _ports(resource: str) -> list[tuple[str, int]]:
    """Returns the addresses of the live Ray nodes that offer the resource, as far as Ray knows."""
    return [(node.address, node.port) for node in control_store.ray_nodes() if resource in node.resources]


async def _refuses(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
