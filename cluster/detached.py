"""Tasks with a context of their own.

Ray notes in the context which request it serves. It takes every call made in this context for the request's child, and
cancels them all if the client disconnects. A task that serves many requests must not be such a child.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def detached(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a task with a context of its own."""
    return asyncio.create_task(work, context=contextvars.Context())


@asynccontextmanager
async def background(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Runs `work` as a `detached` task while the context is open; at its end the task is cancelled and has ended."""
    task = detached(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class DetachedTasks:
    """Tasks that nothing need await, referenced until they end, because an event loop has only weak references to
    tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Those that have not ended."""
        return iter(set(self._tasks))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs `work` as a `detached` task. It must not raise, unless the caller awaits the task."""
        task = detached(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
