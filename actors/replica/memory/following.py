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
"""A pull ends after this long without a new block. If the sequence still waits then, the next pull begins."""


async def follow(
    pull: Callable[[PullKV], Awaitable[Fetched]], wanted: PullKV, wait_s: float, waits: Callable[[], bool]
) -> bool:
    """Pulls the wanted KV while it is computed. KV that does not arrive is computed here.

    Args:
        pull: asks this node's store to pull.
        wait_s: how long at most.
        waits: whether the sequence still waits for the KV.

    Returns:
        Whether all of it arrived.
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
