"""Which row does what in the next engine step. Pure: no clock, no arrays, no threads.

A row waits, is prefilled in chunks, then decodes with all others until it finishes::

    add -> waiting -> prefilling -> running -> finish
              ^-----------------------/ preempt, batch_failed

The engine's step is: `plan(now)` (who must leave), then `admit` and `next_chunk` until the step's prefill budget is
used, then one decode of every running row; so a long prompt never stops the others. Rows are admitted first come
first served within a priority (a higher number goes first). Dense batches cost rows x longest row, so that product,
in tokens, is what admission and preemption bound.

Two kinds of "no": `refusal` says why a row can never be taken or cannot be taken now; the other methods cannot fail
for a row they know, and raise KeyError for one they do not.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import Enum

HEADROOM_TOKENS = 256
"""Room that a row gets when it is admitted, beyond its prompt: one growth step of a dense cache."""

STEP_TOKENS = 2
"""What a running row may grow by before the next look: one step read, one in flight."""


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(frozen=True)
class Limits:
    """`kv_tokens_max` bounds rows x longest row."""

    rows_max: int
    queue_requests_max: int
    prefill_chunk_tokens: int
    kv_tokens_max: int


@dataclass
class Row:
    """One request in the scheduler. Lengths are tokens.

    `prompt` counts the tokens that must have KV before decoding starts, less the last one, which is the first decode
    step's input. `done` of them have it. `generated` grows with every decode step.
    """

    request_id: str
    prompt: int
    max_tokens: int
    priority: int = 0
    deadline: float = float("inf")
    order: int = 0
    state: State = State.WAITING
    done: int = 0
    generated: int = 0
    suspect: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.order)


@dataclass(frozen=True)
class Chunk:
    """Prefill `tokens[start:stop]` of the row."""

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Who leaves before the next step.

    `expired` rows passed their deadline and `preempted` ones went back to the queue; `cut` rows hold as many tokens as
    memory can and end with what they have.
    """

    expired: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)


class Scheduler:
    """Continuous batching for one replica. See the module's text for the life of a row."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._rows: dict[str, Row] = {}
        self._waiting: list[Row] = []
        self._prefilling: Row | None = None
        self._running: dict[str, Row] = {}
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Rows that hold a place: prefilling or decoding."""
        return len(self._running) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens still to prefill, over all rows."""
        rows = [*self._waiting, *([self._prefilling] if self._prefilling else [])]
        return sum(row.prompt - row.done for row in rows)

    def row(self, request_id: str) -> Row | None:
        return self._rows.get(request_id)

    def refusal(self, prompt: int) -> str | None:
        """`full` where the queue is, `too_long` for a prompt that memory can never hold, None where `add` may go."""
        if prompt + STEP_TOKENS > self.limits.kv_tokens_max:
            return "too_long"
        free = self.limits.rows_max - self.running
        if len(self._waiting) >= self.limits.queue_requests_max + max(free, 0):
            return "full"
        return None

    def add(self, row: Row) -> None:
        if row.request_id in self._rows:
            raise ValueError(f"request {row.request_id} is already here")
        self._arrivals += 1
        row.order = self._arrivals
        self._rows[row.request_id] = row
        self._enqueue(row)

    def finish(self, request_id: str) -> None:
        """The row leaves, wherever it is: finished, aborted or failed."""
        row = self._rows.pop(request_id)
        self._take_out(row)

    def reused(self, request_id: str, tokens: int) -> None:
        """The first `tokens` of the admitted row's prompt already have KV."""
        row = self._rows[request_id]
        row.done = min(tokens, row.prompt)
        if row.done == row.prompt:
            self._start_decoding(row)

    def prefilled(self, chunk: Chunk) -> None:
        row = self._rows[chunk.request_id]
        row.done = chunk.stop
        if row.done >= row.prompt:
            self._start_decoding(row)

    def decoded(self, request_id: str) -> None:
        """The row has one more token with KV; a decode step with it succeeded."""
        row = self._rows[request_id]
        row.generated += 1
        row.suspect = False

    def batch_failed(self) -> list[str]:
        """A decode step raised: every running row goes back to the queue, but for the one that is to blame.

        At first nobody is: all become suspects, and suspects join a batch of cleared rows one at a time, where a step
        that succeeds clears them. So a batch that fails with one suspect in it names the culprit.

        Returns:
            The row to end, if it is known.
        """
        rows = list(self._running.values())
        culprits = rows if len(rows) == 1 else [row for row in rows if row.suspect]
        for row in rows:
            if row not in culprits:
                row.suspect = not culprits
                self._requeue(row)
        return [row.request_id for row in culprits]

    def requeue_running(self, but: str) -> None:
        """The batch is lost through no fault of its rows: all of them but one go back to the queue."""
        for row in list(self._running.values()):
            if row.request_id != but:
                self._requeue(row)

    def plan(self, now: float) -> Plan:
        """Who leaves before the step at time `now` (seconds, the clock of the rows' deadlines)."""
        expired = [row.request_id for row in self._rows.values() if row.deadline <= now]
        for request_id in expired:
            self.finish(request_id)
        preempted, cut = self._make_room()
        for request_id in cut:
            self.finish(request_id)
        return Plan(expired, preempted, cut)

    def admit(self) -> str | None:
        """The next row from the queue, if one may start prefilling now; `reused` must follow."""
        if not self._waiting or self._prefilling or self.running >= self.limits.rows_max:
            return None
        row = self._waiting[0]
        if any(running.suspect for running in self._running.values()):
            return None
        if self._running and self._cost(row) > self.limits.kv_tokens_max:
            return None
        self._waiting.pop(0)
        row.state = State.PREFILLING
        self._prefilling = row
        return row.request_id

    def next_chunk(self, budget: int) -> Chunk | None:
        """The next prefill chunk of at most `budget` tokens; None when no row is being prefilled."""
        row = self._prefilling
        if row is None or budget <= 0:
            return None
        size = self.limits.prefill_chunk_tokens
        border = (row.done // size + 1) * size
        return Chunk(row.request_id, row.done, min(row.prompt, border, row.done + budget))

    def decoding(self) -> list[str]:
        """The rows of the next decode step."""
        return list(self._running)

    def check(self) -> None:
        """Raise AssertionError where the tables disagree: every row is in exactly one place, within the limits."""
        places = [*self._waiting, *self._running.values(), *([self._prefilling] if self._prefilling else [])]
        assert len(places) == len(self._rows) == len({row.request_id for row in places})
        assert self.running <= self.limits.rows_max
        assert self._waiting == sorted(self._waiting, key=lambda row: row.rank)
        for row in self._rows.values():
            assert 0 <= row.done <= row.prompt
            expected = (
                State.RUNNING
                if row.request_id in self._running
                else State.PREFILLING
                if row is self._prefilling
                else State.WAITING
            )
            assert row.state is expected

    def _enqueue(self, row: Row) -> None:
        row.state = State.WAITING
        insort(self._waiting, row, key=lambda waiting: waiting.rank)

    def _requeue(self, row: Row) -> None:
        self._take_out(row)
        row.prompt, row.max_tokens = row.length, row.max_tokens - row.generated
        row.generated = row.done = 0
        self._enqueue(row)

    def _take_out(self, row: Row) -> None:
        if row is self._prefilling:
            self._prefilling = None
        elif row.request_id in self._running:
            del self._running[row.request_id]
        else:
            self._waiting.remove(row)

    def _start_decoding(self, row: Row) -> None:
        self._take_out(row)
        row.state = State.RUNNING
        self._running[row.request_id] = row

    def _cost(self, extra: Row | None = None) -> int:
        """Tokens of the dense batch, with room for one more step (and for `extra`, with its headroom)."""
        lengths = [row.length + STEP_TOKENS for row in self._running.values()]
        if self._prefilling:
            lengths.append(self._prefilling.prompt + STEP_TOKENS)
        if extra:
            lengths.append(extra.prompt + min(extra.max_tokens, HEADROOM_TOKENS))
        return len(lengths) * max(lengths, default=0)

    def _make_room(self) -> tuple[list[str], list[str]]:
        """Send the youngest, least urgent rows back until the batch fits; a row alone that does not fit is cut."""
        preempted: list[str] = []
        while self._cost() > self.limits.kv_tokens_max:
            if self.running == 1:
                return preempted, [*self._running]
            candidates = [*self._running.values(), *([self._prefilling] if self._prefilling else [])]
            youngest = max(candidates, key=lambda row: row.rank)
            self._requeue(youngest)
            preempted.append(youngest.request_id)
        return preempted, []
