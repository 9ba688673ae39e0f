"""What is asked of a node's store, and what it answers; `codec.py` says how it travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .entries import Failure, Location, SegmentRecord
from .messages import KVSelection

Limits = Mapping[str, int | None]
"""Bytes by tenant that it may have on a node's disk, None where it has no limit. Who is not in it is not spoken of."""


# Agents' words.


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
    def files_id(self) -> bytes:
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
class CommitOutcome:
    """`kind`: `replaced` or `opened` a branch; or refused, and nothing has changed: the agent was `forgotten`, the turn
    `lost` to another one, there is `no room`, or its tenant is `over quota`, which the store says. `copied` is whether
    as many other nodes have the turn as should; nothing is missing where it was refused."""

    kind: str
    branch: int = 0
    epoch: int = 0
    copied: bool = True

    @property
    def kept(self) -> bool:
        return self.kind in ("replaced", "opened")


@dataclass(frozen=True, slots=True)
class BranchMemory:
    """A branch; its content is None where whoever asked knows it."""

    head: Head
    content: Content | None


@dataclass(frozen=True, slots=True)
class Recall:
    """What a stateless turn asks for: branches of these `words` (see `Head`). `known` are epochs by branch of those
    that need no content; `limits` the tenant's, where the turn is to add words."""

    agent: str
    files_id: bytes
    known: dict[int, int]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recalled:
    """`since` is the sequence now; `let_go` whether the agent said something before and had to make room for others."""

    since: int
    branches: list[BranchMemory]
    let_go: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """As `Recall`, for a continuing turn, which has a name."""

    agent: str
    turn: str
    files_id: bytes
    known: dict[int, int]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that was taken. `branch` is the main one, None where there is none; its content comes only if its tokens
    are of the words that were asked for and not known, its `transcript` always."""

    since: int
    branch: BranchMemory | None
    let_go: bool
    other_transcript: bytes = b""
    """Where `branch` has no content."""

    @property
    def transcript(self) -> bytes:
        content = self.branch.content if self.branch is not None else None
        return self.other_transcript if content is None else content.messages


@dataclass(frozen=True, slots=True)
class TurnName:
    agent: str
    turn: str


@dataclass(frozen=True, slots=True)
class CommitTurn:
    """`limits` are the tenant's, whose KV makes room for the words."""

    agent: str
    commit: Commit
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flag:
    """Whether it is so."""

    value: bool


@dataclass(frozen=True, slots=True)
class AgentKey:
    """`tenant/agent_id`."""

    agent: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """OpenAI messages as JSON."""

    messages: bytes


@dataclass(frozen=True, slots=True)
class AgentBranches:
    """An agent as a node has it: its `main` branch, None where none has a transcript, all of them, the oldest first,
    and its place: the home epoch, and whether the node is its home."""

    agent: str
    main: int | None
    branches: list[Head]
    epoch: int
    is_primary: bool


@dataclass(frozen=True, slots=True)
class ListAgents:
    """Agents of the tenant in the order of their keys, those after the key `after`."""

    tenant: str
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class AgentPage:
    agents: list[AgentBranches]


@dataclass(frozen=True, slots=True)
class AskKV:
    """`replicas` are (files id, model id) of those that may have computed the same words under an id of their own."""

    agent: str
    replicas: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BranchKV:
    """What a branch stands on, at replicas of that model id."""

    model: bytes
    kept: KVSelection


@dataclass(frozen=True, slots=True)
class AgentKV:
    branches: list[BranchKV]


@dataclass(frozen=True, slots=True)
class Fork:
    source: str
    target: str
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's counts since it was started, and its bytes now; `disk` has those of its KV by name."""

    agents_bytes: int
    agents_evicted_total: int
    rows_damaged_total: int
    files_set_aside_total: int
    disk: dict[str, int]
    disk_error: str
    moves_total: int
    moved_bytes_total: int
    adopted_total: int
    copies_failed_total: int
    copies_late: int


# KV on the node's disk.


@dataclass(frozen=True, slots=True)
class DiskSession:
    """What a writer or reader must know: the folder, and which process of the store it writes for."""

    root: str
    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CommitSegment:
    """`limits` are those of the tenant whose KV it is."""

    record: SegmentRecord
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntryIds:
    ids: list[bytes]


@dataclass(frozen=True, slots=True)
class TouchChain:
    model: bytes
    chain: list[bytes]
    owner: str


@dataclass(frozen=True, slots=True)
class FindKV:
    """What is there of a prompt?

    `chain` are the ids of blocks that are wanted, in order; only those up to the first that is missing count, and after
    these tails are looked for, `tails_max` at most. `parent` is what comes before `chain`, and `tokens` are all that
    follow it (`pack_tokens`).
    """

    model: bytes
    chain: list[bytes]
    parent: bytes
    tokens: bytes
    tails_max: int


@dataclass(frozen=True, slots=True)
class FoundTail:
    """A tail, and how many of the tokens that were asked for it begins with."""

    location: Location
    tokens: int


@dataclass(frozen=True, slots=True)
class FoundKV:
    """Pinned for a reader, who gives the `lease` back."""

    blocks: list[Location]
    tails: list[FoundTail]
    lease: str


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A reader has done: it gives its lease back, has used `chain`, and tells which entries it could not read."""

    lease: str
    chain: list[bytes]
    owner: str
    failures: list[Failure] = field(default_factory=list)


# Among the nodes.


@dataclass(frozen=True, slots=True)
class AgentTo:
    """An agent, and the node to which it or a copy of it goes."""

    agent: str
    to: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The agent lives on `node` since home epoch `epoch`; what went, and what it took."""

    node: str
    epoch: int
    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PrimaryEpoch:
    epoch: int


@dataclass(frozen=True, slots=True)
class Promote:
    """`above` is the highest home epoch that was heard of."""

    agent: str
    above: int


@dataclass(frozen=True, slots=True)
class TakeSecondary:
    """An agent's words: all its branches, and by branch the contents of those at least that have changed. `epoch` is
    the home's, and `version` the home's count when it had these: what was sent earlier and comes later changes nothing.
    `limits` are the tenant's, as the home knows them; a copy is never refused for them, KV makes room for it."""

    agent: str
    epoch: int
    version: int
    heads: list[Head]
    contents: dict[int, Content]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BranchIds:
    branches: list[int]


@dataclass(frozen=True, slots=True)
class TakeIn:
    """What a former home of the agent has, as of home epoch `epoch`."""

    agent: str
    epoch: int
    branches: list[BranchMemory]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node says of an agent: its place, when the agent spoke last (0 where it has nothing), up to which epoch it
    was forgotten, and the number before which turns that began are barred since."""

    agent: str
    epoch: int
    role: int
    newest: int
    buried: int
    barred: int = 0


@dataclass(frozen=True, slots=True)
class Standings:
    agents: list[Standing]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The agent was forgotten: nothing up to that epoch may be there any more, and what turns say that began before
    that number is not kept."""

    agent: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class TombstoneList:
    agents: list[Tombstone]


@dataclass(frozen=True, slots=True)
class FetchKV:
    """Pull what the disk of the node `source` has of the agent's KV, within `deadline_s`."""

    agent: str
    source: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PullKV:
    """Pull a chain for a request that is about to be computed: `block_ids` after `root`, then tails of the tokens
    `rest`. `limits` are those of the tenant whose KV it is."""

    source: str
    model: bytes
    root: bytes
    block_ids: list[bytes]
    rest: list[int]
    owner: str
    deadline_s: float
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fetched:
    """`tokens` of the chains that are here now, and what has come for it."""

    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """[host, port] each, the fastest link first."""

    addresses: list[tuple[str, int]]
