"""Which files of KV are which tenant's, and who has more than it may. Pure, in memory; the index tells of every change.

A file has entries of one tenant only: ids of blocks begin with the tenant, and a writer writes what one agent left.
What several agents of a tenant have in common is one entry, so it counts once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

Tag = bytes
"""What stands for a tenant on disk: `codec.tenant_tag`."""


class TenantFiles:
    """Files by number. The tenant b"" is nobody in particular, and nobody's files are not counted."""

    def __init__(self) -> None:
        # By tenant: bytes by file. By file: whose it is, and when it was used last.
        self._files: dict[Tag, dict[int, int]] = {}
        self._of: dict[int, tuple[Tag, int]] = {}
        self._nbytes: Counter[Tag] = Counter()
        self._bytes_max: dict[Tag, int] = {}

    def load(self, files: Iterable[tuple[int, Tag, int, int]]) -> None:
        """Begin with these: number, tenant, bytes and use. The limits stay."""
        for table in (self._files, self._of, self._nbytes):
            table.clear()
        for file in files:
            self.add(*file)

    def add(self, number: int, tenant: Tag, nbytes: int, used: int) -> None:
        if tenant:
            self._of[number] = tenant, used
            self._files.setdefault(tenant, {})[number] = nbytes
            self._nbytes[tenant] += nbytes

    def remove(self, number: int) -> None:
        """The file is gone; one that is not known is nobody's."""
        if (known := self._of.pop(number, None)) is None:
            return
        tenant = known[0]
        files = self._files[tenant]
        self._nbytes[tenant] -= files.pop(number)
        if not files:
            del self._files[tenant], self._nbytes[tenant]

    def use(self, number: int, used: int) -> None:
        """The file was used: the higher the number the later."""
        if (known := self._of.get(number)) is not None:
            self._of[number] = known[0], used

    def limit(self, tenant: Tag, bytes_max: int | None) -> None:
        """What the tenant may have; None for as much as there is room for."""
        if bytes_max is None:
            self._bytes_max.pop(tenant, None)
        else:
            self._bytes_max[tenant] = bytes_max

    def bytes_max(self, tenant: Tag) -> int | None:
        return self._bytes_max.get(tenant)

    def nbytes(self, tenant: Tag) -> int:
        return self._nbytes[tenant]

    def over(self) -> list[Tag]:
        """Who has more than it may."""
        return [tenant for tenant, most in self._bytes_max.items() if self._nbytes[tenant] > most]

    def oldest(self, tenant: Tag) -> Iterator[int]:
        """The numbers of the tenant's files, the least recently used first."""
        order = [(self._of[number][1], number) for number in self._files.get(tenant, ())]
        heapq.heapify(order)
        while order:
            yield heapq.heappop(order)[1]

    def counted(self) -> dict[Tag, dict[int, int]]:
        """Bytes by file by tenant; as the sums are.

        Raises:
            AssertionError: sums and files disagree.
        """
        if {tenant: sum(files.values()) for tenant, files in self._files.items()} != dict(self._nbytes):
            raise AssertionError("bytes of KV are counted wrong")
        return {tenant: dict(files) for tenant, files in self._files.items()}
