"""Each tenant's KV files and bytes, and which tenants exceed their limits. Pure, in memory; the index updates it.

A file has entries of one tenant only, because block ids depend on the tenant and a writer writes KV of one agent. KV
that several agents of a tenant share is one entry, so it counts once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

Tag = bytes
"""A tenant on disk: `entries.tenant_tag`."""


class TenantFiles:
    """Files by number. Files of the tenant b"" (none in particular) are not counted."""

    def __init__(self) -> None:
        # Tenant -> file -> bytes; file -> (tenant, order of use).
        self._files: dict[Tag, dict[int, int]] = {}
        self._of: dict[int, tuple[Tag, int]] = {}
        self._nbytes: Counter[Tag] = Counter()
        self._bytes_max: dict[Tag, int] = {}

    def load(self, files: Iterable[tuple[int, Tag, int, int]]) -> None:
        """Replaces all files by these (number, tenant, bytes, order of use). Keeps the limits."""
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
        """Removes a file; ignores an unknown one."""
        if (known := self._of.pop(number, None)) is None:
            return
        tenant = known[0]
        files = self._files[tenant]
        self._nbytes[tenant] -= files.pop(number)
        if not files:
            del self._files[tenant], self._nbytes[tenant]

    def use(self, number: int, used: int) -> None:
        """Updates a file's order of use; higher is later."""
        if (known := self._of.get(number)) is not None:
            self._of[number] = known[0], used

    def limit(self, tenant: Tag, bytes_max: int | None) -> None:
        """Sets the tenant's limit in bytes; None for no limit."""
        if bytes_max is None:
            self._bytes_max.pop(tenant, None)
        else:
            self._bytes_max[tenant] = bytes_max

    def bytes_max(self, tenant: Tag) -> int | None:
        return self._bytes_max.get(tenant)

    def nbytes(self, tenant: Tag) -> int:
        return self._nbytes[tenant]

    def over(self) -> list[Tag]:
        """Returns the tenants over their limits."""
        return [tenant for tenant, most in self._bytes_max.items() if self._nbytes[tenant] > most]

    def oldest(self, tenant: Tag) -> Iterator[int]:
        """Yields the numbers of the tenant's files, the least recently used first."""
        order = [(self._of[number][1], number) for number in self._files.get(tenant, ())]
        heapq.heapify(order)
        while order:
            yield heapq.heappop(order)[1]

    def counted(self) -> dict[Tag, dict[int, int]]:
        """Returns bytes by file by tenant, for tests.

        Raises:
            AssertionError: the tenants' sums differ from their files.
        """
        if {tenant: sum(files.values()) for tenant, files in self._files.items()} != dict(self._nbytes):
            raise AssertionError("bytes of KV are counted wrong")
        return {tenant: dict(files) for tenant, files in self._files.items()}
