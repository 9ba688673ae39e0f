"""Ends a process of a group that broke, within a second, whatever its threads wait for."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

LAST_MESSAGES_S = 0.4
"""Time to tell the other processes why."""


def end_soon(name: str, why: str) -> None:
    """Ends this process after `LAST_MESSAGES_S`; returns at once.

    Args:
        name: the process's, for its log.
    """
    logger.error("%s ends, because its group broke: %s", name, why)
    ending = threading.Timer(LAST_MESSAGES_S, os._exit, (1,))
    ending.daemon = True
    ending.start()
