"""Who asks, and how much they may: a caller is one key, whose limits count for all its requests together. Pure.

Requests and tokens a minute are buckets that hold a minute's worth and fill steadily. A request is let in while there
is something in both; what it takes of tokens is known later, so that bucket may go below empty and has to fill first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ...cluster.errors import InvalidRequest, RateLimited
from ...cluster.keys import OWNER, KeyLimits

Clock = Callable[[], float]
"""Seconds; never goes back."""


class _Bucket:
    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, count: float) -> None:
        self._level = self.level - count

    def wait_s(self, least: float) -> float:
        """Until there is `least` in it."""
        return max(0.0, least - self.level) * 60 / self.per_minute


class Meter:
    """What one tenant takes.

    Args:
        limits: of its key.
    """

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self.limits = limits
        self.rows = 0
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    def take_request(self) -> None:
        """
        Raises:
            RateLimited: there were too many in the last minute.
        """
        if self._requests is not None:
            if self._requests.level < 1:
                raise _limited(f"{self._requests.per_minute} requests a minute", self._requests.wait_s(1))
            self._requests.take(1)

    def take_rows(self, rows: int, tokens: int) -> None:
        """Begin `rows` whose prompts have `tokens` together.

        Raises:
            RateLimited: there are too many rows already, or there were too many tokens.
        """
        most = self.limits.rows_max
        if most is not None and rows > most:
            raise InvalidRequest(f"this key may have {most} answers computed at a time; the request asks for {rows}")
        if most is not None and self.rows + rows > most:
            raise _limited(f"{most} answers at a time", 1.0)
        if self._tokens is not None:
            if self._tokens.level <= 0:
                raise _limited(f"{self._tokens.per_minute} tokens a minute", self._tokens.wait_s(1))
            self._tokens.take(tokens)
        self.rows += rows

    def end_rows(self, rows: int, tokens: int) -> None:
        """That many have ended, with `tokens` of answers."""
        self.rows -= rows
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's headers."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.per_minute):.3f}s"
        return found


def _bucket(per_minute: int | None, clock: Clock) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, clock)


def _limited(what: str, wait_s: float) -> RateLimited:
    return RateLimited(f"this key may have {what}", retry_after_s=wait_s)


@dataclass(frozen=True)
class Caller:
    """Who a request is from.

    Attributes:
        tenant: whose agents, memory and pictures these are.
        host: the client's address, "" where that says nothing. Requests without an agent queue by it.
        key: the key's id, "" where none was needed.
        admin: whether it may see and change what belongs to nobody's agents: nodes, caches, moves.
        meter: what it takes; None has no limits.
    """

    tenant: str = OWNER
    host: str = ""
    key: str = ""
    admin: bool = True
    meter: Meter | None = field(default=None, compare=False)

    @property
    def limits(self) -> KeyLimits:
        return _NO_LIMITS if self.meter is None else self.meter.limits

    @property
    def disk_limits(self) -> dict[str, int | None]:
        """What its tenant may have on a node's disk, as `store_messages.Limits`."""
        return {self.tenant: self.limits.disk_bytes_max}

    def may_use(self, model: str) -> bool:
        return not self.limits.models or model in self.limits.models

    def priority(self, asked: int) -> int:
        """The priority of its requests that ask for `asked`.

        Raises:
            InvalidRequest: that is more than it may have.
        """
        most = self.limits.priority_max
        if most is None:
            most = asked if self.admin else 0
        if asked > max(most, 0):
            raise InvalidRequest(f"priority: this key may ask for at most {most}", param="priority")
        return min(asked, most)

    def admit(self, rows: int, tokens: int) -> AdmittedRows:
        """Begin `rows` with prompts of `tokens` together.

        Raises:
            RateLimited, InvalidRequest: it may not have so many.
        """
        if self.meter is not None:
            self.meter.take_rows(rows, tokens)
        return AdmittedRows(self.meter, rows)


_NO_LIMITS = KeyLimits()
OWNING = Caller()
"""Whoever runs the server."""


class AdmittedRows:
    """Rows that were let in, until the last of them has ended."""

    def __init__(self, meter: Meter | None, rows: int) -> None:
        self._meter = meter
        self._rows = rows

    def end_row(self, tokens: int) -> None:
        """One of them has ended, with an answer of `tokens`."""
        if self._meter is not None and self._rows:
            self._rows -= 1
            self._meter.end_rows(1, tokens)

    def close(self) -> None:
        """None of the others will begin."""
        if self._meter is not None:
            self._meter.end_rows(self._rows, 0)
        self._rows = 0
