"""Decides which sequences are admitted, prefilled, decoded and preempted in each engine step. Pure: no clock, no
arrays.

A sequence waits, is prefilled in chunks, then decodes with all others until it finishes::

    add -> waiting -> prefilling -> running -> finish
              ^-----------------------/ preempt, batch_failed

An engine step is: `plan(now)` (which sequences leave), then `admit` and `next_chunk` until the step's prefill budget is
used, then one decode step of all running sequences. So a long prompt never stops the others.

Sequences are admitted by priority: a higher number comes first, and preempts lower ones if there is no room. Among
equal priorities the tenant and then the flow that have been given least come first, and in a flow the oldest sequence
(`fairness.py`). A waiting sequence may preempt one whose tenant or flow has several places. Sequences of
`IDLE_PRIORITY` wait, or are preempted, as long as there are others. Admission and preemption limit what the sequences'
KV costs, in tokens: `Limits` says how it is counted, and `room_tokens` how much is free now.

A shared prefix is computed once: if an earlier sequence is computing KV that a waiting one could reuse, the latter
waits for it, and others go ahead. It waits only for sequences before it in rank, so for finitely many, and never for a
less urgent one.

`refusal` says why a sequence can never be accepted, or not now. The other methods cannot fail for a known sequence, and
raise KeyError for an unknown one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heapify, heappop
from itertools import pairwise
from math import inf

from ...protocol.block_ids import BLOCK_TOKENS
from .fairness import DRAWN_TOKENS, FairShares, depths, queues_too_many
from .limits import STEP_TOKENS, Limits
from .prefill_budget import stop_beside, stop_inside
from .sequence import ScheduledSequence, SequenceState
from .shared_blocks import SharedBlocks

HEADROOM_TOKENS = 256
"""Tokens reserved for a sequence beyond its prompt at admission: a block, or one growth step of a dense cache."""

UNEVEN_TOKENS = 2**14
"""The oldest prompt keeps its prefill turns until another tenant or flow has been given this many tokens less. If
prompts are prefilled one after the other, each finishes no later than if they share every step."""


@dataclass(frozen=True)
class PrefillChunk:
    """A sequence's tokens `[start:stop]`, to be prefilled in one call."""

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The sequences that leave before the next step.

    `expired` sequences passed their deadline. `preempted` ones go back to the queue. `cut` sequences fill all memory
    alone, and end with the tokens that they have.
    """

    expired: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)


class Scheduler:
    """Continuous batching for one replica. The module's docstring describes the life of a sequence.

    Attributes:
        room_tokens: what the sequences' KV may cost now, as others hold memory too. A single sequence may exceed it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence, even if the tables are inconsistent."""
        self._sequences: dict[str, ScheduledSequence] = {}
        self._waiting: list[ScheduledSequence] = []
        self._prefilling: dict[str, ScheduledSequence] = {}
        self._running: dict[str, ScheduledSequence] = {}
        self._shares = FairShares()
        self._expected: ScheduledSequence | None = None
        """The sequence for which room was just made."""
        self._blocks = SharedBlocks()
        self.room_tokens: float = inf
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Sequences that hold a place: prefilling or decoding."""
        return len(self._running) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens still to prefill, over all sequences."""
        # Copies, because other threads than the engine's ask.
        waiting = sum(sequence.prompt - min(sequence.known, sequence.prompt) for sequence in list(self._waiting))
        return waiting + sum(sequence.prompt - sequence.reaches for sequence in list(self._prefilling.values()))

    @property
    def free_tokens(self) -> int:
        """Tokens of KV not used by the sequences that hold a place."""
        return max(0, int(self._room) - self.cost_tokens)

    @property
    def cost_tokens(self) -> int:
        """What the sequences that hold a place cost when all their prompts have KV."""
        return self._cost(self._placed())

    @property
    def held_tokens(self) -> int:
        """What these sequences cost with the KV that they have now, or will have after the next step."""
        prefilling = [sequence.done for sequence in self._prefilling.values()]
        lengths = [*(sequence.length + STEP_TOKENS for sequence in self._running.values()), *prefilling]
        return self.limits.cost(lengths) - self._blocks.common(self._placed_ids()) * BLOCK_TOKENS

    @property
    def _room(self) -> float:
        return min(self.limits.kv_tokens_max, self.room_tokens)

    def sequence(self, request_id: str) -> ScheduledSequence | None:
        """Returns the sequence of a request; None if it is unknown."""
        return self._sequences.get(request_id)

    def refusal(self, prompt: int, coming: int = 0, tenant: str = "", flow: str = "") -> str | None:
        """Returns why a sequence with a prompt of `prompt` tokens is refused.

        Args:
            coming: sequences that were accepted but not added yet.

        Returns:
            `full` if the queue is full, `full_for_it` if only this tenant or flow may not queue more, `too_long` if
            memory can never hold the prompt, None if `add` may follow.
        """
        if prompt > self.limits.prompt_tokens_max:
            return "too_long"
        free = max(0, self.limits.sequences_max - self.running)
        room = self.limits.queue_requests_max + free - len(self._waiting) - coming
        if room <= 0:
            return "full"
        return "full_for_it" if queues_too_many(tenant, flow, list(self._waiting), room) else None

    def add(self, sequence: ScheduledSequence) -> None:
        """Queues a sequence.

        Raises:
            ValueError: a sequence of this request is here already.
        """
        if sequence.request_id in self._sequences:
            raise ValueError(f"request {sequence.request_id} is already here")
        self._arrivals += 1
        sequence.order = self._arrivals
        self._sequences[sequence.request_id] = sequence
        self._shares.join(sequence)
        self._enqueue(sequence)

    def finish(self, request_id: str) -> None:
        """Removes a sequence in any state: finished, aborted or failed."""
        sequence = self._sequences.pop(request_id)
        if sequence is self._expected:
            self._expected = None
        self._take_out(sequence)
        self._shares.leave(sequence)

    def await_restore(self, request_id: str, hot: int) -> None:
        """Makes an admitted sequence wait for KV from disk until `reused` is called; memory has its first `hot`
        tokens."""
        sequence = self._sequences[request_id]
        sequence.restoring, sequence.known = True, max(sequence.known, min(hot, sequence.prompt))

    def reused(self, request_id: str, tokens: int) -> None:
        """Notes that the first `tokens` of an admitted sequence's prompt already have KV."""
        sequence = self._sequences[request_id]
        sequence.restoring = False
        sequence.done = min(tokens, sequence.prompt)
        self._hold_blocks(sequence)
        if sequence.done == sequence.prompt:
            self._start_decoding(sequence)

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Notes that a chunk is computed, so that `next_chunk` continues after it."""
        sequence = self._sequences[chunk.request_id]
        first = self._first(sequence.priority)
        first.passed = sequence is not first
        self._shares.charge(sequence, chunk.stop - sequence.done)
        sequence.done = chunk.stop
        self._hold_blocks(sequence)
        if sequence.done >= sequence.prompt:
            self._start_decoding(sequence)

    def decoded(self, request_id: str) -> None:
        """Notes a decode step that succeeded: the sequence has one more token with KV. If the sequence was just
        preempted, the token counts as part of its prompt."""
        sequence = self._sequences[request_id]
        self._shares.charge(sequence, DRAWN_TOKENS)
        sequence.suspect = False
        if sequence.state is SequenceState.RUNNING:
            sequence.generated += 1
            return
        sequence.prompt, sequence.max_tokens, sequence.twin = sequence.prompt + 1, sequence.max_tokens - 1, b""

    def batch_failed(self, *, device: bool = False) -> list[str]:
        """Requeues every running sequence after a decode step raised, except the culprit.

        At first the culprit is unknown, and all sequences become suspects. Then suspects join a batch of cleared
        sequences one at a time, and a step that succeeds clears them. So if a batch fails, its only suspect is the
        culprit.

        Args:
            device: whether the device has failed, so that all KV of the sequences with a place is lost. That may be no
                sequence's fault, so even a sequence that ran alone becomes only a suspect.

        Returns:
            The sequence to end; empty while the culprit is unknown.
        """
        sequences = self._placed() if device else list(self._running.values())
        culprits = (
            sequences
            if len(sequences) == 1 and not device
            else [sequence for sequence in sequences if sequence.suspect]
        )
        for sequence in sequences:
            if sequence not in culprits:
                sequence.suspect = not culprits
                self._requeue(sequence)
        return [sequence.request_id for sequence in culprits]

    def plan(self, now: float) -> Plan:
        """Decides which sequences leave before the step at time `now` (seconds, on the clock of the sequences'
        deadlines)."""
        self._expected = None
        expired = [sequence.request_id for sequence in self._sequences.values() if sequence.deadline <= now]
        for request_id in expired:
            self.finish(request_id)
        preempted, cut = self._make_room()
        for request_id in cut:
            self.finish(request_id)
        return Plan(expired, preempted + self._pause_idle() + self._give_way(), cut)

    def admit(self) -> str | None:
        """Admits the next sequence of the queue if one may start prefilling now; the caller must call `reused` for
        it."""
        if not self._waiting:
            return None
        if self.running >= self.limits.sequences_max or len(self._prefilling) >= self.limits.prefill_sequences_max:
            return None
        sequence, self._expected = self._expected or self._next_waiting(), None
        placed = self._placed()
        if sequence is None or not self._may_join(sequence) or not self._fits(sequence, placed):
            return None
        if sequence.idle and not all(other.idle for other in placed):
            return None
        self._waiting.remove(sequence)
        sequence.state = SequenceState.PREFILLING
        self._prefilling[sequence.request_id] = sequence
        self._shares.admit(sequence)
        return sequence.request_id

    def next_chunk(self, budget: int, step_budget: int = 0) -> PrefillChunk | None:
        """Returns the next prefill chunk, of at most `budget` tokens, which is what is left of a step's `step_budget`.

        Among the most urgent sequences, turns alternate between the first sequence and the one with the fewest tokens
        left, so a short prompt never waits for the whole of a long one. (If the first sequence took turns with a longer
        one, it would be delayed and the other would gain nothing.) The first sequence is the oldest, or one whose
        tenant or flow was given `UNEVEN_TOKENS` less. If the rest of a budget is too small for the first sequence, a
        prompt that can be completed with it may use it, and the next turn is the first sequence's.

        Args:
            step_budget: 0 if none of it is used yet.

        Returns:
            None if no sequence can be prefilled, or if the rest of the step's budget is too small for a chunk. A whole
            budget of at least `TOKENS_MIN` is always enough.
        """
        ready = [sequence for sequence in self._prefilling.values() if not sequence.restoring]
        if not ready or budget <= 0:
            return None
        urgency = max(sequence.priority for sequence in ready)
        urgent = [sequence for sequence in ready if sequence.priority == urgency]
        shortest = min(urgent, key=lambda sequence: (sequence.prompt - sequence.done, sequence.order))
        first = self._first(urgency)
        chunk = self._chunk(first if first.passed else shortest, budget, max(budget, step_budget))
        if chunk is None and first.passed:
            chunk = self._chunk(shortest, budget, max(budget, step_budget))
            return chunk if chunk is not None and chunk.stop == shortest.prompt else None
        return chunk

    def decoding(self) -> list[str]:
        """Returns the ids of the sequences in the next decode step."""
        return list(self._running)

    def check(self) -> None:
        """Checks that every sequence is in exactly one table and within the limits.

        Raises:
            AssertionError: the tables disagree.
        """
        tables = {
            SequenceState.WAITING: {sequence.request_id: sequence for sequence in self._waiting},
            SequenceState.PREFILLING: self._prefilling,
            SequenceState.RUNNING: self._running,
        }
        assert len(self._waiting) + self.running == len(self._sequences)
        for request_id, sequence in self._sequences.items():
            assert sequence.request_id == request_id
            assert tables[sequence.state].get(request_id) is sequence
            assert 0 <= sequence.done <= sequence.prompt
            assert sequence.state is not SequenceState.WAITING or sequence.done == 0
            assert sequence.state is not SequenceState.RUNNING or sequence.done == sequence.prompt
            assert sequence.state is SequenceState.RUNNING or sequence.generated == 0
            assert not sequence.restoring or (sequence.state is SequenceState.PREFILLING and sequence.done == 0)
        assert all(before.rank < after.rank for before, after in pairwise(self._waiting))
        assert self.running <= self.limits.sequences_max
        assert len(self._prefilling) <= self.limits.prefill_sequences_max
        self._blocks.check(self._placed_ids())
        suspects = [sequence for sequence in self._placed() if sequence.suspect]
        assert len(suspects) <= 1, "if a batch with two suspects failed, the culprit would be unknown"

    def _chunk(self, sequence: ScheduledSequence, budget: int, step_budget: int) -> PrefillChunk | None:
        """Returns the next chunk of a prompt. A prompt that a step's budget can complete is not cut: not at a border,
        and not because others have used a part of the budget. Each of its chunks would be a call."""
        size = self.limits.prefill_chunk_tokens
        end = sequence.pause if sequence.done < sequence.pause else sequence.prompt
        left, border = end - sequence.done, (sequence.done // size + 1) * size
        stop = min(end, border)
        if not self.limits.stops_at_borders:
            if left <= min(budget, size):
                stop = end
            elif budget < step_budget and left <= min(step_budget, size):
                return None
        if stop - sequence.done > budget:
            stop = stop_inside(sequence.done, budget, step_budget)
        stop = stop_beside(sequence.done, stop, sequence.unbroken)
        return PrefillChunk(sequence.request_id, sequence.done, stop) if stop > sequence.done else None

    def _first(self, priority: int) -> ScheduledSequence:
        """Returns the sequence of this priority that is first in prefill: the oldest, unless another tenant or flow has
        been given far less."""
        sequences = [
            sequence
            for sequence in self._prefilling.values()
            if sequence.priority == priority and not sequence.restoring
        ]
        oldest = min(sequences, key=lambda sequence: sequence.order)
        least = min(sequences, key=lambda sequence: (-self._shares.lead(oldest, sequence), sequence.order))
        return least if self._shares.lead(oldest, least) > UNEVEN_TOKENS else oldest

    def _placed(self) -> list[ScheduledSequence]:
        return [*self._running.values(), *self._prefilling.values()]

    def _placed_ids(self) -> list[str]:
        return [*self._running, *self._prefilling]

    def _enqueue(self, sequence: ScheduledSequence) -> None:
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=lambda waiting: waiting.rank)

    def _requeue(self, sequence: ScheduledSequence) -> None:
        self._take_out(sequence)
        if sequence.generated:
            sequence.twin = b""  # Its generated tokens are part of its prompt now.
        sequence.prompt, sequence.max_tokens = sequence.length, sequence.max_tokens - sequence.generated
        sequence.generated = sequence.done = 0
        sequence.passed = sequence.restoring = False
        self._enqueue(sequence)

    def _take_out(self, sequence: ScheduledSequence) -> None:
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            del (self._prefilling if sequence.state is SequenceState.PREFILLING else self._running)[sequence.request_id]
            self._blocks.leave(sequence.request_id)

    def _start_decoding(self, sequence: ScheduledSequence) -> None:
        del self._prefilling[sequence.request_id]
        sequence.state = SequenceState.RUNNING
        self._running[sequence.request_id] = sequence

    def _next_waiting(self, *, taking: bool = False) -> ScheduledSequence | None:
        """Returns the first queued sequence, by priority and then by fairness, that does not wait for KV that an
        earlier sequence computes.

        Args:
            taking: whether it is to preempt another sequence, not to take a free place.
        """
        computing = [(sequence.rank, *_computing(sequence)) for sequence in self._prefilling.values()]
        if self._shares.alone:
            return next((sequence for sequence in self._waiting if not _waits(sequence, computing)), None)
        turns = [
            ((-sequence.priority, *self._shares.turn(sequence, taking=taking)), sequence) for sequence in self._waiting
        ]
        heapify(turns)
        while turns:
            _, sequence = heappop(turns)
            if not _waits(sequence, computing):
                return sequence
        return None

    def _may_join(self, sequence: ScheduledSequence) -> bool:
        """Whether the culprit could still be found if a batch with `sequence` in it failed.

        No sequence may join while a suspect is in the batch, and a suspect may join only cleared sequences.
        """
        if any(placed.suspect for placed in self._placed()):
            return False
        return not sequence.suspect or (
            not self._prefilling and all(other.generated for other in self._running.values())
        )

    def _fits(self, sequence: ScheduledSequence, placed: list[ScheduledSequence]) -> bool:
        """Whether `sequence` may be prefilled while the sequences `placed` hold their places."""
        prefilling = sum(other.state is SequenceState.PREFILLING for other in placed)
        if len(placed) >= self.limits.sequences_max or prefilling >= self.limits.prefill_sequences_max:
            return False
        return not placed or self._cost(placed, sequence) <= self._room

    def _hold_blocks(self, sequence: ScheduledSequence) -> None:
        if self.limits.shares:
            self._blocks.hold(sequence.request_id, sequence.keys[: sequence.done // BLOCK_TOKENS])

    def _cost(self, sequences: list[ScheduledSequence], extra: ScheduledSequence | None = None) -> int:
        """Returns what the sequences cost, with room for one more step (and for `extra` with its headroom)."""
        lengths = [sequence.length + STEP_TOKENS for sequence in sequences]
        if extra:
            lengths.append(extra.prompt + max(STEP_TOKENS, min(extra.max_tokens, HEADROOM_TOKENS)))
        keys = extra.keys[: extra.prompt // BLOCK_TOKENS] if extra and self.limits.shares else ()
        return (
            self.limits.cost(lengths)
            - self._blocks.common([sequence.request_id for sequence in sequences], keys) * BLOCK_TOKENS
        )

    def _make_room(self) -> tuple[list[str], list[str]]:
        """Preempts sequences until the batch fits: the least urgent first, then those of the tenant or flow with the
        most places, then the youngest. A single sequence that could never fit is cut."""
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

    def _pause_idle(self) -> list[str]:
        """Preempts the sequences that are computed only while there is nothing else."""
        placed = self._placed()
        idle = [sequence for sequence in placed if sequence.idle]
        if not idle or (len(idle) == len(placed) and all(sequence.idle for sequence in self._waiting[:1])):
            return []
        for sequence in idle:
            self._requeue(sequence)
        return [sequence.request_id for sequence in idle]

    def _give_way(self) -> list[str]:
        """Preempts as few sequences as needed to admit the next queued one: less urgent ones, or sequences whose tenant
        or flow has more places than the next one's would have. A sequence longer than all of the batch may preempt only
        one of the latter, because it could need the memory of many."""
        placed = self._placed()
        if not self._waiting or not placed:
            return []
        if self._shares.alone and all(sequence.priority >= self._waiting[0].priority for sequence in placed):
            return []
        coming = self._next_waiting(taking=True)
        if coming is None or not self._may_join(coming) or self._fits(coming, placed):
            return []
        less_urgent = [sequence for sequence in placed if sequence.priority < coming.priority]
        too_many = _too_many(coming, [sequence for sequence in placed if sequence.priority == coming.priority])
        yielding = [*too_many, *_by_claim(less_urgent)]
        staying = [sequence for sequence in placed if sequence not in yielding]
        if not self._fits(coming, staying):
            return []
        leaving: list[ScheduledSequence] = []
        for sequence in yielding:
            if self._fits(coming, [*staying, sequence]):
                staying.append(sequence)
            else:
                leaving.append(sequence)
        even = [sequence for sequence in leaving if sequence.priority == coming.priority]
        if len(even) > 1 and coming.prompt > max(sequence.length for sequence in placed):
            return []
        for sequence in leaving:
            self._requeue(sequence)
        self._expected = coming
        return [sequence.request_id for sequence in leaving]


def _by_claim(sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Sorts sequences so that the last is preempted first: by priority, then by how many places the tenant already has,
    then by arrival."""
    sequences = sorted(sequences, key=lambda sequence: sequence.order)
    claims = zip(sequences, depths(sequences), strict=True)
    return [sequence for sequence, _ in sorted(claims, key=lambda one: (-one[0].priority, one[1].tenant, one[0].order))]


def _too_many(coming: ScheduledSequence, placed: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Returns the placed sequences that are beyond the share of the tenant of `coming`, or within this tenant, beyond
    the share of its flow. Those furthest beyond it come last."""
    sequences = [*sorted(placed, key=lambda sequence: sequence.order), coming]
    *placed_depths, own = depths(sequences)
    claims = [
        (depth.tenant, sequence.order, sequence)
        for sequence, depth in zip(sequences[:-1], placed_depths, strict=True)
        if (depth.flow > own.flow if sequence.tenant == coming.tenant else depth.tenant > own.tenant)
    ]
    return [sequence for _, _, sequence in sorted(claims, key=lambda one: one[:2])]


def _computing(sequence: ScheduledSequence) -> tuple[bytes, int, int, bytes | None]:
    """Returns what a sequence in prefill computes that others may reuse: its twin, and the index, the end in tokens and
    the key of its next whole block (None if no whole block is left)."""
    index = sequence.reaches // BLOCK_TOKENS
    end = (index + 1) * BLOCK_TOKENS
    return (
        sequence.twin,
        index,
        end,
        sequence.keys[index] if index < len(sequence.keys) and end <= sequence.prompt else None,
    )


def _waits(sequence: ScheduledSequence, computing: list[tuple[tuple[int, int], bytes, int, int, bytes | None]]) -> bool:
    """Whether a sequence before this one in rank computes KV that this one could reuse.

    Equal block ids mean equal histories: if two sequences have the block being computed in common, they have all blocks
    before it in common.
    """
    for rank, twin, index, end, key in computing:
        if rank >= sequence.rank:
            continue
        if twin and twin == sequence.twin:
            return True
        if key is not None and end <= sequence.prompt and index < len(sequence.keys) and key == sequence.keys[index]:
            return True
    return False
