"""The messages to and from a node's store; as `replica_messages.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .entries import Location
from .replica_messages import KVSelection

Limits = Mapping[str, int | None]
"""The bytes that a tenant may have on a node's disk, by tenant; None for no limit. Limits of other tenants stay."""


# Turns and transcripts.


@dataclass(frozen=True, slots=True)
class Head:
    """A branch without its content.

    `model` is the id (32 bytes) of the model of its last turn, under which its KV is kept, and `root` the parent of its
    first KV block (empty if it may not be shared). `files` is the id of that model's files, the same however it
    computes; empty if unknown. `messages` and `tokens` are lengths. `turns` counts from the conversation's beginning,
    over all branches; `injected` is whether messages were added without a reply. `created` and `used` are Unix times.
    `program` is the agent's program, such as `codex`, and `parent` the id of the agent that it works for, with that
    agent's branch at the time if known (`parent_at`); "" if unknown.
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
    program: str = ""
    parent: str = ""

    @property
    def files_id(self) -> bytes:
        """The id of the files that define its token ids, which mean the same for every model with this id."""
        return self.files or self.model


def parent_at(parent: str, branch: int) -> str:
    """Returns a `parent` for `Head`: an agent's id, and one of its branches. The separator between them occurs in no
    id."""
    return f"{parent}#{branch}"


def read_parent(parent: str) -> tuple[str, int | None]:
    """Returns the agent's id and the branch, None if that is not known."""
    agent, _, branch = parent.partition("#")
    return agent, int(branch) if branch.isascii() and branch.isdecimal() and len(branch) < 20 else None


@dataclass(frozen=True, slots=True)
class Content:
    """The memory of a branch: token ids as the bytes of an `array('I')`, their text, and the transcript as JSON in
    UTF-8, a list of OpenAI messages."""

    tokens: bytes
    text: str
    messages: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a turn. `branch` and `epoch` name what it continues; `branch` is None for a new branch. `since` is the
    sequence number at its beginning (0 if unknown) and `turn` the name that `Begin` gave it, "" for a stateless one.
    `turns` includes this one. `program` and `parent` are as in `Head`; "" leaves what is known."""

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
    program: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """How a commit ended. `kind` is `replaced` or `opened` for a branch that was written, else why the commit was
    refused: the agent was `forgotten`, the turn was `lost` to another one, there is `no room`, or its tenant is `over
    quota`. `copied` is whether all required copies were made; True if the commit was refused."""

    kind: str
    branch: int = 0
    epoch: int = 0
    copied: bool = True

    @property
    def kept(self) -> bool:
        return self.kind in ("replaced", "opened")


@dataclass(frozen=True, slots=True)
class BranchMemory:
    """A branch; its content is None if the caller has it."""

    head: Head
    content: Content | None


@dataclass(frozen=True, slots=True)
class Recalled:
    """`since` is the present sequence number; `let_go` is whether the agent had a memory that was evicted."""

    since: int
    branches: list[BranchMemory]
    let_go: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that has begun. `branch` is the main one, None if there is none; its content comes only if it has the
    requested `files_id` and the caller does not know it, its `transcript` always."""

    since: int
    branch: BranchMemory | None
    let_go: bool
    other_transcript: bytes = b""
    """The transcript if `branch` has no content."""

    @property
    def transcript(self) -> bytes:
        content = self.branch.content if self.branch is not None else None
        return self.other_transcript if content is None else content.messages


@dataclass(frozen=True, slots=True)
class AgentBranches:
    """An agent on a node: its `main` branch, None if none has a transcript; all branches, the oldest first; the home
    epoch, and whether the node has the primary."""

    agent: str
    main: int | None
    branches: list[Head]
    epoch: int
    is_primary: bool


@dataclass(frozen=True, slots=True)
class BranchKV:
    """The KV that a branch uses at replicas of the model id `model`."""

    model: bytes
    kept: KVSelection


@dataclass(frozen=True, slots=True)
class Packed:
    """A satchel: the file, its bytes, and how many branches and entries of KV it has."""

    path: str
    nbytes: int
    branches: int
    entries: int


@dataclass(frozen=True, slots=True)
class AskUnpack:
    """Asks to unpack the satchel `path` as the agent. An agent of that name is replaced if `replace` is set, else it is
    an error. KV of the model ids `models` is taken; KV of another cluster's satchel only if its sender is `trusted`."""

    agent: str
    path: str
    models: list[bytes]
    replace: bool = False
    trusted: bool = False
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """How many branches were unpacked, and how many KV entries out of how many, with their bytes; `why_not` says why
    not all, "" if all were. `replaced` is whether there was such an agent before."""

    branches: int
    entries: int
    entries_of: int
    nbytes: int
    why_not: str
    replaced: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's counts since it was started, and its present sizes; `disk` has the figures of its KV by name."""

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
    """What a writer or reader must know: the folder `root`, and the session and epoch of the store's process."""

    root: str
    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class FoundTail:
    """A tail, and how many of its first tokens are those of the prompt."""

    location: Location
    tokens: int


@dataclass(frozen=True, slots=True)
class FoundKV:
    """KV that is pinned for a reader until it returns the `lease`."""

    blocks: list[Location]
    tails: list[FoundTail]
    lease: str


# Between nodes.


@dataclass(frozen=True, slots=True)
class Moved:
    """The agent's primary is on `node` since home epoch `epoch`; how much KV was moved, and in what time. `moved` is
    False if it was there already."""

    node: str
    epoch: int
    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    moved: bool = True


@dataclass(frozen=True, slots=True)
class TakeSecondary:
    """A secondary copy of an agent: all its branches, and by branch at least the contents that have changed. `epoch`
    and `version` are the primary's: a copy that was sent earlier and arrives later changes nothing. `limits` are the
    tenant's, as the primary knows them; a copy is never refused for them, KV is evicted instead."""

    agent: str
    epoch: int
    version: int
    heads: list[Head]
    contents: dict[int, Content]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakeIn:
    """The branches that a former primary of the agent has, as of home epoch `epoch`."""

    agent: str
    epoch: int
    branches: list[BranchMemory]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node knows of an agent: the home epoch, the node's role, the sequence number of its latest turn (0 if
    none), the epoch up to which it was forgotten, and the sequence number before which turns that began cannot
    commit."""

    agent: str
    epoch: int
    role: int
    newest: int
    buried: int
    barred: int = 0


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A forgotten agent: nothing up to this epoch may be kept, and turns that began before this sequence number cannot
    commit."""

    agent: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class PullKV:
    """Asks to pull a chain for a request that is about to be computed: `block_ids` after `root`, then tails of the
    tokens `rest`. `limits` are those of the tenant whose KV it is. With `wait_s` the source may still be computing the
    KV: after this long without new entries the pull ends with what has arrived."""

    source: str
    model: bytes
    root: bytes
    block_ids: list[bytes]
    rest: list[int]
    owner: str
    deadline_s: float
    limits: Limits = field(default_factory=dict)
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """How many `tokens` of the chains the node has now, how much was pulled, and whether that is everything that was
    wanted; for a waiting pull this includes a tail of all tokens after the chain. `more` says whether the rest may
    still come."""

    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    complete: bool = False
    more: bool = False
