"""The drafts of a batch, and which of their tokens are kept.

Noise is a function of (seed, choice, position). So what a sequence will draw after its next token is already certain,
and a draft is right if it equals that. A step computes some sequences' next token and draft, draws at each place what
would be drawn there, and keeps the tokens up to the first that differs. The KV of the others is taken back. So a draft
changes how long an answer takes, and nothing in it.

A step in flight must have ended before drafts are chosen, because they continue its tokens. So drafts are only asked
for if it is likely that one pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..drafting.drafter import Drafter
from ..drafting.pace import WIDTHS, DraftPace, Hope
from ..kernels.decode_views import NEW_MOST, padded_count
from .sampling.ready import Ready
from .sampling.sampling import Draw
from .sequence_states import ExecutorSequence

NO_DRAFT = Hope(0.0, 0)

FORCED_SHARE = 0.99
"""How many of a grammar's only tokens are right: all, unless the device fails."""


class Drafts:
    """The drafts of the sequences of a batch, and the times of its steps. Used by the executor.

    Args:
        vocabulary: how many tokens can be drawn.
        wanted: whether there may be any.

    Attributes:
        wanted: as given.
        count, drafted, right: how many drafts were computed, how many tokens they had, and how many of them were right.
    """

    def __init__(self, vocabulary: int, clock: Callable[[], float] = perf_counter, *, wanted: bool) -> None:
        self._vocabulary = vocabulary
        self.wanted = wanted
        self._clock = clock
        self.pace = DraftPace()
        self.count = self.drafted = self.right = 0
        self._count = 0
        self._tokens = 0
        # When the last step of one token ended, if a step before it was in flight, and nothing came between.
        self._ended: float | None = None
        # Since when the device has had nothing to do.
        self._idle_from: float | None = None
        self._began = 0.0

    def join(self, sequence: ExecutorSequence) -> None:
        """Begins to draft for a sequence that joins the batch, unless it has a grammar."""
        if self.wanted and sequence.grammar is None:
            sequence.drafter = Drafter(sequence.tokens)

    def choose(
        self, sequences: Sequence[ExecutorSequence], inputs: Callable[[], list[int]], *, ragged: bool = False
    ) -> list[list[int]]:
        """Returns what is drafted after every sequence's input; nothing at all if no draft pays.

        Args:
            inputs: returns the next token of each; is only asked if a draft is likely to pay, for it waits.
            ragged: as for `DraftPace.lengths`.
        """
        if not self.wanted or not any(self._lengths(sequences, ragged=ragged)):
            return []
        self.note(sequences, inputs())
        lengths = self._lengths(sequences, ragged=ragged)
        if not any(lengths):
            return []
        self._began = self._clock() if self._idle_from is None else self._idle_from
        drafts = [self._draft(sequence, most) for sequence, most in zip(sequences, lengths, strict=True)]
        counts, self._count = [1 + len(draft) for draft in drafts], sum(map(bool, drafts))
        self._tokens = padded_count(sum(counts)) if ragged else len(counts) * padded_width(max(counts))
        return drafts

    def _lengths(self, sequences: Sequence[ExecutorSequence], *, ragged: bool) -> list[int]:
        return self.pace.lengths([_hope(sequence) for sequence in sequences], ragged=ragged)

    def _draft(self, sequence: ExecutorSequence, most: int) -> list[int]:
        if sequence.forced:
            return [*sequence.forced[:most]]
        if sequence.drafter is None:
            return []
        drafted = sequence.drafter.draft(min(_hope(sequence).most, most))
        return list(takewhile(lambda token: token < self._vocabulary and token not in sequence.ends, drafted))

    def note(self, sequences: Sequence[ExecutorSequence], tokens: Sequence[int]) -> None:
        """Tells the sequences' drafters the next token of each, if they do not know it yet. Call it before the
        sequences count it as computed."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.drafter is not None and sequence.drafter.count == sequence.length:
                sequence.drafter.add(token)

    def pause(self) -> None:
        """Notes that the device computes something else than a step, so that the next step is not timed."""
        self._ended = self._idle_from = None

    def note_step(self, sequences: int) -> None:
        """Notes that a step of one token has ended."""
        now = self._clock()
        if self._ended is not None:
            self.pace.note(sequences, sequences, now - self._ended)
        self._ended, self._idle_from = (now if self._idle_from is None else None), None

    def note_wide(self, checked: Checked) -> None:
        """Notes that a step of several tokens has ended."""
        now, sequences = self._clock(), len(checked.last)
        self.count += self._count
        self.drafted += len(checked.owners) - sequences
        self.right += len(checked.ready)
        self.pace.note(sequences, self._tokens, now - self._began)
        self._ended, self._idle_from = None, now


def _hope(sequence: ExecutorSequence) -> Hope:
    drafter = sequence.drafter
    # A sequence that fills its block has one token in that step: a sealed block cannot be taken back.
    room = BLOCK_TOKENS - 2 - sequence.length % BLOCK_TOKENS
    most = min(NEW_MOST - 1, sequence.tokens_max - sequence.length - 1, room)
    if sequence.forced:
        return Hope(FORCED_SHARE, max(0, min(most, len(sequence.forced))))
    if drafter is None or not drafter.drafts:
        return NO_DRAFT
    known = drafter.count > sequence.length
    return Hope(drafter.share, max(0, most), 1.0 if known else drafter.share)


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
