"""Replicas and consumers of a simulated cluster, and a simple model of what a router has heard about replicas."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import ReplicaReport

from .router_stores import Store

MODEL = "m"
TIMEOUT_S = 5.0
REPORT_S = 0.5
LEASE_S = 10.0
PREFILL_TOKENS_PER_S = 2000.0
DECODE_TOKENS_PER_S = 20.0
SEQUENCES_MAX = 4
QUEUE_MAX = 6
CACHE_BLOCKS = 60


@dataclass
class Ask:
    """A request, as its consumer knows it."""

    request_id: str
    agent: str
    blocks: list[bytes]
    prompt_tokens: int
    answer_tokens: int
    replica: str = ""
    tried: list[str] = field(default_factory=list)


@dataclass
class Seq:
    ask: Ask
    consumer: Consumer
    prefill_left: float
    answer_left: float


@dataclass(eq=False)
class Consumer:
    """A process that routes, submits and releases requests until it dies."""

    asks: dict[str, Ask] = field(default_factory=dict)
    waiting: list[Ask] = field(default_factory=list)
    died: float | None = None


class Replica:
    """A simple engine with a block cache. Its reporter behaves like the real one: a full report follows a lost one."""

    def __init__(self, name: str, node: str, kv_bytes_per_token: int = 36_864) -> None:
        self.name, self.node, self.kv_bytes_per_token = name, node, kv_bytes_per_token
        self.prefill_tokens_per_s, self.decode_token_s = PREFILL_TOKENS_PER_S, 1 / DECODE_TOKENS_PER_S
        self.process = 0
        self.restart()

    def restart(self) -> None:
        self.process += 1
        self.up = True
        self.sequence, self.full, self.report_at = 0, True, 0.0
        self.sequences: dict[str, Seq] = {}
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.events: tuple[set[bytes], set[bytes]] = (set(), set())

    def submit(self, sequence: Seq, store: Store) -> bool:
        if len(self.sequences) >= SEQUENCES_MAX + QUEUE_MAX:
            return False
        held = store.run(sequence.ask.blocks)
        while held < len(sequence.ask.blocks) and sequence.ask.blocks[held] in self.cache:
            held += 1
        sequence.prefill_left = max(1, sequence.ask.prompt_tokens - held * BLOCK_TOKENS)
        self.sequences[sequence.ask.request_id] = sequence
        return True

    def abort(self, sequence: Seq | None) -> None:
        if sequence is not None and self.sequences.get(sequence.ask.request_id) is sequence:
            del self.sequences[sequence.ask.request_id]

    def run(self, seconds: float) -> list[Seq]:
        """Works for a while. Returns the sequences that ended."""
        budget, ended = self.prefill_tokens_per_s * seconds, []
        for sequence in list(self.sequences.values())[:SEQUENCES_MAX]:
            if sequence.prefill_left > 0:
                done = min(budget, sequence.prefill_left)
                sequence.prefill_left -= done
                budget -= done
                if sequence.prefill_left <= 0:
                    self.keep(sequence.ask.blocks)
            else:
                sequence.answer_left -= seconds / self.decode_token_s
                if sequence.answer_left <= 0:
                    ended.append(self.sequences.pop(sequence.ask.request_id))
        return ended

    def report(self) -> ReplicaReport:
        came, went = self.events
        self.events = (set(), set())
        self.sequence += 1
        return ReplicaReport(
            replica=self.name,
            model=MODEL,
            incarnation=f"{self.name}-{self.process}",
            sequence=self.sequence,
            running=min(len(self.sequences), SEQUENCES_MAX),
            waiting=max(0, len(self.sequences) - SEQUENCES_MAX),
            pending_tokens=int(sum(sequence.prefill_left for sequence in self.sequences.values())),
            sequences_max=SEQUENCES_MAX,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            active=list(self.sequences),
            announced=sorted(self.cache if self.full else came),
            retracted=sorted(went),
            full=self.full,
            node=self.node,
            decode_token_s=self.decode_token_s,
            moves_kv=True,
            restore_bytes_per_s=1e9,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    def keep(self, blocks: list[bytes]) -> None:
        came, went = self.events
        for block in reversed(blocks):
            if block not in self.cache:
                came.add(block)
                went.discard(block)
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            block, _ = self.cache.popitem(last=False)
            went.add(block)
            came.discard(block)


class Heard:
    """What one router has heard, in the simplest form: its directory and its live replicas must follow from this."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[bytes]] = {}
        self.last: dict[str, tuple[str, int]] = {}
        self.replaced: set[str] = set()
        self.at: dict[str, float] = {}
        self.lost: dict[str, float] = {}
        """Those that failed, and until when only new processes count."""

    def take(self, report: ReplicaReport, now: float) -> bool:
        """Whether it is news."""
        name = report.replica
        process, sequence = self.last.get(name, ("", -1))
        if report.incarnation == process:
            if report.sequence <= sequence:
                return False
        elif report.incarnation in self.replaced and (
            now - self.at[name] <= TIMEOUT_S or now < self.lost.get(name, now)
        ):
            return False
        else:
            self.replaced.add(process)
            self.blocks[name] = set()
            self.lost.pop(name, None)
        if report.full:
            self.blocks[name] = set()
        self.blocks[name] |= set(report.announced)
        self.blocks[name] -= set(report.retracted)
        self.last[name], self.at[name] = (report.incarnation, report.sequence), now
        if now >= self.lost.get(name, now):
            self.lost.pop(name, None)
        return True

    def living(self, now: float) -> list[str]:
        return sorted(name for name, at in self.at.items() if now - at <= TIMEOUT_S and name not in self.lost)
