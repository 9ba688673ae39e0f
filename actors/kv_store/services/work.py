"""The one thread that uses the database of agents' words, and room for them on a full disk.

The event loop answers meanwhile, and no two changes meet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ....cluster.errors import MemoryFull
from ..agents.database import AgentDatabase

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_TRIES = 3
"""How often a full disk is given room for agents' words, at the cost of KV, before they are refused."""


class Work:
    """
    Args:
        ready: awaited before what somebody asks for: what was forgotten is known after it.
        make_room: has KV, which can be computed again, make room on the disk.
    """

    def __init__(
        self, database: AgentDatabase, *, ready: Callable[[], Awaitable[object]], make_room: Callable[[], object]
    ) -> None:
        self.thread = ThreadPoolExecutor(1, "agents")
        self._database, self._ready, self._make_room = database, ready, make_room

    async def answer(self, work: Callable[[], T]) -> T:
        """What `work` returns, which somebody has asked for."""
        await self._ready()
        return await self.in_order(work)

    async def in_order(self, work: Callable[[], T]) -> T:
        """What `work` returns, after all that was begun before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.though_full, work)

    def from_thread(self, work: Callable[[], T]) -> T:
        """As `in_order`, for another thread than the event loop's. `work` only reads."""
        return self.thread.submit(work).result()

    def though_full(self, work: Callable[[], T]) -> T:
        """Do, in the thread, what may write agents' words. On a full disk KV makes room for it.

        `work` may be done several times; where it raises, it has changed nothing.
        """
        for _ in range(ROOM_TRIES):
            try:
                return work()
            except MemoryFull as error:
                logger.warning("%s: KV makes room", error.message)
                self._database.shorten()
                self._make_room()
        return work()
