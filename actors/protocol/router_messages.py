"""The messages to and from the router, and the reports of replicas and stores to it; as `replica_messages.py`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chain:
    """A request's block ids and pictures for replicas whose model has the id `model_id`; as in `RouteRequest`."""

    model_id: bytes
    block_ids: list[bytes]
    pictures: list[tuple[bytes, int, int, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router needs to choose a replica: ids and sizes, no tokens.

    `beside` is a replica that has just got a request with the same prompt, "" for none. `near` is the node whose store
    has or will have the agent's memory, "" if unknown. `pictures` are [id of its image embeddings, its end in the
    prompt in tokens, its number of tokens, whether there are pixels to encode].

    These ids hold for replicas whose model has the id `model_id`; `others` has those for the ids of nodes that compute
    differently. `splits` says whether one replica may prefill it and another decode it. With an `adapter` (its digest)
    all model ids, also the decision's, are those of the model with the adapter.
    """

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
    splits: bool = False
    adapter: bytes = b""

    @property
    def sits_by(self) -> str:
        """What an agent's last replica is remembered by, beside the agent: the model, with its adapter."""
        return f"{self.model} {self.adapter.hex()}" if self.adapter else self.model


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why.

    `cached_tokens` is how many of the prompt's tokens need not be computed there: those that the replica should have in
    memory, then those on its node's disk, then the `pull_tokens` to be pulled from the node `pull_from` first (whole
    blocks, which end at `cached_tokens`; 0 and "" if nothing is pulled). `node` is the replica's, "" if unknown.
    `move_to` is the node to which the agent's memory moves after this turn, "" for none.

    `costs_s` has the estimated seconds to first token by term (`total` was compared), each a list along `candidates`;
    of very many candidates only the cheapest.

    If a request is split, `prefill_on` is the replica that prefills it, on the node `pull_from`; it is counted there as
    `prefill_sequence` of its id. `replica` waits at most `wait_s` for its KV, and decodes. Then `pull_tokens` are all
    but the prompt's last one, `cached_tokens` is what the prefilling replica need not compute, and `split_costs_s` has
    the terms of the pair, and `alone`, the cost of the best single replica.

    `energy_j` are the joules that the request should take, along `candidates`; [] if energy is not preferred or not
    known.

    `model_id` is the replica's; `model_ids` are those of all replicas of the model that the router knows.
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
    prefill_on: str = ""
    wait_s: float = 0.0
    split_costs_s: dict[str, float] = field(default_factory=dict)
    energy_j: list[float] = field(default_factory=list)


def prefill_sequence(request_id: str) -> str:
    """Returns the id of the sequence that prefills a split request."""
    return f"{request_id}/prefill"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's heartbeat to the router.

    `incarnation` is new at every start of the process. `sequence` is the heartbeat sequence: if the router missed a
    report, its answer is not `complete`, and the next report is `full`: then `announced` has the ids of all blocks and
    image embeddings of the replica. `active` are the requests that are queued or running there.

    These are 0 until they are measured: `prefill_tokens_per_s`, `decode_token_s` (the time of a decode step),
    `restore_bytes_per_s` (KV from the node's disk into memory), `kv_bytes_per_token` (as it is kept and moved) and
    `encode_token_s` (the time to encode a picture, for each of its tokens). `free_bytes` is the memory left for the KV
    of further sequences, -1 if unknown. `model_id` is the same for the whole incarnation. `moves_kv` says whether its
    KV can be written to disk and pulled by other nodes. `prefill_token_j` and `decode_token_j` are the joules that a
    token takes, 0 until they are measured, and for ever where the node has no counter of energy that can be read.
    """

    replica: str
    model: str
    incarnation: str
    sequence: int
    running: int
    waiting: int
    pending_tokens: int
    sequences_max: int
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
    moves_kv: bool = False
    prefill_token_j: float = 0.0
    decode_token_j: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store's heartbeat to the router: what is on its node's disk, and which agents it has.

    `incarnation`, `sequence`, `full` and the answer are as in `ReplicaReport`. A store with very many ids may send some
    of them in reports that directly follow the full one.

    `announced` and `retracted` are ids of blocks, tails and image embeddings on the disk. `agents` are [key, home
    epoch, is home] of new or changed agents, `agents_retracted` the keys of agents that this node has lost, and
    `tombstones` [key, epoch]: everything up to this epoch was forgotten. No id or key is both announced and retracted
    in one report. A full report has all ids, agents and tombstones.

    `links` are measured bytes per second by the node from which this one pulled since its last report. `blocks` and
    `used_bytes` count KV on the disk, `disk_full` means that no more can be written, and `draining` that no agent may
    move here. `memory_free_bytes` is its free memory, -1 if unknown. `disk_error` is why no KV is kept on the
    disk now, "" if it is kept. `agents_let_go` counts the agents evicted since the store was started. `joules` are
    those that the node's counters of energy have counted since then, by source.
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
    joules: dict[str, float] = field(default_factory=dict)


# Further requests to the router, and its answers.


@dataclass(frozen=True, slots=True)
class SequenceLeft:
    """The sequence does not load the replica: it was refused, or ended before a report mentioned it.

    `cached_tokens` of its prompt were not computed there, `disk_tokens` of them were read from disk, and its first
    token came `first_token_s` seconds after it was routed; None for what did not happen.
    """

    replica: str
    request_id: str
    cached_tokens: int | None = None
    first_token_s: float | None = None
    disk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request went where it did: as `Decision`, with the cost terms in seconds and the joules by candidate, and
    what it took, as in `SequenceLeft`: None until it has ended."""

    replica: str
    why: str
    cached_tokens: int = 0
    node: str = ""
    pull_from: str = ""
    pull_tokens: int = 0
    costs_s: dict[str, dict[str, float]] = field(default_factory=dict)
    prefill_on: str = ""
    split_costs_s: dict[str, float] = field(default_factory=dict)
    actual_cached_tokens: int | None = None
    actual_first_token_s: float | None = None
    actual_disk_tokens: int | None = None
    energy_j: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MadeDecision:
    """A decision, with what it was about: the sequence's id, the agent's key ("" for none), and when it was made, in
    Unix time. Decisions are numbered from 1 since the router's start, and get a new number when their sequences end."""

    number: int
    sequence: str
    agent: str
    model: str
    prompt_tokens: int
    at_s: float
    why: Explanation


@dataclass(frozen=True, slots=True)
class Decisions:
    """Some of the router's latest decisions, in the order of their numbers, and the `last` number of all.

    `router` is new at every start of the router.
    """

    router: str
    last: int
    decisions: list[MadeDecision] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where an agent's memory is: its `home` node, "" if none is known; whether that node's store reported lately; the
    highest home `epoch` reported; and the other nodes with a copy, the newest first, without those whose stores are
    silent."""

    agent: str
    home: str
    alive: bool
    epoch: int
    copies: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of those agents that a store has reported. If an agent is not among them, no store has it, unless
    there are `unheard` nodes, whose stores have not reported yet."""

    places: list[AgentPlace]
    unheard: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NodeEntry:
    """A machine that has joined, whether or not it is present now.

    Attributes:
        links: (address, kind) of every link to its KV, the fastest first.
        home: the folder of its memory.
        since_s: when it last joined, in Unix time.
        card: what computes on it if it has a card of its own, such as `card 1 (NVIDIA H200)`; "" otherwise.
    """

    name: str
    address: str
    links: tuple[tuple[str, str], ...]
    version: str
    home: str
    since_s: float
    card: str = ""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node as its store has reported it; None for what it has not reported yet.

    `seen_s` is how long ago it reported. `disk_error`, `disk_full`, `agents_let_go`, `used_bytes`, `free_bytes`,
    `memory_free_bytes`, `blocks`, `links` and `joules` are as in `StoreReport`. `agents` counts those that it has as
    home or copy. `replicas` are names.
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
    joules: dict[str, float] = field(default_factory=dict)
