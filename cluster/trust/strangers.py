"""Limits unauthenticated connections so that none of them can lock out others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def host_of(address: Sequence[str | int] | None) -> str:
    """Returns the host of an address as `socket.accept` returns it; "" if there is none: on macOS a connection that its
    peer has reset before it is accepted has none (XNU's `accept_nocancel`)."""
    return str(address[0]) if address else ""


class Strangers(Generic[T]):
    """Unauthenticated connections, at most `places_max`. A new one always gets a place: the oldest connection of the
    address with the most connections is evicted."""

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._from: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._from)

    def add(self, stranger: T, address: str) -> T | None:
        """Gives it a place. Returns the evicted connection, which the caller closes; None if there was room."""
        self._from[stranger] = address
        if len(self._from) <= self._places_max:
            return None
        crowd = Counter(self._from.values())
        most = max(crowd.values())
        gone = next(each for each, address in self._from.items() if crowd[address] == most)
        del self._from[gone]
        return gone

    def remove(self, stranger: T) -> None:
        """Frees its place: it has authenticated, or has left."""
        self._from.pop(stranger, None)
