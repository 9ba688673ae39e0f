"""Pulls the KV of a prompt while another node computes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ....cluster.errors import QueueFull, SatchelError
from ...protocol.store_messages import Fetched, PullKV

logger = logging.getLogger(__name__)

FOLLOW_S = 0.5
"""A pull ends after so long without a new block. Then it is looked whether the sequence still waits, and the next
begins."""


async def follow(
    pull: Callable[[PullKV], Awaitable[Fetched]], wanted: PullKV, wait_s: float, waits: Callable[[], bool]
) -> bool:
    """Pulls what is wanted as it is made. What does not come is computed.

    Args:
        pull: asks this node's store.
        wait_s: how long at the most.
        waits: whether the sequence still waits for it.

    Returns:
        Whether all of it came.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while waits() and (left_s := until - loop.time()) > 0:
        asked = replace(wanted, deadline_s=min(wanted.deadline_s, left_s), wait_s=FOLLOW_S)
        try:
            came = await pull(asked)
        except QueueFull:
            await asyncio.sleep(FOLLOW_S)
            continue
        except SatchelError as error:
            logger.warning("what %s prefills for %s is not pulled: %s", wanted.source, wanted.owner, error.message)
            return False
        if came.complete or not came.more:
            return came.complete
    return False
