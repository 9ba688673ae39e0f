"""A replica without MLX: its scheduler, its prefix cache and its budget, over a pool that only counts slots."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV
from satchel.actors.replica.memory.budget import Held, MemoryBudget, Rows
from satchel.actors.replica.scheduling.scheduler import Limits, ScheduledRow, Scheduler

ROOT = bytes(32)
TOKEN_BYTES, OPEN_TOKEN_BYTES = 4, 16
BLOCK_BYTES, ROW_BYTES = BLOCK_TOKENS * TOKEN_BYTES, BLOCK_TOKENS * OPEN_TOKEN_BYTES


class Slot:
    """One that somebody holds."""


@dataclass
class Row:
    tokens: list[int]
    max_tokens: int
    slots: list[Slot] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    cached: int | None = None
    ended: str | None = None


class PagedReplica:
    """Takes rows, and takes steps as an engine does. Every step checks its memory."""

    def __init__(self, bytes_max: int, *, rows_max: int = 8, chunk_tokens: int = 2048, queue: int = 256) -> None:
        most = bytes_max // TOKEN_BYTES
        row_tokens = ROW_BYTES // TOKEN_BYTES
        limits = Limits(rows_max, queue, chunk_tokens, most, 4, row_tokens=row_tokens, paged=True, shares=True)
        self.budget = MemoryBudget(bytes_max, TOKEN_BYTES, ROW_BYTES, rows_max, paged=True)
        self.scheduler = Scheduler(limits)
        self.prefixes: PrefixCache[Slot | str] = PrefixCache(sys.maxsize)
        self.rows: dict[str, Row] = {}
        self.computed: Counter[bytes] = Counter()
        self.prefilled = self.peak = self.sent_back = 0
        self._live: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._new = count(2**31)

    def submit(self, name: str, tokens: list[int], max_tokens: int, priority: int = 0) -> str | None:
        """Queues a row. Returns why it is refused."""
        refused = self.scheduler.refusal(len(tokens) - 1)
        if refused is None:
            self.rows[name] = row = Row(list(tokens), max_tokens, ids=block_ids(ROOT, tokens))
            self.scheduler.add(ScheduledRow(name, len(tokens) - 1, max_tokens, priority, keys=tuple(row.ids)))
        return refused

    def run(self, name: str, tokens: list[int], max_tokens: int) -> Row:
        """Runs one row to its end."""
        assert self.submit(name, tokens, max_tokens) is None
        while self.rows[name].ended is None:
            self.step()
        return self.rows[name]

    def step(self) -> None:
        self._fit()
        plan = self.scheduler.plan(0.0)
        for name in plan.cut:
            self._end(name, "cut")
        for name in plan.preempted:
            self.sent_back += 1
            self._leave(self.rows[name], name)
        budget = step_budget = self.scheduler.limits.prefill_chunk_tokens
        while budget > 0:
            while (name := self.scheduler.admit()) is not None:
                self._open(name, self.rows[name])
            chunk = self.scheduler.next_chunk(budget, step_budget)
            if chunk is None:
                break
            self.scheduler.prefilled(chunk)
            self._compute(self.rows[chunk.request_id], chunk.request_id, chunk.start, chunk.stop)
            budget -= chunk.stop - chunk.start
        for name in self.scheduler.decoding():
            row = self.rows[name]
            row.tokens.append(next(self._new))
            # The token before has KV now.
            self._grow(row, len(row.tokens) - 1)
            self.scheduler.decoded(name)
            scheduled = self.scheduler.row(name)
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

    def _counts(self) -> Rows:
        return Rows(self.scheduler.running, self.scheduler.cost_tokens, self.scheduler.held_tokens)

    def _fit(self) -> None:
        self.prefixes.resize(self.budget.kept_bytes(self._counts(), self._held()))
        self.scheduler.room_tokens = self.budget.rows_tokens(self._counts(), self._held())

    def _open(self, name: str, row: Row) -> None:
        scheduled = self.scheduler.row(name)
        assert scheduled is not None
        row.ids = block_ids(ROOT, row.tokens)
        hit = self.prefixes.match(ROOT, row.ids, row.tokens, scheduled.prompt)
        row.slots = [slot for slot in hit.blocks if isinstance(slot, Slot)]
        self.prefixes.pin(name, ROOT, row.ids[: len(row.slots)], [])
        self._fit()
        row.cached = hit.tokens if row.cached is None else row.cached
        self.scheduler.reused(name, hit.tokens)

    def _compute(self, row: Row, name: str, start: int, stop: int) -> None:
        self.prefilled += stop - start
        first, last = len(row.slots), stop // BLOCK_TOKENS
        self._grow(row, stop)
        self.computed.update(row.ids[first:last])
        self._keep(row, name, first, last)

    def _grow(self, row: Row, length: int) -> None:
        while len(row.slots) < length // BLOCK_TOKENS:
            row.slots.append(Slot())
            self._live.add(row.slots[-1])

    def _keep(self, row: Row, name: str, first: int, last: int) -> None:
        self.prefixes.pin(name, ROOT, row.ids[first:last], [])
        new = []
        for index in range(first, last):
            start = index * BLOCK_TOKENS
            kept: PrefixKV[Slot | str] = PrefixKV(row.slots[index], BLOCK_BYTES, pool_bytes=BLOCK_BYTES, slots=1)
            new.append((index, row.tokens[start : start + BLOCK_TOKENS], kept))
        self.prefixes.put_blocks(row.ids[:last], new)

    def _end(self, name: str, why: str) -> None:
        row = self.rows[name]
        row.ended = why
        if self.scheduler.row(name) is not None:
            self.scheduler.finish(name)
        self._leave(row, name)

    def _leave(self, row: Row, name: str) -> None:
        row.ids, length = block_ids(ROOT, row.tokens), len(row.tokens) - 1
        self._keep(row, name, 0, len(row.slots))
        if tail := row.tokens[len(row.slots) * BLOCK_TOKENS : length]:
            kept: PrefixKV[Slot | str] = PrefixKV("tail", len(tail) * OPEN_TOKEN_BYTES)
            self.prefixes.put_tail(ROOT, row.ids[: len(row.slots)], tail, kept)
        row.slots = []
        self.prefixes.resize(sys.maxsize)
        self.prefixes.unpin(name)
        self._fit()
