"""The entries of one pull, in order, and what has become of each. Pure; `transfer.Pull` decides about them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    WAITING = "waiting"
    ASKED = "asked"
    HELD = "held"
    INSTALLING = "installing"
    INSTALLED = "installed"
    SKIPPED = "skipped"
    DROPPED = "dropped"


_HERE = (State.INSTALLED, State.SKIPPED)
_IN_HAND = (State.ASKED, State.HELD, State.INSTALLING)


@dataclass
class Item:
    """One entry. `again` counts how often it was asked for once more."""

    id: bytes
    state: State = State.WAITING
    nbytes: int = 0
    again: int = 0


class Items:
    """Blocks in the order of the chain, then tails.

    Attributes:
        blocks: how many of the items are blocks.
        first_bytes: of all items that were asked for, each counted once.
        in_hand_bytes: of what was asked for, is in memory or is being installed.
        installed, installed_bytes: what this pull brought.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.first_bytes = 0
        self.in_hand_bytes = 0
        self.installed = 0
        self.installed_bytes = 0
        self._items: list[Item] = []
        self._numbers: dict[bytes, int] = {}
        self._waiting: list[int] = []  # a heap; those that wait no longer leave it when they come to its top
        self._next = 0  # the first item that something is still to be done about
        self._installing: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Item:
        return self._items[number]

    def number_of(self, entry: bytes) -> int | None:
        return self._numbers.get(entry)

    def append(self, entry: bytes, *, block: bool) -> None:
        """Add an entry that waits, unless it is there already. All blocks come before the first tail."""
        if entry not in self._numbers:
            self._numbers[entry] = len(self._items)
            self._waiting.append(len(self._items))
            self._items.append(Item(entry))
            self.blocks += block

    def move(self, number: int, state: State) -> None:
        """Let the item be in another state, and the counters with it."""
        item = self._items[number]
        self.in_hand_bytes += item.nbytes * ((state in _IN_HAND) - (item.state in _IN_HAND))
        if state is State.WAITING and item.state is not State.WAITING:
            heapq.heappush(self._waiting, number)
        if state is State.ASKED and item.again == 0:
            self.first_bytes += item.nbytes
        if state is State.INSTALLED:
            self.installed += 1
            self.installed_bytes += item.nbytes
        item.state = state

    def in_state(self, state: State) -> list[int]:
        return [number for number, item in enumerate(self._items) if item.state is state]

    def waiting(self) -> int | None:
        """The first item that waits."""
        while self._waiting and self._items[self._waiting[0]].state is not State.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def next(self) -> int:
        """The first item that is neither here nor dropped: all others wait for it."""
        while self._next < len(self._items) and self._items[self._next].state in (*_HERE, State.DROPPED):
            self._next += 1
        return self._next

    def drop(self, numbers: Iterable[int]) -> tuple[list[int], list[bytes]]:
        """Give these up, but for what is here or is just being installed.

        Returns:
            Those that were given up, and the ids of those of them that lie in memory.
        """
        dropped, held = [], []
        for number in numbers:
            item = self._items[number]
            if item.state is State.HELD:
                held.append(item.id)
            if item.state in (State.WAITING, State.ASKED, State.HELD):
                self.move(number, State.DROPPED)
                dropped.append(number)
        return dropped, held

    def ready(self, count_max: int) -> tuple[list[int], int]:
        """What can be installed next, at most `count_max` items, and its bytes."""
        found: list[int] = []
        nbytes = 0
        for number in range(self.next(), len(self._items)):
            item = self._items[number]
            if item.state is State.HELD:
                found.append(number)
                nbytes += item.nbytes
            elif item.state not in (State.SKIPPED, State.DROPPED):
                break
            if len(found) == count_max:
                break
        return found, nbytes

    @property
    def installing(self) -> bool:
        return bool(self._installing)

    def install(self, numbers: Sequence[int]) -> tuple[bytes, ...]:
        """Let these be the ones that are being installed. Returns their ids."""
        self._installing = list(numbers)
        for number in numbers:
            self.move(number, State.INSTALLING)
        return tuple(self._items[number].id for number in numbers)

    def installed_now(self, ids: Iterable[bytes]) -> None:
        done = set(ids)
        for number in [number for number in self._installing if self._items[number].id in done]:
            self._installing.remove(number)
            self.move(number, State.INSTALLED)

    def install_failed(self) -> None:
        for number in self._installing:
            self.move(number, State.DROPPED)
        self._installing = []

    def blocks_here(self) -> int:
        """How many of the chain's first blocks are here."""
        number = 0
        while number < self.blocks and self._items[number].state in _HERE:
            number += 1
        return number

    def here(self) -> list[bytes]:
        """The ids of the blocks that are here, from the first on, and of the tails where that is all of them."""
        count = self.blocks_here()
        tails = self._items[self.blocks :] if count == self.blocks else []
        return [item.id for item in (*self._items[:count], *tails) if item.state in _HERE]
