"""Who has been given how much, so that nobody starves others: tenants share a replica, and the flows of one its share.

Fair queueing by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), on two
levels: next is a row of the tenant that has been given least, and of its flows (an agent, or a caller without one) the
one that has been given least. Who comes back from idleness begins where those stand that were given least meanwhile:
there is no credit for having asked for nothing.

Every fourth row of a tenant is its oldest, whoever's: so no row waits for ever, however many flows a tenant makes up.
Pure: no clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

DRAWN_TOKENS = 4
"""A token that is drawn counts as so many of a prompt, about as in price lists."""

OLDEST_EVERY = 4
IDLE_MAX = 1024
"""So many that are idle are remembered on each level, those that were given most."""

FLOW_TIMES, TENANT_TIMES = 4, 16
"""No flow queues more than so many times what is left of the queue, and no tenant. So one flow alone has four fifths of
it, and there is always room for others (dynamic thresholds, Choudhury and Hahne 1998)."""


class Sharer(Protocol):
    """A row: whose it is, and its place among all by arrival."""

    @property
    def tenant(self) -> str: ...
    @property
    def flow(self) -> str: ...
    @property
    def order(self) -> int: ...


@dataclass
class _Taker:
    """`given` are tokens, or microseconds of the encoder; `rows` it has in the replica, queued or not."""

    given: int = 0
    rows: int = 0


@dataclass
class _Level:
    """Those who share something. Who is not idle has been given at least `floor`."""

    takers: dict[str, _Taker] = field(default_factory=dict)
    floor: int = 0

    def join(self, name: str) -> None:
        taker = self.takers.setdefault(name, _Taker())
        if not taker.rows:
            self.floor = max(self.floor, min((one.given for one in self.takers.values() if one.rows), default=0))
            taker.given = max(taker.given, self.floor)
        taker.rows += 1

    def leave(self, name: str) -> None:
        taker = self.takers[name]
        taker.rows -= 1
        idle = [one for one, found in self.takers.items() if not found.rows]
        if len(idle) == len(self.takers):
            self.floor = max(self.floor, taker.given)
        if len(idle) > IDLE_MAX:
            del self.takers[min(idle, key=lambda one: self.takers[one].given)]


class FairShares:
    """What each tenant and each of its flows has been given."""

    def __init__(self) -> None:
        self._tenants = _Level()
        self._flows: dict[str, _Level] = defaultdict(_Level)
        self._admitted: Counter[str] = Counter()

    @property
    def alone(self) -> bool:
        """Whether all rows are of one flow."""
        tenants = [name for name, taker in self._tenants.takers.items() if taker.rows]
        return (
            len(tenants) <= 1
            and sum(taker.rows > 0 for name in tenants for taker in self._flows[name].takers.values()) <= 1
        )

    def join(self, row: Sharer) -> None:
        """A row comes into the replica."""
        self._tenants.join(row.tenant)
        self._flows[row.tenant].join(row.flow)

    def leave(self, row: Sharer) -> None:
        """It goes."""
        self._flows[row.tenant].leave(row.flow)
        self._tenants.leave(row.tenant)
        for name in self._flows.keys() - self._tenants.takers.keys():
            del self._flows[name], self._admitted[name]

    def admit(self, row: Sharer) -> None:
        """It gets a place."""
        self._admitted[row.tenant] += 1

    def charge(self, row: Sharer, tokens: int) -> None:
        """So many tokens of a prompt were computed for it, or as many as one drawn token counts."""
        self._tenants.takers[row.tenant].given += tokens
        self._flows[row.tenant].takers[row.flow].given += tokens

    def turn(self, row: Sharer, *, taking: bool) -> tuple[int, int, int]:
        """Whoever has the least of these is next: for a place that is free, or for `taking` another's."""
        tenant = self._tenants.takers[row.tenant].given
        if not taking and self._admitted[row.tenant] % OLDEST_EVERY == OLDEST_EVERY - 1:
            return tenant, 0, row.order
        return tenant, self._flows[row.tenant].takers[row.flow].given, row.order

    def lead(self, row: Sharer, other: Sharer) -> int:
        """How much more the tenant of `row` has been given than the other's; where it is one, of the flows."""
        if row.tenant != other.tenant:
            return self._tenants.takers[row.tenant].given - self._tenants.takers[other.tenant].given
        flows = self._flows[row.tenant].takers
        return flows[row.flow].given - flows[other.flow].given


def queues_too_many(tenant: str, flow: str, waiting: Iterable[Sharer], room: int) -> bool:
    """Whether the tenant or its flow has so many waiting that the `room` which the queue has left is for others."""
    own = [row.flow for row in waiting if row.tenant == tenant]
    return own.count(flow) >= FLOW_TIMES * room or len(own) >= TENANT_TIMES * room


@dataclass(frozen=True)
class Depth:
    """How many rows are before one: of its flow, those that came sooner; of its tenant, those of the same or a lesser
    depth in their flows."""

    tenant: int
    flow: int


def depths(rows: Sequence[Sharer]) -> list[Depth]:
    """Of rows that want places, the earlier ones first. Places are even if those of the least depth have them."""
    flows: Counter[tuple[str, str]] = Counter()
    tenants: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        tenants[row.tenant].append((flows[row.tenant, row.flow], index))
        flows[row.tenant, row.flow] += 1
    found = {
        index: Depth(position, in_flow)
        for places in tenants.values()
        for position, (in_flow, index) in enumerate(sorted(places))
    }
    return [found[index] for index in range(len(rows))]
