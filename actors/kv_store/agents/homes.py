"""Which agents live on this node, and of which it keeps a copy. Pure; what lasts is behind `HomeStorage`.

An agent lives on one node, its *home*; others may have copies. Its *home epoch* counts how often that changed and only
grows, past its deletion too. So of two stores that claim an agent the one with the higher epoch is right, whatever was
cut off from whom, and in whatever order they hear of each other. Of two homes of one epoch, which only a cluster that
fell apart can have, the first by name is right::

    (nothing) --first turn--> home 1
    home e    --moved or adopted elsewhere--> copy e' > e
    copy e    --adopt--> home e + 1
    any e     --forget--> gone, until the next life begins

An agent that was forgotten and speaks again begins another *life*. A life has `LIFE` epochs, and forgetting ends all of
them: also those of homes that nobody who forgot had heard of.

Branches travel whole: exact token ids, text and transcript. Their KV follows by blocks (`transfer`), or is computed
again. A home that another one has taken the place of hands over what only it has (`lacking`) before it is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from ....cluster.errors import AgentElsewhere, AgentNotFound, StaleEpoch, Unavailable
from .branches import Content, Head, Storage

LIFE = 2**20
"""Home epochs of one life: how often an agent may move before it would be taken for another one."""

_PAGE = 1024


class Role(IntEnum):
    HOME = 1
    COPY = 2
    GONE = 3


class Place(NamedTuple):
    """What this node is to an agent, and since which home epoch."""

    epoch: int
    role: Role


NOWHERE = Place(0, Role.GONE)
"""Of an agent that this node has never heard of."""


def life(epoch: int) -> int:
    return epoch // LIFE


def life_end(epoch: int) -> int:
    """The last epoch of a life."""
    return epoch | (LIFE - 1)


def buried_up_to(place: Place) -> int:
    """The epoch up to which nothing of the agent may be there any more; -1 where it was never forgotten."""
    if place == NOWHERE:
        return -1
    return place.epoch if place.role is Role.GONE else life(place.epoch) * LIFE - 1


def outranks(epoch: int, node: str, other_epoch: int, other: str) -> bool:
    """Whether the first of two homes is right."""
    return (-epoch, node) < (-other_epoch, other)


class HomeStorage(Storage, Protocol):
    """Agents' places too. An agent that has branches and no place has been at home here since epoch 1."""

    def place(self, agent: str) -> Place | None:
        """What was set; where that cannot be verified, a copy of epoch 0, which has to be adopted to be a home."""
        ...

    def set_place(self, agent: str, place: Place) -> None: ...

    def heard_of(self, after: str, limit: int) -> list[str]:
        """Agents that have branches or a place, in the order of their keys, those after `after`."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """All that a node knows of an agent, to be copied: `epoch` is its home's."""

    agent: str
    epoch: int
    branches: Sequence[tuple[Head, Content]]


class Homes:
    """The places of a node's agents. The stores own where an agent is; the router's table and the endpoint's are caches
    of it."""

    def __init__(self, storage: HomeStorage, end_turn: Callable[[str], object] = lambda agent: None) -> None:
        """
        Args:
            end_turn: called with an agent of which another node has been the home meanwhile. Whoever had its turn here
                has it no more: nobody would give that back.
        """
        self._storage = storage
        self._end_turn = end_turn

    def place(self, agent: str) -> Place:
        known = self._storage.place(agent)
        if known is not None:
            return known
        return Place(1, Role.HOME) if self._storage.heads(agent) else NOWHERE

    def check(self, agent: str) -> None:
        """
        Raises:
            AgentElsewhere: this node has but a copy of the agent.
        """
        if self.place(agent).role is Role.COPY:
            raise AgentElsewhere(f"agent {agent.partition('/')[2]!r} lives on another node now")

    def settle(self, agent: str) -> None:
        """A turn of the agent has been kept here: if nobody knew of it, it lives here from now on."""
        place = self._storage.place(agent)
        if place is not None and place.role is Role.GONE:
            self._storage.set_place(agent, Place(place.epoch + 1, Role.HOME))

    def memory(self, agent: str) -> Memory:
        """What is to be copied, the branch that was used last at the end.

        Raises:
            AgentNotFound: there is nothing.
        """
        heads = sorted(self._storage.heads(agent), key=lambda head: head.epoch)
        branches = [(head, content) for head in heads if (content := self._storage.content(head)) is not None]
        if not branches:
            raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
        return Memory(agent, self.place(agent).epoch, branches)

    def take_copy(self, agent: str, epoch: int, heads: Sequence[Head], contents: Mapping[int, Content]) -> list[int]:
        """Keep what the agent's home has, in place of what is known here.

        Args:
            epoch: the home's.
            heads: all branches.
            contents: by branch, of those at least that have changed.

        Returns:
            Branches whose contents are missing; if there are any, nothing has changed.

        Raises:
            StaleEpoch: a later home is known, or this node is it.
            Unavailable: this node was the home before, and has to hand over first what it has.
        """
        place = self.place(agent)
        mine = self._storage.heads(agent)
        if place.epoch > epoch or (place.epoch == epoch and place.role is not Role.COPY):
            what = f"{place.role.name.lower()} since epoch {place.epoch}"
            raise StaleEpoch(f"a copy of epoch {epoch} came to a node that is {what}")
        if mine and place.role is Role.HOME:
            raise Unavailable(f"this node was the agent's home in epoch {place.epoch}, and hands over first")
        if place.epoch == epoch and newest(mine) > newest(heads):
            # This one was sent before the one that is here.
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
            self._storage.set_place(agent, Place(epoch, Role.COPY))
        return []

    def adopt(self, agent: str, above: int) -> Place:
        """Become the agent's home, in an epoch above all that are known.

        Raises:
            AgentNotFound: there is no copy here.
        """
        place = self.place(agent)
        if place.role is Role.GONE or life(above) > life(place.epoch) or not self._storage.heads(agent):
            raise AgentNotFound(f"there is no copy of agent {agent.partition('/')[2]!r} here", param="id")
        if place.role is Role.HOME and place.epoch > above:
            return place
        if place.role is not Role.HOME or place.epoch < above:
            self._end_turn(agent)
        place = Place(max(place.epoch, above) + 1, Role.HOME)
        with self._storage.transaction():
            self._storage.set_place(agent, place)
        return place

    def demote(self, agent: str, epoch: int, handed: frozenset[tuple[int, int]] | None = None) -> bool:
        """The agent has another home, in that epoch.

        Args:
            handed: branches and their epochs that the home has; with others here, nothing changes. None for whatever.

        Returns:
            Whether this node is no home of it now.
        """
        place = self.place(agent)
        if place.role is not Role.HOME or place.epoch > epoch:
            return place.role is not Role.HOME
        heads = self._storage.heads(agent)
        if handed is not None and not {(head.branch, head.epoch) for head in heads} <= handed:
            return False
        with self._storage.transaction():
            # Still of its own epoch: what it has is older than what the home has.
            self._storage.set_place(agent, Place(place.epoch, Role.COPY))
        self._end_turn(agent)
        return True

    def lacking(self, memory: Memory) -> list[tuple[Head, Content]]:
        """What a former home remembers and this one does not: branches that none of its own begins with.

        Raises:
            AgentElsewhere: this node is not the agent's home.
        """
        place = self.place(memory.agent)
        if place.role is not Role.HOME:
            raise AgentElsewhere("this node is not the agent's home")
        if life(place.epoch) != life(memory.epoch):
            return []
        mine = self.memory(memory.agent).branches if self._storage.heads(memory.agent) else []
        return [
            (head, content)
            for head, content in memory.branches
            if not any(own.words == head.words and _goes_on(kept, content) for own, kept in mine)
        ]

    def bury(self, agent: str, epoch: int) -> int:
        """The agent is forgotten, in this transaction: no claim up to the returned epoch counts any more."""
        epoch = life_end(max(epoch, self.place(agent).epoch))
        self._storage.set_place(agent, Place(epoch, Role.GONE))
        return epoch

    def to_bury(self, told: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those agents, with the epochs up to which they were forgotten elsewhere, of which that is news here."""

        def news(place: Place, epoch: int) -> bool:
            return buried_up_to(place) < epoch and (place.role is Role.GONE or place.epoch <= epoch)

        return [(agent, epoch) for agent, epoch in told if news(self.place(agent), epoch)]

    def every(self) -> list[str]:
        """All agents that this node has heard of."""
        found: list[str] = []
        while page := self._storage.heard_of(found[-1] if found else "", _PAGE):
            found += page
        return found

    def claims(self, agents: Iterable[str]) -> list[tuple[str, Place]]:
        """The places of these agents, of those that this node has anything to say of."""
        found = [(agent, place) for agent in agents if (place := self.place(agent)) != NOWHERE]
        # A copy that had to make room is none.
        return [(agent, place) for agent, place in found if place.role is not Role.COPY or self._storage.heads(agent)]


def newest(heads: Iterable[Head]) -> int:
    """When the agent spoke last, by its home's counting."""
    return max((head.epoch for head in heads), default=0)


def _goes_on(later: Content, earlier: Content) -> bool:
    return later.tokens.startswith(earlier.tokens) and bool(earlier.tokens or later.messages == earlier.messages)
