"""The client of a node's store, for the endpoint, its node's replicas and other nodes' stores. As `clients.py`.

Replicas get None if the node keeps no KV on disk.
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
from .messages import Count, Nothing
from .router_messages import AgentKeys
from .store_messages import (
    Addresses,
    AgentBranches,
    AgentKey,
    AgentKV,
    AgentPage,
    AgentTo,
    AskKV,
    AskRoom,
    AskUnpack,
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
    FilePath,
    FindKV,
    Flag,
    Fork,
    FoundKV,
    Limits,
    ListAgents,
    MoveAgent,
    Moved,
    Packed,
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
    Unpacked,
)

T = TypeVar("T")


class StoreClient:
    """The store of one node, for every process that calls it.

    Args:
        node: the store's node.
        timing: an answer may take `answer_s`, or `store_answer_s` if it waits for other turns, other nodes or a disk.
        handle: its actor's, if known.
        unanswered: called if no answer comes.
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
        """Returns the memory that a stateless turn begins with.

        Args:
            files_id: of the model's files, which define its token ids; see `Head`.
            known: epochs by branch of what the caller has.
            limits: of the tenant, if the turn will add to the agent's memory.

        Raises:
            QuotaExceeded: the tenant may add nothing.
        """
        message, read = Recall(agent, files_id, dict(known), dict(limits or {})), partial(decode, Recalled)
        return self.actor.call(lambda store: store.recall.remote(encode(message)), read, self._patient_s)

    def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Call[Begun]:
        """Begins a turn of the agent. Turns of one agent run in the order of asking.

        Raises:
            AgentBusy: another turn has it for too long.
            QuotaExceeded: the tenant may add nothing.
        """
        message, read = Begin(agent, turn, files_id, dict(known), dict(limits or {})), partial(decode, Begun)
        return self.actor.call(lambda store: store.begin.remote(encode(message)), read, self._patient_s)

    def renew(self, agent: str, turn: str) -> Call[bool]:
        """Renews the lease of a long turn. Returns False if the turn was lost."""
        message = TurnName(agent, turn)
        return self.actor.call(lambda store: store.renew.remote(encode(message)), _flag, self._patient_s)

    def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> Call[CommitOutcome]:
        """Ends a turn. If the outcome is `kept`, the turn is on the disk; `copied` says whether other nodes have it.

        Args:
            limits: of the tenant, whose KV is evicted to make room.
        """
        message, read = CommitTurn(agent, commit, dict(limits or {})), partial(decode, CommitOutcome)
        # Encoding a turn may take long: it can be a megabyte.
        return self.actor.call(lambda store: store.commit.remote(encode(message)), read, self._patient_s, large=True)

    def abandon(self, agent: str, turn: str) -> Call[None]:
        """Ends the turn without a commit, or stops waiting for it."""
        message = TurnName(agent, turn)
        return self.actor.call(lambda store: store.abandon.remote(encode(message)), _nothing, self._patient_s)

    # Agents.

    def transcript(self, agent: str) -> Call[bytes]:
        """Returns the transcript of the agent's main branch: OpenAI messages as JSON."""
        message = AgentKey(agent)
        return self.actor.call(
            lambda store: store.transcript.remote(encode(message)),
            lambda answer: decode(Transcript, answer).messages,
            self._patient_s,
        )

    def info(self, agent: str) -> Call[AgentBranches]:
        """Returns the agent's branches.

        Raises:
            AgentNotFound: the store does not know it.
        """
        message, read = AgentKey(agent), partial(decode, AgentBranches)
        return self.actor.call(lambda store: store.info.remote(encode(message)), read, self._patient_s)

    def agents(self, tenant: str, after: str, limit: int) -> Call[list[AgentBranches]]:
        """Returns at most `limit` agents of the tenant ("" for all), sorted by key, from the first after `after`."""
        message = ListAgents(tenant, after, limit)
        return self.actor.call(
            lambda store: store.agents.remote(encode(message)),
            lambda answer: decode(AgentPage, answer).agents,
            self._patient_s,
        )

    def blocks(self, agent: str, replicas: Sequence[tuple[bytes, bytes]] = ()) -> Call[list[BranchKV]]:
        """Returns the KV that each of the agent's branches uses.

        Args:
            replicas: (files id, model id) of replicas that may have computed the same tokens under another model id;
                their KV is included.
        """
        message = AskKV(agent, list(replicas))
        return self.actor.call(
            lambda store: store.blocks.remote(encode(message)),
            lambda answer: decode(AgentKV, answer).branches,
            self._patient_s,
        )

    def disk_kept(self, agent: str) -> Call[int]:
        """Returns how many KV entries on the disk, blocks and tails, the agent's branches use."""
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.disk_kept.remote(encode(message)), _count, self._patient_s)

    def fork(self, source: str, target: str, limits: Limits | None = None) -> Call[int]:
        """Copies an agent. Returns the number of branches.

        Raises:
            AgentNotFound: there is no agent `source`.
            AgentExists: there is an agent `target`.
            InvalidRequest, QuotaExceeded: it may not be copied there.
        """
        message = Fork(source, target, dict(limits or {}))
        return self.actor.call(lambda store: store.fork.remote(encode(message)), _count, self._patient_s)

    # Satchels: files on the node's disk.

    def room(self, agent: str, nbytes: int, limits: Limits | None = None) -> Call[str]:
        """Returns the path of a file that does not exist yet, for a satchel that is to be unpacked. Remove it later.

        Raises:
            DiskFull, RequestTooLarge, QuotaExceeded: it is too large.
            Unavailable: the node keeps nothing on disk.
        """
        message = AskRoom(agent, nbytes, dict(limits or {}))
        return self.actor.call(
            lambda store: store.room.remote(encode(message)),
            lambda answer: decode(FilePath, answer).path,
            self._answer_s,
        )

    def pack(self, agent: str, replicas: Sequence[tuple[bytes, bytes]] = ()) -> Call[Packed]:
        """Packs what the node has of an agent into a file, which the caller removes. `replicas` are as for `blocks`.

        Raises:
            AgentNotFound: it has nothing.
            DiskFull, RequestTooLarge: the satchel would be too large.
        """
        message, read = AskKV(agent, list(replicas)), partial(decode, Packed)
        return self.actor.call(lambda store: store.pack.remote(encode(message)), read, self._patient_s)

    def borrow(self, agent: str, home: str) -> Call[None]:
        """Says that words and KV of an agent that lives on the node `home` come now to be packed. `give_back` must
        follow.

        Raises:
            Unavailable: too many are being packed.
        """
        message = AgentTo(agent, home)
        return self.actor.call(lambda store: store.borrow.remote(encode(message)), _nothing, self._answer_s)

    def give_back(self, agent: str) -> Call[None]:
        """Makes the node drop what has come of the agent since `borrow`."""
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.give_back.remote(encode(message)), _nothing, self._answer_s)

    def unpack(self, asked: AskUnpack) -> Call[Unpacked]:
        """Takes in an agent from a satchel.

        Raises:
            InvalidSatchel: it is none, or not whole.
            AgentExists: there is such an agent.
            InvalidRequest, QuotaExceeded, MemoryFull: it does not fit.
        """
        return self.actor.call(
            lambda store: store.unpack.remote(encode(asked)), partial(decode, Unpacked), self._patient_s
        )

    def forget(self, agent: str) -> Call[bool]:
        """Erases the agent's memory; running turns cannot commit. Returns whether there was any.

        The transcript is erased from the disk when this returns, KV blocks soon after.
        """
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.forget.remote(encode(message)), _flag, self._patient_s)

    def stats(self) -> Call[StoreStats]:
        """Returns bytes and counts of the memory on this node."""
        message, read = Nothing(), partial(decode, StoreStats)
        return self.actor.call(lambda store: store.stats.remote(encode(message)), read, self._answer_s)

    # KV on the disk, for replicas of the node. They read and write its files themselves.

    def disk_session(self) -> Call[DiskSession | None]:
        """Returns what a writer or reader must know."""
        message, read = Nothing(), partial(decode_any, DiskSession)
        return self.actor.call(lambda store: store.disk_session.remote(encode(message)), read, self._answer_s)

    def disk_commit(self, record: SegmentRecord, limits: Limits | None = None) -> Call[list[bytes] | None]:
        """Commits a written segment; call `disk_touch` with its chain afterwards. Returns its ids that are there now.

        Entries whose owners were all forgotten since they were computed are not among them.
        """
        message = CommitSegment(record, dict(limits or {}))
        return self.actor.call(lambda store: store.disk_commit.remote(encode(message)), _ids, self._answer_s)

    def disk_touch(self, model: bytes, chain: Sequence[bytes], owner: str) -> Call[list[bytes] | None]:
        """Records the use of a chain. Returns those of its ids that are not there."""
        message = TouchChain(model, list(chain), owner)
        return self.actor.call(lambda store: store.disk_touch.remote(encode(message)), _ids, self._answer_s)

    def disk_find(
        self, model: bytes, chain: Sequence[bytes], parent: bytes, tokens: bytes, tails_max: int
    ) -> Call[FoundKV | None]:
        """Returns the KV of a prompt that is there, pinned for a reader; see `FindKV`."""
        message, read = FindKV(model, list(chain), parent, tokens, tails_max), partial(decode_any, FoundKV)
        return self.actor.call(lambda store: store.disk_find.remote(encode(message)), read, self._answer_s)

    def disk_read(self, lease: str, chain: Sequence[bytes], owner: str, failures: Sequence[Failure] = ()) -> Call[None]:
        """Returns a reader's lease; records that it used `chain`, and which entries it could not read."""
        message = ReadDone(lease, list(chain), owner, list(failures))
        return self.actor.call(lambda store: store.disk_read.remote(encode(message)), _nothing, self._answer_s)

    def pull(self, wanted: PullKV) -> Call[Fetched]:
        """Pulls a chain from another node for a request that is about to be computed on this one."""
        timeout_s = self._answer_s + wanted.deadline_s
        return self.actor.call(lambda store: store.pull.remote(encode(wanted)), partial(decode, Fetched), timeout_s)

    # Where agents live.

    def move(self, agent: str, to: str, *, at_once: bool = False) -> Call[Moved]:
        """Moves the agent to another node, between two of its turns.

        Args:
            at_once: do not wait for the end of a turn; it is committed on the other node.

        Raises:
            AgentNotFound, AgentBusy, AgentElsewhere: it cannot be moved from here.
            Unavailable: that node is not present now.
        """
        message, read = MoveAgent(agent, to, at_once), partial(decode, Moved)
        return self.actor.call(lambda store: store.move.remote(encode(message)), read, self._patient_s)

    def promote(self, agent: str, above: int) -> Call[int]:
        """Promotes the node to primary after the old one was lost, from the latest copy on the nodes that answer.

        Args:
            above: the highest home epoch that the caller knows.

        Returns:
            The new epoch.

        Raises:
            AgentNotFound: no node has a copy, or the agent was forgotten.
        """
        message = Promote(agent, above)
        return self.actor.call(lambda store: store.promote.remote(encode(message)), _epoch, self._answer_s)

    def drain(self) -> Call[None]:
        """Makes the store tell the router that no agent may move here any more: the node leaves."""
        message = Nothing()
        return self.actor.call(lambda store: store.drain.remote(encode(message)), _nothing, self._answer_s)

    # Between the stores of nodes.

    def promote_here(self, agent: str, above: int) -> Call[int]:
        """As `promote`, but from the copy that is there: the present primary asks for it. Returns the new epoch."""
        message = Promote(agent, above)
        return self.actor.call(lambda store: store.promote_here.remote(encode(message)), _epoch, self._answer_s)

    def take_secondary(self, copy: TakeSecondary) -> Call[list[int]]:
        """Stores a secondary copy of an agent. Returns the branches whose contents are missing.

        Raises:
            StaleEpoch: the node knows a later primary.
            Unavailable: that node was the primary before, and must first hand over what it has.
        """
        return self.actor.call(
            lambda store: store.take_secondary.remote(encode(copy)),
            lambda answer: decode(BranchIds, answer).branches,
            self._answer_s,
        )

    def send_secondary(self, agent: str, to: str) -> Call[int]:
        """Makes the node update the copy of the agent on the node `to`. Returns the home epoch of what it sent."""
        message = AgentTo(agent, to)
        return self.actor.call(lambda store: store.send_secondary.remote(encode(message)), _epoch, self._answer_s)

    def take_in(self, memory: TakeIn) -> Call[int]:
        """Adds what only a former primary of the agent has. Returns the number of branches added."""
        return self.actor.call(lambda store: store.take_in.remote(encode(memory)), _count, self._answer_s)

    def standing(self, agents: Sequence[str]) -> Call[list[Standing]]:
        """Returns what the node knows of these agents, without those that it does not know."""
        message = AgentKeys(list(agents))
        return self.actor.call(
            lambda store: store.standing.remote(encode(message)),
            lambda answer: decode(Standings, answer).agents,
            self._answer_s,
        )

    def doubt(self, agent: str) -> Call[None]:
        """Makes the node check whether the agent has another primary now."""
        message = AgentKey(agent)
        return self.actor.call(lambda store: store.doubt.remote(encode(message)), _nothing, self._answer_s)

    def buried(self) -> Call[list[Tombstone]]:
        """Returns the tombstones of the node."""
        message = Nothing()
        return self.actor.call(
            lambda store: store.buried.remote(encode(message)),
            lambda answer: decode(TombstoneList, answer).agents,
            self._answer_s,
        )

    def bury(self, burial: Tombstone) -> Call[bool]:
        """Forgets an agent that was forgotten on another node, unless it was created again in a later epoch. Returns
        whether the tombstone was new."""
        return self.actor.call(lambda store: store.bury.remote(encode(burial)), _flag, self._answer_s)

    def fetch(self, agent: str, source: str, deadline_s: float) -> Call[Fetched]:
        """Makes the node pull the agent's KV that is missing on its disk from the disk of the node `source`, for all
        branches that it knows."""
        message, read = FetchKV(agent, source, deadline_s), partial(decode, Fetched)
        return self.actor.call(lambda store: store.fetch.remote(encode(message)), read, self._answer_s + deadline_s)

    def block_addresses(self) -> Call[list[tuple[str, int]]]:
        """Returns host and port of every link that serves the node's blocks, the fastest first."""
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
    entries = decode_any(EntryIds, answer)
    return None if entries is None else entries.ids


def _addresses(answer: bytes) -> list[tuple[str, int]]:
    return [(host, port) for host, port in decode(Addresses, answer).addresses]
