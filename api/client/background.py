"""The background event loop on which Python handles run, and reading answers from outside it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ray.exceptions import RayError

from ...cluster.errors import NotRunning, SlowReader, Unavailable
from .watch import ServerWatch

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_END_S = 3.0
_LOOK_S = 2.0


class BackgroundLoop:
    """A background thread with an event loop. If it is closed or the server is lost, waiting and later calls raise
    `NotRunning`.

    Args:
        watch: watches the server; without it, the server never counts as lost.
    """

    def __init__(self, watch: ServerWatch | None = None) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="satchel", daemon=True)
        self._thread.start()
        if watch is not None:
            self._following = asyncio.run_coroutine_threadsafe(watch.follow(self._interrupt), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to the end and returns its result; not from an event loop's thread.

        Raises:
            NotRunning: the loop is closed or the server is lost, before or during the call.
        """
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            raise self._refusal() from None
        except (Unavailable, RayError):
            self.check()
            raise
        except BaseException:
            future.cancel()
            raise

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, from another event loop. Cancelling the caller cancels `work`.

        Raises:
            NotRunning: the loop is closed or the server is lost, before or during the call.
        """
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not self._open and not _is_cancelled():
                raise self._refusal() from None
            raise
        except (Unavailable, RayError):
            await asyncio.to_thread(self.check)
            raise

    def check(self) -> None:
        """Checks whether the server still runs; do not call it from this loop's thread.

        Raises:
            NotRunning: the loop is closed, or the server lost.
        """
        if self._open and self._watch is not None:
            with suppress(CancelledError, TimeoutError):
                asyncio.run_coroutine_threadsafe(self._watch.look(), self._loop).result(timeout=_LOOK_S)
        if not self._open:
            raise self._refusal()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._interrupt()
        self._thread.join(timeout=5)

    @property
    def _open(self) -> bool:
        return not self._closed and not (self._watch is not None and self._watch.lost)

    def _refusal(self) -> NotRunning:
        if self._watch is not None and self._watch.lost:
            return self._watch.refusal()
        return NotRunning("the cluster's handle is closed")

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._open:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._waiting.add(future)
                future.add_done_callback(self._waiting.discard)
                return future
        work.close()
        raise self._refusal()

    def _interrupt(self) -> None:
        """Ends all waiting calls at once; their work ends as soon as it can."""
        for future in list(self._waiting):
            future.cancel()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ignores errors of work for a server that is gone, because they are expected."""
        if self._open:
            loop.default_exception_handler(context)
        else:
            logger.debug("%s", context["message"], exc_info=context.get("exception"))

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


def _is_cancelled() -> bool:
    """Returns whether the running task itself was cancelled, not the future it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Feed:
    """A turn that runs in its own task on the background loop, so that its reader may stop at any moment.

    Unread pieces are limited: past `pieces_max` the turn ends with `SlowReader`, which is raised after the pieces so
    far.
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
