"""Joules of what is measured, by the machine's own counters; unknown where none can be read."""

from __future__ import annotations

import time

from satchel.cluster.devices.energy import EnergyMeter, node_meter, spent

SECONDS_LEAST = 0.5
"""Counters step every tenth of a second or so: of shorter times they say little."""


class EnergySpent:
    """Counts from its making on.

    Args:
        meter: this machine's, if it is not given.
    """

    def __init__(self, meter: EnergyMeter | None = None) -> None:
        self._meter = meter or node_meter()
        self._before, self._began = self._meter.read(), time.monotonic()

    def per_token(self, tokens: int) -> float | None:
        """Returns the joules since then, by token: of all that the card or the machine does, idle power too. None if no
        counter can be read, or after a short time."""
        joules = spent(self._before, self._meter.read())
        if joules is None or not tokens or time.monotonic() - self._began < SECONDS_LEAST:
            return None
        return joules / tokens
