"""How fast something may go: a bucket of tokens. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """How much may go now; where that is nothing, ask again after `wait_s`."""

    count: int
    wait_s: float


class TokenBucket:
    """At most `rate` a second in the long run, and `rate * burst_s` at once.

    Args:
        rate: tokens a second, above zero.
        now: seconds, of a clock that only goes forward, as in all methods.
        burst_s: how long an unused rate is kept.
        piece: the least that is granted, so that little is not asked for all the time.
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
        """Take up to `wanted` tokens, at least the smaller of `wanted` and a piece."""
        self._tokens = min(self._room, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(now, self._at)
        least = min(wanted, self._piece)
        # A fraction that rounding left out must not cost another round.
        if self._tokens + 1e-6 < least:
            return Grant(0, (least - self._tokens) / self._rate)
        count = min(wanted, max(int(self._tokens), least))
        self._tokens -= count
        return Grant(count, 0.0)
