"""A node's store as everybody calls it: the endpoint, its node's replicas, other nodes' stores. As `clients.py`.

Replicas get None where the node keeps no KV on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ...cluster.timing import Timing
from .calls import ActorRef, Call
from .codec import decode, decode_any, encode
from .entries import Failure, SegmentRecord
from .handles import store_actor_name
from .messages import AgentKeys, Count, Nothing
from .store_messages import (
    Addresses,
    AgentBranches,
    AgentKey,
    AgentKV,
    AgentPage,
    AgentTo,
    AskKV,
    Begin,
    Begun,
    BranchIds,
    BranchKV,
    Commit,
    CommitOutcome,
    CommitSegment,
    CommitTurn,
    DiskSession,
    EntryIds,
    Fetched,
    FetchKV,
    FindKV,
    Flag,
    Fork,
    FoundKV,
    Limits,
    ListAgents,
    Moved,
    PrimaryEpoch,
    Promote,
    PullKV,
    ReadDone,
    Recall,
    Recalled,
    Standing,
    Standings,
    StoreStats,
    TakeIn,
    TakeSecondary,
    Tombstone,
    TombstoneList,
    TouchChain,
    Transcript,
    TurnName,
)

T = TypeVar("T")


class StoreClient:
    """
    Args:
        node: whose store it is.
        timing: `answer_s` is how long an answer may take, `store_answer_s` one that waits for other turns, other nodes
            or a disk.
        handle: its actor's, where it is known already.
        unanswered: called where no answer came.
    """

    def __init__(
        self, node: str, timing: Timing, handle: Any = None, unanswered: Callable[[], object] | None = None
    ) -> None:
        self._answer_s, self._patient_s = timing.answer_s, timing.store_answer_s
        silent = f"the store of node {node} does not answer now"
        self.actor = ActorRef(store_actor_name(node), silent, handle=handle, on_no_answer=unanswered)

    # Turns.

    def recall(
        self, agent: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Call[Recalled]:
        """What a stateless turn begins with.

        Args:
            words: what the model's token ids belong to; see `Head`.
            known: epochs by branch of what the caller has.
            limits: of the tenant, where the turn is to add words.

        Raises:
            QuotaExceeded: it may add none.
        """
        message, read = Recall(agent, files_id, dict(known), dict(limits or {})), partial(decode, Recalled)
        return self.actor.call(lambda store: store.recall.remote(encode(message)), read, self._patient_s)

    def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Call[Begun]:
        """Take the agent's turn, in the order of asking.

        Raises:
            AgentBusy: another turn has it for too long.
            QuotaExceeded: the tenant may add no words.
        """
        message, read = Begin(agent, turn, files_id, dict(known), dict(limits or {})), partial(decode, Begun)
        return self.actor.call(lambda store: store.begin.remote(encode(message)), read, self._patient_s)

    def renew(self, agent: str, turn: str) -> Call[bool]:
        """A sign of life of a long turn. False when the turn was lost."""
        message = TurnName(agent, turn)
        return self.actor.call(lambda store: store.renew.remote(encode(message)), _flag, self._patient_s)

    def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> Call[CommitOutcome]:
        """End a turn; it is on the disk when this returns, and copied, or not.

        Args:
            limits: of the tenant, whose KV makes room for the words.
        """
        message, read = CommitTurn(agent, commit, dict(limits or {})), partial(decode, CommitOutcome)
        # What a turn leaves may be a megabyte to write down.
        return self.actor.call(lambda store: store.commit.remote(encode(message)), read, self._patient_s, large=True)

    def abandon(self, agent: str, turn: str) -> Call[None]:
        """End the turn without a word, or stop waiting for it."""
        message = TurnName(agent, turn)
        return self.actor.call(lambda store: store.abandon.remote(encode(message)), _nothing, self._patient_s)

    # Agents.

    def transcript(self, agent: str) -> Call[bytes]:
        """What the agent said and heard on its main branch: OpenAI messages as JSON."""
        message = AgentKey(agent)
        return self.actor.call(
            lambda store: store.transcript.remote(encode(message)),
            lambda answer: decode(Transcript, answer).messages,
            self._patient_s,
        )

    def info(self, agent: str) -> Call[AgentBranches]:
        """The agent's branches.

        Raises:
            AgentNotFound: nothing is known of it.
        """
        message, read = AgentKey(agent), partial(decode, AgentBranches)
        return self.actor.call(lambda store: store.info.remote(encode(message)), read, self._patient_s)

    def agents(self, tenant: str, after: str, limit: int) -> Call[list[AgentBranches]]:
        """Agents of the tenant in the order of their keys, those after the key `after`."""
        message = ListAgents(tenant, after, limit)
        return self.actor.call(
            lambda store: store.agents.remote(encode(message)),
            lambda answer: decode(AgentPage, answer).agents,
            self._patient_s,
        )

    def blocks(self, agent: str, replicas: Sequence[tuple[bytes, bytes]] = ()) -> Call[list[BranchKV]]:
        """What each of the agent's branches stands on. Of one that is shorter than a block its tokens are all there is.

        Args:
            replicas: (files id, model id) of those that may have computed the same words under an id of their own, of
                which is told too then.
        """
        message = AskKV(agent, list(replicas))
        return self.actor.call(
            lambda store: store.blocks.remote(encode(message)),
            lambda answer: decode(AgentKV, answer).branches,
            self._patient_s,
        )

    def disk_kept(self, agent: str) -> Call[int]:
        """How many entries of KV on the disk, blocks and tails, the agent's branches stand on."""
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.disk_kept.remote(encode(message)), _count, self._patient_s)

    def fork(self, source: str, target: str, limits: Limits | None = None) -> Call[int]:
        """Copy an agent. Returns the number of branches.

        Raises:
            AgentNotFound, AgentExists, InvalidRequest, QuotaExceeded: there is nothing to copy, or no place for it.
        """
        message = Fork(source, target, dict(limits or {}))
        return self.actor.call(lambda store: store.fork.remote(encode(message)), _count, self._patient_s)

    def forget(self, agent: str) -> Call[bool]:
        """Erase the agent's memory; turns under way cannot commit. Returns whether there was any.

        The transcript is off the disk when this returns, and KV blocks soon after.
        """
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.forget.remote(encode(message)), _flag, self._patient_s)

    def stats(self) -> Call[StoreStats]:
        """Bytes and counts of the memory on this node."""
        message, read = Nothing(), partial(decode, StoreStats)
        return self.actor.call(lambda store: store.stats.remote(encode(message)), read, self._answer_s)

    # KV on the disk, for replicas of the node. Its bytes go past the store, by files.

    def disk_session(self) -> Call[DiskSession | None]:
        """What a writer or reader must know."""
        message, read = Nothing(), partial(decode_any, DiskSession)
        return self.actor.call(lambda store: store.disk_session.remote(encode(message)), read, self._answer_s)

    def disk_commit(self, record: SegmentRecord, limits: Limits | None = None) -> Call[list[bytes] | None]:
        """Make a written segment count; its chain is to be touched afterwards. Returns its ids that are there now.

        What belongs to nobody but to agents that were forgotten since it was computed is not among them.
        """
        message = CommitSegment(record, dict(limits or {}))
        return self.actor.call(lambda store: store.disk_commit.remote(encode(message)), _ids, self._answer_s)

    def disk_touch(self, model: bytes, chain: Sequence[bytes], owner: str) -> Call[list[bytes] | None]:
        """Note that a chain was used. Returns the ids of it that are not there."""
        message = TouchChain(model, list(chain), owner)
        return self.actor.call(lambda store: store.disk_touch.remote(encode(message)), _ids, self._answer_s)

    def disk_find(
        self, model: bytes, chain: Sequence[bytes], parent: bytes, tokens: bytes, tails_max: int
    ) -> Call[FoundKV | None]:
        """What is there of a prompt, pinned for a reader; as `FindKV` says."""
        message, read = FindKV(model, list(chain), parent, tokens, tails_max), partial(decode_any, FoundKV)
        return self.actor.call(lambda store: store.disk_find.remote(encode(message)), read, self._answer_s)

    def disk_read(self, lease: str, chain: Sequence[bytes], owner: str, failures: Sequence[Failure] = ()) -> Call[None]:
        """A reader has done: it gives its lease back, has used `chain`, and tells which entries it could not read."""
        message = ReadDone(lease, list(chain), owner, list(failures))
        return self.actor.call(lambda store: store.disk_read.remote(encode(message)), _nothing, self._answer_s)

    def pull(self, wanted: PullKV) -> Call[Fetched]:
        """Fetch a chain from another node for a request that is about to be computed here."""
        timeout_s = self._answer_s + wanted.deadline_s
        return self.actor.call(lambda store: store.pull.remote(encode(wanted)), partial(decode, Fetched), timeout_s)

    # Where agents live.

    def move(self, agent: str, to: str) -> Call[Moved]:
        """Hand the agent over to another node, between two of its turns.

        Raises:
            AgentNotFound, AgentBusy, AgentElsewhere: it cannot be moved from here.
            Unavailable: no such node is there now.
        """
        message, read = AgentTo(agent, to), partial(decode, Moved)
        return self.actor.call(lambda store: store.move.remote(encode(message)), read, self._patient_s)

    def promote(self, agent: str, above: int) -> Call[int]:
        """Become the agent's home after its own was lost, with the latest copy that any node has that answers.

        Args:
            above: the highest home epoch that the caller has heard of.

        Returns:
            The new epoch.

        Raises:
            AgentNotFound: nobody has a copy, or the agent was forgotten.
        """
        message = Promote(agent, above)
        return self.actor.call(lambda store: store.promote.remote(encode(message)), _epoch, self._answer_s)

    def drain(self) -> Call[None]:
        """The node leaves: it tells the router that no agent is to come here any more."""
        message = Nothing()
        return self.actor.call(lambda store: store.drain.remote(encode(message)), _nothing, self._answer_s)

    # For the stores of other nodes.

    def promote_here(self, agent: str, above: int) -> Call[int]:
        """As `adopt`, from the copy that is there: the home itself asks for it. Returns the new epoch."""
        message = Promote(agent, above)
        return self.actor.call(lambda store: store.promote_here.remote(encode(message)), _epoch, self._answer_s)

    def take_secondary(self, copy: TakeSecondary) -> Call[list[int]]:
        """Keep a copy of an agent's words. Returns the branches whose contents are missing.

        Raises:
            StaleEpoch: a later home is known there.
            Unavailable: that node was the home before, and hands over first what it has.
        """
        return self.actor.call(
            lambda store: store.take_secondary.remote(encode(copy)),
            lambda answer: decode(BranchIds, answer).branches,
            self._answer_s,
        )

    def send_secondary(self, agent: str, to: str) -> Call[int]:
        """Bring another node's copy of the agent up to date with what is there. Returns the home epoch of that."""
        message = AgentTo(agent, to)
        return self.actor.call(lambda store: store.send_secondary.remote(encode(message)), _epoch, self._answer_s)

    def take_in(self, memory: TakeIn) -> Call[int]:
        """Keep what a former home of the agent has and this one has not. Returns how many branches that were."""
        return self.actor.call(lambda store: store.take_in.remote(encode(memory)), _count, self._answer_s)

    def standing(self, agents: Sequence[str]) -> Call[list[Standing]]:
        """What the node says of these agents, of those that it has heard of."""
        message = AgentKeys(list(agents))
        return self.actor.call(
            lambda store: store.standing.remote(encode(message)),
            lambda answer: decode(Standings, answer).agents,
            self._answer_s,
        )

    def doubt(self, agent: str) -> Call[None]:
        """The agent may have another home now; the node finds out."""
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.doubt.remote(encode(message)), _nothing, self._answer_s)

    def buried(self) -> Call[list[Tombstone]]:
        """The agents that were forgotten there."""
        message = Nothing()
        return self.actor.call(
            lambda store: store.buried.remote(encode(message)),
            lambda answer: decode(TombstoneList, answer).agents,
            self._answer_s,
        )

    def bury(self, burial: Tombstone) -> Call[bool]:
        """Forget an agent that was forgotten elsewhere, unless it lives again in a later epoch. Returns whether that
        was news."""
        return self.actor.call(lambda store: store.bury.remote(encode(burial)), _flag, self._answer_s)

    def fetch(self, agent: str, source: str, deadline_s: float) -> Call[Fetched]:
        """Have the node pull what another one's disk has of the agent's KV and its own has not, of all branches that it
        knows."""
        message, read = FetchKV(agent, source, deadline_s), partial(decode, Fetched)
        return self.actor.call(lambda store: store.fetch.remote(encode(message)), read, self._answer_s + deadline_s)

    def block_addresses(self) -> Call[list[tuple[str, int]]]:
        """Where the node's blocks are served, host and port, the fastest link first."""
        message = Nothing()
        return self.actor.call(lambda store: store.block_addresses.remote(encode(message)), _addresses, self._answer_s)


def _nothing(answer: bytes) -> None:
    decode_any(Nothing, answer)


def _flag(answer: bytes) -> bool:
    return decode(Flag, answer).value


def _count(answer: bytes) -> int:
    return decode(Count, answer).count


def _epoch(answer: bytes) -> int:
    return decode(PrimaryEpoch, answer).epoch


def _ids(answer: bytes) -> list[bytes] | None:
    found = decode_any(EntryIds, answer)
    return None if found is None else found.ids


def _addresses(answer: bytes) -> list[tuple[str, int]]:
    return [(host, port) for host, port in decode(Addresses, answer).addresses]
