"""Every message between Satchel's processes but the stores' (`store_messages.py`). One version number covers them all.

How they travel is in `codec.py`: field by field, so both sides must run the same `VERSION`.
Tokens go from a replica straight to whoever asked (a *consumer*: the endpoint, or a driver with handles); the router
sees sizes and ids only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VERSION = 13


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row draws its tokens, every field by the row itself and never by its batch mates.

    The order: `logit_bias` (pairs of token and what is added to its logit) and the penalties change the logits,
    `temperature` divides them, then `top_k`, `top_p` and `min_p` leave tokens out, and noise decides among the rest.
    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off, as are `repetition_penalty` 1 (it counts
    prompt and answer) and `presence_penalty` and `frequency_penalty` 0 (they count the answer).

    `seed` is always set: the consumer draws one where the caller gave none, so that a row that moves to another
    replica goes on with the same noise. `choice` tells rows of one request and seed apart.

    End-of-sequence tokens and `stop_token_ids` end the row, and cannot be drawn before `min_tokens`; `ignore_eos`
    leaves the `stop_token_ids` in force.

    With `max_tokens` 0 the prompt is computed and kept, and nothing is drawn.

    `logprobs` is None, or how many of the likeliest tokens are reported beside each drawn one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    seed: int = 0
    choice: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture in a prompt, or some frames of a video that are encoded together.

    Its span begins at the prompt's token `start`; `tokens` are the ids that the model is given there, where the prompt
    has words (`media_ids`). `key` names what is encoded, `grid` is (frames, rows, columns) of patches where
    positions depend on it. `pixels` are RGB, a byte a channel, of `width` x `height`, frame by frame; none where
    nobody has them any more.
    """

    start: int
    tokens: list[int]
    key: bytes
    grid: list[int]
    width: int
    height: int
    pixels: list[bytes]
    video: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One row to generate.

    `prompt` are token ids, and words where they stand for a picture of `media`; `block_ids` the ids of its whole
    blocks, in order; `root_id` the parent of the first. `generated` counts how many of the prompt's last tokens were
    generated for this same request earlier, on a replica that was lost: sampling goes on at that position. `choices`
    counts the requests with this very prompt that come together, as a caller's `n` does: their prompt is computed once.
    KV of the prompt's first `pull_tokens` tokens is to be fetched from the node `pull_from` before, as far as it is not
    here; "" for no node. The agent has had the prompt's first `remembered_tokens` tokens in earlier turns; 0 where that
    is not known. Where it is not `reusable` no other request can find its KV, so none is kept when it ends. `block_ids`
    and `root_id` are made of `model_id`, b"" where nobody has said which that is. Tenants take turns, and of one
    tenant its flows. Of the tenant's KV that nobody uses the replica's memory keeps `memory_bytes_max`, and of its
    agents' words and KV each node's disk `disk_bytes_max`; None without a limit of its own.
    """

    request_id: str
    consumer: str
    model: str
    agent: str
    prompt: list[int]
    block_ids: list[bytes]
    root_id: bytes
    sampling: Sampling
    priority: int = 0
    deadline_s: float = 600.0
    generated: int = 0
    choices: int = 1
    pull_from: str = ""
    pull_tokens: int = 0
    media: list[MediaSpan] = field(default_factory=list)
    remembered_tokens: int = 0
    reusable: bool = True
    model_id: bytes = b""
    tenant: str = ""
    flow: str = ""
    memory_bytes_max: int | None = None
    disk_bytes_max: int | None = None

    @property
    def disk_limits(self) -> dict[str, int | None]:
        """As `store_messages.Limits`."""
        return {self.tenant: self.disk_bytes_max}


TokenLogprobs = tuple[float, list[tuple[int, float]]]
"""The natural logarithm of a drawn token's probability, and (token, logarithm) of the likeliest ones, best first; by
the model's own distribution, before bias, penalties, temperature and filters."""


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What one row produced since the last frame.

    `finish` is None while the row goes on, then `stop`, `length`, `abort` or `error`. `cached_tokens` comes with the
    first update. `error` is `SatchelError.to_wire()` where `finish` is `error`. `logprobs` has an entry for every token
    where the request asked for them.
    """

    request_id: str
    tokens: list[int]
    finish: str | None = None
    cached_tokens: int | None = None
    error: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """What is new in all rows of one consumer: an engine step, or several where it was slow to ask."""

    rows: list[RowUpdate]


@dataclass(frozen=True, slots=True)
class Chain:
    """What a request's blocks and pictures are called at replicas of the id `model_id`; as in `RouteRequest`."""

    model_id: bytes
    block_ids: list[bytes]
    pictures: list[tuple[bytes, int, int, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router needs to choose: ids and sizes, no tokens. `beside` is a replica that has just got a request with
    the same prompt, "" for none; `near` is the node whose store has the agent's memory or will have it, "" where nobody
    knows. `pictures` are [id of its features, token of the prompt at which it ends, how many tokens it has, whether
    there are pixels to encode].

    All of that is called so at replicas whose model has the id `model_id`; `others` says the same for further ids, as
    nodes that compute differently have."""

    request_id: str
    model: str
    agent: str
    block_ids: list[bytes]
    prompt_tokens: int
    exclude: list[str] = field(default_factory=list)
    beside: str = ""
    near: str = ""
    pictures: list[tuple[bytes, int, int, bool]] = field(default_factory=list)
    model_id: bytes = b""
    others: list[Chain] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why.

    `cached_tokens` is how much of the prompt need not be computed there: what the replica is believed to hold, what its
    node's disk has, and last the `pull_tokens` that node `pull_from` has and that are to be pulled first. They are
    whole blocks, the ones that end at `cached_tokens`; "" and 0 where nothing is pulled. `node` is the replica's, ""
    where it has not said. `move_to` is the node that the agent's memory is to move to after this turn, "" for none.

    `costs_s` has the estimated seconds to first token by term (`total` is what was compared), each a list along
    `candidates`; of very many candidates the cheapest only.

    `model_id` is the replica's, and `model_ids` has those of all replicas of the model that the router knows.
    """

    replica: str
    why: str
    cached_tokens: int = 0
    candidates: list[str] = field(default_factory=list)
    costs_s: dict[str, list[float]] = field(default_factory=dict)
    node: str = ""
    pull_from: str = ""
    pull_tokens: int = 0
    move_to: str = ""
    model_id: bytes = b""
    model_ids: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's heartbeat to the router.

    `incarnation` is new at every start of the process. `sequence` counts reports; the router answers "resync" when it
    missed one, and then `announced` holds the ids of all blocks and pictures' features that the replica has, and `full`
    is True. `active` lists the requests that are queued or running there.

    Of the figures, 0 is "not measured yet": the rate of prefill, `decode_token_s` (the time of a decode step),
    `restore_bytes_per_s` (KV from the node's disk into memory), `kv_bytes_per_token` (as it is kept and moved) and
    `encode_token_s` (the time to encode a picture, for each of its tokens).
    `free_bytes` is the memory left for the KV of further rows, -1 where that is not known.
    `model_id` is the same for the whole incarnation.
    """

    replica: str
    model: str
    incarnation: str
    sequence: int
    running: int
    waiting: int
    pending_tokens: int
    rows_max: int
    prefill_tokens_per_s: float
    active: list[str]
    announced: list[bytes]
    retracted: list[bytes]
    full: bool
    node: str = ""
    decode_token_s: float = 0.0
    restore_bytes_per_s: float = 0.0
    kv_bytes_per_token: float = 0.0
    free_bytes: int = -1
    encode_token_s: float = 0.0
    model_id: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store's heartbeat to the router: what its node's disk holds, and which agents.

    `incarnation`, `sequence`, `full` and the answer are as in `ReplicaReport`. A store with very many ids may send
    some in the full report and the others in those that follow at once.

    `announced` and `retracted` are ids of what is on the disk: blocks, tails and pictures' features. `agents` are
    [key, home epoch, is home] of those that came or changed, `agents_retracted` keys of those this node has no more,
    `tombstones` [key, epoch]: whatever has this epoch or a lower one was forgotten. Neither an id nor a key is both
    announced and retracted in one report. A full report has all ids, agents and tombstones.

    `links` are bytes a second, by the node from which this one pulled since its last report, as measured. `blocks` and
    `used_bytes` are those of KV on the disk, `disk_full` says that no more can be written, and `draining` that no agent
    is to come here. `memory_free_bytes` is what its machine has left, -1 where that is not known. `disk_error` says why
    no KV is kept on its disk now, "" where it is, and `agents_let_go` how many agents had to make room for others
    since the store was started.
    """

    node: str
    incarnation: str
    sequence: int
    announced: list[bytes]
    retracted: list[bytes]
    full: bool
    agents: list[tuple[str, int, bool]] = field(default_factory=list)
    agents_retracted: list[str] = field(default_factory=list)
    tombstones: list[tuple[str, int]] = field(default_factory=list)
    links: dict[str, float] = field(default_factory=dict)
    used_bytes: int = 0
    free_bytes: int = -1
    disk_full: bool = False
    draining: bool = False
    memory_free_bytes: int = -1
    blocks: int = 0
    disk_error: str = ""
    agents_let_go: int = 0


# What is asked of the router, but for `RouteRequest`, and what it answers.


@dataclass(frozen=True, slots=True)
class Nothing:
    """A question that needs no words."""


@dataclass(frozen=True, slots=True)
class ReportAck:
    """The router has a report. One that is not `complete`, because one before it was missed, asks for a full one."""

    complete: bool


@dataclass(frozen=True, slots=True)
class ReplicaName:
    replica: str


@dataclass(frozen=True, slots=True)
class NodeName:
    node: str


@dataclass(frozen=True, slots=True)
class ModelName:
    model: str


@dataclass(frozen=True, slots=True)
class Names:
    """Of replicas, or keys of agents."""

    names: list[str]


@dataclass(frozen=True, slots=True)
class RowLeft:
    """The row is no load on the replica: it was refused, or has ended before a report mentioned it."""

    replica: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestId:
    request_id: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request went where it did: as `Decision`, with the cost terms in seconds by candidate."""

    replica: str
    why: str
    cached_tokens: int = 0
    node: str = ""
    pull_from: str = ""
    pull_tokens: int = 0
    costs_s: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """`tenant/agent_id` each."""

    agents: list[str]


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where an agent's memory is: its `home` node, "" where no node that is known is; whether that node's store
    reported lately; the highest home `epoch` that was heard; and the other nodes that have a copy, the newest first,
    those whose stores are silent left out."""

    agent: str
    home: str
    alive: bool
    epoch: int
    copies: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Places:
    """Those of the agents that stores know. While there are nodes `unheard`, which are still to say which agents they
    have, nothing is known of an agent that is not among them; else no store knows it."""

    places: list[AgentPlace]
    unheard: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AgentMoved:
    """The agent's home is `node` since `epoch`."""

    agent: str
    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node as its store has described it; None where it has said nothing yet.

    `seen_s` is how long ago it reported, `disk_error` why no KV is kept on its disk, "" where it is, and
    `agents_let_go` how many had to make room since its store was started. `free_bytes` is -1 where not known,
    `memory_free_bytes` is its machine's. `blocks` are on its disk, `agents` count those that it has as home or copy,
    `replicas` are names, and `links` bytes a second by the node that it pulled from, as measured.
    """

    name: str
    alive: bool
    seen_s: float | None = None
    draining: bool = False
    disk_full: bool = False
    disk_error: str = ""
    agents_let_go: int | None = None
    used_bytes: int | None = None
    free_bytes: int = -1
    memory_free_bytes: int | None = None
    blocks: int | None = None
    agents: int | None = None
    replicas: list[str] = field(default_factory=list)
    links: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeReports:
    nodes: list[NodeReport]


@dataclass(frozen=True, slots=True)
class StopServing:
    """The endpoint takes no more connections, and lets clients read the rest of their answers for `timeout_s`."""

    timeout_s: float


# What is asked of a replica, but for `GenerateRequest`, and what it answers.


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """What a replica is doing until it is ready, and the fraction of that, None where unknown."""

    what: str
    fraction: float | None
    ready: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as a replica has loaded it. `model_id` and `files_id` are made of `computing` and `files`, each by name;
    `layers` says in words which of them keep what, and how; `created` is Unix time."""

    replica: str
    node: str
    name: str
    model_id: bytes
    files_id: bytes
    files: dict[str, str]
    computing: dict[str, str]
    folder: str
    trust_remote_code: bool
    context_tokens: int
    vocabulary_size: int
    dtype: str
    weights: str
    kv: str
    layers: str
    created: int
    pid: int


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One replica, read now. `answers` is False where it did not reply in time, is loading or stands still."""

    replica: str
    model: str
    answers: bool
    running: int = 0
    waiting: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    requests_total: int = 0
    prefix_blocks: int = 0
    prefix_bytes: int = 0
    prefix_hits_total: int = 0
    prefix_misses_total: int = 0
    unwritten_bytes: int = 0
    written_blocks_total: int = 0
    written_bytes_total: int = 0
    unwritten_turns_total: int = 0
    restored_tokens_total: int = 0
    blocks_corrupt_total: int = 0
    failed_checks_total: int = 0
    vision_cache_hits_total: int = 0
    vision_encodes_total: int = 0
    vision_bytes: int = 0
    node: str = ""
    model_id: str = ""
    computing: dict[str, str] = field(default_factory=dict)
    """How it computes, by setting: see `identity.computing`."""


@dataclass(frozen=True, slots=True)
class NextFrame:
    """The `number`-th frame of a consumer, counted from 0: those before it have come."""

    consumer: str
    number: int


@dataclass(frozen=True, slots=True)
class RowIds:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class KVSelection:
    """Blocks of one chain, or where that is shorter than a block, what `first` (packed tokens) begins with after
    `root`; and pictures' features."""

    root: bytes
    block_ids: list[bytes]
    first: bytes
    embeddings: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Count:
    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new rows from now on. Running ones finish, or with `end_rows` end with an error that says so."""

    end_rows: bool = False
