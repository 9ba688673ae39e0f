"""A replica without MLX: its scheduler, its prefix cache and its budget, over a pool that only counts slots."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV
from satchel.actors.replica.memory.budget import Held, MemoryBudget, Sequences
from satchel.actors.replica.scheduling.limits import Limits
from satchel.actors.replica.scheduling.scheduler import Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence

ROOT = bytes(32)
TOKEN_BYTES, OPEN_TOKEN_BYTES = 4, 16
BLOCK_BYTES, OPEN_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES, BLOCK_TOKENS * OPEN_TOKEN_BYTES


class Slot:
    """A slot of the pool that is in use."""


@dataclass
class Seq:
    tokens: list[int]
    max_tokens: int
    slots: list[Slot] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    cached: int | None = None
    ended: str | None = None


class PagedReplica:
    """Accepts sequences, and runs steps as an engine does. Every step checks its memory."""

    def __init__(self, bytes_max: int, *, sequences_max: int = 8, chunk_tokens: int = 2048, queue: int = 256) -> None:
        most = bytes_max // TOKEN_BYTES
        sequence_tokens = OPEN_BLOCK_BYTES // TOKEN_BYTES
        limits = Limits(
            sequences_max, queue, chunk_tokens, most, 4, sequence_tokens=sequence_tokens, paged=True, shares=True
        )
        self.budget = MemoryBudget(bytes_max, TOKEN_BYTES, OPEN_BLOCK_BYTES, sequences_max, paged=True)
        self.scheduler = Scheduler(limits)
        self.prefixes: PrefixCache[Slot | str] = PrefixCache(sys.maxsize)
        self.sequences: dict[str, Seq] = {}
        self.computed: Counter[bytes] = Counter()
        self.prefilled = self.peak = self.sent_back = 0
        self._live: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._new = count(2**31)

    def submit(self, name: str, tokens: list[int], max_tokens: int, priority: int = 0) -> str | None:
        """Queues a sequence. Returns why it is refused."""
        refused = self.scheduler.refusal(len(tokens) - 1)
        if refused is None:
            self.sequences[name] = sequence = Seq(list(tokens), max_tokens, ids=block_ids(ROOT, tokens))
            self.scheduler.add(ScheduledSequence(name, len(tokens) - 1, max_tokens, priority, keys=tuple(sequence.ids)))
        return refused

    def run(self, name: str, tokens: list[int], max_tokens: int) -> Seq:
        """Runs one sequence to its end."""
        assert self.submit(name, tokens, max_tokens) is None
        while self.sequences[name].ended is None:
            self.step()
        return self.sequences[name]

    def step(self) -> None:
        self._fit()
        plan = self.scheduler.plan(0.0)
        for name in plan.cut:
            self._end(name, "cut")
        for name in plan.preempted:
            self.sent_back += 1
            self._leave(self.sequences[name], name)
        budget = step_budget = self.scheduler.limits.prefill_chunk_tokens
        while budget > 0:
            while (name := self.scheduler.admit()) is not None:
                self._open(name, self.sequences[name])
            chunk = self.scheduler.next_chunk(budget, step_budget)
            if chunk is None:
                break
            self.scheduler.prefilled(chunk)
            self._compute(self.sequences[chunk.request_id], chunk.request_id, chunk.start, chunk.stop)
            budget -= chunk.stop - chunk.start
        for name in self.scheduler.decoding():
            sequence = self.sequences[name]
            sequence.tokens.append(next(self._new))
            # The token before has KV now.
            self._grow(sequence, len(sequence.tokens) - 1)
            self.scheduler.decoded(name)
            scheduled = self.scheduler.sequence(name)
            assert scheduled is not None
            if scheduled.generated >= scheduled.max_tokens:
                self._end(name, "length")
        self.check()

    def used(self) -> int:
        """Bytes of slots, tails and open blocks."""
        return self.budget.used(self._counts(), self._held())

    def check(self) -> None:
        self.scheduler.check()
        self.peak = max(self.peak, self.used())
        assert self.used() <= self.budget.bytes_max, f"{self.used()} bytes of {self.budget.bytes_max}"

    def _held(self) -> Held:
        slots = len(self._live) * BLOCK_BYTES
        kept = self.prefixes.nbytes - self.prefixes.pool_bytes
        return Held(pool=slots, slots=slots, kept=kept, loose=self.prefixes.loose_bytes)

    def _counts(self) -> Sequences:
        return Sequences(self.scheduler.running, self.scheduler.cost_tokens, self.scheduler.held_tokens)

    def _fit(self) -> None:
        self.prefixes.resize(self.budget.kept_bytes(self._counts(), self._held()))
        self.scheduler.room_tokens = self.budget.sequences_tokens(self._counts(), self._held())

    def _open(self, name: str, sequence: Seq) -> None:
        scheduled = self.scheduler.sequence(name)
        assert scheduled is not None
        sequence.ids = block_ids(ROOT, sequence.tokens)
        hit = self.prefixes.match(ROOT, sequence.ids, sequence.tokens, scheduled.prompt)
        sequence.slots = [slot for slot in hit.blocks if isinstance(slot, Slot)]
        self.prefixes.pin(name, ROOT, sequence.ids[: len(sequence.slots)], [])
        self._fit()
        sequence.cached = hit.tokens if sequence.cached is None else sequence.cached
        self.scheduler.reused(name, hit.tokens)

    def _compute(self, sequence: Seq, name: str, start: int, stop: int) -> None:
        self.prefilled += stop - start
        first, last = len(sequence.slots), stop // BLOCK_TOKENS
        self._grow(sequence, stop)
        self.computed.update(sequence.ids[first:last])
        self._keep(sequence, name, first, last)

    def _grow(self, sequence: Seq, length: int) -> None:
        while len(sequence.slots) < length // BLOCK_TOKENS:
            sequence.slots.append(Slot())
            self._live.add(sequence.slots[-1])

    def _keep(self, sequence: Seq, name: str, first: int, last: int) -> None:
        self.prefixes.pin(name, ROOT, sequence.ids[first:last], [])
        new = []
        for index in range(first, last):
            start = index * BLOCK_TOKENS
            kept: PrefixKV[Slot | str] = PrefixKV(sequence.slots[index], BLOCK_BYTES, pool_bytes=BLOCK_BYTES, slots=1)
            new.append((index, sequence.tokens[start : start + BLOCK_TOKENS], kept))
        self.prefixes.put_blocks(sequence.ids[:last], new)

    def _end(self, name: str, why: str) -> None:
        sequence = self.sequences[name]
        sequence.ended = why
        if self.scheduler.sequence(name) is not None:
            self.scheduler.finish(name)
        self._leave(sequence, name)

    def _leave(self, sequence: Seq, name: str) -> None:
        sequence.ids, length = block_ids(ROOT, sequence.tokens), len(sequence.tokens) - 1
        self._keep(sequence, name, 0, len(sequence.slots))
        if tail := sequence.tokens[len(sequence.slots) * BLOCK_TOKENS : length]:
            kept: PrefixKV[Slot | str] = PrefixKV("tail", len(tail) * OPEN_TOKEN_BYTES)
            self.prefixes.put_tail(ROOT, sequence.ids[: len(sequence.slots)], tail, kept)
        sequence.slots = []
        self.prefixes.resize(sys.maxsize)
        self.prefixes.unpin(name)
        self._fit()
