"""The entries of one pull, in order, and their states. Pure; `Pull` decides about them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class ItemState(Enum):
    WAITING = "waiting"
    ASKED = "asked"
    HELD = "held"
    INSTALLING = "installing"
    INSTALLED = "installed"
    SKIPPED = "skipped"
    DROPPED = "dropped"


_HERE = (ItemState.INSTALLED, ItemState.SKIPPED)
_IN_HAND = (ItemState.ASKED, ItemState.HELD, ItemState.INSTALLING)


@dataclass
class Item:
    """One entry. `again` counts its retries."""

    id: bytes
    state: ItemState = ItemState.WAITING
    nbytes: int = 0
    again: int = 0


class Items:
    """Blocks in the order of the chain, then tails.

    Attributes:
        blocks: how many of the items are blocks.
        first_bytes: bytes of all items ever fetched, each counted once.
        in_hand_bytes: bytes of items that are outstanding, in memory or being installed.
        installed, installed_bytes: entries that this pull brought, and their bytes.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.first_bytes = 0
        self.in_hand_bytes = 0
        self.installed = 0
        self.installed_bytes = 0
        self._items: list[Item] = []
        self._numbers: dict[bytes, int] = {}
        self._waiting: list[int] = []  # a heap; items that no longer wait are removed when they reach its top
        self._next = 0  # the first unfinished item
        self._installing: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Item:
        return self._items[number]

    def number_of(self, entry: bytes) -> int | None:
        return self._numbers.get(entry)

    def append(self, entry: bytes, *, block: bool) -> None:
        """Adds a waiting entry, unless it exists already. Add all blocks before the first tail."""
        if entry not in self._numbers:
            self._numbers[entry] = len(self._items)
            self._waiting.append(len(self._items))
            self._items.append(Item(entry))
            self.blocks += block

    def move(self, number: int, state: ItemState) -> None:
        """Changes an item's state and updates the counters."""
        item = self._items[number]
        self.in_hand_bytes += item.nbytes * ((state in _IN_HAND) - (item.state in _IN_HAND))
        if state is ItemState.WAITING and item.state is not ItemState.WAITING:
            heapq.heappush(self._waiting, number)
        if state is ItemState.ASKED and item.again == 0:
            self.first_bytes += item.nbytes
        if state is ItemState.INSTALLED:
            self.installed += 1
            self.installed_bytes += item.nbytes
        item.state = state

    def in_state(self, state: ItemState) -> list[int]:
        return [number for number, item in enumerate(self._items) if item.state is state]

    def waiting(self) -> int | None:
        """Returns the first waiting item."""
        while self._waiting and self._items[self._waiting[0]].state is not ItemState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def next(self) -> int:
        """Returns the first item that is neither here nor dropped; later ones cannot be installed before it."""
        while self._next < len(self._items) and self._items[self._next].state in (*_HERE, ItemState.DROPPED):
            self._next += 1
        return self._next

    def drop(self, numbers: Iterable[int]) -> tuple[list[int], list[bytes]]:
        """Drops items, except those that are here or being installed.

        Returns:
            The dropped items, and the ids of those that were in memory.
        """
        dropped, held = [], []
        for number in numbers:
            item = self._items[number]
            if item.state is ItemState.HELD:
                held.append(item.id)
            if item.state in (ItemState.WAITING, ItemState.ASKED, ItemState.HELD):
                self.move(number, ItemState.DROPPED)
                dropped.append(number)
        return dropped, held

    def ready(self, count_max: int) -> tuple[list[int], int]:
        """Returns up to `count_max` items that can be installed next, and their bytes."""
        items: list[int] = []
        nbytes = 0
        for number in range(self.next(), len(self._items)):
            item = self._items[number]
            if item.state is ItemState.HELD:
                items.append(number)
                nbytes += item.nbytes
            elif item.state not in (ItemState.SKIPPED, ItemState.DROPPED):
                break
            if len(items) == count_max:
                break
        return items, nbytes

    @property
    def installing(self) -> bool:
        return bool(self._installing)

    def install(self, numbers: Sequence[int]) -> tuple[bytes, ...]:
        """Marks these as being installed. Returns their ids."""
        self._installing = list(numbers)
        for number in numbers:
            self.move(number, ItemState.INSTALLING)
        return tuple(self._items[number].id for number in numbers)

    def installed_now(self, ids: Iterable[bytes]) -> None:
        done = set(ids)
        for number in [number for number in self._installing if self._items[number].id in done]:
            self._installing.remove(number)
            self.move(number, ItemState.INSTALLED)

    def install_failed(self) -> None:
        for number in self._installing:
            self.move(number, ItemState.DROPPED)
        self._installing = []

    def blocks_here(self) -> int:
        """Returns how many of the chain's first blocks are here."""
        number = 0
        while number < self.blocks and self._items[number].state in _HERE:
            number += 1
        return number

    def here(self) -> list[bytes]:
        """Returns the ids of the chain's first blocks that are here, and of the tails if all blocks are."""
        count = self.blocks_here()
        tails = self._items[self.blocks :] if count == self.blocks else []
        return [item.id for item in (*self._items[:count], *tails) if item.state in _HERE]
