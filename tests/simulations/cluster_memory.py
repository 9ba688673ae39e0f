"""The storage of agents' branches, in memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from satchel.actors.kv_store.agents.branches import CommitActions
from satchel.actors.kv_store.agents.roles import Place
from satchel.actors.protocol.store_messages import Content, Head
from satchel.cluster.errors import Unavailable


class Memory:
    """A `RoleStorage` that survives a crash of its node.

    Attributes:
        full: nothing can be written.
        syncs: called before a change becomes durable; if it raises, the change is undone.
    """

    def __init__(self) -> None:
        self.full = False
        self.syncs: Callable[[], None] = lambda: None
        self._inside = False
        self._actions = CommitActions()
        self.branches: dict[str, dict[int, tuple[Head, Content]]] = {}
        self.places: dict[str, Place] = {}
        self.graves: dict[str, tuple[int, float]] = {}

    @property
    def nbytes(self) -> int:
        return 0

    def nbytes_of(self, tenant: str) -> int:
        held = (branches for agent, branches in self.branches.items() if agent.partition("/")[0] == tenant)
        return sum(len(content.tokens) + len(content.messages) for branches in held for _, content in branches.values())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = (
            {agent: dict(branches) for agent, branches in self.branches.items()},
            dict(self.places),
            dict(self.graves),
        )
        actions = len(self._actions)
        inner, self._inside = self._inside, True
        try:
            yield
            self._inside = inner
            self._sync()
        except BaseException:
            self.branches, self.places, self.graves = before
            self._actions.take_back(actions)
            raise
        finally:
            self._inside = inner
        if not inner:
            self._actions.run()

    def after_commit(self, action: Callable[[], object]) -> None:
        if self._inside:
            self._actions.add(action)
        else:
            action()

    def _sync(self) -> None:
        """Called before a write outside of a transaction, and at the end of one."""
        if not self._inside:
            if self.full:
                raise Unavailable("the disk is full")
            self.syncs()

    def sequence(self) -> int:
        epochs = [head.epoch for branches in self.branches.values() for head, _ in branches.values()]
        return max([0, *epochs, *(number for number, _ in self.graves.values())])

    def heads(self, agent: str) -> list[Head]:
        return [head for head, _ in self.branches.get(agent, {}).values()]

    def content(self, head: Head) -> Content | None:
        found = self.branches.get(head.agent, {}).get(head.branch)
        return found[1] if found and found[0].epoch == head.epoch else None

    def put(self, head: Head, content: Content) -> None:
        self._sync()
        self.branches.setdefault(head.agent, {})[head.branch] = head, content

    def drop(self, head: Head) -> None:
        self._sync()
        del self.branches[head.agent][head.branch]

    def erase(self, agent: str) -> None:
        self._sync()
        self.branches.pop(agent, None)

    def let_go(self, agent: str, sequence: int, keep: int) -> None:
        self.erase(agent)

    def was_let_go(self, agent: str) -> bool:
        return False

    def quietest(self, after: int, limit: int) -> list[tuple[int, str]]:
        return []

    def agents(self, prefix: str, after: str, limit: int) -> list[str]:
        return sorted(agent for agent, branches in self.branches.items() if branches and agent > after)[:limit]

    def bury(self, agent: str, sequence: int, at: float) -> None:
        self._sync()
        self.graves[agent] = sequence, at

    def buried(self, agent: str) -> int:
        return self.graves.get(agent, (0, 0.0))[0]

    def tombstones(self) -> list[str]:
        return list(self.graves)

    def prune(self, before: float, keep: int) -> int:
        return 0

    def scrub(self) -> None:
        pass

    def place(self, agent: str) -> Place | None:
        return self.places.get(agent)

    def set_place(self, agent: str, place: Place) -> None:
        self._sync()
        self.places[agent] = place

    def heard_of(self, after: str, limit: int) -> list[str]:
        known = {*self.places, *(agent for agent, branches in self.branches.items() if branches)}
        return heapq.nsmallest(limit, (agent for agent in known if agent > after))
