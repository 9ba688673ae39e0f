"""Decides which rows are admitted, prefilled, decoded and preempted in each engine step. Pure: no clock, no arrays.

A row waits, is prefilled in chunks, then decodes with all others until it finishes::

    add -> waiting -> prefilling -> running -> finish
              ^-----------------------/ preempt, batch_failed

The engine's step is: `plan(now)` (which rows leave), then `admit` and `next_chunk` until the step's prefill budget is
used, then one decode step of every running row; so a long prompt never stops the others.

Admission goes by priority first: a higher number is admitted first, and preempts lower ones if there is no room. Among
equal priorities the tenant and then the flow that have been given least come first, and in a flow the oldest row
(`fairness.py`). A row without a place may preempt one of a tenant or flow that has several. Admission and preemption
bound what the rows' KV costs, in tokens: `Limits` says how it is counted, and `room_tokens` what is there now.

What two prompts have in common is computed once: a row that could reuse what an earlier one is computing waits for it,
while others go ahead. It waits only for rows before it in rank, so it waits for finitely many, and never for a less
urgent one.

`refusal` says why a row can never be taken or cannot be taken now. The other methods cannot fail for a row they know,
and raise KeyError for an unknown one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop
from itertools import pairwise
from math import inf

from ...protocol.block_ids import BLOCK_TOKENS
from .fairness import DRAWN_TOKENS, FairShares, depths, queues_too_many
from .prefill_budget import stop_beside, stop_inside
from .shared_blocks import SharedBlocks

HEADROOM_TOKENS = 256
"""Tokens reserved for a row beyond its prompt at admission: a block, or one growth step of a dense cache."""

STEP_TOKENS = 2
"""Tokens that a running row may gain before the next `plan`: one step read, one in flight."""


UNEVEN_TOKENS = 2**14
"""The oldest prompt keeps its prefill turns until another tenant or flow has been given this much less: one after the
other, all prompts finish as soon as side by side, or sooner."""


class RowState(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(frozen=True)
class Limits:
    """The bounds of a batch and its queue.

    Attributes:
        kv_tokens_max: bounds what the KV of all rows costs, at most.
        row_tokens: what a row costs besides its tokens: its open block, windows and states.
        paged: a row costs its own whole blocks; else the batch is dense, and each row costs as much as the longest.
        shares: rows hold the same memory for the blocks of equal `keys` that have KV, which are counted once; a row
            that is admitted finds those that another one holds.
    """

    rows_max: int
    queue_requests_max: int
    prefill_chunk_tokens: int
    kv_tokens_max: int
    prefill_rows_max: int = 4
    row_tokens: int = 0
    paged: bool = False
    shares: bool = False

    def cost(self, lengths: Sequence[int]) -> int:
        """Returns what rows of these lengths cost that share nothing, in tokens."""
        if not self.paged:
            return len(lengths) * (max(lengths, default=0) + self.row_tokens)
        # The rest of a row is in its open block, which `row_tokens` has.
        whole = sum(length // BLOCK_TOKENS for length in lengths)
        return whole * BLOCK_TOKENS + len(lengths) * self.row_tokens

    @property
    def prompt_tokens_max(self) -> int:
        """The longest prompt that memory can hold; negative if none."""
        room = self.kv_tokens_max - self.row_tokens
        if self.paged:
            room = (room // BLOCK_TOKENS + 1) * BLOCK_TOKENS - 1
        return room - STEP_TOKENS


@dataclass(eq=False)
class ScheduledRow:
    """One request in the scheduler. Lengths are tokens.

    Attributes:
        prompt: tokens that must have KV before decoding starts. The very last token of the prompt is not counted: it is
            the first decode step's input.
        done: how many of them have KV.
        generated: tokens decoded since the row was last queued.
        keys: ids of the prompt's whole blocks; empty if blocks cannot be reused.
        twin: equal for rows with equal whole prompts; empty if whole prompts cannot be reused.
        known: how many prompt tokens could be reused when the row arrived.
        pause: a number of tokens at which a chunk ends, as if a border were there; 0 for none.
        unbroken: [start, stop) of tokens that must be computed in one chunk.
        restoring: it has a place and waits for KV that is read back.
        suspect: it was in a batch that failed.
        passed: a shorter row took the last prefill turn from this one.
    """

    request_id: str
    prompt: int
    max_tokens: int
    priority: int = 0
    deadline: float = float("inf")
    tenant: str = ""
    flow: str = ""
    order: int = 0
    state: RowState = RowState.WAITING
    done: int = 0
    generated: int = 0
    suspect: bool = False
    keys: tuple[bytes, ...] = ()
    twin: bytes = b""
    known: int = 0
    pause: int = 0
    unbroken: Sequence[tuple[int, int]] = ()
    restoring: bool = False
    passed: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.order)


@dataclass(frozen=True)
class PrefillChunk:
    """A row's tokens `[start:stop]`, to be prefilled in one call."""

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The rows that leave before the next step.

    `expired` rows passed their deadline and `preempted` ones went back to the queue; `cut` rows hold as many tokens as
    fit into memory, and end with what they have.
    """

    expired: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)


class Scheduler:
    """Continuous batching for one replica. The module's docstring describes the life of a row.

    Attributes:
        room_tokens: what the rows' KV may cost now, where others hold memory too. A row alone goes on beyond it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Forgets every row, even if the tables are inconsistent."""
        self._rows: dict[str, ScheduledRow] = {}
        self._waiting: list[ScheduledRow] = []
        self._prefilling: dict[str, ScheduledRow] = {}
        self._running: dict[str, ScheduledRow] = {}
        self._shares = FairShares()
        self._expected: ScheduledRow | None = None
        """The row for which room was just made."""
        self._blocks = SharedBlocks()
        self.room_tokens: float = inf
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Rows that hold a place: prefilling or decoding."""
        return len(self._running) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens still to prefill, over all rows."""
        # Copies, because other threads than the engine's ask.
        waiting = sum(row.prompt - min(row.known, row.prompt) for row in list(self._waiting))
        return waiting + sum(row.prompt - _reaches(row) for row in list(self._prefilling.values()))

    @property
    def free_tokens(self) -> int:
        """Tokens of KV not used by the rows that hold a place."""
        return max(0, int(self._room) - self.cost_tokens)

    @property
    def cost_tokens(self) -> int:
        """What the rows that hold a place cost when all their prompts have KV."""
        return self._cost(self._placed())

    @property
    def held_tokens(self) -> int:
        """What they cost with the KV that they have now, or will have after the next step."""
        prefilling = [row.done for row in self._prefilling.values()]
        lengths = [*(row.length + STEP_TOKENS for row in self._running.values()), *prefilling]
        return self.limits.cost(lengths) - self._blocks.common(self._placed_ids()) * BLOCK_TOKENS

    @property
    def _room(self) -> float:
        return min(self.limits.kv_tokens_max, self.room_tokens)

    def row(self, request_id: str) -> ScheduledRow | None:
        """Returns the row of a request; None if it is unknown."""
        return self._rows.get(request_id)

    def refusal(self, prompt: int, coming: int = 0, tenant: str = "", flow: str = "") -> str | None:
        """Returns why a row with a prompt of `prompt` tokens is refused.

        Args:
            coming: rows that were accepted but not added yet.

        Returns:
            `full` if the queue is, `full_for_it` if only this tenant or flow may queue no more, `too_long` if memory
            can never hold the prompt, None if `add` may follow.
        """
        if prompt > self.limits.prompt_tokens_max:
            return "too_long"
        free = max(0, self.limits.rows_max - self.running)
        room = self.limits.queue_requests_max + free - len(self._waiting) - coming
        if room <= 0:
            return "full"
        return "full_for_it" if queues_too_many(tenant, flow, list(self._waiting), room) else None

    def add(self, row: ScheduledRow) -> None:
        """Queues a row.

        Raises:
            ValueError: a row of this request is here already.
        """
        if row.request_id in self._rows:
            raise ValueError(f"request {row.request_id} is already here")
        self._arrivals += 1
        row.order = self._arrivals
        self._rows[row.request_id] = row
        self._shares.join(row)
        self._enqueue(row)

    def finish(self, request_id: str) -> None:
        """Removes a row in any state: finished, aborted or failed."""
        row = self._rows.pop(request_id)
        if row is self._expected:
            self._expected = None
        self._take_out(row)
        self._shares.leave(row)

    def await_restore(self, request_id: str, hot: int) -> None:
        """Lets an admitted row, of which memory has `hot` tokens, wait for KV from disk until `reused` is called."""
        row = self._rows[request_id]
        row.restoring, row.known = True, max(row.known, min(hot, row.prompt))

    def reused(self, request_id: str, tokens: int) -> None:
        """Notes that the first `tokens` of an admitted row's prompt already have KV."""
        row = self._rows[request_id]
        row.restoring = False
        row.done = min(tokens, row.prompt)
        self._hold_blocks(row)
        if row.done == row.prompt:
            self._start_decoding(row)

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Notes that a chunk is computed now, so that `next_chunk` goes on after it."""
        row = self._rows[chunk.request_id]
        first = self._first(row.priority)
        first.passed = row is not first
        self._shares.charge(row, chunk.stop - row.done)
        row.done = chunk.stop
        self._hold_blocks(row)
        if row.done >= row.prompt:
            self._start_decoding(row)

    def decoded(self, request_id: str) -> None:
        """Notes a decode step that succeeded: the row has one more token with KV. If the row was just preempted, the
        token counts as part of its prompt."""
        row = self._rows[request_id]
        self._shares.charge(row, DRAWN_TOKENS)
        row.suspect = False
        if row.state is RowState.RUNNING:
            row.generated += 1
            return
        row.prompt, row.max_tokens, row.twin = row.prompt + 1, row.max_tokens - 1, b""

    def batch_failed(self, *, device: bool = False) -> list[str]:
        """Requeues every running row after a decode step raised, except the culprit.

        At first the culprit is unknown: all rows become suspects. Suspects join a batch of cleared rows one at a time,
        and a step that succeeds clears them. So the only suspect in a batch that fails is the culprit.

        Args:
            device: the device has failed, and nothing of any row that holds a place is left. It may be nobody's fault,
                so even a row that was alone is only a suspect.

        Returns:
            The row to end, if it is known.
        """
        rows = self._placed() if device else list(self._running.values())
        culprits = rows if len(rows) == 1 and not device else [row for row in rows if row.suspect]
        for row in rows:
            if row not in culprits:
                row.suspect = not culprits
                self._requeue(row)
        return [row.request_id for row in culprits]

    def plan(self, now: float) -> Plan:
        """Decides which rows leave before the step at time `now` (seconds, on the clock of the rows' deadlines)."""
        self._expected = None
        expired = [row.request_id for row in self._rows.values() if row.deadline <= now]
        for request_id in expired:
            self.finish(request_id)
        preempted, cut = self._make_room()
        for request_id in cut:
            self.finish(request_id)
        return Plan(expired, preempted + self._give_way(), cut)

    def admit(self) -> str | None:
        """Admits the next row of the queue if one may start prefilling now; the caller must call `reused` for it."""
        if self.running >= self.limits.rows_max or len(self._prefilling) >= self.limits.prefill_rows_max:
            return None
        row, self._expected = self._expected or self._next_waiting(), None
        if row is None or not self._may_join(row) or not self._fits(row, self._placed()):
            return None
        self._waiting.remove(row)
        row.state = RowState.PREFILLING
        self._prefilling[row.request_id] = row
        self._shares.admit(row)
        return row.request_id

    def next_chunk(self, budget: int, step_budget: int = 0) -> PrefillChunk | None:
        """Returns the next prefill chunk, of at most `budget` tokens, the rest of a step's `step_budget`.

        Among the most urgent rows turns alternate between the first row and the row with the fewest tokens left, so a
        short prompt never waits for the whole of a long one. (Taking turns with a longer row would delay the first row
        and gain nothing for the other.) The first row is the oldest, or one whose tenant or flow was given
        `UNEVEN_TOKENS` less. If the rest of a budget is too small for the first row, a prompt that it completes may use
        it, and the next turn is the first row's.

        Args:
            step_budget: 0 if nothing of it was used yet.

        Returns:
            None if no row is being prefilled, or if the rest of the step's budget is not worth a chunk. A whole budget
            of at least `TOKENS_MIN` always gives a chunk.
        """
        ready = [row for row in self._prefilling.values() if not row.restoring]
        if not ready or budget <= 0:
            return None
        urgency = max(row.priority for row in ready)
        urgent = [row for row in ready if row.priority == urgency]
        shortest = min(urgent, key=lambda row: (row.prompt - row.done, row.order))
        first = self._first(urgency)
        chunk = self._chunk(first if first.passed else shortest, budget, max(budget, step_budget))
        if chunk is None and first.passed:
            chunk = self._chunk(shortest, budget, max(budget, step_budget))
            return chunk if chunk is not None and chunk.stop == shortest.prompt else None
        return chunk

    def decoding(self) -> list[str]:
        """Returns the ids of the rows in the next decode step."""
        return list(self._running)

    def check(self) -> None:
        """Checks that every row is in exactly one table and within the limits.

        Raises:
            AssertionError: the tables disagree.
        """
        tables = {
            RowState.WAITING: {row.request_id: row for row in self._waiting},
            RowState.PREFILLING: self._prefilling,
            RowState.RUNNING: self._running,
        }
        assert len(self._waiting) + self.running == len(self._rows)
        for request_id, row in self._rows.items():
            assert row.request_id == request_id
            assert tables[row.state].get(request_id) is row
            assert 0 <= row.done <= row.prompt
            assert row.state is not RowState.WAITING or row.done == 0
            assert row.state is not RowState.RUNNING or row.done == row.prompt
            assert row.state is RowState.RUNNING or row.generated == 0
            assert not row.restoring or (row.state is RowState.PREFILLING and row.done == 0)
        assert all(before.rank < after.rank for before, after in pairwise(self._waiting))
        assert self.running <= self.limits.rows_max
        assert len(self._prefilling) <= self.limits.prefill_rows_max
        self._blocks.check(self._placed_ids())
        suspects = [row for row in self._placed() if row.suspect]
        assert len(suspects) <= 1, "two suspects in one batch could not be told apart"

    def _chunk(self, row: ScheduledRow, budget: int, step_budget: int) -> PrefillChunk | None:
        size = self.limits.prefill_chunk_tokens
        border = (row.done // size + 1) * size
        stop = min(row.prompt, border, row.pause if row.done < row.pause else border)
        if stop - row.done > budget:
            stop = stop_inside(row.done, budget, step_budget)
        stop = stop_beside(row.done, stop, row.unbroken)
        return PrefillChunk(row.request_id, row.done, stop) if stop > row.done else None

    def _first(self, priority: int) -> ScheduledRow:
        """Returns the row of this priority that is first in prefill: the oldest, unless another is owed too much."""
        rows = [row for row in self._prefilling.values() if row.priority == priority and not row.restoring]
        oldest = min(rows, key=lambda row: row.order)
        least = min(rows, key=lambda row: (-self._shares.lead(oldest, row), row.order))
        return least if self._shares.lead(oldest, least) > UNEVEN_TOKENS else oldest

    def _placed(self) -> list[ScheduledRow]:
        return [*self._running.values(), *self._prefilling.values()]

    def _placed_ids(self) -> list[str]:
        return [*self._running, *self._prefilling]

    def _enqueue(self, row: ScheduledRow) -> None:
        row.state = RowState.WAITING
        insort(self._waiting, row, key=lambda waiting: waiting.rank)

    def _requeue(self, row: ScheduledRow) -> None:
        self._take_out(row)
        if row.generated:
            row.twin = b""  # Its generated tokens are part of its prompt now.
        row.prompt, row.max_tokens = row.length, row.max_tokens - row.generated
        row.generated = row.done = 0
        row.passed = row.restoring = False
        self._enqueue(row)

    def _take_out(self, row: ScheduledRow) -> None:
        if row.state is RowState.WAITING:
            self._waiting.remove(row)
        else:
            del (self._prefilling if row.state is RowState.PREFILLING else self._running)[row.request_id]
            self._blocks.leave(row.request_id)

    def _start_decoding(self, row: ScheduledRow) -> None:
        del self._prefilling[row.request_id]
        row.state = RowState.RUNNING
        self._running[row.request_id] = row

    def _next_waiting(self, *, taking: bool = False) -> ScheduledRow | None:
        """Returns the first queued row, by priority and then by fairness, that does not wait for KV that an earlier row
        computes.

        Args:
            taking: whether it is to take another row's place, not a free one.
        """
        computing = [(row.rank, *_computing(row)) for row in self._prefilling.values()]
        if self._shares.alone:
            return next((row for row in self._waiting if not _waits(row, computing)), None)
        turns = [((-row.priority, *self._shares.turn(row, taking=taking)), row) for row in self._waiting]
        heapify(turns)
        while turns:
            _, row = heappop(turns)
            if not _waits(row, computing):
                return row
        return None

    def _may_join(self, row: ScheduledRow) -> bool:
        """Whether the culprit would still be known if a batch with `row` in it failed.

        No row joins before a suspect is cleared, and a suspect joins only rows that a step has cleared.
        """
        if any(placed.suspect for placed in self._placed()):
            return False
        return not row.suspect or (not self._prefilling and all(other.generated for other in self._running.values()))

    def _fits(self, row: ScheduledRow, placed: list[ScheduledRow]) -> bool:
        """Whether `row` may be prefilled while the rows `placed` hold their places."""
        prefilling = sum(other.state is RowState.PREFILLING for other in placed)
        if len(placed) >= self.limits.rows_max or prefilling >= self.limits.prefill_rows_max:
            return False
        return not placed or self._cost(placed, row) <= self._room

    def _hold_blocks(self, row: ScheduledRow) -> None:
        if self.limits.shares:
            self._blocks.hold(row.request_id, row.keys[: row.done // BLOCK_TOKENS])

    def _cost(self, rows: list[ScheduledRow], extra: ScheduledRow | None = None) -> int:
        """Returns what the rows cost, with room for one more step (and for `extra` with its headroom)."""
        lengths = [row.length + STEP_TOKENS for row in rows]
        if extra:
            lengths.append(extra.prompt + max(STEP_TOKENS, min(extra.max_tokens, HEADROOM_TOKENS)))
        keys = extra.keys[: extra.prompt // BLOCK_TOKENS] if extra and self.limits.shares else ()
        return self.limits.cost(lengths) - self._blocks.common([row.request_id for row in rows], keys) * BLOCK_TOKENS

    def _make_room(self) -> tuple[list[str], list[str]]:
        """Preempts rows until the batch fits: the least urgent ones, of these a tenant's or flow's with the most
        places, of these the youngest. A single row that could never fit is cut."""
        preempted: list[str] = []
        placed = self._placed()
        if self._cost(placed) <= self._room:
            return [], []
        placed = _by_claim(placed)
        while (cost := self._cost(placed)) > self._room:
            if len(placed) == 1:
                return preempted, [placed[0].request_id] if cost > self.limits.kv_tokens_max else []
            last = placed.pop()
            self._requeue(last)
            preempted.append(last.request_id)
        return preempted, []

    def _give_way(self) -> list[str]:
        """Preempts as few rows as let the next queued row in: less urgent ones, or rows whose tenant or flow has more
        places than the next one's would have. A row longer than all of the batch may take one such place only: it could
        cost the room of many."""
        placed = self._placed()
        if not self._waiting or not placed:
            return []
        if self._shares.alone and all(row.priority >= self._waiting[0].priority for row in placed):
            return []
        coming = self._next_waiting(taking=True)
        if coming is None or not self._may_join(coming) or self._fits(coming, placed):
            return []
        less_urgent = [row for row in placed if row.priority < coming.priority]
        too_many = _too_many(coming, [row for row in placed if row.priority == coming.priority])
        yielding = [*too_many, *_by_claim(less_urgent)]
        staying = [row for row in placed if row not in yielding]
        if not self._fits(coming, staying):
            return []
        leaving: list[ScheduledRow] = []
        for row in yielding:
            if self._fits(coming, [*staying, row]):
                staying.append(row)
            else:
                leaving.append(row)
        even = [row for row in leaving if row.priority == coming.priority]
        if len(even) > 1 and coming.prompt > max(row.length for row in placed):
            return []
        for row in leaving:
            self._requeue(row)
        self._expected = coming
        return [row.request_id for row in leaving]


def _by_claim(rows: list[ScheduledRow]) -> list[ScheduledRow]:
    """Sorts rows so that the last is preempted first: by priority, then by how many places the tenant already has, then
    by arrival."""
    rows = sorted(rows, key=lambda row: row.order)
    claims = zip(rows, depths(rows), strict=True)
    return [row for row, _ in sorted(claims, key=lambda one: (-one[0].priority, one[1].tenant, one[0].order))]


def _too_many(coming: ScheduledRow, placed: list[ScheduledRow]) -> list[ScheduledRow]:
    """Returns the rows that exceed the share of the tenant of `coming`, or of its flow within the same tenant. Those
    that exceed it most come last."""
    rows = [*sorted(placed, key=lambda row: row.order), coming]
    *placed_depths, own = depths(rows)
    claims = [
        (depth.tenant, row.order, row)
        for row, depth in zip(rows[:-1], placed_depths, strict=True)
        if (depth.flow > own.flow if row.tenant == coming.tenant else depth.tenant > own.tenant)
    ]
    return [row for _, _, row in sorted(claims, key=lambda one: one[:2])]


def _reaches(row: ScheduledRow) -> int:
    """Returns how many tokens of a row in prefill have KV, or will have it before anything is computed."""
    return min(row.known, row.prompt) if row.restoring else row.done


def _computing(row: ScheduledRow) -> tuple[bytes, int, int, bytes | None]:
    """Returns what a row in prefill computes that others may reuse: its twin, and its next whole block's index, end in
    tokens, and key (None if no whole block is left)."""
    index = _reaches(row) // BLOCK_TOKENS
    end = (index + 1) * BLOCK_TOKENS
    return row.twin, index, end, row.keys[index] if index < len(row.keys) and end <= row.prompt else None


def _waits(row: ScheduledRow, computing: list[tuple[tuple[int, int], bytes, int, int, bytes | None]]) -> bool:
    """Whether a row before this one in rank computes KV that this one could reuse.

    Equal block ids mean equal histories, so two rows that agree in the block being computed agree in all before.
    """
    for rank, twin, index, end, key in computing:
        if rank >= row.rank:
            continue
        if twin and twin == row.twin:
            return True
        if key is not None and end <= row.prompt and index < len(row.keys) and key == row.keys[index]:
            return True
    return False
