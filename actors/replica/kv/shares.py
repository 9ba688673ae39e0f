"""What tenants with a limit of their own have in a cache, in its order of use. Pure.

A tenant without one is not counted, and costs nothing.
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
    # Of what nobody holds.
    nbytes: int = 0
    # All that is the tenant's, also what somebody holds; the oldest first.
    keys: OrderedDict[Key, None] = field(default_factory=OrderedDict)


class MemoryShares(Generic[Key]):
    """Counts by tenant what nobody holds. The cache tells of every change."""

    def __init__(self) -> None:
        self._of: dict[str, _Share[Key]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def bytes_max(self, tenant: str) -> int | None:
        """What it may have; None without a limit."""
        share = self._of.get(tenant)
        return None if share is None else share.bytes_max

    def begin(self, tenant: str, bytes_max: int, there: Iterable[tuple[Key, int]]) -> None:
        """Count a tenant that was not counted.

        Args:
            there: what is the tenant's, the oldest first, and how much counts of it: 0 where somebody holds it.
        """
        share = self._of[tenant] = _Share[Key](bytes_max)
        for key, nbytes in there:
            share.keys[key] = None
            share.nbytes += nbytes

    def change(self, tenant: str, bytes_max: int) -> None:
        """Another limit for a tenant that is counted."""
        self._of[tenant].bytes_max = bytes_max

    def end(self, tenant: str) -> None:
        """Count the tenant no more."""
        self._of.pop(tenant, None)

    def add(self, tenant: str, key: Key, nbytes: int) -> None:
        """The newest; `nbytes` of it count."""
        if (share := self._of.get(tenant)) is not None:
            share.keys[key] = None
            share.nbytes += nbytes

    def remove(self, tenant: str, key: Key, nbytes: int) -> None:
        if (share := self._of.get(tenant)) is not None:
            del share.keys[key]
            share.nbytes -= nbytes

    def count(self, tenant: str, nbytes: int) -> None:
        """So much more counts: somebody lets go of it, or takes it where that is negative."""
        if (share := self._of.get(tenant)) is not None:
            share.nbytes += nbytes

    def use(self, tenant: str, key: Key) -> None:
        """It is the newest now."""
        if (share := self._of.get(tenant)) is not None:
            share.keys.move_to_end(key)

    def excess(self, tenant: str) -> int:
        """How many bytes it has too much; negative or 0 for none."""
        share = self._of.get(tenant)
        return 0 if share is None else share.nbytes - share.bytes_max

    def oldest(self, tenant: str) -> Iterable[Key]:
        """All that it has, the oldest first."""
        share = self._of.get(tenant)
        return () if share is None else share.keys

    def clear(self) -> None:
        """Nothing is there any more. The limits stay."""
        for share in self._of.values():
            share.keys.clear()
            share.nbytes = 0

    def counted(self) -> dict[str, tuple[int, list[Key]]]:
        """By tenant what counts, and what it has, the oldest first."""
        return {tenant: (share.nbytes, list(share.keys)) for tenant, share in self._of.items()}
