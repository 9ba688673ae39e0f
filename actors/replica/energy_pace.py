"""The joules that a replica's tokens take, from readings of its node's counters. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...cluster.devices.energy import spent

DECODED_LEAST, PREFILLED_LEAST = 8, 256
"""Tokens between two readings; with fewer of them the reading says little of each."""

WEIGHT = 0.2
"""Of a new measurement in the average."""


@dataclass(frozen=True)
class EnergyReading:
    """What has been counted so far.

    Attributes:
        joules: by source.
        computed, generated: tokens prefilled, and decoded.
        running: sequences now.
    """

    joules: dict[str, float]
    computed: int
    generated: int
    running: int


class EnergyPace:
    """Joules a token, as averages over times in which sequences ran at the begin and at the end.

    While nothing is prefilled all energy is the decoded tokens'. Otherwise what these usually take is subtracted, and
    the rest is the prefilled tokens'. All that the counters count is in it: idle power, and what other programs and
    replicas on the device take meanwhile.

    Attributes:
        prefill_token_j, decode_token_j: 0 until they are measured.
    """

    def __init__(self) -> None:
        self.prefill_token_j = self.decode_token_j = 0.0
        self._last: EnergyReading | None = None

    def note(self, reading: EnergyReading) -> None:
        """Takes the next reading."""
        last, self._last = self._last, reading
        if last is None or not last.running or not reading.running:
            return
        joules = spent(last.joules, reading.joules)
        computed, generated = reading.computed - last.computed, reading.generated - last.generated
        if not joules or computed < 0 or generated < 0:
            return
        if not computed and generated >= DECODED_LEAST:
            self.decode_token_j = _averaged(self.decode_token_j, joules / generated)
        elif computed >= PREFILLED_LEAST and (self.decode_token_j or not generated):
            rest = joules - generated * self.decode_token_j
            if rest > 0.0:
                self.prefill_token_j = _averaged(self.prefill_token_j, rest / computed)


def _averaged(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
