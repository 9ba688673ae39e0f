"""Counts the cached bytes of tenants that have a limit of their own, in order of use. Pure.

Tenants without a limit are not counted and cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Share(Generic[Key]):
    bytes_max: int
    # Bytes of unpinned entries.
    nbytes: int = 0
    # All entries of the tenant, also pinned ones; the oldest first.
    keys: OrderedDict[Key, None] = field(default_factory=OrderedDict)


class MemoryShares(Generic[Key]):
    """Bytes of unpinned entries by tenant. The cache reports every change."""

    def __init__(self) -> None:
        self._of: dict[str, _Share[Key]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def bytes_max(self, tenant: str) -> int | None:
        """Returns the tenant's limit; None if it has none."""
        share = self._of.get(tenant)
        return None if share is None else share.bytes_max

    def begin(self, tenant: str, bytes_max: int, entries: Iterable[tuple[Key, int]]) -> None:
        """Starts counting a tenant.

        Args:
            entries: the tenant's entries, the oldest first, with the bytes that count: 0 for a pinned one.
        """
        share = self._of[tenant] = _Share[Key](bytes_max)
        for key, nbytes in entries:
            share.keys[key] = None
            share.nbytes += nbytes

    def change(self, tenant: str, bytes_max: int) -> None:
        """Changes the limit of a tenant that is counted."""
        self._of[tenant].bytes_max = bytes_max

    def end(self, tenant: str) -> None:
        """Stops counting a tenant."""
        self._of.pop(tenant, None)

    def add(self, tenant: str, key: Key, nbytes: int) -> None:
        """Adds the newest entry; `nbytes` of it count, 0 if it is pinned."""
        if (share := self._of.get(tenant)) is not None:
            share.keys[key] = None
            share.nbytes += nbytes

    def remove(self, tenant: str, key: Key, nbytes: int) -> None:
        """Removes an entry, of which `nbytes` counted."""
        if (share := self._of.get(tenant)) is not None:
            del share.keys[key]
            share.nbytes -= nbytes

    def count(self, tenant: str, nbytes: int) -> None:
        """Adds the bytes of an entry that is unpinned, or subtracts those of one that is pinned (`nbytes` negative)."""
        if (share := self._of.get(tenant)) is not None:
            share.nbytes += nbytes

    def use(self, tenant: str, key: Key) -> None:
        """Makes an entry the newest."""
        if (share := self._of.get(tenant)) is not None:
            share.keys.move_to_end(key)

    def age(self, tenant: str, key: Key) -> None:
        """Makes an entry the oldest."""
        if (share := self._of.get(tenant)) is not None:
            share.keys.move_to_end(key, last=False)

    def excess(self, tenant: str) -> int:
        """Returns the bytes above the tenant's limit; 0 or negative if within it."""
        share = self._of.get(tenant)
        return 0 if share is None else share.nbytes - share.bytes_max

    def oldest(self, tenant: str) -> Iterable[Key]:
        """Returns the tenant's entries, the oldest first."""
        share = self._of.get(tenant)
        return () if share is None else share.keys

    def clear(self) -> None:
        """Forgets all entries, but no limits."""
        for share in self._of.values():
            share.keys.clear()
            share.nbytes = 0

    def counted(self) -> dict[str, tuple[int, list[Key]]]:
        """Returns by tenant the bytes that count and its entries, the oldest first."""
        return {tenant: (share.nbytes, list(share.keys)) for tenant, share in self._of.items()}
