"""The drafts of a batch, and which of their tokens are kept.

Noise is a function of (seed, choice, position). So what a sequence will draw after its next token is already certain,
and a draft is right if it equals that. A step computes some sequences' next token and draft, draws at each place what
would be drawn there, and keeps the tokens up to the first that differs. The KV of the others is taken back. So a draft
changes how long an answer takes, and nothing in it.

A step in flight must have ended before drafts are chosen, because they continue its tokens. So drafts are only asked
for if it is likely that one pays.

A draft is what a grammar forces, or what followed in the sequence's context before, or what a small model says. The
first costs nothing and is right. The model drafts where it is right more often than the context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, takewhile
from time import perf_counter
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device_errors import on_device
from ..drafting.drafter import Drafter
from ..drafting.model_pace import DEPTHS, SHARE_MOST, TRIAL_DEPTH
from ..drafting.pace import TOKENS_MOST, WIDTHS, DraftPace, Hope
from ..kernels.decode_views import NEW_MOST, padded_count
from .draft_model.head_drafts import HeadDrafts
from .draft_model.model_drafts import SEQUENCES_MAX, DraftModel, ModelDrafts
from .sampling.ready import Ready
from .sampling.sampling import Draw
from .sequence_states import ExecutorSequence

logger = logging.getLogger(__name__)

NO_DRAFT = Hope(0.0, 0)

FORCED_SHARE = 0.99
"""How many of a grammar's only tokens are right: all, unless the device fails."""

HORIZON_TOKENS, HORIZON_LEAST = 128, 16
"""For so many further tokens of a sequence a model is expected to draft, if the sequence may have as many; with fewer
than the second it is not followed."""

RESTS_STEPS = 8
"""If it does not pay that the model drafts, or follows another sequence, that is looked at so many steps later."""


@dataclass(frozen=True)
class _Plan:
    """What to draft: for every sequence how many tokens; for those at `places` the model drafts them, in `depth` steps
    of its own. `speed` is how many times as many tokens a second that is expected to give."""

    speed: float
    lengths: list[int]
    places: frozenset[int] = frozenset()
    depth: int = 0
    is_trial: bool = False


class Drafts:
    """The drafts of the sequences of a batch, and the times of its steps. Used by the executor.

    Args:
        vocabulary: how many tokens can be drawn.
        wanted: whether there may be any.
        model: a small model that drafts too; None for none.
        tokens_most: as for `DraftPace`.

    Attributes:
        wanted: as given.
        model: the sequences that the model drafts for; None without one, and after it has failed.
        failure: why the model drafts no more; empty if it has not failed.
        count, drafted, right: how many drafts were computed, how many tokens they had, and how many of them were right.
        drafted_by_model, right_by_model: those of them that the model drafted.
    """

    def __init__(
        self,
        vocabulary: int,
        clock: Callable[[], float] = perf_counter,
        *,
        wanted: bool,
        model: DraftModel | None = None,
        tokens_most: int = TOKENS_MOST,
    ) -> None:
        self._vocabulary = vocabulary
        self.wanted = wanted
        self._clock = clock
        self.pace = DraftPace(tokens_most)
        self.model: ModelDrafts | None = None
        if wanted and model is not None:
            drafts = ModelDrafts if model.outputs is None else HeadDrafts
            self.model = drafts(model, vocabulary, clock)
        self.failure = ""
        self.count = self.drafted = self.right = 0
        self.drafted_by_model = self.right_by_model = 0
        self._count = 0
        self._tokens = 0
        # When the last step of one token ended, if a step before it was in flight, and nothing came between.
        self._ended: float | None = None
        # Since when the device has had nothing to do.
        self._idle_from: float | None = None
        self._began = 0.0
        # For how many steps nothing is expected of the model, and when it began the drafts that are only a trial.
        self._rests_drafts, self._rests_follow = 0, 0
        self._trial_began: float | None = None
        # Of the step: each sequence for which the model has drafted, its place, and how many tokens.
        self._by_model: list[tuple[ExecutorSequence, int, int]] = []

    def join(self, sequence: ExecutorSequence) -> None:
        """Begins to draft for a sequence that joins the batch, unless it has a grammar."""
        if self.wanted and sequence.grammar is None:
            sequence.drafter = Drafter(sequence.tokens)

    def choose(
        self,
        sequences: Sequence[ExecutorSequence],
        inputs: Callable[[], list[int]],
        sampler: Any = None,
        *,
        ragged: bool = False,
        idle: bool = True,
    ) -> list[list[int]]:
        """Returns what is drafted after every sequence's input; nothing at all if no draft pays.

        Args:
            inputs: returns the next token of each; is only asked if a draft is likely to pay, for it waits.
            sampler: the `BatchSampler` of the batch; a model needs it.
            ragged: as for `DraftPace.lengths`.
            idle: whether nobody waits for a first token, so that the model may compute prompts.
        """
        if not self.wanted:
            return []
        with self._model_may_fail():
            self._follow(sequences, inputs, ragged=ragged, idle=idle)
        if not any(self._plan(sequences, ragged=ragged).lengths):
            return []
        self.note(sequences, inputs())
        plan = self._plan(sequences, ragged=ragged)
        if not any(plan.lengths):
            return []
        began, guesses = self._clock(), dict[int, list[int]]()
        with self._model_may_fail():
            guesses = self._guesses(sequences, plan, sampler)
        self._trial_began = began if plan.is_trial else None
        self._began = self._clock() if self._idle_from is None or plan.depth else self._idle_from
        drafts = [
            self._fitting(sequence, guesses.get(place, ()) if place in plan.places else _drafted(sequence), most)
            for place, (sequence, most) in enumerate(zip(sequences, plan.lengths, strict=True))
        ]
        if plan.depth and not any(drafts):
            # The next step is not the last thing that was computed.
            self.pause()
        self._by_model = [(sequences[at], at, len(drafts[at])) for at in plan.places if drafts[at]]
        counts, self._count = [1 + len(draft) for draft in drafts], sum(map(bool, drafts))
        self._tokens = padded_count(sum(counts)) if ragged else len(counts) * padded_width(max(counts))
        return drafts

    def _plan(self, sequences: Sequence[ExecutorSequence], *, ragged: bool) -> _Plan:
        """Returns what is expected to give most, with the sequences that the model can draft for now."""
        hopes = [_hope(sequence) for sequence in sequences]
        model = self.model
        if model is None or self._rests_drafts > 0 or not self.pace.is_timed(len(sequences)):
            return _Plan(1.0, self.pace.lengths(hopes, ragged=ragged))
        ready = [place for place, sequence in enumerate(sequences) if model.is_ready(sequence)]
        plan = self._best(sequences, hopes, ready, model, ragged=ragged)
        if plan.depth or not ready:
            return plan
        room = self.pace.tokens_most - len(sequences)
        tried = ready[: max(0, room) // TRIAL_DEPTH] if ragged else ready
        if tried and not any(plan.lengths) and self._may_try(sequences, tried, model, ragged=ragged):
            lengths = [min(TRIAL_DEPTH, _most(each)) if at in tried else 0 for at, each in enumerate(sequences)]
            return _Plan(1.0, lengths, frozenset(tried), TRIAL_DEPTH, is_trial=True)
        self._rests_drafts = RESTS_STEPS
        return plan

    def _best(
        self,
        sequences: Sequence[ExecutorSequence],
        hopes: Sequence[Hope],
        places: Sequence[int],
        model: ModelDrafts,
        *,
        ragged: bool,
        share: float | None = None,
    ) -> _Plan:
        """Returns what is expected to give most.

        Args:
            hopes: of the sequences without the model.
            places: for which sequences the model may draft.
            share: which part of its tokens is right; None for what is known of it.
        """
        best = _Plan(*self.pace.best(hopes, ragged=ragged))
        shares = {at: model.share(sequences[at]) if share is None else share for at in places}
        taken = [at for at in places if not hopes[at].most or hopes[at].share * hopes[at].chance < shares[at]]
        most = {at: _most(sequences[at]) for at in taken if not sequences[at].forced}
        for depth in DEPTHS if any(most.values()) else ():
            mixed = list(hopes)
            for at, room in most.items():
                mixed[at] = Hope(shares[at], min(depth, room))
            before_s = model.pace.drafts_s(max(len(places), model.followed), depth)
            speed, lengths = self.pace.best(mixed, ragged=ragged, before_s=before_s)
            if speed > best.speed and any(lengths[at] for at in most):
                deepest = max(lengths[at] for at in most)
                best = _Plan(speed, lengths, frozenset(most), deepest)
        return best

    def _may_try(
        self, sequences: Sequence[ExecutorSequence], places: Sequence[int], model: ModelDrafts, *, ragged: bool
    ) -> bool:
        """Whether the model may draft although that is not expected to pay: nobody knows yet, and it could."""
        pace, hopes = model.pace, [NO_DRAFT] * len(sequences)
        costs_s = pace.drafts_s(max(1, model.followed), TRIAL_DEPTH) + self.pace.single_s(len(sequences))
        if pace.is_known or pace.credit_s < costs_s:
            return False
        return self._best(sequences, hopes, places, model, ragged=ragged, share=SHARE_MOST).depth > 0

    def _follow(
        self, sequences: Sequence[ExecutorSequence], inputs: Callable[[], list[int]], *, ragged: bool, idle: bool
    ) -> None:
        """Computes a piece of what the model needs to know of a sequence for which it may pay that it drafts."""
        model = self.model
        if model is None:
            return
        model.forget_others(sequences)
        if not model.begins:
            self._rests_follow -= 1
            if self._rests_follow > 0 or not idle or not self.pace.is_timed(len(sequences)):
                return
            self._rests_follow = RESTS_STEPS
            if (found := self._worth_following(sequences, model, ragged=ragged)) is None:
                return
            model.begin(found[0], paid=found[1])
        if idle and model.begins:
            self.note(sequences, inputs())
            model.compute_piece()
            self.pause()
            self._rests_drafts = 0

    def _worth_following(
        self, sequences: Sequence[ExecutorSequence], model: ModelDrafts, *, ragged: bool
    ) -> tuple[ExecutorSequence, bool] | None:
        """Returns a sequence that the model should begin to follow, and whether that is expected to pay; else it is to
        find out. None for no sequence."""
        if model.followed >= SEQUENCES_MAX:
            return None
        hopes = [_hope(sequence) for sequence in sequences]
        ready = [place for place, sequence in enumerate(sequences) if model.is_ready(sequence)]
        left = {
            at: each.tokens_max - each.length
            for at, each in enumerate(sequences)
            if at not in ready and each.drafter is not None
        }
        left = {at: tokens for at, tokens in left.items() if tokens >= HORIZON_LEAST}
        if not left:
            return None
        longest = max(left, key=lambda at: left[at])
        now = self._best(sequences, hopes, ready, model, ragged=ragged).speed
        then = self._best(sequences, hopes, [*ready, *left], model, ragged=ragged).speed
        saved_s = min(HORIZON_TOKENS, left[longest]) * self.pace.single_s(len(sequences)) * (1.0 / now - 1.0 / then)
        if saved_s > sum(model.prompt_s(sequences[at]) for at in left):
            self._rests_follow = 0
            return sequences[longest], True
        tries = not model.followed and self._may_try(sequences, [longest], model, ragged=ragged)
        return (sequences[longest], False) if tries else None

    def _guesses(self, sequences: Sequence[ExecutorSequence], plan: _Plan, sampler: Any) -> dict[int, list[int]]:
        """Returns what the model drafts, by the sequences' places."""
        if self.model is None or not plan.depth:
            return {}
        return self.model.draft({id(each): at for at, each in enumerate(sequences)}, plan.depth, sampler)

    @contextmanager
    def _model_may_fail(self) -> Iterator[None]:
        """A context in which the model computes. If it fails otherwise than the device does, it drafts no more."""
        try:
            with on_device():
                yield
        except Exception as error:
            if self.model is None:
                raise
            self.failure = f"{self.model.name} drafts no more: {error}"
            logger.warning("%s", self.failure, exc_info=True)
            self.model = None

    def _fitting(self, sequence: ExecutorSequence, draft: Sequence[int], most: int) -> list[int]:
        """Returns the first `most` tokens of a draft, without what cannot be drawn and without ends."""
        return list(takewhile(lambda token: token < self._vocabulary and token not in sequence.ends, draft[:most]))

    def note(self, sequences: Sequence[ExecutorSequence], tokens: Sequence[int]) -> None:
        """Tells the sequences' drafters the next token of each, if they do not know it yet. Call it before the
        sequences count it as computed."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.drafter is not None and sequence.drafter.count == sequence.length:
                sequence.drafter.add(token)

    def note_outputs(
        self, sequences: Sequence[ExecutorSequence], counts: Sequence[int], computed: Sequence[int], outputs: mx.array
    ) -> None:
        """Notes what layers gave in a step, for a head that drafts. Call it before the sequences count its tokens.

        Args:
            counts: how many tokens of each sequence stay.
            computed: how many each has in `outputs`, `(tokens, dimensions)`.
        """
        if self.model is not None:
            self.model.note_outputs(sequences, counts, [*accumulate(computed, initial=0)][:-1], outputs)

    def pause(self) -> None:
        """Notes that the device computes something else than a step, so that the next step is not timed."""
        self._ended = self._idle_from = None

    def note_step(self, sequences: int) -> None:
        """Notes that a step of one token has ended."""
        now = self._clock()
        if self._ended is not None:
            self._note_time(sequences, sequences, now - self._ended)
        self._ended, self._idle_from = (now if self._idle_from is None else None), None

    def note_wide(self, checked: Checked) -> None:
        """Notes that a step of several tokens has ended."""
        now, sequences = self._clock(), len(checked.last)
        self.count += self._count
        self.drafted += len(checked.owners) - sequences
        self.right += len(checked.ready)
        self._note_time(sequences, self._tokens, now - self._began)
        self._ended, self._idle_from = None, now
        by_model, self._by_model = self._by_model, []
        for sequence, place, drafted in by_model:
            right = checked.computed[place] - 1
            self.drafted_by_model += drafted
            self.right_by_model += right
            if self.model is not None:
                self.model.note_right(sequence, right, drafted)
        if self.model is not None and self._trial_began is not None:
            self.model.pace.credit_s -= max(0.0, now - self._trial_began - self.pace.single_s(sequences))
        self._trial_began = None

    def _note_time(self, sequences: int, tokens: int, seconds: float) -> None:
        self.pace.note(sequences, tokens, seconds)
        self._rests_drafts -= 1
        if self.model is not None:
            self.model.pace.note_step(seconds)


def _most(sequence: ExecutorSequence) -> int:
    """Returns how many tokens a sequence's draft may have."""
    # A sequence that fills its block has one token in that step: a sealed block cannot be taken back.
    room = BLOCK_TOKENS - 2 - sequence.length % BLOCK_TOKENS
    return max(0, min(NEW_MOST - 1, sequence.tokens_max - sequence.length - 1, room))


def _hope(sequence: ExecutorSequence) -> Hope:
    """Returns what may be expected of a sequence's draft without a model."""
    drafter, most = sequence.drafter, _most(sequence)
    if sequence.forced:
        return Hope(FORCED_SHARE, min(most, len(sequence.forced)))
    if drafter is None or not drafter.drafts:
        return NO_DRAFT
    known = drafter.count > sequence.length
    return Hope(drafter.share, most, 1.0 if known else drafter.share)


def _drafted(sequence: ExecutorSequence) -> Sequence[int]:
    """Returns a sequence's draft without a model."""
    if sequence.forced or sequence.drafter is None:
        return sequence.forced
    return sequence.drafter.draft(_most(sequence))


def padded_width(longest: int) -> int:
    """Returns to how many tokens of each sequence a step is padded, if all have as many."""
    return next(width for width in WIDTHS if width >= longest)


@dataclass(frozen=True)
class Checked:
    """Which tokens of the drafts of a step are right.

    Attributes:
        ready: the right ones, sequence after sequence.
        computed: how many tokens of each sequence stay: its input and what is right.
        last: for every sequence, the place of what it drew after these.
        next: for every sequence, the token that it drew there.
        owners: for every place, the sequence that draws its next token there; None for the others.
        sound: whether all draws are sound.
    """

    ready: list[Ready]
    computed: list[int]
    last: list[int]
    next: list[int]
    owners: list[str | None]
    sound: bool


def check(sequences: Sequence[ExecutorSequence], drafts: Sequence[Sequence[int]], draw: Draw) -> Checked:
    """Compares drafts with what was drawn, and tells the drafters what is right. Waits for the device.

    Args:
        draw: for every sequence what was drawn before its draft and after each of its tokens. What comes after a draw
            that is not sound has no meaning.
    """
    # One after the other they would be waited for one after the other.
    mx.eval(*draw.arrays())
    drawn: list[int] = draw.tokens.tolist()  # type: ignore[assignment]
    sound: list[bool] = draw.sound.tolist()  # type: ignore[assignment]
    logprobs, first = draw.logprobs(), 0
    checked = Checked([], [], [], [], [None] * len(drawn), all(sound))
    for sequence, draft in zip(sequences, drafts, strict=True):
        count = 0
        while count < len(draft) and sound[first + count] and drawn[first + count] == draft[count]:
            count += 1
        kept = range(first, first + count)
        checked.ready.extend(Ready(sequence.sequence_id, drawn[at], logprobs=logprobs[at]) for at in kept)
        checked.computed.append(1 + count)
        checked.last.append(first + count)
        checked.next.append(drawn[first + count])
        checked.owners[first + count] = sequence.sequence_id
        if sequence.drafter is not None:
            for at in kept:
                sequence.drafter.add(drawn[at])
        first += 1 + len(draft)
    return checked
