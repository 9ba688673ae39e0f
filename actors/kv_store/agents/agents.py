"""Agents' memory as a state machine: branches, epochs, turns, tombstones. Pure; what lasts is behind `Storage`.

One counter, the *sequence*, orders everything that happens here. A branch's id is the number at which it was opened,
its epoch the number of its last replacement, and a tombstone carries the number of its burial. So epochs only grow, no
pair of branch and epoch ever stands for two contents, and the least recently used branch is that of the least epoch.

Two kinds of turns end in `commit`:

- A stateless turn recalls the branches and waits for nobody. It replaces a branch only where that is still in the epoch
  it saw; else, or if it continues none, it opens a new one. So concurrent turns and side requests overwrite nothing.
- A continuing turn is taken first (`begin`), one at a time for each agent, and continues the *main* branch. A turn that
  is never given back ends with its lease.

What began before the agent was forgotten cannot commit afterwards: it carries the sequence it began at, the tombstone a
later one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cachetools import FIFOCache

from ....cluster.errors import AgentExists, AgentNotFound, InvalidRequest, Unavailable
from .branches import AgentLimits, Commit, Content, Head, Outcome, Storage, main_branch

_SEEN_MAX = 4096
_QUIET_BATCH = 64


@dataclass(slots=True)
class _Turn:
    name: str
    ends: float


class _NoRoom(Exception):
    pass


class Agents:
    """All agents of a node.

    Args:
        root_of: the root id of an agent's blocks under a model; empty where they are shared with nobody.
        start: the least sequence to begin with. One that grows with the clock keeps branch ids unique even where the
            storage had to begin anew.
        on_let_go: called with every agent that had to make room for others.
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
        # Below this, tombstones have been let go, so a turn that began earlier may not commit.
        self._floor = 0
        self._turns: dict[str, _Turn] = {}
        # Agents that nothing is known of and that a turn has asked for: forgetting one must reach that turn.
        self._seen: FIFOCache[str, None] = FIFOCache(_SEEN_MAX)
        # Evicted agents that nobody was told of, as many as there is room for.
        self._gone: dict[str, None] = {}
        self.evicted = 0

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def nbytes_of(self, tenant: str) -> int:
        """Of one tenant's agents, copies too. From any thread."""
        return self._storage.nbytes_of(tenant)

    def recall(
        self, agent: str, words: bytes, known: Mapping[int, int]
    ) -> tuple[int, list[tuple[Head, Content | None]]]:
        """What a stateless turn begins with.

        Args:
            known: the epochs of the branches that the caller has.

        Returns:
            The sequence now, and the agent's branches of those words, the content of those only that are not known.
        """
        found: list[tuple[Head, Content | None]] = []
        heads = self._storage.heads(agent)
        if not heads:
            self._seen[agent] = None
        for head in heads:
            if head.words != words:
                continue
            if known.get(head.branch) == head.epoch:
                found.append((head, None))
            elif (content := self._storage.content(head)) is not None:
                found.append((head, content))
        return self._sequence, found

    def begin(
        self, agent: str, turn: str, now: float, lease_s: float
    ) -> tuple[int, tuple[Head, Content] | None] | None:
        """Take the agent's turn: the sequence now, and the main branch if there is one. None while another turn runs.

        Args:
            now: by a clock that never goes back.
        """
        if self.busy(agent, turn, now):
            return None
        main = self._main(agent)
        self._turns[agent] = _Turn(turn, now + lease_s)
        return self._sequence, main

    def busy(self, agent: str, turn: str, now: float) -> bool:
        """Whether a turn other than `turn` has the agent."""
        held = self._turns.get(agent)
        return held is not None and held.name != turn and now < held.ends

    def turn_ends(self, agent: str) -> float | None:
        """When the lease of the agent's turn runs out, None where there is none."""
        held = self._turns.get(agent)
        return held.ends if held else None

    def renew(self, agent: str, turn: str, now: float, lease_s: float) -> bool:
        """Extend the turn's lease. False when the turn was lost."""
        held = self._turns.get(agent)
        if held is None or held.name != turn:
            return False
        held.ends = now + lease_s
        return True

    def abandon(self, agent: str, turn: str) -> None:
        """End the turn without a word."""
        held = self._turns.get(agent)
        if held is not None and held.name == turn:
            del self._turns[agent]

    def end_turn(self, agent: str) -> None:
        """End the agent's turn, whoever has it."""
        self._turns.pop(agent, None)

    def retake(self, agent: str, turn: str, now: float, lease_s: float) -> None:
        """Give a turn back to its owner whose commit came to nothing, unless somebody else has taken the agent's."""
        self._turns.setdefault(agent, _Turn(turn, now + lease_s))

    def commit(self, agent: str, commit: Commit, now: float, unix_now: float) -> Outcome:
        """End a turn and keep what it computed. Refused, nothing changes but that the turn is over.

        A turn whose lease the storage's process has lost by restarting may commit all the same: nobody else has it.
        """
        held = self._turns.get(agent)
        if commit.turn and held is not None and held.name != commit.turn:
            return Outcome("lost")
        if self._storage.buried(agent) > commit.since or self._floor > commit.since:
            outcome = Outcome("forgotten")
        else:
            try:
                outcome = self._write(agent, commit, now, unix_now)
            except _NoRoom:
                outcome = Outcome("no room")
        # Last: where the storage failed, the turn is still its owner's to commit or abandon.
        if commit.turn:
            self._turns.pop(agent, None)
        return outcome

    def fork(self, source: str, target: str, now: float, unix_now: float) -> int:
        """Copy all branches of `source` to a new agent. Returns how many.

        The KV blocks are the same where the scopes are. Under `share: agent` they differ, so what the target says next
        is computed once more from its beginning.

        Raises:
            AgentNotFound: no such source.
            AgentExists: the target is there, or in its first turn.
            InvalidRequest: both do not fit into the memory.
        """
        heads = sorted(self._storage.heads(source), key=lambda head: head.epoch)
        copies = [(head, content) for head in heads if (content := self._storage.content(head)) is not None]
        if not copies:
            raise AgentNotFound(f"there is no agent {_id(source)!r}", param="id")
        if self._storage.heads(target) or self.busy(target, "", now):
            raise AgentExists(f"there is an agent {_id(target)!r} already", param="as")
        # The ids are made first and in the order of the old ones: the oldest branch stays the oldest.
        ids = {head.branch: self._next() for head in sorted(heads, key=lambda head: head.branch)}
        try:
            with self._storage.transaction():
                for head, content in copies:
                    root = self.root_of(target, head.model)
                    epoch = self._next()
                    copy = replace(
                        head, agent=target, branch=ids[head.branch], epoch=epoch, root=root, created=unix_now
                    )
                    self._storage.put(copy, content)
                self._make_room({source, target}, now, trim=None)
        except _NoRoom:
            raise InvalidRequest("a copy of the agent does not fit into transcripts_bytes_max", param="as") from None
        return len(copies)

    def forget(self, agent: str, unix_now: float) -> bool:
        """Erase the agent and bar the turns under way. Returns whether anything was known of it."""
        known = bool(self._storage.heads(agent)) or agent in self._turns
        if not known and agent not in self._seen:
            return False
        self.bury(agent, unix_now)
        return known

    def bury(self, agent: str, unix_now: float, number: int = 0) -> None:
        """As `forget`, also where nothing is known of the agent here.

        Args:
            number: of its tombstone on the node where it was forgotten: a turn that began there before is barred here.
        """
        self._sequence = max(self._sequence, number)
        with self._storage.transaction():
            self._storage.erase(agent)
            self._storage.bury(agent, self._next(), unix_now)
            gone = self._storage.prune(unix_now - self._limits.tombstone_s, self._limits.tombstones_max)
        self._floor = max(self._floor, gone)
        self._turns.pop(agent, None)
        self._seen.pop(agent, None)

    def take_in(self, agent: str, branches: Iterable[tuple[Head, Content]], now: float) -> None:
        """Keep branches that a former home of the agent has, with their numbers where those are free.

        Raises:
            Unavailable: there is no room.
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
                    # Whoever counts along sees that something has changed.
                    self._next()
                    root = self.root_of(agent, head.model)
                    self._make_place(heads)
                    self._storage.put(replace(head, agent=agent, branch=branch, epoch=epoch, root=root), content)
                self._make_room({agent}, now, trim=None)
        except _NoRoom:
            raise Unavailable("there is no room for what another node hands over") from None

    def make_room(self, agent: str, now: float) -> None:
        """Evict others for what `agent` was just given, in this transaction.

        Raises:
            Unavailable: that is not enough.
        """
        try:
            self._make_room({agent}, now, trim=None)
        except _NoRoom:
            raise Unavailable("there is no room for a copy of the agent") from None

    def take_evicted(self) -> list[str]:
        """Agents that had to make room since the last call."""
        gone, self._gone = list(self._gone), {}
        return gone

    def buried(self, agent: str) -> int:
        """The number of the agent's tombstone, 0 where it has none."""
        return self._storage.buried(agent)

    def forgotten(self) -> list[str]:
        """Agents that were forgotten, the latest last, also those that have come back since."""
        return self._storage.tombstones()

    def let_go(self, agent: str) -> bool:
        """Whether the agent had to make room for others, and has said nothing since."""
        return self._storage.was_let_go(agent)

    def lives(self, agent: str) -> bool:
        """Whether the agent has branches, or may have one as soon as its turn ends."""
        return bool(self._storage.heads(agent)) or agent in self._turns or agent in self._seen

    def heads(self, agent: str) -> list[Head]:
        """The agent's branches, the oldest first."""
        return sorted(self._storage.heads(agent), key=lambda head: head.branch)

    def content(self, head: Head) -> Content | None:
        return self._storage.content(head)

    def transcript(self, agent: str) -> bytes:
        """The main branch's messages as JSON."""
        main = self._main(agent)
        return main[1].messages if main else b"[]"

    def list(self, prefix: str, after: str, limit: int) -> Sequence[tuple[str, list[Head]]]:
        """Agents in the order of their keys, with their branches."""
        found: list[tuple[str, list[Head]]] = []
        while len(found) < limit:
            agents = self._storage.agents(prefix, after, limit - len(found))
            if not agents:
                break
            after = agents[-1]
            found += [(agent, heads) for agent in agents if (heads := self.heads(agent))]
        return found

    def check(self, agents: Collection[str]) -> None:
        """Raise AssertionError where what must always hold does not."""
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
        """These came from another node: whatever happens here is later."""
        self._sequence = max([self._sequence, *(head.epoch for head in heads)])

    def count_apart(self, residue: int, modulus: int) -> None:
        """Number everything from now on by `residue` modulo `modulus`: what two nodes do has different numbers then."""
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

    def _write(self, agent: str, commit: Commit, now: float, unix_now: float) -> Outcome:
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
        )
        with self._storage.transaction():
            self._storage.put(head, commit.content)
            if old is None:
                self._make_place(heads)
            self._make_room({agent}, now, trim=head)
        self._seen.pop(agent, None)
        return Outcome("replaced" if old else "opened", head.branch, epoch)

    def _make_place(self, heads: list[Head]) -> None:
        """Before there are more than `branches_max`, the least recently used goes; the main one only if no other is
        there, so that many side requests do not end the conversation."""
        others = sorted(heads, key=lambda head: head.epoch)
        main = main_branch(others)
        while len(others) + 1 > self._limits.branches_max:
            gone = next((head for head in others if head != main), others[0])
            others.remove(gone)
            self._storage.drop(gone)

    def _make_room(self, keep: set[str], now: float, trim: Head | None) -> None:
        """Evict quiet agents, never one in `keep` or in its turn; then other branches of `trim`'s agent.

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
        self.evicted += len(evicted)
        for agent in evicted:
            self._on_let_go(agent)
        self._gone |= dict.fromkeys(evicted[: _SEEN_MAX - len(self._gone)])

    @property
    def _over(self) -> bool:
        return self._storage.nbytes > self._limits.bytes_max


def _id(agent: str) -> str:
    """The agent's id without its tenant."""
    return agent.partition("/")[2] or agent
