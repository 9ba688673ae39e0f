"""The only thread that uses the database of transcripts. On a full disk it has KV make room for them. The event loop
goes on meanwhile, and changes never overlap.
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
"""How often KV is evicted to make room for a transcript on a full disk before the write is refused."""


class Work:
    """
    Args:
        ready: awaited before each request, so that forgotten agents are known.
        make_room: evicts KV, which can be recomputed, to make room on the disk.
    """

    def __init__(
        self, database: AgentDatabase, *, ready: Callable[[], Awaitable[object]], make_room: Callable[[], object]
    ) -> None:
        self.thread = ThreadPoolExecutor(1, "agents")
        self._database, self._ready, self._make_room = database, ready, make_room

    async def answer(self, work: Callable[[], T]) -> T:
        """Runs `work` for a request, and returns its result."""
        await self._ready()
        return await self.in_order(work)

    async def in_order(self, work: Callable[[], T]) -> T:
        """Runs `work` after everything that was begun before it, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.though_full, work)

    def from_thread(self, work: Callable[[], T]) -> T:
        """As `in_order`, for another thread than the event loop's. `work` only reads."""
        return self.thread.submit(work).result()

    def though_full(self, work: Callable[[], T]) -> T:
        """Runs `work`, which may write transcripts, in the thread. If the disk is full, KV is evicted and `work` runs
        again.

        `work` may run several times. If it raises, it has changed nothing.
        """
        for _ in range(ROOM_TRIES):
            try:
                return work()
            except MemoryFull as error:
                logger.warning("%s: KV makes room", error.message)
                self._database.shorten()
                self._make_room()
        return work()
