"""The other nodes' stores, and which of them keep copies. `Peers` calls them; `RayPeers` does so over Ray."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from ....cluster.errors import NoAnswer, Unavailable, from_wire
from ....cluster.timing import Timing
from ..agents.branches import Content, Head

logger = logging.getLogger(__name__)


class Peers(Protocol):
    """For one event loop."""

    async def others(self) -> list[str]:
        """The nodes that live, but for this one."""
        ...

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the store of a node answers.

        Raises:
            SatchelError: what it raised, or `Unavailable` where it does not answer in time.
        """
        ...


def copy_nodes(agent: str, nodes: Iterable[str], count: int) -> list[str]:
    """Where an agent's copies belong: the same for all who ask, spread evenly, and few change when nodes come and go
    (rendezvous hashing)."""

    def weight(node: str) -> bytes:
        return hashlib.blake2b(f"{node}\0{agent}".encode(), digest_size=8).digest()

    return sorted(nodes, key=weight, reverse=True)[:count]


def head_to_wire(head: Head) -> dict[str, Any]:
    return asdict(head)


def head_from_wire(fields: dict[str, Any]) -> Head:
    return Head(**fields)


def content_to_wire(content: Content) -> list[Any]:
    return [content.tokens, content.text, content.messages]


class RayPeers:
    """The stores of the cluster that this actor lives in.

    Args:
        node: this one.
        timing: of the cluster.
    """

    def __init__(self, node: str, timing: Timing) -> None:
        self._node, self._timing = node, timing
        self._others: list[str] = []
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None

    async def others(self) -> list[str]:
        age_s = float("inf") if self._read_at is None else time.monotonic() - self._read_at
        if age_s > self._timing.peers_s and self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if age_s > self._timing.peers_old_s and self._reading is not None:
            # Else turns need not wait for a router that is slow.
            await asyncio.shield(self._reading)
        return self._others

    async def _read(self) -> None:
        try:
            self._others = await asyncio.to_thread(self._ask_router)
            self._read_at = time.monotonic()
        finally:
            self._reading = None

    def _ask_router(self) -> list[str]:
        from ...protocol.clients import RouterClient

        try:
            found = RouterClient(self._timing).nodes().within(self._timing.brief_answer_s).wait()
        except NoAnswer as error:
            # The router restarts; those who were there before are the best guess.
            logger.warning("the router does not say which nodes there are: %s", type(error).__name__)
            return self._others
        return [state.name for state in found if state.alive and state.name != self._node]

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        from ray.exceptions import RayError

        from ...protocol.handles import actor_handle, store_actor_name

        try:
            async with asyncio.timeout(timeout_s):
                handle = await asyncio.to_thread(actor_handle, store_actor_name(node))
                answer = await getattr(handle, method).remote(*arguments)
        except (RayError, ValueError, TimeoutError) as error:
            # It may be gone, and then nobody is to wait for it again: the next one asks who is there.
            self._read_at = None
            raise Unavailable(f"the store of node {node} does not answer: {type(error).__name__}") from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]
