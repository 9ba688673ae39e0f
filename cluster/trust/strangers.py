"""Who keeps a place while he has not proved who he is: nobody is kept out by strangers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Strangers(Generic[T]):
    """Connections that have proved nothing yet, at most `places_max`. A new one always finds a place: of the address
    that has most of them the oldest goes."""

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._from: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._from)

    def add(self, stranger: T, address: str) -> T | None:
        """Give it a place. Returns who has lost his, and is to be sent away."""
        self._from[stranger] = address
        if len(self._from) <= self._places_max:
            return None
        crowd = Counter(self._from.values())
        most = max(crowd.values())
        gone = next(each for each, address in self._from.items() if crowd[address] == most)
        del self._from[gone]
        return gone

    def remove(self, stranger: T) -> None:
        """It is known now, or has left."""
        self._from.pop(stranger, None)
