"""A batch's decode steps: what is drawn, drafted and allowed by grammars. The device's side of it is `batch.py`.

Decode steps are pipelined: `step` launches the computation of token t+1 of every sequence, then returns token t, which
is ready. So the Python work between two steps overlaps with the device's. If sequences have grammars, their masks are
computed from token t between the launch of the model and that of sampling. If a sequence is alone and its grammar
allows only one choice for several tokens, it gets these tokens in one step; the answer is the same. The first input of
a sequence that joins is the last token of its prompt. Joins and leaves take effect together at the next step, because
each copies the whole batch.

If other processes have other layers, the sequences are divided into two micro-batches, where that pays
(`micro_batches.py`), and a step goes through both. While this process computes one of them, whose tokens nobody has
read yet, the processes before it compute the other; so with two processes both always compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import Sampling
from ..device.device_errors import on_device
from ..drafting.pace import TOKENS_MOST
from ..kernels.decode_views import NEW_MOST
from ..kv.paged_cache import PagedKVCache
from ..kv.unbatched import UnbatchedSequences
from .batch import Batch
from .draft_model.model_drafts import DraftModel
from .drafts import Drafts, check
from .followers import Followers
from .loaded_model import LoadedModel
from .micro_batches import TWO, MicroBatchRule
from .sampling.grammar import MaskMaker, SequenceGrammar, SequenceMasks
from .sampling.ready import Ready, read
from .sampling.sampling import BatchSampler, Draw
from .sequence_states import ExecutorSequence, MicroBatch, Stage

FORCED_MAX = 8
"""The most tokens that one step may compute for a sequence: so many cost a device little more than one."""

FORCED_HISTORY_MAX = 4096
"""The most tokens of history for each step that is saved: a chunk unpacks a sequence's blocks, but a step reads them in
place."""


Change = tuple[mx.array | None, Sequence[int], Sequence[int]]


@dataclass
class DrawnBatch(MicroBatch):
    """A micro-batch with what is drawn.

    Attributes:
        sampler: a `BatchSampler`.
        inputs: of its next step, `(sequences,)`.
        draw: what was drawn last, and of which sequence it is; None for drafts that are wrong.
        forced: the next tokens of the only sequence, at least two, if its grammar allows no others; the first is its
            input.
        change: if sequences have joined or left since the inputs were drawn: what was drawn, the numbers of those that
            stay, and the inputs of those that have joined.
    """

    sampler: Any = None
    inputs: mx.array | None = None
    change: Change | None = None
    draw: tuple[Draw, list[str | None]] | None = None
    forced: Sequence[int] = ()

    def tokens(self) -> list[int]:
        """Returns the inputs of the next step. It only waits for what was drawn: `inputs` of a batch that has changed
        are put together behind a prefill that runs ahead."""
        assert self.inputs is not None
        return _read_tokens(self.inputs, self.change)


def _read_tokens(inputs: mx.array, change: Change | None) -> list[int]:
    """As `DrawnBatch.tokens`."""
    drawn, kept, joined = (inputs, None, ()) if change is None else change
    tokens: list[int] = [] if drawn is None else drawn.tolist()  # type: ignore[assignment]
    return tokens if kept is None else [*(tokens[index] for index in kept), *joined]


class BatchExecutor(Batch):
    """The sequences in prefill and the batch of decoding sequences, with what is drawn. Used by the engine.

    Args:
        drafts: whether sequences are drafted, if the model allows it. On a CPU only a sequence that is alone is.
        exact_drafts: they are only drafted if that changes no bit of a token's logits.
        draft_model: drafts too; None for none.
        followers: as for `Batch`.

    Attributes:
        drafts: the drafts of the batch's sequences.
        make_sampler: makes the `BatchSampler` of a batch; self-tests replace it.
        rule: says how many micro-batches there are, if other processes have other layers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        drafts: bool = False,
        exact_drafts: bool = False,
        draft_model: DraftModel | None = None,
        followers: Followers | None = None,
    ) -> None:
        super().__init__(loaded, followers, None if draft_model is None else draft_model.outputs)
        self.runs_ahead = self.may_run_ahead and (followers is None or followers.overlaps)
        self._make_masks = MaskMaker()
        self.make_sampler: Callable[[], Any] = lambda: BatchSampler(loaded.vocabulary_size, loaded.eos_token_ids)
        self._exact_drafts, alike = exact_drafts, loaded.way.alike if exact_drafts else TOKENS_MOST
        self.drafts = Drafts(
            loaded.vocabulary_size,
            wanted=drafts and alike > 0 and not loaded.undrafted,
            model=draft_model,
            tokens_most=alike,
        )
        self.rule, self._clock = MicroBatchRule(), perf_counter
        # When the last step ended, if nothing came after it, and whether the sequences of a step are others.
        self._ended: float | None = None
        self._changed = False
        self.forget()

    def _new_micro_batch(self) -> DrawnBatch:
        self.drafts.pause()
        return DrawnBatch(sampler=self.make_sampler())

    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """As `Batch.prefill`."""
        self.drafts.pause()
        self._ended = None
        super().prefill(work)

    def wait_for_prefill(self) -> None:
        """As `Batch.wait_for_prefill`. The next step says nothing about others."""
        if self.ahead.running:
            self.drafts.pause()
        super().wait_for_prefill()

    def join(
        self,
        sequence_id: str,
        tokens: Sequence[int],
        sampling: Sampling,
        drawn: int,
        grammar: SequenceGrammar | None = None,
    ) -> None:
        """Moves a prefilled sequence into the batch at the next step.

        Args:
            tokens: all tokens of the sequence; the last one is its first input.
            drawn: how many of them were generated (before a preemption, or on a replica that was lost).
            grammar: the sequence's grammar, at any earlier state; None for none.
        """
        self._coming[sequence_id].join(
            tokens, sampling, drawn, grammar, self._loaded.eos_token_ids.union(sampling.stop_token_ids)
        )
        self.line_up(sequence_id, self._smallest())

    def _smallest(self) -> int:
        """Returns the number of the micro-batch that a sequence should join."""
        counts = self._counts()
        counts = counts[: self._wanted(sum(counts) + 1)]
        return counts.index(min(counts))

    def _wanted(self, sequences: int) -> int:
        """Returns how many micro-batches so many sequences should have."""
        return 1 if self.followers is None or not self.followers.overlaps else self.rule.choose(sequences)

    def _counts(self) -> list[int]:
        """Returns how many sequences each micro-batch has, with those that join and without those that have left."""
        counts = [0] * TWO
        for number, each in enumerate(self._micro_batches):
            counts[number] += len(each.sequences) - len(each.leaving)
        for sequence in self._coming.values():
            if sequence.stage is Stage.JOINING:
                counts[sequence.micro_batch] += 1
        return counts

    @on_device()
    def first(self) -> list[Ready]:
        """Returns the first tokens of sequences that have just joined, so that they can be delivered before the next
        step is launched; that step returns them again. Empty if this would delay more sequences than have just
        joined."""
        return [ready for each in self._micro_batches for ready in self._first(each)]

    def _first(self, batch: DrawnBatch) -> list[Ready]:
        sequences = [
            (index, sequence)
            for index, sequence in enumerate(batch.sequences)
            if sequence.sequence_id not in batch.leaving
        ]
        begun = [(index, sequence) for index, sequence in sequences if sequence.fed and not sequence.begun]
        if not begun or 2 * len(begun) < len(sequences) or batch.inputs is None or batch.draw is None:
            return []
        tokens, drawn = batch.tokens(), read(*batch.draw)
        return [
            Ready(sequence.sequence_id, tokens[index], *drawn[sequence.sequence_id], sequence.grammar_error)
            for index, sequence in begun
        ]

    @on_device()
    def drawn(self, sequence_id: str) -> Ready | None:
        """Returns a decoding sequence's last token, which the next step would return; None if it has none yet."""
        if sequence_id in self._coming or not self.holds(sequence_id):
            return None
        batch, index = self._place(sequence_id)
        sequence = batch.sequences[index]
        if batch.inputs is None or batch.draw is None or not sequence.fed:
            return None
        tokens = batch.tokens()
        return Ready(sequence_id, tokens[index], *read(*batch.draw)[sequence_id], sequence.grammar_error)

    @on_device()
    def step(self) -> list[Ready]:
        """Runs one decode step for all sequences.

        Returns:
            The tokens of the step before; sequences that have just joined have none yet.
        """
        if self.followers is not None:
            self._balance()
        joining = {each.micro_batch for each in self._coming.values() if each.stage is Stage.JOINING}
        decoding = {number for number, each in enumerate(self._micro_batches) if each.sequences}
        numbers = sorted(joining | decoding)
        if len(numbers) == TWO:
            return self._note(self._step_both())
        return self._note([ready for number in numbers for ready in self._step(number)])

    def _step_both(self) -> list[Ready]:
        """Runs a step of both micro-batches. Their followers begin both first: while the last stage computes what it
        launched last, they compute the next one."""
        assert self.followers is not None
        for number in range(TWO):
            self._select(number)
            self._change_batch()
            self.followers.tell_ahead("compute", [self._given()])
        # MLX waits for nearly all of what it launches on a CPU, so there the last one is launched in the next step.
        return [*self._finish(0), *self._finish(1, launch=self._on_gpu)]

    def _note(self, ready: list[Ready]) -> list[Ready]:
        """Tells the rule how long a step took, if a step of the same sequences was the last thing before."""
        if self.followers is None:
            return ready
        counts, now = [len(each.sequences) for each in self._micro_batches], self._clock()
        if self._ended is not None and not self._changed:
            self.rule.note(sum(counts), sum(map(bool, counts)), now - self._ended)
        self._ended, self._changed = now, False
        return ready

    def _select(self, number: int) -> None:
        if number != self._selected:
            self.select(number)

    def _given(self) -> mx.array | Sequence[int]:
        """Returns the tokens that the selected micro-batch's next step computes."""
        now: DrawnBatch = self._now
        if len(now.sequences) > 1:
            now.forced = ()
        assert now.inputs is not None
        if self.followers is not None and not now.forced and now.change is not None:
            self.followers.know(now.inputs, now.tokens)
        return now.forced or now.inputs

    def _finish(self, number: int, *, launch: bool = True) -> list[Ready]:
        self._select(number)
        ready = self._compute(launch=launch, alone=False)
        self.drafts.pause()
        return ready

    def _balance(self) -> None:
        """Moves sequences between the micro-batches, until both have equally many, or one has all."""
        counts = self._counts()
        both = self._wanted(sum(counts)) == TWO
        most, least = (0, 1) if counts[0] >= counts[1] else (1, 0)
        count = (counts[most] - counts[least]) // 2 if both else counts[least]
        source, target = (most, least) if both else (least, most)
        if count == 0:
            return
        self._select(source)
        batch: DrawnBatch = self._now
        found = [each for each in batch.sequences if each.fed and each.sequence_id not in batch.leaving]
        # Those that have yet to join are moved in a later step.
        if found := found[-count:]:
            self._move(source, found, target)

    def _move(self, source: int, moved: Sequence[ExecutorSequence], target: int) -> None:
        """Moves sequences to another micro-batch, with what was drawn for them."""
        self._select(source)
        batch: DrawnBatch = self._now
        ids = [sequence.sequence_id for sequence in moved]
        places = {sequence.sequence_id: index for index, sequence in enumerate(batch.sequences)}
        for sequence in moved:
            ready = self.drawn(sequence.sequence_id)
            assert ready is not None
            sequence.moved = (ready, batch.sampler.state_of(places[sequence.sequence_id]))
        stay = [index for sequence_id, index in places.items() if sequence_id not in ids]
        self.move(ids, target)
        if self._micro_batches[source] is not batch:
            return
        assert batch.inputs is not None
        batch.inputs, batch.change = batch.inputs[mx.array(stay)], None
        batch.sampler.keep(stay)

    def _step(self, number: int) -> list[Ready]:
        """Runs a step of the only micro-batch. If there are several, nothing is drafted: that would wait for what was
        just launched."""
        self._select(number)
        self._change_batch()
        now: DrawnBatch = self._now
        if now.inputs is None:
            return []
        may_draft = (len(now.sequences) == 1 or self.batched_prefill) and not self._drafts_change_bits
        # A step without padding has one token of a sequence that fills its block, beside the others' drafts.
        ragged = may_draft and self.takes_drafts
        if may_draft and (ragged or not self._seals) and any(drafts := self._choose_drafts(ragged=ragged)):
            return self._step_ahead(now.inputs, drafts)
        ready = self._compute()
        if self.drafts.wanted:
            self.drafts.note_step(len(now.sequences))
        return ready

    @property
    def _drafts_change_bits(self) -> bool:
        """Whether nothing is drafted now because that could change bits: no load has tried adapters."""
        now: DrawnBatch = self._now
        return self._exact_drafts and (not self.takes_drafts or any(each.adapter for each in now.sequences))

    def _choose_drafts(self, *, ragged: bool) -> list[list[int]]:
        now: DrawnBatch = self._now
        return self.drafts.choose(now.sequences, now.tokens, now.sampler, ragged=ragged, idle=not self._coming)

    def _compute(self, *, launch: bool = True, alone: bool = True) -> list[Ready]:
        """Computes and draws the next tokens of the selected micro-batch. Returns those that were drawn before.

        Args:
            launch: if False, it is computed once the tokens are asked for.
            alone: whether there is no other micro-batch.
        """
        now: DrawnBatch = self._now
        given, before, seals = self._given(), now.draw, self._seals
        inputs, change = now.inputs, now.change
        assert inputs is not None
        forced, now.forced = now.forced, ()
        if forced:
            now.sampler.passed(forced[1:])
        logits = self.compute(given)
        draw = now.sampler(logits, self._masks(given, logits))
        now.inputs = drawn = draw.tokens.astype(mx.uint32)
        now.change = None
        now.draw = draw, [sequence.sequence_id for sequence in now.sequences]
        told = [] if self.followers is None else self.followers.copies_of(drawn)
        if launch or seals:
            # What nobody needs yet must not keep arrays from being written in place.
            outputs = () if self.hidden is None else (self.hidden,)
            mx.async_eval(now.inputs, *told, *draw.arrays(), *outputs, *(self._pool_arrays() if seals else ()))
        if seals:
            self.seal_filled()
        if alone and self.followers is not None:
            # All that follows here would keep the thread that sends them from running.
            self.followers.pass_tokens()
        tokens = _read_tokens(inputs, change)
        ready = self._ready(tokens, before)
        ready += [Ready(now.sequences[0].sequence_id, token) for token in forced[1:]]
        if self.drafts.wanted:
            self.drafts.note(now.sequences, tokens)
        counts = [len(forced) or 1] * len(now.sequences)
        if self.hidden is not None:
            self.drafts.note_outputs(now.sequences, counts, counts, self.hidden)
        self.advance(counts)
        return ready

    @on_device()
    def step_with(self, drafts: list[list[int]]) -> list[Ready]:
        """As `step`, with these drafts after the sequences' inputs. What is drafted fills no block. Every sequence must
        have had a step. For the warm-up."""
        self._change_batch()
        inputs = self._now.inputs
        assert inputs is not None
        return self._step_ahead(inputs, drafts)

    def _ready(self, tokens: Sequence[int], draw: tuple[Draw, list[str | None]] | None) -> list[Ready]:
        """Returns the inputs of a step, as the step before drew them."""
        drawn = {} if draw is None else read(*draw)
        ready = []
        for sequence, token in zip(self._sequences, tokens, strict=True):
            name, moved = sequence.sequence_id, sequence.moved
            if moved is not None:
                drawn[name], sequence.moved = (moved[0].sound, moved[0].logprobs), None
            if sequence.fed:
                sound, logprobs = drawn[name]
                failure = "" if sequence.grammar is None else sequence.grammar.failure
                ready.append(Ready(name, token, sound, logprobs, failure))
        return ready

    def _step_ahead(self, inputs: mx.array, drafts: list[list[int]]) -> list[Ready]:
        """As `step`, but computes a draft after each input; see `drafts.py`. Waits for what is drawn."""
        now: DrawnBatch = self._now
        # Such a step says nothing about others.
        self._changed, now.forced = True, ()
        first = now.tokens()
        tokens = [[token, *draft] for token, draft in zip(first, drafts, strict=True)]
        logits = self.compute_ahead(tokens)
        sampler = now.sampler.ahead(drafts)
        masks = self._masks(inputs, logits, drafts)
        draw = sampler(logits, masks)
        if self.hidden is not None:
            mx.async_eval(*draw.arrays(), self.hidden)
        ready, checked = self._ready(first, now.draw), check(self._sequences, drafts, draw)
        if self.hidden is not None:
            self.drafts.note_outputs(self._sequences, checked.computed, [1 + len(each) for each in drafts], self.hidden)
        for sequence, draft, count in zip(self._sequences, drafts, checked.computed, strict=True):
            if sequence.grammar is not None:
                for token in draft[: count - 1]:
                    sequence.grammar.follow(token)
        self._note_forced(masks, checked.last)
        lengths = [sequence.length + count for sequence, count in zip(self._sequences, checked.computed, strict=True)]
        if self._seals:
            self.seal_filled()
        self.take_back(lengths, clean=not checked.sound)
        sampler.keep(checked.last)
        now.sampler, now.draw = sampler, (draw, checked.owners)
        # From what the host has read: a device takes a tenth of a millisecond to pick so few numbers.
        now.inputs, now.change = mx.array(checked.next, mx.uint32), None
        self.drafts.note_wide(checked)
        self.advance(checked.computed)
        return ready + checked.ready

    def _forced_after(self, length: int, mask: np.ndarray) -> Sequence[int]:
        """Returns the only possible tokens after the first `length` of the only sequence; () if there are fewer than
        two, or if one step cannot compute them. `mask`, `(words,) uint32`, limits the first of them."""
        (sequence,) = self._sequences
        # The step that fills a block has one token.
        most = min(FORCED_MAX, sequence.tokens_max - length, BLOCK_TOKENS - 1 - length % BLOCK_TOKENS)
        caches = self._caches
        paged = not isinstance(caches, UnbatchedSequences) and all(isinstance(cache, PagedKVCache) for cache in caches)
        # CUDA would make a plan for every number of tokens, or compute them padded.
        if sequence.grammar is None or not paged or mx.cuda.is_available() or not self._now.sampler.can_pass():
            return ()
        found = list(takewhile(lambda token: token not in sequence.ends, sequence.grammar.forced(mask, most)))
        return found if (len(found) - 1) * FORCED_HISTORY_MAX > length else ()

    def _masks(
        self, inputs: mx.array | Sequence[int], logits: mx.array, drafts: Sequence[Sequence[int]] | None = None
    ) -> SequenceMasks | None:
        """Returns which tokens the sequences with grammars may draw next, by their places in what is sampled. Reads the
        inputs, which are as for `compute`, while the model computes their `logits`.

        Args:
            drafts: of every sequence, the tokens that are computed after its input; None if there are none.
        """
        if not any(sequence.grammar is not None for sequence in self._sequences):
            return None
        mx.async_eval(logits)
        constrained = [
            (index, sequence.grammar) for index, sequence in enumerate(self._sequences) if sequence.grammar is not None
        ]
        tokens = [[token] for token in self._now.tokens()] if isinstance(inputs, mx.array) else [inputs]
        for index, grammar in constrained:
            if self._sequences[index].fed:
                for token in tokens[index]:
                    grammar.follow(token)
        if drafts is not None:
            starts = [0, *accumulate(1 + len(draft) for draft in drafts)]
            return self._make_masks(
                (starts[index] + at, place)
                for index, grammar in constrained
                for at, place in enumerate([grammar, *grammar.ahead(drafts[index])])
            )
        masks = self._make_masks(constrained)
        if masks is not None and len(self._sequences) == 1:
            self._now.forced = self._forced_after(self._sequences[0].length + len(tokens[0]), masks.words[0])
        self._note_forced(masks, range(len(self._sequences)))
        return masks

    def _note_forced(self, masks: SequenceMasks | None, places: Sequence[int]) -> None:
        """Notes the only tokens that sequences may have after the next one, for drafts.

        Args:
            masks: by the places in what was sampled.
            places: of every sequence, where its next token was drawn.
        """
        if not (self.drafts.wanted and self.batched_prefill and self.takes_drafts):
            return
        words = {} if masks is None else dict(zip(masks.sequences, masks.words, strict=True))
        for sequence, place in zip(self._sequences, places, strict=True):
            sequence.forced = ()
            if sequence.grammar is not None and place in words:
                found = sequence.grammar.forced(words[place], NEW_MOST)
                sequence.forced = [*takewhile(lambda token, ends=sequence.ends: token not in ends, found)][1:]

    def _change_batch(self) -> None:
        """Removes sequences that left and appends sequences that join."""
        now: DrawnBatch = self._now
        if not now.leaving and not self._joining():
            return
        self.drafts.pause()
        self._changed = True
        before, drawn = len(now.sequences), now.inputs
        told = now.change is None
        keep, joined = self.change()
        if len(keep) < before:
            assert now.inputs is not None
            now.inputs = now.inputs[mx.array(keep)]
            now.sampler.keep(keep)
        first = [each.moved[0].token if each.moved else each.tokens[-1] for each in joined]
        if joined:
            inputs = mx.array(first, dtype=mx.uint32)
            now.inputs = inputs if now.inputs is None else mx.concatenate([now.inputs, inputs])
        now.change = (drawn, keep, first) if told else None
        for sequence in joined:
            if sequence.moved is not None:
                now.sampler.add_state(sequence.moved[1])
                continue
            prompt = len(sequence.tokens) - sequence.drawn
            now.sampler.add(sequence.sampling, sequence.tokens[:prompt], sequence.tokens[prompt:])
            self.drafts.join(sequence)
            sequence.tokens = ()
