"""What tenants with a limit may have on this node's disk, agents' words and KV together. Pure.

A limit comes with every request of its tenant, and with copies from other nodes, so nothing of it is kept: after a
start it is known before the tenant adds anything. KV makes room for words, as it can be computed again. Words are
refused while those that are there are over the limit by themselves, so what ends at the same time may take them over it
once: by one turn, and never further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....cluster.errors import QuotaExceeded

Limits = Mapping[str, int | None]
"""Bytes by tenant, None where it has no limit. Who is not in it is not spoken of."""


def tenant_of(agent: str) -> str:
    """Whose the agent (its key) is."""
    return agent.partition("/")[0]


class Quotas:
    """The limits as they were heard last.

    Args:
        words: how many bytes of words a tenant's agents have here, copies of those of other nodes too.
        owner: the tenant that has no limit.
    """

    def __init__(self, words: Callable[[str], int], owner: str) -> None:
        self._words, self._owner = words, owner
        self._known: dict[str, int | None] = {}

    def note(self, limits: Limits | None) -> None:
        """These count from now on."""
        for tenant, bytes_max in (limits or {}).items():
            if tenant != self._owner:
                self._known[tenant] = bytes_max

    def of(self, agent: str) -> dict[str, int | None]:
        """What is known of the limit of the agent's tenant, for another node."""
        tenant = tenant_of(agent)
        return {tenant: self._known[tenant]} if tenant in self._known else {}

    def knows(self, tenant: str) -> bool:
        """Whether anything was heard of the tenant's limit."""
        return tenant in self._known

    def kv_bytes_max(self, tenant: str) -> int | None:
        """What its words leave for its KV; None without a limit."""
        most = self._known.get(tenant)
        return None if most is None else max(0, most - self._words(tenant))

    def is_over(self, agent: str) -> bool:
        """Whether words alone are more than the agent's tenant may have."""
        most = self._known.get(tenant_of(agent))
        return most is not None and self._words(tenant_of(agent)) > most

    def check(self, agent: str) -> None:
        """
        Raises:
            QuotaExceeded: the agent's tenant may add no words.
        """
        if self.is_over(agent):
            tenant = tenant_of(agent)
            held, most = self._words(tenant), self._known[tenant]
            raise QuotaExceeded(
                f"words of the agents of {tenant!r} come to {held:,} bytes, and its key allows {most:,} on a node's "
                "disk for words and KV: erasing agents makes room (DELETE /v1/agents/ID)"
            )
