"""A rate limit: says when bytes may be sent. Pure."""

from __future__ import annotations

BURST_S = 0.02
"""Unused capacity of at most this many seconds may be sent at once."""

PIECE_BYTES = 65_536
"""The smallest piece that a sender waits for, so that it does not wait often for a few bytes."""


class Rate:
    """A limit for what several senders send together, piece by piece.

    Args:
        bytes_per_s: above zero.
        now: monotonic seconds, as in all methods.

    Raises:
        ValueError: the rate is not above zero.
    """

    def __init__(self, bytes_per_s: float, now: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate is above zero, not {bytes_per_s}")
        self._rate, self._free_at = bytes_per_s, now
        self.piece_bytes = max(PIECE_BYTES, int(bytes_per_s * BURST_S))

    def wait_s(self, nbytes: int, now: float) -> float:
        """Returns after how many seconds the next `nbytes` may be sent. They count as sent."""
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
        return max(0.0, self._free_at - now)
