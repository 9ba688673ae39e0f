"""A store's periodic work: it asks the other nodes what happened there, and retries what failed."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from ....cluster.config.timing import Timing
from ..replication.copies import Secondaries
from ..replication.orphans import Orphans
from ..replication.succession import Succession
from .tombstones import Tombstones

logger = logging.getLogger(__name__)

TEND_S = 5.0
"""How often failures are retried."""

LEARN_S = 60.0
"""How often the other nodes are asked."""


class Tending:
    """Made on the event loop that it lives on.

    Attributes:
        introduced: set once turns may begin here.
    """

    def __init__(
        self,
        succession: Succession,
        copies: Secondaries,
        orphans: Orphans,
        tombstones: Tombstones,
        timing: Timing,
    ) -> None:
        self._timing = timing
        self._succession, self._copies, self._orphans, self._tombstones = succession, copies, orphans, tombstones
        self._loop = asyncio.get_running_loop()
        self.introduced = asyncio.Event()

    async def ready(self) -> None:
        """Waits until this node knows for which agents it is still the primary, if the other nodes answer. Turns wait
        for this."""
        if not self.introduced.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.learn_s):
                    await self.introduced.wait()
            self.introduced.set()

    async def learn(self) -> None:
        """Asks the other nodes which agents were forgotten or moved; then turns may begin here."""
        try:
            async with asyncio.timeout(self._timing.learn_s):
                await self._succession.learn()
        except TimeoutError:
            logger.warning("the other nodes take too long to say what happened there")
        finally:
            self.introduced.set()

    def introduce(self) -> None:
        """Learns what was forgotten elsewhere before anything is announced. Called on the reporter's thread."""
        ends = time.monotonic() + self._timing.introduce_s
        while True:
            asyncio.run_coroutine_threadsafe(self.learn(), self._loop).result(2 * self._timing.learn_s)
            if self._succession.heard or time.monotonic() > ends:
                return
            time.sleep(self._timing.report_s)

    async def tend(self) -> None:
        """Retries what failed: copies, tombstones, handing over."""
        await self._succession.resolve()
        await self._copies.catch_up()
        await self._orphans.tend()
        await self._tombstones.again()

    async def run(self) -> None:
        """Runs `tend` and `learn` for ever."""
        learned_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TEND_S):
                    await self._succession.awake.wait()
            self._succession.awake.clear()
            try:
                await self.tend()
                if time.monotonic() - learned_at > LEARN_S:
                    learned_at = time.monotonic()
                    await self.learn()
            except Exception as error:
                # The next round tries again. Without this, an error would end all periodic work.
                logger.exception("what failed before fails again: %s", type(error).__name__)
            # Not more often, even if it is woken.
            await asyncio.sleep(0.1)
