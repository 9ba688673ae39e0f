"""Nodes as their stores describe them: which are alive, and how fast KV moves between them. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..protocol.router_messages import StoreReport
from .load import measured
from .voice import Voice

ASSUMED_LINK_BYTES_PER_S = 100e6
"""Rate between nodes that have not moved anything yet: a poor gigabit network, so that pulls are rarely slower."""

LINK_WEIGHT = 0.3
"""Weight of a new measurement in the smoothed rate."""

LINK_RETRY_S = 600.0
"""A measurement below the assumed rate expires after this time, because an avoided link is never measured again."""

FIRST = 8
"""Initial length of the arrays."""

LINKS_MAX = 4096
"""How many links a node may have."""


class MeasuredLink(NamedTuple):
    """The smoothed rate of a link, and when it was last measured."""

    bytes_per_s: float
    measured_at: float


@dataclass(slots=True, eq=False)
class StoreState:
    """A node's store as its last report describes it."""

    name: str
    index: int
    voice: Voice
    blocks: int = 0
    used_bytes: int = 0
    free_bytes: int = -1
    memory_free_bytes: int = -1
    disk_full: bool = False
    disk_error: str = ""
    agents_let_go: int = 0
    joules: dict[str, float] = field(default_factory=dict)
    draining: bool = False
    links: dict[str, MeasuredLink] = field(default_factory=dict)
    """Measured links, by the node that KV came from."""


class NodeTable:
    """All nodes whose stores have reported. The figures for costs are arrays `(room,)`, indexed by a node's `index`;
    their room doubles if it is used up."""

    def __init__(self) -> None:
        self.states: dict[str, StoreState] = {}
        self._names: dict[int, str] = {}
        self._free = list(range(FIRST))
        self.seen = np.full(FIRST, -inf)
        """When each last reported, `float64`; -inf for lost ones."""
        self.disks = np.full(FIRST, -1)
        """The index of each one's disk in `Directory.runs`, `int64`."""
        self.writes = np.zeros(FIRST, bool)
        """Whether each can store what it pulls, `bool`."""
        self.draining = np.zeros(FIRST, bool)
        self.busy_until = np.full(FIRST, -inf)
        """When the pulls from each will be done, `float64`."""
        self.rates = np.full((FIRST, FIRST), ASSUMED_LINK_BYTES_PER_S)
        """Bytes per second, `(room, room) float64`: to the first node from the second."""

    def join(self, name: str, voice: Voice, disk: int) -> StoreState:
        """Adds a node, or the new process of a known one, whose measurements stay.

        Args:
            disk: the index of its disk in `Directory.runs`.
        """
        state = self.states.get(name)
        if state is not None:
            state.voice = voice
            return state
        if not self._free:
            self._grow()
        state = self.states[name] = StoreState(name, heapq.heappop(self._free), voice)
        self._names[state.index] = name
        self.disks[state.index] = disk
        for other in self.states.values():
            # Others may have measured links to it before its first report.
            self._set_rates(state, other)
        return state

    def apply(self, state: StoreState, report: StoreReport, now: float) -> None:
        """Takes the node's own figures and links from a report."""
        index = state.index
        state.blocks, state.used_bytes, state.free_bytes = report.blocks, report.used_bytes, report.free_bytes
        state.memory_free_bytes = report.memory_free_bytes
        state.disk_full, state.draining = report.disk_full, report.draining
        state.disk_error, state.agents_let_go = report.disk_error, report.agents_let_go
        state.joules = report.joules
        self.seen[index] = -inf if state.voice.lost else now
        self.writes[index], self.draining[index] = not report.disk_full, report.draining
        slow = [
            name
            for name, link in state.links.items()
            if link.bytes_per_s < ASSUMED_LINK_BYTES_PER_S and now - link.measured_at > LINK_RETRY_S
        ]
        for name in slow:
            del state.links[name]
        for name, rate in report.links.items():
            known = state.links.get(name)
            if measured(rate, 0.0) and name != state.name and (known or len(state.links) < LINKS_MAX):
                # If a link is suddenly less than half as fast, older measurements are useless.
                old = known.bytes_per_s if known and rate >= known.bytes_per_s / 2 else rate
                state.links[name] = MeasuredLink(old + LINK_WEIGHT * (rate - old), now)
        for name in {*slow, *report.links} & self.states.keys():
            self._set_rates(state, self.states[name])

    def lives(self, name: str, now: float, timeout_s: float) -> bool:
        """Whether the node is known and reported within `timeout_s`."""
        state = self.states.get(name)
        return state is not None and state.voice.lives(now, timeout_s)

    def drains(self, name: str) -> bool:
        """Whether the node is known and drained."""
        state = self.states.get(name)
        return state is not None and state.draining

    def lose(self, name: str, until: float) -> None:
        """Avoids the node until its store reports again, at `until` or later."""
        state = self.states.get(name)
        if state is not None:
            state.voice.lose(until)
            self.seen[state.index] = -inf

    def forget(self, name: str) -> None:
        """Forgets a node and all its measurements.

        Raises:
            KeyError: the node is unknown.
        """
        state = self.states.pop(name)
        state.links.clear()
        for other in self.states.values():
            other.links.pop(name, None)
        index = state.index
        self.seen[index] = self.busy_until[index] = -inf
        self.disks[index] = -1
        self.writes[index] = self.draining[index] = False
        self.rates[index, :] = self.rates[:, index] = ASSUMED_LINK_BYTES_PER_S
        del self._names[index]
        heapq.heappush(self._free, index)

    def index(self, name: str) -> int:
        """Returns the node's index, -1 if it is unknown."""
        state = self.states.get(name)
        return -1 if state is None else state.index

    def named(self, index: int) -> str:
        """Returns the name of the node with this index."""
        return self._names[index]

    def reserve(self, source: int, seconds: float, now: float) -> None:
        """Counts a pull from `source` that takes `seconds`; the next one waits for it."""
        self.busy_until[source] = max(self.busy_until[source], now) + seconds

    def check(self) -> None:
        """Checks all tables.

        Raises:
            AssertionError: they disagree.
        """
        taken = [state.index for state in self.states.values()]
        assert sorted(taken + self._free) == list(range(len(self.seen)))
        assert (self.seen[self._free] == -inf).all() and (self.disks[self._free] == -1).all()
        assert (self.rates > 0.0).all()
        for name, state in self.states.items():
            assert state.name == name == self._names[state.index] and self.disks[state.index] >= 0
            assert self.seen[state.index] == (-inf if state.voice.lost else state.voice.seen)
            assert self.draining[state.index] == state.draining
            for other, link in state.links.items():
                if other in self.states:
                    assert self.rates[state.index, self.states[other].index] == link.bytes_per_s

    def _set_rates(self, one: StoreState, other: StoreState) -> None:
        """Sets the rates between two nodes: as measured, else as measured in the other direction, else as assumed."""
        forth, back = one.links.get(other.name), other.links.get(one.name)
        for to, source, link in ((one, other, forth or back), (other, one, back or forth)):
            self.rates[to.index, source.index] = link.bytes_per_s if link else ASSUMED_LINK_BYTES_PER_S

    def _grow(self) -> None:
        old = len(self.seen)
        self.seen, self.busy_until = _doubled(self.seen, -inf), _doubled(self.busy_until, -inf)
        self.disks = _doubled(self.disks, -1)
        self.writes, self.draining = _doubled(self.writes, False), _doubled(self.draining, False)
        rates = np.full((2 * old, 2 * old), ASSUMED_LINK_BYTES_PER_S)
        rates[:old, :old] = self.rates
        self.rates = rates
        self._free = list(range(old, 2 * old))


def _doubled(array: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
    """Returns an array `(n,)` extended to `(2 n,)` with `fill`, of the same dtype."""
    return np.concatenate([array, np.full(len(array), fill, array.dtype)])
