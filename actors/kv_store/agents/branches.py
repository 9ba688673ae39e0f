"""The limits of agents' memory, what a storage of branches must do, and which branch is the main one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ...protocol.store_messages import Content, Head

ROW_BYTES = 512
"""Overhead that a branch counts besides its content: keys, numbers, database pages."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """`bytes_max` bounds the content of all branches. Beyond it the least recently used agents are evicted; the last
    `let_go_max` of them are remembered. At most `tombstones_max` tombstones are kept, for `tombstone_s` seconds."""

    branches_max: int = 8
    bytes_max: int = 256 * 2**20
    tombstones_max: int = 10_000
    let_go_max: int = 10_000
    tombstone_s: float = 30 * 86400.0


class CommitActions:
    """What is to be done in memory once the open transaction is committed."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, action: Callable[[], object]) -> None:
        self._waiting.append(action)

    def take_back(self, since: int) -> None:
        """Forgets all but the first `since`: what asked for them was rolled back."""
        del self._waiting[since:]

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()


class Storage(Protocol):
    """Durable storage of branches and tombstones, used by `Agents`. Damaged rows are absent. Changes are made inside a
    `transaction`, which commits all of them or none."""

    @property
    def nbytes(self) -> int:
        """The bytes of all branches: their content, and `ROW_BYTES` each."""
        ...

    def nbytes_of(self, tenant: str) -> int:
        """Returns `nbytes` of one tenant's agents. Safe from any thread."""
        ...

    def transaction(self) -> AbstractContextManager[None]: ...

    def after_commit(self, action: Callable[[], object]) -> None:
        """Calls `action`, which changes what is in memory, once the transaction that is open is committed, never if it
        is rolled back. Outside of one it is called at once."""
        ...

    def sequence(self) -> int:
        """Returns the highest sequence of any branch or tombstone."""
        ...

    def heads(self, agent: str) -> list[Head]: ...

    def content(self, head: Head) -> Content | None: ...

    def put(self, head: Head, content: Content) -> None:
        """Writes a branch and replaces the one of the same id."""
        ...

    def drop(self, head: Head) -> None: ...

    def erase(self, agent: str) -> None:
        """Removes all branches of the agent."""
        ...

    def let_go(self, agent: str, sequence: int, keep: int) -> None:
        """Removes all branches of an evicted agent, and marks it as evicted until a branch is `put` or it is buried.
        Keeps the latest `keep` marks."""
        ...

    def was_let_go(self, agent: str) -> bool: ...

    def quietest(self, after: int, limit: int) -> list[tuple[int, str]]:
        """Returns up to `limit` pairs (epoch of the last change, agent) with an epoch above `after`, in order."""
        ...

    def agents(self, prefix: str, after: str, limit: int) -> list[str]:
        """Returns agents whose key begins with `prefix` and sorts after `after`, in order."""
        ...

    def bury(self, agent: str, sequence: int, at: float) -> None:
        """Writes a tombstone and replaces an older one. `at` is a Unix time."""
        ...

    def buried(self, agent: str) -> int:
        """Returns the sequence of the agent's tombstone, 0 if it has none."""
        ...

    def tombstones(self) -> list[str]:
        """Returns every agent with a tombstone."""
        ...

    def prune(self, before: float, keep: int) -> int:
        """Removes tombstones older than `before` and all but the latest `keep`. Returns the highest one removed."""
        ...


def main_branch(heads: Collection[Head]) -> Head | None:
    """Returns the branch that a continuing turn continues: the most recently used of those with several turns or an
    injection, else the oldest. None if no branch has a transcript."""
    candidates = [head for head in heads if head.messages]
    grown = [head for head in candidates if head.turns > 1 or head.injected]
    if grown:
        return max(grown, key=lambda head: head.epoch)
    return min(candidates, key=lambda head: head.branch, default=None)
