"""Asks again what the cluster cannot take now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...cluster.errors import SatchelError

T = TypeVar("T")

AGAIN = (429, 503, 504)
"""The statuses of errors that may be over later."""

RETRY_S = (0.5, 30.0)
"""The least and the most seconds until a request is made again."""


async def until_taken(ask: Callable[[], Awaitable[T]]) -> T:
    """Returns the answer to a request, made again until it is taken or the caller is cancelled.

    Raises:
        SatchelError: an error that stays.
    """
    wait_s, most_s = RETRY_S
    while True:
        try:
            return await ask()
        except SatchelError as error:
            if error.status not in AGAIN:
                raise
            await asyncio.sleep(min(max(error.retry_after_s or 0.0, wait_s), most_s))
        wait_s = min(2 * wait_s, most_s)
