"""What a driver's handles run on: an event loop in a thread of its own, and answers read from outside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from ..cluster.errors import SlowReader

T = TypeVar("T")


class BackgroundLoop:
    """A background thread with an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="satchel", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result; not from an event loop's thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, from another event loop. Cancelling the caller cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


class Feed:
    """A turn running in a task of its own on the background loop, so that its reader may stop at any moment.

    Of a reader that does not read, only so much is kept: past `pieces_max` the turn ends with `SlowReader`, which the
    reader meets after what is kept.
    """

    def __init__(self, pieces: AsyncGenerator[str, None], pieces_max: int) -> None:
        self._pieces = pieces
        self._pieces_max = pieces_max
        self._queue: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if self._queue.qsize() >= self._pieces_max:
                        raise SlowReader(f"more than {self._pieces_max} pieces of the answer waited to be read")
                    self._queue.put_nowait(piece)
            self._queue.put_nowait(None)
        except Exception as error:
            self._queue.put_nowait(error)

    async def next(self) -> str | None:
        """The next piece; None after the last. Raises what the turn raised."""
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def close(self) -> None:
        """End the turn, if it has not ended, and wait for that."""
        self._task.cancel()
        await asyncio.wait({self._task})
