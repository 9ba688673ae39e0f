"""Leases of readers on files. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Leases:
    """The files that must not be unlinked: those that an unexpired lease names.

    Args:
        count_max: leases at the same time; expired ones do not count.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._taken = 0
        self._ends: dict[str, float] = {}
        self._names: dict[str, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, names: Iterable[str], now: float, lease_s: float, old: str = "") -> str | None:
        """Returns a new lease, None if there are too many. It replaces the lease `old` and also holds its files."""
        self.expire(now)
        if len(self._ends) >= self._count_max + (old in self._ends):
            return None
        self._taken += 1
        lease = f"lease-{self._taken}"
        self._ends.pop(old, None)
        self._ends[lease] = now + lease_s
        self._names[lease] = self._names.pop(old, frozenset()).union(names)
        return lease

    def give_back(self, lease: str, now: float) -> bool:
        """Ends a lease. Returns whether it was still held."""
        self.expire(now)
        self._names.pop(lease, None)
        return self._ends.pop(lease, None) is not None

    def expire(self, now: float) -> None:
        for lease in [lease for lease, ends in self._ends.items() if ends <= now]:
            del self._ends[lease], self._names[lease]

    def held(self, now: float) -> set[str]:
        """Returns the names of all leased files."""
        self.expire(now)
        return set().union(*self._names.values())
