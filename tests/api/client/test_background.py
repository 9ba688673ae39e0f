"""Answers read from outside the loop that makes them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator

import pytest

from satchel.api.client.background import BackgroundLoop, Feed, blocking, on_loop
from satchel.api.client.cluster import Agent, Cluster
from satchel.cluster.errors import NotRunning, SlowReader

PIECES_MAX = 8


async def test_a_handle_that_does_not_read_ends_its_turn():
    """The pieces so far can still be read; then the reader gets the error."""
    ended = asyncio.Event()

    async def turn() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "word "
                await asyncio.sleep(0)
        finally:
            ended.set()

    feed = Feed(turn(), PIECES_MAX)
    await asyncio.wait_for(ended.wait(), 10)
    assert [await feed.next() for _ in range(PIECES_MAX)] == ["word "] * PIECES_MAX
    with pytest.raises(SlowReader):
        await feed.next()
    await feed.close()


def test_closing_ends_everybody_who_waits():
    loop = BackgroundLoop()
    heard: list[object] = []

    def wait_for_ever() -> None:
        try:
            loop.run(asyncio.sleep(1000))
        except NotRunning as error:
            heard.append(error.message)

    threads = [threading.Thread(target=wait_for_ever) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def elsewhere() -> None:
        waiting = asyncio.create_task(loop.wait(asyncio.sleep(1000)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(loop.close)
        with pytest.raises(NotRunning):
            await waiting

    asyncio.run(elsewhere())
    for thread in threads:
        thread.join(20)
    assert heard == ["the cluster's handle is closed"] * 3
    with pytest.raises(NotRunning):
        loop.run(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("kind", [Agent, Cluster])
def test_every_method_has_a_form_without_an_event_loop(kind: type):
    """It has the same parameters and the same docstring."""
    public = {name: method for name, method in vars(kind).items() if callable(method) and not name.startswith("_")}
    awaited = {name for name, method in public.items() if inspect.iscoroutinefunction(method)}
    assert awaited and awaited <= {name.removesuffix("_sync") for name in public if name.endswith("_sync")}
    for name in awaited:
        method, twin = public[name], public[f"{name}_sync"]
        assert not inspect.iscoroutinefunction(twin) and twin.__name__ == f"{name}_sync"
        assert inspect.signature(twin) == inspect.signature(method)
        assert inspect.getdoc(twin) == f"`{name}` for code without an event loop.\n\n{inspect.getdoc(method)}"


def test_both_forms_run_on_the_background_loop_and_raise_what_the_work_raises():
    class Worker:
        def __init__(self) -> None:
            self._loop = BackgroundLoop()

        @on_loop
        async def divide(self, number: int, *, by: int = 1) -> tuple[int, str]:
            """The quotient, and who computed it."""
            return number // by, threading.current_thread().name

        divide_sync = blocking(divide)

    worker = Worker()
    assert worker.divide_sync(6, by=2) == asyncio.run(worker.divide(6, by=2)) == (3, "satchel")
    with pytest.raises(ZeroDivisionError):
        worker.divide_sync(1, by=0)
    worker._loop.close()
    for divide in (worker.divide_sync, lambda number: asyncio.run(worker.divide(number))):
        with pytest.raises(NotRunning):
            divide(1)
