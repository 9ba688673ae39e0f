"""Results that are told of while they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

News = TypeVar("News")
Result = TypeVar("Result")


async def news_and_result(
    make: Callable[[Callable[[News], None]], Coroutine[Any, Any, Result]],
) -> AsyncGenerator[News | Result, None]:
    """Yields what is told while a result is made, and then the result. Raises as `make`. Closing it ends the making.

    Args:
        make: makes the result. Its argument is called with what there is to tell.
    """
    told: asyncio.Queue[News] = asyncio.Queue()
    made = asyncio.create_task(make(told.put_nowait))
    try:
        while not made.done():
            news = asyncio.create_task(told.get())
            try:
                await asyncio.wait({made, news}, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    yield news.result()
            finally:
                news.cancel()
        while not told.empty():
            yield told.get_nowait()
        yield made.result()
    finally:
        made.cancel()
        await asyncio.wait({made})
