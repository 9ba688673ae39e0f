"""Callers and their rate limits. A caller is one key, whose limits count for all its requests together. Pure.

Requests and tokens per minute are token buckets of a minute's capacity that fill steadily. A request is admitted while
neither is empty. Its token count is known only later, so the token bucket may go below zero and then has to refill.
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
        """Returns the time until the level reaches `least`."""
        return max(0.0, least - self.level) * 60 / self.per_minute


class Meter:
    """The usage of one key, checked against its `limits`."""

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self.limits = limits
        self.sequences = 0
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    def take_request(self) -> None:
        """Counts one request.

        Raises:
            RateLimited: there were too many in the last minute.
        """
        if self._requests is not None:
            if self._requests.level < 1:
                raise _limited(f"{self._requests.per_minute} requests a minute", self._requests.wait_s(1))
            self._requests.take(1)

    def take_sequences(self, sequences: int, tokens: int) -> None:
        """Counts `sequences` as running, and the `tokens` of all their prompts.

        Raises:
            InvalidRequest: the key never allows so many sequences.
            RateLimited: too many sequences are running, or there were too many tokens in the last minute.
        """
        most = self.limits.rows_max
        if most is not None and sequences > most:
            raise InvalidRequest(f"this key may have {most} concurrent answers; the request asks for {sequences}")
        if most is not None and self.sequences + sequences > most:
            raise _limited(f"{most} concurrent answers", 1.0)
        if self._tokens is not None:
            if self._tokens.level <= 0:
                raise _limited(f"{self._tokens.per_minute} tokens a minute", self._tokens.wait_s(1))
            self._tokens.take(tokens)
        self.sequences += sequences

    def end_sequences(self, sequences: int, tokens: int) -> None:
        """Counts `sequences` as ended, and the `tokens` of their answers."""
        self.sequences -= sequences
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """Returns what is left, in OpenAI's headers."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.per_minute):.3f}s"
        return headers


def _bucket(per_minute: int | None, clock: Clock) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, clock)


def _limited(what: str, wait_s: float) -> RateLimited:
    return RateLimited(f"this key may have {what}", retry_after_s=wait_s)


@dataclass(frozen=True)
class Caller:
    """The origin of a request.

    Attributes:
        tenant: owner of the agents, memory and pictures.
        host: the client's address, "" if unknown. Requests without an agent are queued by it.
        key: the key's id, "" if the endpoint needs no key.
        admin: whether it may see and change what belongs to no agent: nodes, caches, moves.
        meter: its usage; None has no limits.
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
        """The tenant's quota on a node's disk, as `store_messages.Limits`."""
        return {self.tenant: self.limits.disk_bytes_max}

    def may_use(self, model: str) -> bool:
        return not self.limits.models or model in self.limits.models

    def priority(self, asked: int) -> int:
        """Returns the priority of a request that asks for `asked`.

        Raises:
            InvalidRequest: the key does not allow that much.
        """
        most = self.limits.priority_max
        if most is None:
            most = asked if self.admin else 0
        if asked > max(most, 0):
            raise InvalidRequest(f"priority: this key may ask for at most {most}", param="priority")
        return min(asked, most)

    def admit(self, sequences: int, tokens: int) -> AdmittedSequences:
        """Admits `sequences` whose prompts have `tokens` together.

        Raises:
            RateLimited, InvalidRequest: as `Meter.take_sequences`.
        """
        if self.meter is not None:
            self.meter.take_sequences(sequences, tokens)
        return AdmittedSequences(self.meter, sequences)


_NO_LIMITS = KeyLimits()
OWNING = Caller()
"""The owner of the server."""


class AdmittedSequences:
    """Admitted sequences, until the last of them has ended."""

    def __init__(self, meter: Meter | None, sequences: int) -> None:
        self._meter = meter
        self._sequences = sequences

    def end_sequence(self, tokens: int) -> None:
        """Counts one of them as ended, with an answer of `tokens`."""
        if self._meter is not None and self._sequences:
            self._sequences -= 1
            self._meter.end_sequences(1, tokens)

    def close(self) -> None:
        """Gives back the sequences that have not ended."""
        if self._meter is not None:
            self._meter.end_sequences(self._sequences, 0)
        self._sequences = 0
