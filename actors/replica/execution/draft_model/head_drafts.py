"""Drafts of a head: a few layers that draft from what layers of the other model gave for a sequence's tokens.

What a head gets for a token is the token after it, and the outputs of the other model's layers for it. After the newest
token these are not known yet: then the head gets what it gave itself. So its KV of drafted tokens is made anew once
they are known. It needs no prompt: it begins with the first tokens of the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx

from ..sequence_states import ExecutorSequence
from .model_drafts import LEFT, SEQUENCES_MAX, WIDTHS, DraftModel, Followed, ModelDrafts
from .recent_kv import ROOM, States

STEPS = WIDTHS[-1]
"""Of how many steps the outputs are kept. A sequence that was not drafted for longer is begun anew."""


class HeadDrafts(ModelDrafts):
    """As `ModelDrafts`, for a head."""

    def __init__(self, model: DraftModel, vocabulary: int, clock: Callable[[], float] = perf_counter) -> None:
        super().__init__(model, vocabulary, clock)
        self._sequences: Sequence[ExecutorSequence] = ()
        # The outputs of steps; and of each sequence the number of its first token there, how many, and the place.
        self._steps: deque[tuple[mx.array, list[tuple[ExecutorSequence, int, int, int]]]] = deque(maxlen=STEPS)
        # For the tokens that are computed next: the numbers of the steps, and the places there.
        self._rows: list[list[tuple[int, int]]] = []

    def note_outputs(
        self, sequences: Sequence[ExecutorSequence], counts: Sequence[int], places: Sequence[int], outputs: mx.array
    ) -> None:
        each = zip(sequences, counts, places, strict=True)
        self._steps.append((outputs, [(sequence, sequence.length, count, place) for sequence, count, place in each]))

    def forget_others(self, sequences: Sequence[ExecutorSequence]) -> None:
        now = {id(sequence) for sequence in sequences}
        self._keep([index for index, each in enumerate(self._followed) if id(each.sequence) in now])
        self._sequences = sequences

    def is_ready(self, sequence: ExecutorSequence) -> bool:
        if sequence.drafter is None or not self._steps:
            return False
        return any(
            each is sequence and first + count == sequence.length for each, first, count, _ in self._steps[-1][1]
        )

    @property
    def followed(self) -> int:
        return min(SEQUENCES_MAX, sum(map(self.is_ready, self._sequences)))

    @property
    def begins(self) -> bool:
        return False

    def prompt_s(self, sequence: ExecutorSequence) -> float:
        return 0.0

    def begin(self, sequence: ExecutorSequence, *, paid: bool) -> None:
        """Does nothing: it needs no prompt."""

    def _new_tokens(self) -> list[list[int]]:
        followed = {id(each.sequence) for each in self._followed}
        for sequence in self._sequences:
            if len(self._followed) < SEQUENCES_MAX and id(sequence) not in followed and self.is_ready(sequence):
                self._kv.open()
                self._followed.append(Followed(sequence, 0, 0))
        self._rows = [self._begin_from(each) if self.is_ready(each.sequence) else [] for each in self._followed]
        return [
            each.drafter.since(each.end + 1) if row else []
            for each, row in zip(self._followed, self._rows, strict=True)
        ]

    def _begin_from(self, each: Followed) -> list[tuple[int, int]]:
        """Returns where the outputs of a sequence's tokens without KV are: the number of the step, and the place there.
        Begins the sequence anew if outputs are missing, or if there is no room."""
        known: dict[int, tuple[int, int]] = {}
        for number, (_, sequences) in enumerate(self._steps):
            for sequence, first, count, place in sequences:
                if sequence is each.sequence:
                    known |= {first + at: (number, place + at) for at in range(count)}
        # The newest token has no outputs yet.
        last = begin = each.drafter.count - 2
        while begin > each.end and begin - 1 in known and last - begin + 1 < WIDTHS[-1]:
            begin -= 1
        if begin != each.end or last - each.start + LEFT > ROOM:
            each.start = each.end = begin
        return [known[at] for at in range(begin, last + 1)]

    def _states(self, width: int) -> States:
        numbers = sorted({number for row in self._rows for number, _ in row})
        arrays, starts, at = [self._steps[number][0] for number in numbers], dict[int, int](), 0
        for number, array in zip(numbers, arrays, strict=True):
            starts[number], at = at, at + array.shape[0]
        flat = [[starts[number] + place for number, place in row] for row in self._rows]
        return [mx.concatenate(arrays)[mx.array([[*row, *[0] * (width - len(row))] for row in flat])]]

    def _note_guessed(self, each: Followed, tokens: Sequence[int]) -> None:
        """Nothing: what a head gave itself is made anew from the outputs."""
