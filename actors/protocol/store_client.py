"""The methods of a node's store, for the endpoint, its node's replicas and other nodes' stores. As `clients.py`.

Replicas get None if the node keeps no KV on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...cluster.config.timing import Timing
from ..rpc.client import ActorRef
from ..rpc.local import LocalAddress
from ..rpc.spec import Client, method
from .entries import Failure, SegmentRecord
from .names import store_actor_name
from .store_messages import (
    AgentBranches,
    AskUnpack,
    Begun,
    BranchKV,
    Commit,
    CommitOutcome,
    DiskSession,
    Fetched,
    FoundKV,
    Limits,
    Moved,
    Packed,
    PullKV,
    Recalled,
    Standing,
    StoreStats,
    TakeIn,
    TakeSecondary,
    Tombstone,
    Unpacked,
)


def _patient(timing: Timing, *_: Any) -> float:
    """The time limit of calls that wait for other turns, other nodes or a disk."""
    return timing.store_answer_s


class StoreClient(Client):
    """The store of one node.

    Args:
        node: the store's node.
        handle: its actor's, if known.
        unanswered: called if no answer comes.
        kind: as for `ReplicaClient`.
    """

    def __init__(
        self,
        node: str,
        timing: Timing,
        handle: Any = None,
        unanswered: Callable[[], object] | None = None,
        *,
        kind: type[ActorRef] = ActorRef,
    ) -> None:
        silent = f"the store of node {node} does not answer now"
        super().__init__(kind(store_actor_name(node), silent, handle=handle, on_no_answer=unanswered), timing)

    @method()
    def local_address(self) -> LocalAddress:
        """As `ReplicaClient.local_address`."""
        ...

    # Turns.

    @method(_patient)
    def recall(self, agent: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None) -> Recalled:
        """Returns the memory that a stateless turn begins with.

        Args:
            files_id: of the model's files, which define its token ids; see `Head`.
            known: epochs by branch of what the caller has.
            limits: of the tenant, if the turn will add to the agent's memory.

        Raises:
            QuotaExceeded: the tenant may add nothing.
        """
        ...

    @method(_patient)
    def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Begun:
        """Begins a turn of the agent. Turns of one agent run in the order of asking.

        Raises:
            AgentBusy: another turn has it for too long.
            QuotaExceeded: the tenant may add nothing.
        """
        ...

    @method(_patient)
    def renew(self, agent: str, turn: str) -> bool:
        """Renews the lease of a long turn. Returns False if the turn was lost."""
        ...

    @method(_patient, large=True)
    def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> CommitOutcome:
        """Ends a turn. If the outcome is `kept`, the turn is on the disk; `copied` says whether other nodes have it.

        Args:
            limits: of the tenant, whose KV is evicted to make room.
        """
        ...

    @method(_patient)
    def abandon(self, agent: str, turn: str) -> None:
        """Ends the turn without a commit, or stops waiting for it."""
        ...

    # Agents.

    @method(_patient)
    def transcript(self, agent: str) -> bytes:
        """Returns the transcript of the agent's main branch: OpenAI messages as JSON."""
        ...

    @method(_patient)
    def info(self, agent: str) -> AgentBranches:
        """Returns the agent's branches.

        Raises:
            AgentNotFound: the store does not know it.
        """
        ...

    @method(_patient)
    def agents(self, tenant: str, after: str, limit: int) -> list[AgentBranches]:
        """Returns at most `limit` agents of the tenant ("" for all), sorted by key, from the first after `after`."""
        ...

    @method(_patient)
    def blocks(self, agent: str, replicas: Sequence[tuple[bytes, bytes]] = ()) -> list[BranchKV]:
        """Returns the KV that each of the agent's branches uses.

        Args:
            replicas: (files id, model id) of replicas that may have computed the same tokens under another model id;
                their KV is included.
        """
        ...

    @method(_patient)
    def disk_kept(self, agent: str) -> int:
        """Returns how many KV entries on the disk, blocks and tails, the agent's branches use."""
        ...

    @method(_patient)
    def fork(self, source: str, target: str, limits: Limits | None = None) -> int:
        """Copies an agent. Returns the number of branches.

        Raises:
            AgentNotFound: there is no agent `source`.
            AgentExists: there is an agent `target`.
            InvalidRequest, QuotaExceeded: it may not be copied there.
        """
        ...

    # Satchels: files on the node's disk.

    @method()
    def room(self, agent: str, nbytes: int, limits: Limits | None = None) -> str:
        """Returns the path of a file that does not exist yet, for a satchel that is to be unpacked. Remove it later.

        Raises:
            DiskFull, RequestTooLarge, QuotaExceeded: it is too large.
            Unavailable: the node keeps nothing on disk.
        """
        ...

    @method(_patient)
    def pack(self, agent: str, replicas: Sequence[tuple[bytes, bytes]] = ()) -> Packed:
        """Packs what the node has of an agent into a file, which the caller removes. `replicas` are as for `blocks`.

        Raises:
            AgentNotFound: the node has nothing of it.
            DiskFull, RequestTooLarge: the satchel would be too large.
        """
        ...

    @method()
    def borrow(self, agent: str, home: str) -> None:
        """Announces that branches and KV of an agent that lives on the node `home` will be copied here to be packed.
        `give_back` must follow.

        Raises:
            Unavailable: too many are being packed.
        """
        ...

    @method()
    def give_back(self, agent: str) -> None:
        """Makes the node drop what was copied of the agent since `borrow`."""
        ...

    @method(_patient)
    def unpack(self, asked: AskUnpack) -> Unpacked:
        """Unpacks an agent from a satchel.

        Raises:
            InvalidSatchel: the file is no satchel, or damaged.
            AgentExists: there is such an agent.
            InvalidRequest, QuotaExceeded, MemoryFull: it does not fit.
        """
        ...

    @method(_patient)
    def forget(self, agent: str) -> bool:
        """Erases the agent's memory; running turns cannot commit. Returns whether there was any.

        The transcript is erased from the disk when this returns, KV blocks soon after.
        """
        ...

    @method()
    def stats(self) -> StoreStats:
        """Returns bytes and counts of the memory on this node."""
        ...

    # KV on the disk, for replicas of the node. They read and write its files themselves.

    @method()
    def disk_session(self) -> DiskSession | None:
        """Returns what a writer or reader must know."""
        ...

    @method()
    def disk_commit(self, segment: SegmentRecord, limits: Limits | None = None) -> list[bytes] | None:
        """Commits a written segment; call `disk_touch` with its chain afterwards. Returns its ids that are there now.

        Entries whose owners were all forgotten since they were computed are not among them.

        Args:
            limits: of the tenant whose KV it is.
        """
        ...

    @method()
    def disk_touch(self, model: bytes, chain: Sequence[bytes], owner: str) -> list[bytes] | None:
        """Records the use of a chain. Returns those of its ids that are not there."""
        ...

    @method()
    def disk_find(
        self, model: bytes, chain: Sequence[bytes], parent: bytes, tokens: bytes, tails_max: int
    ) -> FoundKV | None:
        """Returns the KV of a prompt that is there, pinned for a reader: the blocks before the first that is missing,
        and at most `tails_max` tails after them.

        Args:
            chain: the ids of the prompt's blocks, in order.
            parent: the id before `chain`.
            tokens: all tokens after `parent` (`pack_tokens`).
        """
        ...

    @method()
    def disk_read(self, lease: str, chain: Sequence[bytes], owner: str, failures: Sequence[Failure] = ()) -> None:
        """Returns a reader's lease; records that it used `chain`, and which entries it could not read."""
        ...

    @method()
    def kv_models(self, agent: str) -> list[bytes]:
        """Returns the ids of the models whose KV the node's disk has; if `agent` is not "", only that agent's."""
        ...

    @method()
    def claimed(self, agent: str, above: int, models: list[bytes], entries: list[bytes]) -> list[bytes]:
        """Returns the ids of those entries that the agent's branches on this node claim, or soon will, if it lives here
        in an epoch above that one.

        Args:
            models: whose entries they are.
            entries: `EntryRecord.facts` of each.
        """
        ...

    @method(lambda timing, wanted: timing.answer_s + wanted.deadline_s)
    def pull(self, wanted: PullKV) -> Fetched:
        """Pulls a chain from another node for a request that is about to be computed on this one."""
        ...

    # Where agents live.

    @method(_patient)
    def move(self, agent: str, to: str, *, at_once: bool = False) -> Moved:
        """Moves the agent to another node, between two of its turns.

        Args:
            at_once: do not wait for the end of a turn; it is committed on the other node.

        Raises:
            AgentNotFound, AgentBusy, AgentElsewhere: it cannot be moved from here.
            Unavailable: that node is not present now.
        """
        ...

    @method()
    def promote(self, agent: str, above: int) -> int:
        """Promotes the node to primary after the old one was lost, from the latest copy on the nodes that answer.

        Args:
            above: the highest home epoch that the caller knows.

        Returns:
            The new epoch.

        Raises:
            AgentNotFound: no node has a copy, or the agent was forgotten.
        """
        ...

    @method()
    def drain(self) -> None:
        """Makes the store tell the router that no agent may move here any more: the node leaves."""
        ...

    # Between the stores of nodes.

    @method()
    def promote_here(self, agent: str, above: int) -> int:
        """As `promote`, but from the copy that is there: the present primary asks for it. Returns the new epoch."""
        ...

    @method()
    def take_secondary(self, copy: TakeSecondary) -> list[int]:
        """Stores a secondary copy of an agent. Returns the branches whose contents are missing.

        Raises:
            StaleEpoch: the node knows a later primary.
            Unavailable: that node was the primary before, and must first hand over what it has.
        """
        ...

    @method()
    def send_secondary(self, agent: str, to: str) -> int:
        """Makes the node update the copy of the agent on the node `to`. Returns the home epoch of what it sent."""
        ...

    @method()
    def take_in(self, handed: TakeIn) -> int:
        """Adds what only a former primary of the agent has. Returns the number of branches added."""
        ...

    @method()
    def standing(self, agents: Sequence[str]) -> list[Standing]:
        """Returns what the node knows of these agents, without those that it does not know."""
        ...

    @method()
    def doubt(self, agent: str) -> None:
        """Makes the node check whether the agent has another primary now."""
        ...

    @method()
    def buried(self) -> list[Tombstone]:
        """Returns the tombstones of the node."""
        ...

    @method()
    def bury(self, agent: str, epoch: int, number: int) -> bool:
        """Forgets an agent that was forgotten on another node, unless it was created again in a later epoch. Returns
        whether the tombstone was new. The arguments are as in `Tombstone`."""
        ...

    @method(lambda timing, agent, source, deadline_s: timing.answer_s + deadline_s)
    def fetch(self, agent: str, source: str, deadline_s: float) -> Fetched:
        """Makes the node pull the agent's KV that is missing on its disk from the disk of the node `source`, for all
        branches that it knows, within `deadline_s`."""
        ...

    @method()
    def block_addresses(self) -> list[tuple[str, int]]:
        """Returns host and port of every link that serves the node's blocks, the fastest first."""
        ...
