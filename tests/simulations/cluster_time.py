"""Virtual time, and processes that can be killed in it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from inspect import isawaitable
from typing import Any, TypeVar

from satchel.cluster.errors import SatchelError

T = TypeVar("T")


class Clock:
    """Stands for `time` in the actors' modules."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()

    def monotonic(self) -> float:
        return self.loop.time()

    def time(self) -> float:
        return self.loop.time()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time advances only when everything waits, and then at once.

    Attributes:
        failures: unexpected exceptions of processes' tasks.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.failures: list[BaseException] = []
        super().__init__(_Jump(self))
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Threads take no time here, but for those that wait for something: a function of such gives an awaitable."""
        done = self.create_future()
        try:
            found = func(*args)
        except Exception as error:
            done.set_exception(error)
        else:
            if isawaitable(found):
                return asyncio.ensure_future(found)
            done.set_result(found)
        return done


def _make_task(loop: Any, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    process = Process.current.get() if context is None else context.get(Process.current)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.forget)
        if not process.alive:
            task.cancel()
    return task


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop_of = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self._loop_of.now += timeout
        return []


class Process:
    """What runs in one process of a node: tasks, and all that these start. They end with it. `host` is its machine, ""
    if no machine ever sleeps."""

    current: ContextVar[Process | None] = ContextVar("process", default=None)

    def __init__(self, name: str) -> None:
        self.name, self.alive, self.host = name, True, ""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._context = copy_context()
        self._context.run(Process.current.set, self)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context)

    def run(self, work: Callable[[], T]) -> T:
        return self._context.run(work)

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Removes an ended task, and keeps its exception, because nobody may wait for it."""
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        loop = task.get_loop()
        if isinstance(loop, VirtualLoop) and error is not None and not isinstance(error, SatchelError | TimeoutError):
            loop.failures.append(error)

    def end(self) -> None:
        self.alive = False
        for task in list(self.tasks):
            task.cancel()
