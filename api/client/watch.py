"""Watches whether the server of Python handles still runs. Ray notices its end after a minute or never; this file
notices it within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...cluster.errors import NotRunning
from ...cluster.patches import rest_ray_listener
from ...cluster.processes import ProcessMark

LOOK_S = 0.5
"""Seconds between two checks."""

KNOCK_S = 1.0
"""How long the control store may take to accept a connection."""

SILENCE_S = 6.0
SILENT_LOOKS = 5
"""The control store is lost if it accepts no connection for this many seconds and in this many checks. Checks are
counted too, because time also passes while this process, or its machine, stands still."""


class ServerWatch:
    """Watches the server of one cluster, on one event loop.

    The server has ended for good if its process has ended, or if its machine refuses connections to Ray's control
    store. If nothing answers, the server is lost until something answers.

    Args:
        address: the control store's, `HOST:PORT`.
        process: the server's, if it runs on this machine.
    """

    def __init__(self, address: str, process: ProcessMark | None = None) -> None:
        self._address = address
        self._process = process
        self._ended = False
        self._heard_at = time.monotonic()
        self._silent_looks = 0

    @property
    def ended(self) -> bool:
        """Whether the server has ended for good."""
        return self._ended

    @property
    def lost(self) -> bool:
        """Whether the cluster can answer no calls now."""
        silent = self._silent_looks >= SILENT_LOOKS and time.monotonic() - self._heard_at >= SILENCE_S
        return self._ended or silent

    def refusal(self) -> NotRunning:
        """Returns the error of all calls while the server is lost."""
        if self._ended:
            return NotRunning(
                f"the server (control store {self._address}) has ended; start it with `satchel serve`, then `connect()`"
            )
        return NotRunning(f"the server (control store {self._address}) does not answer; it may come back")

    async def look(self) -> None:
        """Checks once, for at most `KNOCK_S`."""
        if self._process is not None and not self._process.is_alive():
            self._end()
            return
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(*host_and_port(self._address))
        except ConnectionRefusedError:
            self._end()
        except (OSError, TimeoutError):
            self._silent_looks += 1
        else:
            writer.close()
            self._heard_at, self._silent_looks = time.monotonic(), 0

    def _end(self) -> None:
        self._ended = True
        rest_ray_listener()

    async def follow(self, on_lost: Callable[[], None]) -> None:
        """Checks until the server has ended, and calls `on_lost` each time that it is lost."""
        while not self._ended:
            before = self.lost
            await self.look()
            if self.lost and not before:
                on_lost()
            await asyncio.sleep(LOOK_S)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
