"""Disk limits of tenants on this node, for agents' branches and KV together. Pure.

Every request of a tenant and every copy from another node carries the limit, so it is not stored: after a start it is
known before the tenant adds anything. KV makes room for branches, because it can be recomputed. A branch is refused if
the tenant's branches alone exceed the limit already, so turns that end at the same time can exceed it by one turn.
"""

from __future__ import annotations

from collections.abc import Callable

from ....cluster.errors import QuotaExceeded
from ...protocol.store_messages import Limits


def tenant_of(agent: str) -> str:
    """Returns the tenant of an agent (its key)."""
    return agent.partition("/")[0]


class Quotas:
    """The latest known limits.

    Args:
        words: returns the bytes of a tenant's branches on this node, secondaries included.
        owner: the tenant that has no limit.
    """

    def __init__(self, words: Callable[[str], int], owner: str) -> None:
        self._words, self._owner = words, owner
        self._known: dict[str, int | None] = {}

    def note(self, limits: Limits | None) -> None:
        """Replaces the limits of these tenants."""
        for tenant, bytes_max in (limits or {}).items():
            if tenant != self._owner:
                self._known[tenant] = bytes_max

    def of(self, agent: str) -> dict[str, int | None]:
        """Returns the known limit of the agent's tenant, for another node."""
        tenant = tenant_of(agent)
        return {tenant: self._known[tenant]} if tenant in self._known else {}

    def knows(self, tenant: str) -> bool:
        """Returns whether the tenant's limit is known."""
        return tenant in self._known

    def kv_bytes_max(self, tenant: str) -> int | None:
        """Returns the bytes that the tenant's branches leave for its KV; None without a limit."""
        most = self._known.get(tenant)
        return None if most is None else max(0, most - self._words(tenant))

    def is_over(self, agent: str) -> bool:
        """Returns whether the branches of the agent's tenant alone exceed its limit."""
        most = self._known.get(tenant_of(agent))
        return most is not None and self._words(tenant_of(agent)) > most

    def check(self, agent: str) -> None:
        """Checks that the agent's tenant may add a branch.

        Raises:
            QuotaExceeded: its branches alone exceed its limit.
        """
        if self.is_over(agent):
            tenant = tenant_of(agent)
            held, most = self._words(tenant), self._known[tenant]
            raise QuotaExceeded(
                f"the agents of {tenant!r} take {held:,} bytes without KV, and its key allows {most:,} on a node's "
                "disk, KV included: erasing agents makes room (DELETE /v1/agents/ID)"
            )
