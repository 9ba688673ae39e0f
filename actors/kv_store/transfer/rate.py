"""A token bucket. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """How many tokens were granted; if none, ask again after `wait_s`."""

    count: int
    wait_s: float


class TokenBucket:
    """Grants `rate` tokens per second in the long run, and at most `rate * burst_s` (or one piece) at once.

    Args:
        rate: tokens per second, above zero.
        now: monotonic seconds, as in all methods.
        burst_s: for how long unused tokens accumulate.
        piece: the smallest grant, so that callers do not ask for a few tokens all the time.

    Raises:
        ValueError: `rate` is not above zero.
    """

    def __init__(self, rate: float, now: float, *, burst_s: float = 0.02, piece: int = 65_536) -> None:
        if not rate > 0:
            raise ValueError(f"a rate is above zero, not {rate}")
        self._rate = rate
        self._room = max(float(piece), rate * burst_s)
        self._piece = piece
        self._tokens = 0.0
        self._at = now

    def take(self, wanted: int, now: float) -> Grant:
        """Grants up to `wanted` tokens, at least a piece or all of `wanted`, or none."""
        self._tokens = min(self._room, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(now, self._at)
        least = min(wanted, self._piece)
        # A rounding error must not cost another wait.
        if self._tokens + 1e-6 < least:
            return Grant(0, (least - self._tokens) / self._rate)
        count = min(wanted, max(int(self._tokens), least))
        self._tokens -= count
        return Grant(count, 0.0)
