"""Which node is an agent's home, and which have a copy of its memory. Pure. A cache of what the stores own: every
report of a store corrects it, and a full report replaces all that it held of that store.

A *home epoch* counts an agent's promotions, and only grows. Every store claims agents: a key, an epoch, and whether it
is the primary. The primary is the node that claims so with the highest epoch ever reported; a node with a lower epoch
was primary before and is a secondary now, or stale. So the order of reports does not matter, nor does a node that
returns with claims from before its agents were adopted elsewhere. A tombstone's epoch ends every claim up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachetools import FIFOCache

from .directory import parts

REMEMBERED_MAX = 100_000
"""How many epochs of unclaimed agents are remembered, and how many tombstones; the oldest are dropped first."""


class Claim(NamedTuple):
    """A node's claim on an agent."""

    node: str
    epoch: int
    is_primary: bool


class Whereabouts(NamedTuple):
    """Where an agent's memory is: `node` is the primary, "" if none is known. The newest `copies` come first."""

    node: str
    epoch: int
    copies: tuple[str, ...] = ()


@dataclass(slots=True)
class _AgentClaims:
    epoch: int
    """The highest epoch ever reported, even if no node claims it any more."""
    claims: tuple[Claim, ...] = ()
    away: str = ""
    """The node of its last turn, "" if that was the primary."""


class AgentPlaces:
    """All agents' nodes. Memory is bounded by what stores claim, and `remembered_max`."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._agents: dict[str, _AgentClaims] = {}
        self._nodes: dict[str, set[str]] = {}
        """The agents that each node claims, as primary or secondary."""
        self._unclaimed: FIFOCache[str, int] = FIFOCache(remembered_max)
        self._buried: FIFOCache[str, int] = FIFOCache(remembered_max)

    def __len__(self) -> int:
        return len(self._agents)

    def where(self, agent: str) -> Whereabouts | None:
        """Returns where the agent's memory is; None if no node claims it."""
        known = self._agents.get(agent)
        if known is None:
            return None
        home = _home(known)
        others = sorted((-claim.epoch, claim.node) for claim in known.claims if claim.node != home)
        return Whereabouts(home, known.epoch, tuple(node for _, node in others))

    def answer(self, agent: str, node: str) -> bool:
        """Notes the node of an agent's turn. Returns whether this and the last turn were both on it and not on the
        primary."""
        known = self._agents.get(agent)
        if known is None:
            return False
        before, known.away = known.away, node if node != _home(known) else ""
        return bool(node) and known.away == before == node

    def agents_on(self, node: str) -> list[str]:
        """Returns the keys of the agents whose primary the node is, sorted."""
        return sorted(agent for agent in self._nodes.get(node, ()) if _home(self._agents[agent]) == node)

    def count(self, node: str) -> int:
        """Returns how many agents the node claims, as primary or secondary."""
        return len(self._nodes.get(node, ()))

    def update(
        self,
        node: str,
        claimed: Sequence[Sequence[object]],
        retracted: Sequence[str],
        buried: Sequence[Sequence[object]],
        *,
        whole: bool,
    ) -> Iterator[None]:
        """Applies a store's report, and pauses between its parts; the tables are consistent at every pause.

        Args:
            claimed: [agent, home epoch, is primary].
            buried: [agent, home epoch] of tombstones.
            whole: whether the node has only the agents of `claimed`.
        """
        for part in parts(buried):
            for agent, epoch in part:
                self._bury(str(agent), int(epoch))
            yield
        kept: set[str] = set()
        for part in parts(claimed):
            for agent, epoch, is_primary in part:
                self._claim(str(agent), Claim(node, int(epoch), bool(is_primary)))
                kept.add(str(agent))
            yield
        gone = [*retracted, *(self._nodes.get(node, set()) - kept if whole else ())]
        for part in parts(gone):
            for agent in part:
                self._drop(agent, node)
            yield

    def moved(self, agent: str, node: str, epoch: int) -> None:
        """Makes a node the agent's primary since `epoch`, before the node's next report says so."""
        self._claim(agent, Claim(node, epoch, True))

    def forget(self, node: str) -> None:
        """Drops all claims of a node. Its agents keep their epochs."""
        for agent in list(self._nodes.get(node, ())):
            self._drop(agent, node)

    def check(self) -> None:
        """Checks all tables.

        Raises:
            AssertionError: they disagree.
        """
        claimed: dict[str, set[str]] = {}
        for agent, known in self._agents.items():
            assert known.claims and known.epoch >= max(claim.epoch for claim in known.claims)
            assert len({claim.node for claim in known.claims}) == len(known.claims), "a node claims an agent once"
            assert known.epoch > self._buried.get(agent, -1)
            for claim in known.claims:
                assert claim.epoch > self._buried.get(agent, -1), "what is buried is claimed by nobody"
                claimed.setdefault(claim.node, set()).add(agent)
        assert claimed == self._nodes
        assert not self._agents.keys() & self._unclaimed.keys()

    def _claim(self, agent: str, claim: Claim) -> None:
        if claim.epoch <= self._buried.get(agent, -1):
            self._drop(agent, claim.node)
            return
        known = self._agents.get(agent)
        if known is None:
            known = self._agents[agent] = _AgentClaims(self._unclaimed.pop(agent, claim.epoch))
        known.epoch = max(known.epoch, claim.epoch)
        known.claims = (*(other for other in known.claims if other.node != claim.node), claim)
        self._nodes.setdefault(claim.node, set()).add(agent)

    def _drop(self, agent: str, node: str) -> None:
        known = self._agents.get(agent)
        claims = self._nodes.get(node)
        if known is None or claims is None or agent not in claims:
            return
        claims.discard(agent)
        if not claims:
            del self._nodes[node]
        known.claims = tuple(claim for claim in known.claims if claim.node != node)
        if not known.claims:
            del self._agents[agent]
            if known.epoch > self._buried.get(agent, -1):
                self._unclaimed[agent] = known.epoch

    def _bury(self, agent: str, epoch: int) -> None:
        if epoch <= self._buried.get(agent, -1):
            return
        self._buried[agent] = epoch
        if self._unclaimed.get(agent, epoch + 1) <= epoch:
            del self._unclaimed[agent]
        known = self._agents.get(agent)
        for claim in known.claims if known else ():
            if claim.epoch <= epoch:
                self._drop(agent, claim.node)


def _home(known: _AgentClaims) -> str:
    """Returns the primary, "" if there is none. Two of one epoch should not exist; then the first by name is taken, so
    that the order of reports does not matter."""
    return min((claim.node for claim in known.claims if claim.is_primary and claim.epoch == known.epoch), default="")
