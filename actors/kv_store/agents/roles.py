"""For which agents this node is the primary (*home*) or a secondary (*copy*). Pure; `RoleStorage` is durable.

An agent has one primary, which commits its turns; other nodes may be secondaries. Its *home epoch* counts changes of
the primary. It only grows, across deletions too. So if two stores claim an agent, the one with the higher epoch is
right, regardless of partitions and of the order of messages. Two primaries of one epoch can exist only after a
partition; then the first by name is right::

    (nothing) --first turn--> home 1
    home e    --moved or adopted elsewhere--> copy e' > e
    copy e    --adopt--> home e + 1
    any e     --forget--> gone, until the next life begins

A turn of a forgotten agent begins a new *life* of it. A life has `LIFE` epochs. Forgetting ends the whole life. So it
also ends primaries that the forgetting node did not know.

Branches are copied whole: exact token ids, text and transcript. Their KV follows by blocks (`transfer`), or is computed
again. A primary that was replaced hands over the branches that only it has (`lacking`) before it steps down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from ....cluster.errors import AgentElsewhere, AgentNotFound, StaleEpoch, Unavailable
from ...protocol.store_messages import Content, Head
from .branches import Storage

LIFE = 2**20
"""Home epochs of one life: how often an agent may move before it would be taken for its next life."""

_PAGE = 1024


class Role(IntEnum):
    PRIMARY = 1
    SECONDARY = 2
    FORGOTTEN = 3


class Place(NamedTuple):
    """This node's role for an agent, and since which home epoch it has it."""

    epoch: int
    role: Role


NOWHERE = Place(0, Role.FORGOTTEN)
"""The place of an unknown agent."""


def life(epoch: int) -> int:
    return epoch // LIFE


def life_end(epoch: int) -> int:
    """Returns the last epoch of the life that `epoch` is in."""
    return epoch | (LIFE - 1)


def tombstone_epoch(place: Place) -> int:
    """Returns the epoch up to which the agent was forgotten, -1 if it never was."""
    if place == NOWHERE:
        return -1
    return place.epoch if place.role is Role.FORGOTTEN else life(place.epoch) * LIFE - 1


def outranks(epoch: int, node: str, other_epoch: int, other: str) -> bool:
    """Returns whether the primary `node` in `epoch` wins over the primary `other` in `other_epoch`."""
    return (-epoch, node) < (-other_epoch, other)


class RoleStorage(Storage, Protocol):
    """`Storage` with agents' places. An agent with branches and no place has had its primary here since epoch 1."""

    def place(self, agent: str) -> Place | None:
        """Returns what was set. If that does not verify: a copy of epoch 0, which must be promoted to be a primary."""
        ...

    def set_place(self, agent: str, place: Place) -> None: ...

    def heard_of(self, after: str, limit: int) -> list[str]:
        """Returns up to `limit` agents that have branches or a place and sort after `after`, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """All branches of an agent, as copied to other nodes. `epoch` is its home epoch."""

    agent: str
    epoch: int
    branches: Sequence[tuple[Head, Content]]


class RoleTable:
    """The places of a node's agents. The stores own where an agent is; the router's table and the endpoint's are caches
    of it."""

    def __init__(self, storage: RoleStorage, end_turn: Callable[[str], object] = lambda agent: None) -> None:
        """
        Args:
            end_turn: called with an agent whose primary has been another node. It ends the agent's turn here, because
                no one would.
        """
        self._storage = storage
        self._end_turn = end_turn

    def place(self, agent: str) -> Place:
        known = self._storage.place(agent)
        if known is not None:
            return known
        return Place(1, Role.PRIMARY) if self._storage.heads(agent) else NOWHERE

    def check(self, agent: str) -> None:
        """Checks that turns of the agent may run here.

        Raises:
            AgentElsewhere: this node is only a secondary.
        """
        if self.place(agent).role is Role.SECONDARY:
            raise AgentElsewhere(f"agent {agent.partition('/')[2]!r} lives on another node now")

    def settle(self, agent: str) -> None:
        """Makes this node the primary of an agent without one, after a turn was committed here."""
        place = self._storage.place(agent)
        if place is not None and place.role is Role.FORGOTTEN:
            self._storage.set_place(agent, Place(place.epoch + 1, Role.PRIMARY))

    def memory(self, agent: str) -> Memory:
        """Returns the agent's branches, the most recently used last.

        Raises:
            AgentNotFound: the agent has none here.
        """
        heads = sorted(self._storage.heads(agent), key=lambda head: head.epoch)
        branches = [(head, content) for head in heads if (content := self._storage.content(head)) is not None]
        if not branches:
            raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
        return Memory(agent, self.place(agent).epoch, branches)

    def take_secondary(
        self, agent: str, epoch: int, heads: Sequence[Head], contents: Mapping[int, Content]
    ) -> list[int]:
        """Replaces this secondary's branches by the primary's.

        Args:
            epoch: the primary's.
            heads: all branches.
            contents: by branch id; at least the changed ones.

        Returns:
            Branches whose contents are missing. If there are any, nothing has changed.

        Raises:
            StaleEpoch: a later primary is known, or this node is the primary.
            Unavailable: this node was the primary before, and must hand over its branches first.
        """
        place = self.place(agent)
        mine = self._storage.heads(agent)
        if place.epoch > epoch or (place.epoch == epoch and place.role is not Role.SECONDARY):
            role = place.role.name.lower()
            raise StaleEpoch(f"a copy of epoch {epoch} came to a node that is {role} since epoch {place.epoch}")
        if mine and place.role is Role.PRIMARY:
            raise Unavailable(f"this node was primary in epoch {place.epoch}, and must hand over its branches first")
        if place.epoch == epoch and newest(mine) > newest(heads):
            # This copy is older than the stored one.
            return []
        known = {(head.branch, head.epoch) for head in mine}
        wanted = {(head.branch, head.epoch) for head in heads}
        missing = [branch for branch, _ in wanted - known if branch not in contents]
        if missing:
            return missing
        with self._storage.transaction():
            for head in mine:
                if (head.branch, head.epoch) not in wanted:
                    self._storage.drop(head)
            for head in heads:
                if (head.branch, head.epoch) not in known:
                    self._storage.put(head, contents[head.branch])
            self._storage.set_place(agent, Place(epoch, Role.SECONDARY))
        return []

    def promote(self, agent: str, above: int) -> Place:
        """Promotes this node to primary, in an epoch above `above` and its own.

        Raises:
            AgentNotFound: this node has no copy.
        """
        place = self.place(agent)
        if place.role is Role.FORGOTTEN or life(above) > life(place.epoch) or not self._storage.heads(agent):
            raise AgentNotFound(f"there is no copy of agent {agent.partition('/')[2]!r} here", param="id")
        if place.role is Role.PRIMARY and place.epoch > above:
            return place
        if place.role is not Role.PRIMARY or place.epoch < above:
            self._storage.after_commit(lambda: self._end_turn(agent))
        place = Place(max(place.epoch, above) + 1, Role.PRIMARY)
        with self._storage.transaction():
            self._storage.set_place(agent, place)
        return place

    def demote(self, agent: str, epoch: int, handed: frozenset[tuple[int, int]] | None = None) -> bool:
        """Steps down in favour of the primary in `epoch`.

        Args:
            handed: (branch, epoch) pairs that the new primary has. If this node has others, nothing changes. None
                steps down in any case.

        Returns:
            Whether this node is no primary now.
        """
        place = self.place(agent)
        if place.role is not Role.PRIMARY or place.epoch > epoch:
            return place.role is not Role.PRIMARY
        heads = self._storage.heads(agent)
        if handed is not None and not {(head.branch, head.epoch) for head in heads} <= handed:
            return False
        with self._storage.transaction():
            # Keeps its own epoch, because its branches are older than the new primary's.
            self._storage.set_place(agent, Place(place.epoch, Role.SECONDARY))
        self._storage.after_commit(lambda: self._end_turn(agent))
        return True

    def let_go_copy(self, agent: str) -> bool:
        """Drops this secondary's branches. Returns False if this node is the primary."""
        if self.place(agent).role is Role.PRIMARY:
            return False
        with self._storage.transaction():
            self._storage.erase(agent)
        return True

    def lacking(self, memory: Memory) -> list[tuple[Head, Content]]:
        """Returns a former primary's branches that this primary lacks: those that none of its own continues.

        Raises:
            AgentElsewhere: this node is not the primary.
        """
        place = self.place(memory.agent)
        if place.role is not Role.PRIMARY:
            raise AgentElsewhere("this node is not the agent's primary")
        if life(place.epoch) != life(memory.epoch):
            return []
        mine = self.memory(memory.agent).branches if self._storage.heads(memory.agent) else []
        return [
            (head, content)
            for head, content in memory.branches
            if not any(own.files_id == head.files_id and _goes_on(owned, content) for own, owned in mine)
        ]

    def bury(self, agent: str, epoch: int) -> int:
        """Marks the agent as forgotten, inside the caller's transaction. Claims up to the returned epoch are void."""
        epoch = life_end(max(epoch, self.place(agent).epoch))
        self._storage.set_place(agent, Place(epoch, Role.FORGOTTEN))
        return epoch

    def to_bury(self, tombstones: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Returns those of another node's tombstones that are new here, as (agent, epoch up to which it was
        forgotten)."""

        def new(place: Place, epoch: int) -> bool:
            return tombstone_epoch(place) < epoch and (place.role is Role.FORGOTTEN or place.epoch <= epoch)

        return [(agent, epoch) for agent, epoch in tombstones if new(self.place(agent), epoch)]

    def every(self) -> list[str]:
        """Returns all agents that this node knows."""
        agents: list[str] = []
        while page := self._storage.heard_of(agents[-1] if agents else "", _PAGE):
            agents += page
        return agents

    def claims(self, agents: Iterable[str]) -> list[tuple[str, Place]]:
        """Returns the places of those of `agents` that this node knows."""
        places = [(agent, place) for agent in agents if (place := self.place(agent)) != NOWHERE]
        # An evicted copy does not count.
        return [
            (agent, place) for agent, place in places if place.role is not Role.SECONDARY or self._storage.heads(agent)
        ]


def newest(heads: Iterable[Head]) -> int:
    """Returns the sequence of the agent's latest turn, by its primary's clock."""
    return max((head.epoch for head in heads), default=0)


def _goes_on(later: Content, earlier: Content) -> bool:
    return later.tokens.startswith(earlier.tokens) and bool(earlier.tokens or later.messages == earlier.messages)
