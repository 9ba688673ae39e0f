"""Drafts of a small model with the same tokenizer, for the sequences of a batch.

The model computes the last tokens of a sequence once it is expected to pay, a piece before a step, and then follows
what is drawn. All sequences that it follows draft together, one token after the other. It draws as they will, with the
same noise, penalties and limits: so it is right more often than its likeliest token would be. A sequence that grows too
long for its KV is begun anew with its last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from time import perf_counter
from typing import Any

import mlx.core as mx

from ...drafting.drafter import Drafter
from ...drafting.model_pace import ModelPace, Share
from ..recorded.layer_outputs import LayerOutputs
from ..sequence_states import ExecutorSequence
from .recent_kv import ROOM, RecentKV, States, padded_rows

KEPT = ROOM // 2
"""With how many of its last tokens a sequence is begun."""

KEPT_TRIAL = (128, 64, 32)
"""With how many it is if that is not expected to pay: the first of these for which there is credit."""

PIECES = (16, 64, 256)
"""Tokens of a piece: the largest that takes at most `PAUSE_S`, and no more than there are; else the smallest."""

PAUSE_S = 0.03

WIDTHS = (1, 2, 4, 8, 16)
"""To how many tokens of each sequence it is padded what was drawn since the last draft."""

USUAL_WIDTH = 8
"""A draft behind more tokens says nothing about how long others take."""

LEFT = 2 * WIDTHS[-1]
"""A sequence that has room for fewer tokens is not followed further."""

SEQUENCES_MAX = 16
"""The most sequences that are followed: with more, a step of one token each has enough to compute."""


@dataclass(frozen=True)
class DraftModel:
    """A small model that drafts.

    Attributes:
        name: what it was loaded from.
        known: ids below it are the same tokens for the model that it drafts for.
        kv: of no sequence, for its layers.
        kv_bytes: the most that its KV takes, for a head with what it drafts from.
        pieces, token_s: its first times, as for `ModelPace`.
        outputs: the layers of the other model from whose outputs it drafts; None for a whole model, to which tokens
            are enough.
    """

    name: str
    known: int
    kv: RecentKV
    kv_bytes: int
    pieces: dict[int, float]
    token_s: float
    outputs: LayerOutputs | None = None


@dataclass(eq=False)
class Followed:
    """A sequence that the model follows.

    Attributes:
        start, end: which of its tokens have KV.
        guessed: tokens that have KV after these. They were drafted.
        share: how many of its drafted tokens were right.
        paid: whether it is expected to pay; else it is followed to find out.
    """

    sequence: ExecutorSequence
    start: int
    end: int
    paid: bool = True
    guessed: list[int] = field(default_factory=list)
    share: Share = field(default_factory=Share)

    @property
    def drafter(self) -> Drafter:
        assert self.sequence.drafter is not None
        return self.sequence.drafter

    def settle(self) -> list[int]:
        """Counts what was guessed and came. Returns the tokens after that, at least one."""
        came = self.drafter.since(self.end)
        right = sum(1 for _ in takewhile(bool, map(eq, self.guessed, came[:-1])))
        self.end, self.guessed = self.end + right, []
        return came[right:]


class ModelDrafts:
    """The sequences that a drafting model follows. Used by `Drafts`.

    Args:
        vocabulary: how many tokens can be drawn.
    """

    def __init__(self, model: DraftModel, vocabulary: int, clock: Callable[[], float] = perf_counter) -> None:
        self._model, self._vocabulary, self._clock = model, vocabulary, clock
        self.pace = ModelPace(model.pieces, model.token_s)
        self._followed: list[Followed] = []
        self._kv = model.kv.bare()
        # The one whose last tokens are being computed.
        self._next: tuple[Followed, RecentKV] | None = None

    @property
    def name(self) -> str:
        return self._model.name

    def forget_others(self, sequences: Sequence[ExecutorSequence]) -> None:
        """Forgets all but these sequences, and those without room."""
        now = {id(sequence) for sequence in sequences}
        if self._next is not None and id(self._next[0].sequence) not in now:
            self._next = None
        keep = [
            index
            for index, each in enumerate(self._followed)
            if id(each.sequence) in now and each.drafter.count - each.start + LEFT <= ROOM
        ]
        self._keep(keep)

    def share(self, sequence: ExecutorSequence) -> float:
        """Returns which part of a sequence's drafted tokens may be expected to be right."""
        return self.pace.share(next((each.share for each in self._followed if each.sequence is sequence), None))

    def is_ready(self, sequence: ExecutorSequence) -> bool:
        """Whether it can draft for a sequence now."""
        return any(each.sequence is sequence and each.drafter.count - each.end < WIDTHS[-1] for each in self._followed)

    @property
    def followed(self) -> int:
        """How many sequences it follows, with the one that it begins."""
        return len(self._followed) + (self._next is not None)

    def note_outputs(
        self, sequences: Sequence[ExecutorSequence], counts: Sequence[int], places: Sequence[int], outputs: mx.array
    ) -> None:
        """Notes what layers of the other model gave in a step; a whole model does not need it. Call it before the
        sequences count the step's tokens.

        Args:
            counts: how many tokens of each sequence were computed and stay.
            places: where the first of them is in `outputs`, `(tokens, dimensions)`.
        """

    # Before it can draft for a sequence.

    @property
    def begins(self) -> bool:
        """Whether it computes a sequence's last tokens."""
        return self._next is not None

    def prompt_s(self, sequence: ExecutorSequence) -> float:
        """Returns how long it takes to compute a sequence's last tokens."""
        assert sequence.drafter is not None
        return self.pace.prompt_s(min(KEPT, sequence.drafter.count))

    def begin(self, sequence: ExecutorSequence, *, paid: bool) -> None:
        """Begins to compute a sequence's last tokens.

        Args:
            paid: whether that is expected to pay; else it is not begun without credit.
        """
        afforded = [count for count in KEPT_TRIAL if self.pace.prompt_s(count) <= self.pace.credit_s]
        if not paid and not afforded:
            return
        assert self._next is None and sequence.drafter is not None
        count = sequence.drafter.count
        index = next((at for at, each in enumerate(self._followed) if each.sequence is sequence), None)
        share = Share()
        if index is not None:
            before, kv = self._followed[index], self._kv.take(index)
            self._keep([at for at in range(len(self._followed)) if at != index])
            if count - before.end < KEPT:
                before.settle()
                kv.lengths, before.paid = [before.end - before.start], paid
                self._next = before, kv
                return
            share = before.share
        start = max(0, count - (KEPT if paid else afforded[0]))
        kv = self._model.kv.bare()
        kv.open()
        self._next = Followed(sequence, start, start, paid, share=share), kv

    def compute_piece(self) -> None:
        """Computes a piece of the sequence that it begins. Waits for it."""
        assert self._next is not None
        each, kv = self._next
        missing = each.drafter.since(each.end)
        if each.end - each.start + len(missing) + LEFT > ROOM:
            self._next = None
            return
        if len(missing) >= WIDTHS[-1]:
            least, *larger = PIECES
            fit = [size for size in larger if size < len(missing) and self.pace.prompt_s(size) <= PAUSE_S]
            size = max(fit, default=least)
            given = missing[:-1][:size]
            began = self._clock()
            kv.compute([self._known(given)], size)
            mx.eval(kv.arrays())
            seconds = self._clock() - began
            self.pace.note_piece(size, seconds)
            if not each.paid:
                self.pace.credit_s -= seconds
            each.end += len(given)
            missing = missing[len(given) :]
        if len(missing) < WIDTHS[-1]:
            self._next = None
            self._kv.join(kv)
            self._followed.append(each)

    # Drafts.

    def draft(self, places: dict[int, int], depth: int, sampler: Any) -> dict[int, list[int]]:
        """Drafts for some sequences that are ready. Waits for the device.

        Args:
            places: by the sequences' `id`: their places in the batch, for all of the batch.
            depth: how many tokens.
            sampler: the `BatchSampler` of the batch.

        Returns:
            Drafts of all sequences that are followed, by their places. One that was not ready has none.
        """
        began = self._clock()
        new = self._new_tokens()
        if not any(new):
            return {}
        self._kv.lengths = [each.end - each.start for each in self._followed]
        width = next(width for width in WIDTHS if width >= max(map(len, new)))
        guess = sampler.guessing([places[id(each.sequence)] for each in self._followed])
        logits = self._kv.compute([self._known(tokens) for tokens in new], width, self._states(width))
        drawn = [guess(self._fitting(logits)).tokens]
        while len(drawn) < depth:
            tokens = mx.minimum(drawn[-1], self._model.known - 1)
            drawn.append(guess(self._fitting(self._kv.compute_one(tokens))).tokens)
        mx.eval(drawn, self._kv.arrays())
        if width <= USUAL_WIDTH:
            self.pace.note_drafts(padded_rows(len(self._followed)), depth, self._clock() - began)
        drafts, found = zip(*(tokens.tolist() for tokens in drawn), strict=True), dict[int, list[int]]()
        for each, tokens, draft in zip(self._followed, new, drafts, strict=True):
            if tokens:
                each.end += len(tokens)
                found[places[id(each.sequence)]] = list(draft)
                self._note_guessed(each, draft[:-1])
        return found

    def _new_tokens(self) -> list[list[int]]:
        """Returns what is computed next of every sequence that is followed; [] for one that is not ready."""
        # What was guessed is overwritten where it was wrong, or where there is nothing to draft for.
        came = [each.settle() for each in self._followed]
        return [tokens if len(tokens) <= WIDTHS[-1] else [] for tokens in came]

    def _states(self, width: int) -> States | None:
        """Returns the states of these tokens, as for `RecentKV.compute`."""
        return None

    def _note_guessed(self, each: Followed, tokens: Sequence[int]) -> None:
        """Notes which tokens have KV after those that are known."""
        each.guessed = list(tokens)

    def note_right(self, sequence: ExecutorSequence, right: int, drafted: int) -> None:
        """Notes how many tokens of a sequence's draft were right."""
        own = next((each.share for each in self._followed if each.sequence is sequence), Share())
        self.pace.note_right(own, right, drafted)

    def _keep(self, indices: Sequence[int]) -> None:
        self._kv.keep(indices)
        self._followed = [self._followed[index] for index in indices]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens with 0 in place of those that the model does not know, such as of pictures."""
        return [token if token < self._model.known else 0 for token in tokens]

    def _fitting(self, logits: mx.array) -> mx.array:
        """Returns the logits of the tokens that both models know, `(sequences, vocabulary)`; the others are -inf."""
        known = self._model.known
        more = self._vocabulary - known
        return mx.pad(logits[:, :known], [(0, 0), (0, more)], constant_values=-mx.inf) if more else logits[:, :known]
