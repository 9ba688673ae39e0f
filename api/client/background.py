"""The background event loop on which Python handles run, and reading answers from outside it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ...cluster.errors import NotRunning, SlowReader

T = TypeVar("T")
P = ParamSpec("P")

_END_S = 3.0


class BackgroundLoop:
    """A background thread with an event loop. Calls that wait when it is closed, and later ones, raise `NotRunning`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="satchel", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to the end and returns its result; not from an event loop's thread.

        Raises:
            NotRunning: the loop is closed, or closes meanwhile.
        """
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            raise _closed() from None
        except BaseException:
            future.cancel()
            raise

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, from another event loop. Cancelling the caller cancels `work`.

        Raises:
            NotRunning: the loop is closed, or closes meanwhile.
        """
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and not _is_cancelled():
                raise _closed() from None
            raise

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(timeout=5)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise _closed()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_END_S)
        self._loop.stop()


class Handle(Protocol):
    """An object with methods that run on a background loop."""

    _loop: BackgroundLoop


H = TypeVar("H", bound=Handle)
Method = Callable[Concatenate[H, P], Coroutine[Any, Any, T]]


def on_loop(method: Method[H, P, T]) -> Method[H, P, T]:
    """Makes a method run on the background loop, whatever loop it is awaited on."""

    @wraps(method)
    async def wait(self: H, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.wait(method(self, *args, **kwargs))

    return wait


def blocking(method: Method[H, P, T]) -> Callable[Concatenate[H, P], T]:
    """Makes the synchronous form of a method made by `on_loop`. Its name is that method's with `_sync`."""
    inside: Method[H, P, T] = inspect.unwrap(method)

    @wraps(inside)
    def run(self: H, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(inside(self, *args, **kwargs))

    run.__name__, run.__qualname__ = f"{inside.__name__}_sync", f"{inside.__qualname__}_sync"
    run.__doc__ = f"`{inside.__name__}` for code without an event loop.\n\n{inspect.getdoc(inside)}"
    return run


def _closed() -> NotRunning:
    return NotRunning("the cluster's handle is closed")


def _is_cancelled() -> bool:
    """Returns whether the running task itself was cancelled, not the future it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Feed:
    """A turn running in a task of its own on the background loop, so that its reader may stop at any moment.

    Unread pieces are bounded: past `pieces_max` the turn ends with `SlowReader`, raised after the pieces kept so far.
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
        """Returns the next piece; None after the last. Raises what the turn raised."""
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def close(self) -> None:
        """Ends the turn if it still runs, and waits for its end."""
        self._task.cancel()
        await asyncio.wait({self._task})
