"""What agents' memory is made of: a branch's head and content, the end of a turn, and what a storage must do. Pure."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

ROW_BYTES = 512
"""What a branch counts beside its content: keys, numbers, the database's own."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """`bytes_max` bounds the content of all branches; beyond it the agents that were quiet longest go, the last
    `let_go_max` of which are remembered as such. Tombstones are kept for `tombstone_s` seconds and at most
    `tombstones_max` of them."""

    branches_max: int = 8
    bytes_max: int = 256 * 2**20
    tombstones_max: int = 10_000
    let_go_max: int = 10_000
    tombstone_s: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Head:
    """A branch without its content.

    `model` is the id (32 bytes) of the model that took its last turn, under which its KV is kept, and `root` the parent
    of its first KV block (empty where nobody may share it). `files` is the id of that model's files, the same wherever
    it is computed with; empty where nobody has said. `messages` and `tokens` are lengths. `turns` counts from the
    conversation's beginning, on whichever branch they were taken; `injected` says that something was put in without a
    reply. `created` and `used` are Unix times.
    """

    agent: str
    branch: int
    epoch: int
    model: bytes
    root: bytes
    turns: int
    injected: bool
    messages: int
    tokens: int
    nbytes: int
    created: float
    used: float
    files: bytes = b""

    @property
    def words(self) -> bytes:
        """What its token ids belong to: they mean the same for every model that has it."""
        return self.files or self.model


@dataclass(frozen=True, slots=True)
class Content:
    """What a branch remembers: token ids as `array('I')` has them in bytes, the text they spell, and the transcript as
    JSON in UTF-8, a list of messages in OpenAI's form."""

    tokens: bytes
    text: str
    messages: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a turn. `branch` and `epoch` are what it continues, None for nothing; `since` is the sequence at which
    it began (0 where unknown) and `turn` the name of a turn that was taken, "" for a stateless one. `turns` counts with
    this one."""

    model: bytes
    content: Content
    messages: int
    since: int
    branch: int | None = None
    epoch: int = 0
    turns: int = 1
    injected: bool = False
    turn: str = ""
    files: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: `replaced` or `opened` a branch; or refused, and nothing has changed: the agent was `forgotten`, the turn
    `lost` to another one, there is `no room`, or its tenant is `over quota`, which the store says."""

    kind: str
    branch: int = 0
    epoch: int = 0

    @property
    def kept(self) -> bool:
        return self.kind in ("replaced", "opened")


class Storage(Protocol):
    """What lasts. Damaged rows are absent. Changes are made within a `transaction`: all of its block or none."""

    @property
    def nbytes(self) -> int:
        """Of all branches: content, and `ROW_BYTES` each."""
        ...

    def nbytes_of(self, tenant: str) -> int:
        """As `nbytes`, of one tenant's agents. From any thread."""
        ...

    def transaction(self) -> AbstractContextManager[None]: ...

    def sequence(self) -> int:
        """The highest number that any branch or tombstone carries."""
        ...

    def heads(self, agent: str) -> list[Head]: ...

    def content(self, head: Head) -> Content | None: ...

    def put(self, head: Head, content: Content) -> None:
        """Write a branch, in place of the one of its id."""
        ...

    def drop(self, head: Head) -> None: ...

    def erase(self, agent: str) -> None:
        """Remove all branches of the agent."""
        ...

    def let_go(self, agent: str, sequence: int, keep: int) -> None:
        """Remove all branches of the agent, and remember that it had some until one is `put` again, or it is buried. Of
        those that this was done to the latest `keep` are remembered."""
        ...

    def was_let_go(self, agent: str) -> bool: ...

    def quietest(self, after: int, limit: int) -> list[tuple[int, str]]:
        """Epoch of the last change and agent, in that order, of those changed later than `after`."""
        ...

    def agents(self, prefix: str, after: str, limit: int) -> list[str]:
        """Agents whose key begins with `prefix` and comes after `after`, in order."""
        ...

    def bury(self, agent: str, sequence: int, at: float) -> None:
        """Leave a tombstone, in place of an older one."""
        ...

    def buried(self, agent: str) -> int:
        """The sequence of the agent's tombstone, 0 for none."""
        ...

    def tombstones(self) -> list[str]:
        """Every agent that has one."""
        ...

    def prune(self, before: float, keep: int) -> int:
        """Remove tombstones older than `before`, and all but the latest `keep`. Returns the highest sequence gone."""
        ...


def main_branch(heads: Collection[Head]) -> Head | None:
    """The branch that a continuing turn goes on with: of those with more than one turn or an injection the one that was
    continued last, else the oldest; None where none has a transcript."""
    told = [head for head in heads if head.messages]
    grown = [head for head in told if head.turns > 1 or head.injected]
    if grown:
        return max(grown, key=lambda head: head.epoch)
    return min(told, key=lambda head: head.branch, default=None)
