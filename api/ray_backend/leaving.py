"""Removes a node from its cluster for good: its sequences end or fail over, then its agents move to other nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...actors.kv_store.replication.peers import secondary_nodes
from ...actors.protocol.clients import ReplicaClient, RouterClient
from ...actors.protocol.store_client import StoreClient
from ...actors.start import drain
from ...cluster.config.nodes import Node
from ...cluster.config.timing import Timing
from ...cluster.errors import NoAnswer, SatchelError

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""How many agents are moved at the same time. Several, because a move waits for the network and for disks."""


@dataclass(frozen=True)
class HandedOver:
    """How many agents moved to a new primary, and how many are left with only their secondaries."""

    moved: int = 0
    left: int = 0


async def drain_and_hand_over(replicas: Mapping[str, ReplicaClient], node: Node, timing: Timing) -> HandedOver:
    """Drains a node: it accepts no new agents, its sequences have `node_drain_s` to end and the others fail over, then
    its agents move to other nodes within `hand_over_s`.

    Raises:
        SatchelError: the node's store or the router does not answer.
    """
    answer_s = timing.brief_answer_s
    try:
        store = StoreClient(node.name, timing)
        await store.drain().within(answer_s)
    finally:
        await drain(replicas, timing.node_drain_s, timing, leaves=True)

    router = RouterClient(timing)
    nodes = await router.nodes().within(answer_s)
    others = [other.name for other in nodes if other.alive and other.name != node.name]
    agents = await router.agents_on(node.name).within(answer_s)
    if not others:
        return HandedOver(left=len(agents))

    async def move(agent: str) -> bool:
        places = (await router.places([agent]).within(answer_s)).places
        # Prefer a node with a secondary, which already has most of the agent's data.
        copies = [copy for place in places for copy in place.copies]
        # `hand_over` limits the time.
        to = next(iter(copies), secondary_nodes(agent, others, 1)[0])
        try:
            # The turn of a sequence that has just failed over may take longer than this node stays.
            await store.move(agent, to, at_once=True).within(timing.hand_over_s)
        except NoAnswer:
            raise
        except SatchelError as error:
            logger.warning("agent %s is not handed over: %s", agent, error.message)
            return False
        return True

    return await hand_over(agents, move, timing.hand_over_s)


async def hand_over(agents: list[str], move: Callable[[str], Awaitable[bool]], within_s: float) -> HandedOver:
    """Moves all agents, a few at the same time; those that have not moved after `within_s` are left.

    Args:
        move: moves one agent and returns whether it has a new primary.
    """
    waiting, moved = iter(agents), 0
    ends = time.monotonic() + within_s

    async def move_some() -> None:
        nonlocal moved
        for agent in waiting:
            try:
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    has_moved = await move(agent)
                moved += has_moved
            except (NoAnswer, TimeoutError) as error:
                logger.warning("agent %s is not handed over: %s", agent, type(error).__name__)
            if time.monotonic() >= ends:
                return

    await asyncio.gather(*(move_some() for _ in range(AT_ONCE)))
    return HandedOver(moved, len(agents) - moved)
