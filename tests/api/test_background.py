"""Answers read from outside the loop that makes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from satchel.api.background import BackgroundLoop, Feed
from satchel.cluster.errors import NotRunning, SlowReader

PIECES_MAX = 8


async def test_a_handle_that_does_not_read_ends_its_turn():
    """What was kept can still be read; then the reader hears why there is no more."""
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
        thread.join(5)
    assert heard == ["the cluster's handle is closed"] * 3
    with pytest.raises(NotRunning):
        loop.run(asyncio.sleep(0))
    loop.close()
