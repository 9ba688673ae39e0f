"""The load of each replica, counted by the router. Pure: `now` is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ..protocol.router_messages import ReplicaReport
from .voice import Voice

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
"""Assumed until a replica has measured its own rate."""

DEFAULT_RESTORE_BYTES_PER_S = 1e9
"""The same for reading KV from the node's disk; a Mac's disk is three times as fast."""

DEFAULT_KV_BYTES_PER_TOKEN = 131_072
"""The same for a token's KV: that of an 8B model in 16 bits, so that moving KV never looks cheaper than it is."""

DEFAULT_ENCODE_TOKEN_S = 0.002
"""The same for encoding a picture, per token: about a second for 700 x 700 pixels."""

DECODE_SEQUENCE_TOKENS = 64
"""Cost of each sequence that decodes beside a request, in prefill tokens, until a decode step is measured. A replica
that prefills slowly also decodes slowly, and its steps take longer with more sequences."""

DECODE_SEQUENCE_STEPS = 3
"""The same in measured decode steps."""

SEQUENCE_WAIT_S = 1.0
"""Cost of each sequence beyond the batch's places: it waits for another to finish."""


@dataclass(slots=True)
class Load:
    """A request on a replica.

    `tokens` were to be prefilled when it was routed. Once a report has `seen` it, they are an upper bound of the rest.
    """

    since: float
    tokens: int
    seen: bool = False


@dataclass(slots=True, eq=False)
class ReplicaState:
    """A replica as its last report describes it, and its current requests.

    A request is counted from its routing until its consumer says that it ended, because reports are old when they
    arrive. Reports only remove requests that never arrived, or whose consumer died.
    """

    name: str
    model: str
    voice: Voice
    node: str = ""
    model_id: bytes = b""
    """It can use only KV of this id, which changes when its self-test ends."""
    sequences_max: int = 1
    pending_tokens: int = 0
    token_s: float = 1.0 / DEFAULT_PREFILL_TOKENS_PER_S
    """Seconds to prefill a token."""
    sequence_s: float = DECODE_SEQUENCE_TOKENS / DEFAULT_PREFILL_TOKENS_PER_S
    """Seconds that a sequence costs the sequences beside it."""
    step_s: float = DECODE_SEQUENCE_TOKENS / DEFAULT_PREFILL_TOKENS_PER_S / DECODE_SEQUENCE_STEPS
    """Seconds of a decode step."""
    kv_bytes: float = DEFAULT_KV_BYTES_PER_TOKEN
    """Bytes of a token's KV."""
    restore_token_s: float = DEFAULT_KV_BYTES_PER_TOKEN / DEFAULT_RESTORE_BYTES_PER_S
    """Seconds to read a token's KV from the node's disk."""
    free_bytes: float = inf
    """Free memory for sequences' KV."""
    encode_token_s: float = DEFAULT_ENCODE_TOKEN_S
    """Seconds to encode a picture, per token."""
    moves_kv: bool = False
    """Whether its KV can go to other nodes."""
    prefill_token_j: float = 0.0
    """Joules to prefill a token; 0 as long as that is not known."""
    decode_token_j: float = 0.0
    """Joules of a decoded token; 0 as long as that is not known."""
    requests: dict[str, Load] = field(default_factory=dict)
    last_assigned: int = 0
    queue_s: float = 0.0
    decode_s: float = 0.0
    _reserved_tokens: int = 0
    """The sum of `tokens` of the requests that no report has seen."""
    _seen_tokens: int = 0
    """The sum of `tokens` of the others."""
    _strangers: bool = False
    """Whether the last report named requests that are not counted here."""

    def apply(self, report: ReplicaReport) -> None:
        """Takes the replica's own figures from a report; missing or invalid ones get defaults."""
        self.node, self.model_id = report.node, report.model_id
        self.sequences_max, self.pending_tokens = max(1, report.sequences_max), max(0, report.pending_tokens)
        self.token_s = 1.0 / measured(report.prefill_tokens_per_s, DEFAULT_PREFILL_TOKENS_PER_S)
        self.step_s = measured(report.decode_token_s, DECODE_SEQUENCE_TOKENS * self.token_s / DECODE_SEQUENCE_STEPS)
        self.sequence_s = DECODE_SEQUENCE_STEPS * self.step_s
        self.kv_bytes = measured(report.kv_bytes_per_token, DEFAULT_KV_BYTES_PER_TOKEN)
        self.restore_token_s = self.kv_bytes / measured(report.restore_bytes_per_s, DEFAULT_RESTORE_BYTES_PER_S)
        self.free_bytes = report.free_bytes if report.free_bytes >= 0 else inf
        self.encode_token_s = measured(report.encode_token_s, DEFAULT_ENCODE_TOKEN_S)
        self.moves_kv = report.moves_kv
        self.prefill_token_j = measured(report.prefill_token_j, 0.0)
        self.decode_token_j = measured(report.decode_token_j, 0.0)

    def add(self, request_id: str, load: Load) -> None:
        """Counts a request that is not counted yet."""
        self.requests[request_id] = load
        self._shift(load, 1)
        self._price()

    def remove(self, request_id: str) -> None:
        """Uncounts a request."""
        self._shift(self.requests.pop(request_id), -1)
        self._price()

    def correct(self, active: set[str], now: float, reservation_s: float) -> list[str]:
        """Corrects the counts by a report's `active` requests. Returns the requests that were dropped.

        Args:
            reservation_s: a request that no report has mentioned for this long has not arrived.
        """
        dropped = []
        for request_id, load in list(self.requests.items()):
            if request_id in active:
                self._shift(load, -1)
                load.seen = True
                self._shift(load, 1)
            elif load.seen or now - load.since > reservation_s:
                self._shift(self.requests.pop(request_id), -1)
                dropped.append(request_id)
        self._strangers = not active <= self.requests.keys()
        self._price()
        return dropped

    def check(self) -> None:
        """Checks sums and terms against the requests.

        Raises:
            AssertionError: they disagree.
        """
        loads = self.requests.values()
        assert all(load.tokens >= 0 for load in loads)
        assert self._reserved_tokens == sum(load.tokens for load in loads if not load.seen)
        assert self._seen_tokens == sum(load.tokens for load in loads if load.seen)
        terms = self.queue_s, self.decode_s
        assert min(terms) >= 0.0
        self._price()
        assert terms == (self.queue_s, self.decode_s)

    def _shift(self, load: Load, sign: int) -> None:
        if load.seen:
            self._seen_tokens += sign * load.tokens
        else:
            self._reserved_tokens += sign * load.tokens

    def _price(self) -> None:
        """Computes the cost terms that are the same for every request."""
        sequences, pending = len(self.requests), self.pending_tokens
        if not self._strangers:
            # The report is old when it arrives: there cannot be more left than was routed here.
            pending = min(pending, self._seen_tokens)
        self.queue_s = (pending + self._reserved_tokens) * self.token_s + max(
            0, sequences + 1 - self.sequences_max
        ) * SEQUENCE_WAIT_S
        self.decode_s = min(sequences, self.sequences_max) * self.sequence_s


def measured(value: float, otherwise: float) -> float:
    """Returns `value`, or `otherwise` if it is 0 (not measured yet), negative or not finite."""
    return value if 0.0 < value < inf else otherwise
