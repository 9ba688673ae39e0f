"""Answers read from outside the loop that makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from satchel.api.background import Feed
from satchel.cluster.errors import SlowReader

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
