"""Machines, links and connections of a simulated group: what arrives when, and what a kernel acknowledges."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LATENCY_S = 0.001

RETRANSMIT_S = 0.2
"""A kernel sends again what was not acknowledged this long after a link is whole again."""


class Clock:
    """Virtual time: what is to be done when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Has something done later; what is due at the same time is done in the order in which it was asked for."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, do))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        self.now = until


@dataclass
class Machine:
    """A node: whether it is up, how often it has booted, and since when it was last lost to the head."""

    name: str
    up: bool = True
    boots: int = 0
    lost_since: float = 0.0


class Network:
    """The links between machines."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._cut: dict[frozenset[str], int] = {}
        self._ends: list[End] = []

    def passes(self, one: Machine, other: Machine) -> bool:
        whole = not self._cut.get(frozenset((one.name, other.name)))
        return one.up and other.up and (one is other or whole)

    def cut(self, one: Machine, other: Machine, seconds: float) -> None:
        pair = frozenset((one.name, other.name))
        self._cut[pair] = self._cut.get(pair, 0) + 1

        def heal() -> None:
            self._cut[pair] -= 1
            self.clock.after(RETRANSMIT_S, self.flush)

        self.clock.after(seconds, heal)

    def flush(self) -> None:
        """Kernels send again."""
        for end in self._ends:
            end.flush()

    def connect(self, one: Any, other: Any) -> tuple[End, End]:
        """Connects two processes, which have `machine`, `alive`, and `arrived(end)`."""
        near, far = End(self, one), End(self, other)
        near.far, far.far = far, near
        self._ends += [near, far]
        return near, far


CLOSED = ("closed",)
"""What an end hears last."""


@dataclass(eq=False)
class End:
    """One end of a connection: what has come, and what was sent and not acknowledged."""

    network: Network
    process: Any
    came: list[tuple[Any, ...]] = field(default_factory=list)
    unacknowledged: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self.far: End = self
        self._boots, self._sent = self.process.machine.boots, 0

    def send(self, *said: Any) -> None:
        if not self.closed:
            self._sent += 1
            self.unacknowledged[self._sent] = said
            self._transmit(self._sent)

    def close(self) -> None:
        self.send(*CLOSED)
        self.closed = True

    def flush(self) -> None:
        for number in list(self.unacknowledged):
            self._transmit(number)

    def _transmit(self, number: int) -> None:
        if self.network.passes(self.process.machine, self.far.process.machine):
            self.network.clock.after(LATENCY_S, lambda: self._arrives(number))

    def _arrives(self, number: int) -> None:
        far = self.far
        passes = self.network.passes(self.process.machine, far.process.machine)
        # In order: what comes before an earlier message is sent again after it.
        if not passes or next(iter(self.unacknowledged), 0) != number:
            return
        said = self.unacknowledged.pop(number)
        if far.closed or far.process.machine.boots != far._boots:
            # The other machine knows no such connection.
            self._comes(CLOSED)
        else:
            far._comes(said)

    def _comes(self, said: tuple[Any, ...]) -> None:
        if self.process.alive and self.process.machine.boots == self._boots:
            self.came.append(said)
            self.process.arrived(self)
