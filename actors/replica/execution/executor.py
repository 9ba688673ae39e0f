"""A batch's decode steps: what is drawn, drafted and allowed by grammars. The device's side of it is `batch.py`.

Decode steps are pipelined: `step` launches the computation of token t+1 of every sequence, then returns token t, which
is ready. So the Python work between two steps overlaps with the device's. If sequences have grammars, their masks are
computed from token t between the launch of the model and that of sampling. If a sequence is alone and its grammar
allows only one choice for several tokens, it gets these tokens in one step; the answer is the same. The first input of
a sequence that joins is the last token of its prompt. Joins and leaves take effect together at the next step, because
each copies the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import Sampling
from ..device.device_errors import on_device
from ..kernels.decode_views import NEW_MOST
from ..kv.paged_cache import PagedKVCache
from ..kv.unbatched import UnbatchedSequences
from .batch import Batch, Followers
from .drafts import Drafts, check
from .grammar import MaskMaker, SequenceGrammar, SequenceMasks
from .loaded_model import LoadedModel
from .ready import Ready, read
from .sampling import BatchSampler, Draw

FORCED_MAX = 8
"""The most tokens that one step may compute for a sequence: so many cost a device little more than one."""

FORCED_HISTORY_MAX = 4096
"""The most tokens of history for each step that is saved: a chunk unpacks a sequence's blocks, but a step reads them in
place."""


class BatchExecutor(Batch):
    """The sequences in prefill and the batch of decoding sequences, with what is drawn. Used by the engine.

    Args:
        drafts: whether sequences are drafted, if the model allows it. On a CPU only a sequence that is alone is.
        followers: as for `Batch`.

    Attributes:
        drafts: the drafts of the batch's sequences.
        make_sampler: makes the `BatchSampler` of a batch; self-tests replace it.
    """

    def __init__(self, loaded: LoadedModel, *, drafts: bool = False, followers: Followers | None = None) -> None:
        super().__init__(loaded, followers)
        self._make_masks = MaskMaker()
        self.make_sampler: Callable[[], Any] = lambda: BatchSampler(loaded.vocabulary_size, loaded.eos_token_ids)
        self.drafts = Drafts(loaded.vocabulary_size, wanted=drafts and not loaded.undrafted)
        self.forget()

    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """As `Batch.prefill`."""
        self.drafts.pause()
        super().prefill(work)

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
        self.line_up(sequence_id)

    @on_device()
    def first(self) -> list[Ready]:
        """Returns the first tokens of sequences that have just joined, so that they can be delivered before the next
        step is launched; that step returns them again. Empty if this would delay more sequences than have just
        joined."""
        sequences = [
            (index, sequence)
            for index, sequence in enumerate(self._sequences)
            if sequence.sequence_id not in self._leaving
        ]
        begun = [(index, sequence) for index, sequence in sequences if sequence.fed and not sequence.begun]
        if not begun or 2 * len(begun) < len(sequences) or self._inputs is None or self._draw is None:
            return []
        tokens: list[int] = self._inputs.tolist()  # type: ignore[assignment]
        drawn = read(*self._draw)
        return [
            Ready(sequence.sequence_id, tokens[index], *drawn[sequence.sequence_id], sequence.grammar_error)
            for index, sequence in begun
        ]

    @on_device()
    def drawn(self, sequence_id: str) -> Ready | None:
        """Returns a decoding sequence's last token, which the next step would return; None if it has none yet."""
        if self._inputs is None or self._draw is None or sequence_id in self._coming:
            return None
        tokens: list[int] = self._inputs.tolist()  # type: ignore[assignment]
        for token, sequence in zip(tokens, self._sequences, strict=True):
            if sequence.sequence_id == sequence_id and sequence.fed and sequence_id not in self._leaving:
                return Ready(sequence_id, token, *read(*self._draw)[sequence_id], sequence.grammar_error)
        return None

    @on_device()
    def step(self) -> list[Ready]:
        """Runs one decode step for the whole batch.

        Returns:
            The tokens of the step before; sequences that have just joined have none yet.
        """
        self._change_batch()
        inputs, before = self._inputs, self._draw
        if inputs is None:
            return []
        seals, may_draft = self._seals, len(self._sequences) == 1 or self.batched_prefill
        if (
            not seals
            and may_draft
            and any(drafts := self.drafts.choose(self._sequences, inputs, ragged=self.takes_drafts))
        ):
            return self._step_ahead(inputs, drafts)
        forced, self._forced = self._forced if len(self._sequences) == 1 else (), ()
        if forced:
            self._sampler.passed(forced[1:])
        logits = self.compute(forced or inputs)
        draw = self._sampler(logits, self._masks(forced or inputs, logits))
        self._inputs, self._draw = (
            draw.tokens.astype(mx.uint32),
            (draw, [sequence.sequence_id for sequence in self._sequences]),
        )
        mx.async_eval(self._inputs, *draw.arrays(), *(self._pool_arrays() if seals else ()))
        if seals:
            self.seal_filled()
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        ready = self._ready(tokens, before)
        ready += [Ready(self._sequences[0].sequence_id, token) for token in forced[1:]]
        if self.drafts.wanted:
            self.drafts.note(self._sequences, tokens)
            self.drafts.note_step(len(self._sequences))
        self.advance([len(forced) or 1] * len(self._sequences))
        return ready

    @on_device()
    def step_with(self, drafts: list[list[int]]) -> list[Ready]:
        """As `step`, with these drafts after the sequences' inputs, which fill no block. Every sequence must have had a
        step. For the warm-up."""
        self._change_batch()
        assert self._inputs is not None
        return self._step_ahead(self._inputs, drafts)

    def _ready(self, tokens: Sequence[int], draw: tuple[Draw, list[str | None]] | None) -> list[Ready]:
        """Returns the inputs of a step, as the step before drew them."""
        drawn = {} if draw is None else read(*draw)
        return [
            Ready(
                sequence.sequence_id,
                token,
                *drawn[sequence.sequence_id],
                "" if sequence.grammar is None else sequence.grammar.failure,
            )
            for sequence, token in zip(self._sequences, tokens, strict=True)
            if sequence.fed
        ]

    def _step_ahead(self, inputs: mx.array, drafts: list[list[int]]) -> list[Ready]:
        """As `step`, but computes a draft after each input; see `drafts.py`. Waits for what is drawn."""
        self._forced = ()
        first: list[int] = inputs.tolist()  # type: ignore[assignment]
        tokens = [[token, *draft] for token, draft in zip(first, drafts, strict=True)]
        logits = self.compute_ahead(tokens)
        sampler = self._sampler.ahead(drafts)
        masks = self._masks(inputs, logits, drafts)
        draw = sampler(logits, masks)
        ready, checked = self._ready(first, self._draw), check(self._sequences, drafts, draw)
        for sequence, draft, count in zip(self._sequences, drafts, checked.computed, strict=True):
            if sequence.grammar is not None:
                for token in draft[: count - 1]:
                    sequence.grammar.follow(token)
        self._note_forced(masks, checked.last)
        lengths = [sequence.length + count for sequence, count in zip(self._sequences, checked.computed, strict=True)]
        self.take_back(lengths, clean=not checked.sound)
        sampler.keep(checked.last)
        self._sampler, self._draw = sampler, (draw, checked.owners)
        self._inputs = draw.tokens[mx.array(checked.last)].astype(mx.uint32)
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
        if sequence.grammar is None or not paged or mx.cuda.is_available() or not self._sampler.can_pass():
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
        tokens = [[token] for token in inputs.tolist()] if isinstance(inputs, mx.array) else [inputs]  # type: ignore[union-attr]
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
            self._forced = self._forced_after(self._sequences[0].length + len(tokens[0]), masks.words[0])
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

    def forget(self) -> None:
        """As `Batch.forget`, with what was drawn."""
        super().forget()
        self._inputs: mx.array | None = None
        # What was drawn, and of which sequence it is; None for drafts that are wrong.
        self._draw: tuple[Draw, list[str | None]] | None = None
        # The next tokens of the only sequence, at least two, if its grammar allows no others; the first is its input.
        self._forced: Sequence[int] = ()
        self._sampler = self.make_sampler()
        self.drafts.pause()

    def _change_batch(self) -> None:
        """Removes sequences that left and appends sequences that join."""
        if not self._leaving and not self._joining():
            return
        self.drafts.pause()
        before = len(self._sequences)
        keep, joined = self.change()
        if len(keep) < before:
            assert self._inputs is not None
            self._inputs = self._inputs[mx.array(keep)]
            self._sampler.keep(keep)
        if joined:
            inputs = mx.array([sequence.tokens[-1] for sequence in joined], dtype=mx.uint32)
            self._inputs = inputs if self._inputs is None else mx.concatenate([self._inputs, inputs])
        for sequence in joined:
            prompt = len(sequence.tokens) - sequence.drawn
            self._sampler.add(sequence.sampling, sequence.tokens[:prompt], sequence.tokens[prompt:])
            self.drafts.join(sequence)
            sequence.tokens = ()
