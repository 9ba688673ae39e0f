"""Fair shares: tenants share a replica evenly, and a tenant's flows share what it gets. Pure: no clock.

Fair queueing by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), on two
levels: the next sequence comes from the tenant that has been given least, and among its flows (an agent, or a caller
without one) from the one that has been given least. A tenant or flow that was idle continues at the lowest counter of
the busy ones, so idleness earns no credit.

Every fourth admitted sequence of a tenant is its oldest one, of any flow. So no sequence waits for ever, however many
flows a tenant makes up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

DRAWN_TOKENS = 4
"""One generated token counts as this many prompt tokens, about as in API prices."""

OLDEST_EVERY = 4
IDLE_MAX = 1024
"""How many idle takers are remembered on each level: those that have been given most."""

FLOW_TIMES, TENANT_TIMES = 4, 16
"""A flow or a tenant may queue at most this many times the queue's free room. So a single flow gets at most four fifths
of the queue, and there is always room for others (dynamic thresholds, Choudhury and Hahne 1998)."""


class Sharer(Protocol):
    """A sequence with its tenant, its flow and its order of arrival."""

    @property
    def tenant(self) -> str: ...
    @property
    def flow(self) -> str: ...
    @property
    def order(self) -> int: ...


@dataclass
class _Taker:
    """A tenant's or flow's counters. `given` is in tokens, or in microseconds of the encoder; `sequences` counts those
    in the replica, queued or not."""

    given: int = 0
    sequences: int = 0


@dataclass
class _Level:
    """The tenants, or one tenant's flows. Those with sequences have been given at least `floor`."""

    takers: dict[str, _Taker] = field(default_factory=dict)
    floor: int = 0

    def join(self, name: str) -> None:
        """Counts a sequence of a taker. An idle taker starts at the counter of the busy taker that has been given
        least."""
        taker = self.takers.setdefault(name, _Taker())
        if not taker.sequences:
            self.floor = max(self.floor, min((one.given for one in self.takers.values() if one.sequences), default=0))
            taker.given = max(taker.given, self.floor)
        taker.sequences += 1

    def leave(self, name: str) -> None:
        """Uncounts a sequence of a taker, and forgets an idle taker if there are too many."""
        taker = self.takers[name]
        taker.sequences -= 1
        idle = [one for one, other in self.takers.items() if not other.sequences]
        if len(idle) == len(self.takers):
            self.floor = max(self.floor, taker.given)
        if len(idle) > IDLE_MAX:
            del self.takers[min(idle, key=lambda one: self.takers[one].given)]


class FairShares:
    """Counts what each tenant and each of its flows has been given."""

    def __init__(self) -> None:
        self._tenants = _Level()
        self._flows: dict[str, _Level] = defaultdict(_Level)
        self._admitted: Counter[str] = Counter()

    @property
    def alone(self) -> bool:
        """Whether all sequences are of one flow."""
        tenants = [name for name, taker in self._tenants.takers.items() if taker.sequences]
        return (
            len(tenants) <= 1
            and sum(taker.sequences > 0 for name in tenants for taker in self._flows[name].takers.values()) <= 1
        )

    def join(self, sequence: Sharer) -> None:
        """Counts a sequence that came into the replica."""
        self._tenants.join(sequence.tenant)
        self._flows[sequence.tenant].join(sequence.flow)

    def leave(self, sequence: Sharer) -> None:
        """Uncounts a sequence that left."""
        self._flows[sequence.tenant].leave(sequence.flow)
        self._tenants.leave(sequence.tenant)
        for name in self._flows.keys() - self._tenants.takers.keys():
            del self._flows[name], self._admitted[name]

    def admit(self, sequence: Sharer) -> None:
        """Counts a sequence that gets a place."""
        self._admitted[sequence.tenant] += 1

    def charge(self, sequence: Sharer, tokens: int) -> None:
        """Charges prompt tokens that were computed for a sequence, or `DRAWN_TOKENS` for a generated token."""
        self._tenants.takers[sequence.tenant].given += tokens
        self._flows[sequence.tenant].takers[sequence.flow].given += tokens

    def turn(self, sequence: Sharer, *, taking: bool) -> tuple[int, int, int]:
        """Returns a sequence's sort key: the sequence with the least is next.

        Args:
            taking: whether it would preempt another sequence to get its place.
        """
        tenant = self._tenants.takers[sequence.tenant].given
        if not taking and self._admitted[sequence.tenant] % OLDEST_EVERY == OLDEST_EVERY - 1:
            return tenant, 0, sequence.order
        return tenant, self._flows[sequence.tenant].takers[sequence.flow].given, sequence.order

    def lead(self, sequence: Sharer, other: Sharer) -> int:
        """Returns how much more the tenant of `sequence` has been given than that of `other`. If both are of one
        tenant, compares their flows."""
        if sequence.tenant != other.tenant:
            return self._tenants.takers[sequence.tenant].given - self._tenants.takers[other.tenant].given
        flows = self._flows[sequence.tenant].takers
        return flows[sequence.flow].given - flows[other.flow].given


def queues_too_many(tenant: str, flow: str, waiting: Iterable[Sharer], room: int) -> bool:
    """Whether the tenant or its flow has so many sequences waiting that the queue's free `room` is reserved for
    others."""
    own = [sequence.flow for sequence in waiting if sequence.tenant == tenant]
    return takes_too_much(own.count(flow), len(own), room)


def takes_too_much(of_flow: int, of_tenant: int, room: int) -> bool:
    """Whether a flow or its tenant has so much of something, that the free `room` is reserved for others. All are in
    one unit, such as sequences or bytes."""
    return of_flow >= FLOW_TIMES * room or of_tenant >= TENANT_TIMES * room


@dataclass(frozen=True)
class Depth:
    """How many sequences come before a sequence. In its flow those that came earlier; in its tenant those with less
    depth in their flows, or equal depth and earlier arrival."""

    tenant: int
    flow: int


def depths(sequences: Sequence[Sharer]) -> list[Depth]:
    """Returns the depth of every sequence; `sequences` are in order of arrival. If places go to the sequences of least
    depth, they are shared evenly."""
    flows: Counter[tuple[str, str]] = Counter()
    tenants: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        tenants[sequence.tenant].append((flows[sequence.tenant, sequence.flow], index))
        flows[sequence.tenant, sequence.flow] += 1
    by_index = {
        index: Depth(position, in_flow)
        for places in tenants.values()
        for position, (in_flow, index) in enumerate(sorted(places))
    }
    return [by_index[index] for index in range(len(sequences))]
