"""Agents' memory as a state machine: branches, epochs, turns, tombstones. Pure; `Storage` makes it durable.

One logical clock, the *sequence*, orders all changes. A branch's id is the sequence at which it was opened, its epoch
the sequence of its last replacement, and a tombstone carries the sequence at which it was written. So epochs only grow,
a pair of branch and epoch never stands for two contents, and the least recently used branch has the lowest epoch.

Two kinds of turns end in `commit`:

- A stateless turn recalls the branches and takes no lock. It replaces a branch only if the branch is still in the epoch
  that the turn saw. Otherwise, or if it continues none, it opens a new branch. So concurrent turns and side requests
  overwrite nothing.
- A continuing turn locks the agent first (`begin`) and continues the *main* branch. Its lease ends it if it neither
  commits nor is abandoned.

A turn that began before the agent was forgotten cannot commit afterwards: the tombstone has a later sequence than the
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cachetools import FIFOCache

from ....cluster.errors import AgentExists, AgentNotFound, InvalidRequest, Unavailable
from ...protocol.store_messages import Commit, CommitOutcome, Content, Head
from .branches import AgentLimits, Storage, main_branch

_SEEN_MAX = 4096
_TURNS_MAX = 4096
_QUIET_BATCH = 64


@dataclass(slots=True)
class _TurnLease:
    name: str
    ends: float


class _NoRoom(Exception):
    pass


class Agents:
    """All agents of a node.

    Args:
        root_of: the root id of an agent's blocks under a model; empty if they are not shared.
        start: the lowest first sequence. One that grows with the clock keeps branch ids unique even if the storage was
            recreated.
        on_let_go: called with each evicted agent.
    """

    def __init__(
        self,
        storage: Storage,
        limits: AgentLimits,
        root_of: Callable[[str, bytes], bytes],
        start: int = 0,
        on_let_go: Callable[[str], object] = lambda agent: None,
    ) -> None:
        self._on_let_go = on_let_go
        self._storage = storage
        self._limits = limits
        self.root_of = root_of
        self._sequence = max(start, storage.sequence())
        self._residue, self._modulus = 0, 1
        # Tombstones below this were pruned, so a turn that began earlier may not commit.
        self._floor = 0
        self._turns: dict[str, _TurnLease] = {}
        # Unknown agents that a stateless turn has recalled: if one is forgotten, that turn must not commit.
        self._seen: FIFOCache[str, None] = FIFOCache(_SEEN_MAX)
        # Evicted agents that `take_evicted` has not returned yet; bounded.
        self._gone: dict[str, None] = {}
        self.evicted = 0

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def nbytes_of(self, tenant: str) -> int:
        """Returns the bytes of one tenant's agents, secondaries included. Safe from any thread."""
        return self._storage.nbytes_of(tenant)

    def recall(
        self, agent: str, files_id: bytes, known: Mapping[int, int]
    ) -> tuple[int, list[tuple[Head, Content | None]]]:
        """Begins a stateless turn.

        Args:
            words: the id that the branches' token ids belong to (`Head.words`).
            known: epoch by branch of what the caller has cached.

        Returns:
            The current sequence, and the agent's branches with that id. The content is None if the caller has it.
        """
        branches: list[tuple[Head, Content | None]] = []
        heads = self._storage.heads(agent)
        if not heads:
            self._seen[agent] = None
        for head in heads:
            if head.files_id != files_id:
                continue
            if known.get(head.branch) == head.epoch:
                branches.append((head, None))
            elif (content := self._storage.content(head)) is not None:
                branches.append((head, content))
        return self._sequence, branches

    def begin(
        self, agent: str, turn: str, now: float, lease_s: float
    ) -> tuple[int, tuple[Head, Content] | None] | None:
        """Begins a continuing turn.

        Args:
            now: seconds of a monotonic clock.

        Returns:
            The current sequence, and the main branch if there is one. None while another turn runs.
        """
        if self.busy(agent, turn, now):
            return None
        if len(self._turns) >= _TURNS_MAX:
            # Turns whose endpoint ended are neither committed nor abandoned.
            self._turns = {other: held for other, held in self._turns.items() if now < held.ends}
        main = self._main(agent)
        self._turns[agent] = _TurnLease(turn, now + lease_s)
        return self._sequence, main

    def busy(self, agent: str, turn: str, now: float) -> bool:
        """Returns whether a turn other than `turn` holds the agent."""
        held = self._turns.get(agent)
        return held is not None and held.name != turn and now < held.ends

    def turn_ends(self, agent: str) -> float | None:
        """Returns when the lease of the agent's turn expires, None if no turn runs."""
        held = self._turns.get(agent)
        return held.ends if held else None

    def renew(self, agent: str, turn: str, now: float, lease_s: float) -> bool:
        """Extends the turn's lease. Returns False if the turn was lost."""
        held = self._turns.get(agent)
        if held is None or held.name != turn:
            return False
        held.ends = now + lease_s
        return True

    def abandon(self, agent: str, turn: str) -> None:
        """Ends the turn without a commit."""
        held = self._turns.get(agent)
        if held is not None and held.name == turn:
            del self._turns[agent]

    def end_turn(self, agent: str) -> None:
        """Ends the agent's turn, whoever holds it."""
        self._turns.pop(agent, None)

    def retake(self, agent: str, turn: str, now: float, lease_s: float) -> None:
        """Extends the lease of a turn whose commit failed, or gives it one, unless another turn has begun."""
        held = self._turns.setdefault(agent, _TurnLease(turn, now + lease_s))
        if held.name == turn:
            held.ends = now + lease_s

    def commit(self, agent: str, commit: Commit, now: float, unix_now: float) -> CommitOutcome:
        """Ends a turn and stores its branch. A refused commit only ends the turn.

        If the store's process restarted and lost the lease, the turn may still commit: no other turn holds the agent.
        """
        held = self._turns.get(agent)
        if commit.turn and held is not None and held.name != commit.turn:
            return CommitOutcome("lost")
        if self._storage.buried(agent) > commit.since or self._floor > commit.since:
            outcome = CommitOutcome("forgotten")
        else:
            try:
                outcome = self._write(agent, commit, now, unix_now)
            except _NoRoom:
                outcome = CommitOutcome("no room")
        # If the storage fails, the owner can still commit or abandon the turn.
        if commit.turn:
            self._storage.after_commit(lambda: self.end_turn(agent))
        return outcome

    def fork(self, source: str, target: str, now: float, unix_now: float) -> int:
        """Copies all branches of `source` to a new agent. Returns how many.

        Both agents share KV blocks if their scopes are equal. Under `share: agent` the scopes differ, so the target's
        next turn computes all of its KV.

        Raises:
            AgentNotFound: `source` does not exist.
            AgentExists: `target` exists, or is in its first turn.
            InvalidRequest: both do not fit into the memory.
        """
        heads = self._storage.heads(source)
        copies = [(head, content) for head in heads if (content := self._storage.content(head)) is not None]
        if not copies:
            raise AgentNotFound(f"there is no agent {_id(source)!r}", param="id")
        if self._storage.heads(target) or self.busy(target, "", now):
            raise AgentExists(f"there is an agent {_id(target)!r} already", param="as")
        try:
            self._bring(target, [(replace(head, created=unix_now), content) for head, content in copies], {source}, now)
        except _NoRoom:
            raise InvalidRequest("a copy of the agent does not fit into transcripts_bytes_max", param="as") from None
        return len(copies)

    def bring(self, agent: str, branches: Sequence[tuple[Head, Content]], now: float) -> None:
        """Stores the branches of an agent from another cluster that is unknown here. They get new branch ids in the
        same order.

        Raises:
            InvalidRequest: they do not fit into the memory.
        """
        try:
            self._bring(agent, branches, set(), now)
        except _NoRoom:
            raise InvalidRequest("the agent does not fit into transcripts_bytes_max") from None
        self._storage.after_commit(lambda: self._seen.pop(agent, None))

    def _bring(self, agent: str, branches: Sequence[tuple[Head, Content]], keep: set[str], now: float) -> None:
        # Ids first, in the order of the old ones: the oldest branch stays the oldest.
        ids = {number: self._next() for number in sorted(head.branch for head, _ in branches)}
        with self._storage.transaction():
            for head, content in sorted(branches, key=lambda branch: branch[0].epoch):
                self._make_place(self._storage.heads(agent))
                root, epoch = self.root_of(agent, head.model), self._next()
                self._storage.put(replace(head, agent=agent, branch=ids[head.branch], epoch=epoch, root=root), content)
            self._make_room({*keep, agent}, now, trim=None)

    def forget(self, agent: str, unix_now: float) -> bool:
        """Erases the agent and bars its running turns from committing. Returns whether the agent was known."""
        known = bool(self._storage.heads(agent)) or agent in self._turns
        if not known and agent not in self._seen:
            return False
        self.bury(agent, unix_now)
        return known

    def bury(self, agent: str, unix_now: float, number: int = 0) -> None:
        """Erases the agent and writes its tombstone, even if the agent is unknown here.

        Args:
            number: the sequence of its tombstone on the node where it was forgotten. Turns that began before it there
                are barred here.
        """
        self._sequence = max(self._sequence, number)
        with self._storage.transaction():
            self._storage.erase(agent)
            self._storage.bury(agent, self._next(), unix_now)
            gone = self._storage.prune(unix_now - self._limits.tombstone_s, self._limits.tombstones_max)

        def bar() -> None:
            self._floor = max(self._floor, gone)
            self._turns.pop(agent, None)
            self._seen.pop(agent, None)

        self._storage.after_commit(bar)

    def take_in(self, agent: str, branches: Iterable[tuple[Head, Content]], now: float) -> None:
        """Stores branches of a former primary of the agent, under their own numbers if those are free.

        Raises:
            Unavailable: they do not fit.
        """
        try:
            with self._storage.transaction():
                for head, content in branches:
                    heads = self._storage.heads(agent)
                    taken = {number for own in heads for number in (own.branch, own.epoch)}
                    branch, epoch = head.branch, head.epoch
                    if taken & {branch, epoch}:
                        branch, epoch = self._next(), self._next()
                    self.witness([head])
                    # The sequence versions copies, so it must grow with this change.
                    self._next()
                    root = self.root_of(agent, head.model)
                    self._make_place(heads)
                    self._storage.put(replace(head, agent=agent, branch=branch, epoch=epoch, root=root), content)
                self._make_room({agent}, now, trim=None)
        except _NoRoom:
            raise Unavailable("there is no room for the branches that another node hands over") from None

    def make_room(self, agent: str, now: float) -> None:
        """Evicts other agents until `agent`, which has just grown, fits. Runs inside the caller's transaction.

        Raises:
            Unavailable: evicting all others is not enough.
        """
        try:
            self._make_room({agent}, now, trim=None)
        except _NoRoom:
            raise Unavailable("there is no room for a copy of the agent") from None

    def take_evicted(self) -> list[str]:
        """Returns the agents evicted since the last call."""
        gone, self._gone = list(self._gone), {}
        return gone

    def buried(self, agent: str) -> int:
        """Returns the sequence of the agent's tombstone, 0 if it has none."""
        return self._storage.buried(agent)

    def forgotten(self) -> list[str]:
        """Returns the agents with a tombstone, the latest last, including those that were created again."""
        return self._storage.tombstones()

    def let_go(self, agent: str) -> bool:
        """Returns whether the agent was evicted and has no newer turn."""
        return self._storage.was_let_go(agent)

    def lives(self, agent: str) -> bool:
        """Returns whether the agent has branches, or may have one when its turn ends."""
        return bool(self._storage.heads(agent)) or agent in self._turns or agent in self._seen

    def heads(self, agent: str) -> list[Head]:
        """Returns the agent's branches, the oldest first."""
        return sorted(self._storage.heads(agent), key=lambda head: head.branch)

    def content(self, head: Head) -> Content | None:
        return self._storage.content(head)

    def transcript(self, agent: str) -> bytes:
        """Returns the main branch's messages as JSON."""
        main = self._main(agent)
        return main[1].messages if main else b"[]"

    def list(self, prefix: str, after: str, limit: int) -> Sequence[tuple[str, list[Head]]]:
        """Returns up to `limit` agents in the order of their keys, with their branches."""
        listed: list[tuple[str, list[Head]]] = []
        while len(listed) < limit:
            agents = self._storage.agents(prefix, after, limit - len(listed))
            if not agents:
                break
            after = agents[-1]
            listed += [(agent, heads) for agent in agents if (heads := self.heads(agent))]
        return listed

    def check(self, agents: Collection[str]) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self._storage.nbytes <= self._limits.bytes_max
        for agent in agents:
            epochs: set[int] = set()
            heads = self._storage.heads(agent)
            assert len(heads) <= self._limits.branches_max, heads
            for head in heads:
                assert head.agent == agent and head.branch <= head.epoch <= self._sequence, head
                assert head.epoch not in epochs, head
                epochs.add(head.epoch)

    def witness(self, heads: Iterable[Head]) -> None:
        """Advances the logical clock past the epochs of branches from another node."""
        self._sequence = max([self._sequence, *(head.epoch for head in heads)])

    def count_apart(self, residue: int, modulus: int) -> None:
        """Restricts new sequence numbers to `residue` modulo `modulus`, so two nodes never use the same one."""
        self._residue, self._modulus = residue, modulus

    def _next(self) -> int:
        self._sequence += 1
        self._sequence += (self._residue - self._sequence) % self._modulus
        return self._sequence

    def _main(self, agent: str) -> tuple[Head, Content] | None:
        heads = self._storage.heads(agent)
        while (head := main_branch(heads)) is not None:
            if (content := self._storage.content(head)) is not None:
                return head, content
            heads.remove(head)
        return None

    def _write(self, agent: str, commit: Commit, now: float, unix_now: float) -> CommitOutcome:
        heads = self._storage.heads(agent)
        old = next((head for head in heads if head.branch == commit.branch and head.epoch == commit.epoch), None)
        epoch = self._next()
        head = Head(
            agent=agent,
            branch=old.branch if old else epoch,
            epoch=epoch,
            model=commit.model,
            root=self.root_of(agent, commit.model),
            turns=commit.turns,
            injected=commit.injected or (old is not None and old.injected),
            messages=commit.messages,
            tokens=len(commit.content.tokens) // 4,
            nbytes=0,
            created=old.created if old else unix_now,
            used=unix_now,
            files=commit.files,
            program=commit.program or (old.program if old else ""),
            parent=_parent(commit.parent, old.parent if old else "", heads),
        )
        with self._storage.transaction():
            self._storage.put(head, commit.content)
            if old is None:
                self._make_place(heads)
            self._make_room({agent}, now, trim=head)
        self._storage.after_commit(lambda: self._seen.pop(agent, None))
        return CommitOutcome("replaced" if old else "opened", head.branch, epoch)

    def _make_place(self, heads: list[Head]) -> None:
        """Drops the least recently used branches until one more fits into `branches_max`. The main branch goes last, so
        that many side requests do not end the conversation."""
        others = sorted(heads, key=lambda head: head.epoch)
        main = main_branch(others)
        while len(others) + 1 > self._limits.branches_max:
            gone = next((head for head in others if head != main), others[0])
            others.remove(gone)
            self._storage.drop(gone)

    def _make_room(self, keep: set[str], now: float, trim: Head | None) -> None:
        """Evicts the least recently used agents, except those in `keep` or in a turn; then other branches of `trim`'s
        agent.

        Raises:
            _NoRoom: that is not enough.
        """
        after = -1
        evicted: list[str] = []
        while self._over and (quiet := self._storage.quietest(after, _QUIET_BATCH)):
            after = quiet[-1][0]
            for _, agent in quiet:
                if self._over and agent not in keep and not self.busy(agent, "", now):
                    self._storage.let_go(agent, self._sequence, self._limits.let_go_max)
                    evicted.append(agent)
        if trim is not None and self._over:
            heads = self._storage.heads(trim.agent)
            main = main_branch(heads)
            for head in sorted(heads, key=lambda head: (head == main, head.epoch)):
                if self._over and head.branch != trim.branch:
                    self._storage.drop(head)
        if self._over:
            raise _NoRoom
        self._storage.after_commit(lambda: self._note_evicted(evicted))

    def _note_evicted(self, evicted: Sequence[str]) -> None:
        self.evicted += len(evicted)
        for agent in evicted:
            self._on_let_go(agent)
        self._gone |= dict.fromkeys(evicted[: _SEEN_MAX - len(self._gone)])

    @property
    def _over(self) -> bool:
        return self._storage.nbytes > self._limits.bytes_max


def _id(agent: str) -> str:
    """Returns the agent's id without its tenant."""
    return agent.partition("/")[2] or agent


def _parent(said: str, before: str, heads: Sequence[Head]) -> str:
    """Returns a branch's parent agent: as the request named it, with the parent's branch once that is known."""
    if "#" in said:
        return said
    known = (head.parent for head in heads if head.parent.startswith(f"{said or before}#"))
    return next(known, said or before)
