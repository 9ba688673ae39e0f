"""The MLX side of a replica: sequences' caches, prefill chunks, and the batched decode step. No policy.

Everything here runs on one thread, because a lazy MLX array can be evaluated only on the thread that made it. Methods
that compute or wait may raise `DeviceFailed`; then `reset` must follow.

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
from ..device.device import on_gpu
from ..device.device_errors import on_device
from ..kv import caches as kv_cache
from ..kv.caches import PooledBlock, Records, Slab
from ..kv.paged_cache import PagedKVCache
from ..kv.sequence_view import SequenceView, Stacks
from ..kv.unbatched import UnbatchedSequences
from .compiled_step import CompiledStep
from .drafts import Drafts, check, padded_width
from .grammar import MaskMaker, SequenceGrammar, SequenceMasks
from .loaded_model import LoadedModel
from .padding import count_together, padded_tokens
from .pieces import IN_ONE_PIECE
from .ready import Ready, read
from .sampling import BatchSampler, Draw
from .sequence_states import ExecutorSequence, Stage, Together, arriving
from .vision import SequencePart, SequencePictures

CLEAR_EVERY_STEPS = 512
STACKED_SPANS_MAX = 16
FORCED_MAX = 8
"""The most tokens that one step may compute for a sequence: so many cost a device little more than one."""

FORCED_HISTORY_MAX = 4096
"""The most tokens of history for each step that is saved: a chunk unpacks a sequence's blocks, but a step reads them in
place."""

CLEAR_EVERY_TOKENS = 8192
"""Prefilled tokens after which MLX's cache of freed buffers is emptied; decoding cannot use many of them."""


class BatchExecutor:
    """The sequences in prefill and the batch of decoding sequences. Used by the engine.

    With `batched_prefill` prompts run as padded batches, even a single prompt: a short prompt alone leaves a GPU idle,
    and without a mask array cuDNN makes a plan for every new length. A CPU gains nothing from it, and mlx-lm's Mamba
    layers would take the padding into their state.

    Args:
        drafts: whether sequences are drafted, if the model allows it. On a CPU only a sequence that is alone is.

    Attributes:
        workspace_bytes: the most temporary memory that a prefill has needed.
        drafts: the drafts of the batch's sequences.
        make_sampler: makes the `BatchSampler` of a batch; self-tests replace it.
        pieces: a piece ends after each layer of a prompt, so that requests are served during self-tests.
    """

    def __init__(self, loaded: LoadedModel, *, drafts: bool = False) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._on_gpu = on_gpu()
        batched = self._on_gpu and loaded.spec.reusable and not loaded.spec.recurrent
        self.batched_prefill = batched and not loaded.unbatched
        pool = loaded.pool
        # CUDA runs evaluations one after another anyway.
        self._settles = pool is not None and not (pool.kernels and mx.cuda.is_available())
        # On Metal MLX does not know that kernels write into arrays that they read.
        self._settles_always = self._settles and pool is not None and pool.kernels
        self._compiled = (
            CompiledStep(self._model, loaded.deferral) if loaded.way.compiled and not loaded.unbatched else None
        )
        # Sequences that do not decode yet; `_sequences` are those of the batch.
        self._coming: dict[str, ExecutorSequence] = {}
        self._leaving: set[str] = set()
        self._since_clear = 0
        self._make_masks = MaskMaker()
        self.make_sampler: Callable[[], Any] = lambda: BatchSampler(loaded.vocabulary_size, loaded.eos_token_ids)
        self.pieces = IN_ONE_PIECE
        self.workspace_bytes = 0
        self._steps = 0
        self.drafts = Drafts(loaded.vocabulary_size, wanted=drafts and not loaded.undrafted)
        self._forget()

    @on_device()
    def open(
        self,
        sequence_id: str,
        blocks: Sequence[Slab | PooledBlock],
        tail: Slab | None,
        tail_tokens: int,
        pictures: SequencePictures | None = None,
    ) -> None:
        """Makes caches for a sequence and restores the known part of its prompt.

        Args:
            blocks: KV of consecutive tokens from the prompt's begin.
            tail: KV after them, of which the first `tail_tokens` tokens are used.
        """
        caches = self._loaded.new_caches()
        kv_cache.restore(self._loaded.spec, caches, blocks, tail, tail_tokens)
        length = sum(block.tokens for block in blocks) + tail_tokens
        self._coming[sequence_id] = ExecutorSequence(sequence_id, length, caches, pictures)

    @on_device()
    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Computes the KV of some sequences' next tokens, (sequence id, tokens) each.

        Raises:
            Exception: whatever the model raises. `length` tells which sequences are done. The others may be prefilled
                again; if the caches of one were being changed, it fails again.
        """
        sequences = [(self._coming[sequence_id], tokens) for sequence_id, tokens in work]
        self.drafts.pause()
        self._settle()
        mx.reset_peak_memory()
        while self.batched_prefill and sequences:
            count = count_together([(sequence.length, len(tokens)) for sequence, tokens in sequences])
            self._prefill_together(sequences[:count])
            sequences = sequences[count:]
        for sequence, tokens in sequences:
            if sequence.failure is not None:
                raise sequence.failure
            caches, inputs = sequence.own(), mx.array([list(tokens)], mx.uint32)
            part = sequence.part(tokens)
            kv_cache.set_bidirectional(caches, [part.bidirectional])
            try:
                self._model(inputs, cache=caches, **self._inputs_besides([part], len(tokens)))
                # The logits are not evaluated, so the output layer is not computed.
                self._evaluate(caches)
            except Exception as error:
                sequence.failure = error
                raise
            kv_cache.set_bidirectional(caches, [])
            sequence.length += len(tokens)
        self.workspace_bytes = max(self.workspace_bytes, mx.get_peak_memory() - mx.get_active_memory())
        self._since_clear += sum(len(tokens) for _, tokens in work)
        if self._since_clear >= CLEAR_EVERY_TOKENS:
            self._since_clear = 0
            mx.clear_cache()

    def _evaluate(self, caches: Sequence[Any]) -> None:
        if self.pieces is IN_ONE_PIECE:
            mx.eval([cache.state for cache in caches])
        else:
            self.pieces.evaluate(caches)

    def _inputs_besides(self, parts: Sequence[SequencePart], width: int) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches, for a padded batch of `width` tokens."""
        vision = self._loaded.vision
        return {} if vision is None else vision.inputs(parts, width)

    def _prefill_together(self, sequences: Sequence[tuple[ExecutorSequence, Sequence[int]]]) -> None:
        lengths = [len(tokens) for _, tokens in sequences]
        longest = padded_tokens(max(lengths))
        padding = [longest - length for length in lengths]
        caches = kv_cache.merge([sequence.own() for sequence, _ in sequences])
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=padding)
        parts = [sequence.part(tokens) for sequence, tokens in sequences]
        kv_cache.set_bidirectional(caches, [part.bidirectional for part in parts])
        extra = self._inputs_besides(parts, longest)
        self._model(
            mx.array([[*tokens, *[0] * pad] for (_, tokens), pad in zip(sequences, padding, strict=True)], mx.uint32),
            cache=caches,
            **extra,
        )
        for cache in caches:
            cache.finalize()
        kv_cache.set_bidirectional(caches, [])
        self._evaluate(caches)
        # Sequences that are prefilled together mostly join the batch together, and extracting one costs two copies a
        # layer.
        together = Together(
            caches, {sequence.sequence_id: index for index, (sequence, _) in enumerate(sequences)}, len(sequences)
        )
        for sequence, tokens in sequences:
            sequence.caches, sequence.together, sequence.length = [], together, sequence.length + len(tokens)

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
        # Sequences join in this order.
        sequence = self._coming[sequence_id] = self._coming.pop(sequence_id)
        sequence.join(tokens, sampling, drawn, grammar, self._loaded.eos_token_ids.union(sampling.stop_token_ids))

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
        self._stacks = Stacks()
        self._change_batch()
        inputs, before = self._inputs, self._draw
        if inputs is None:
            return []
        seals = any(sequence.length % BLOCK_TOKENS == BLOCK_TOKENS - 1 for sequence in self._sequences)
        if seals:
            self._settle()
        elif (len(self._sequences) == 1 or self.batched_prefill) and any(
            drafts := self.drafts.choose(self._sequences, inputs)
        ):
            return self._step_ahead(inputs, drafts)
        forced, self._forced = self._forced if len(self._sequences) == 1 else (), ()
        if forced:
            self._sampler.passed(forced[1:])
        logits = self._logits(forced or inputs)
        draw = self._sampler(logits, self._masks(forced or inputs, logits))
        self._inputs, self._draw = (
            draw.tokens.astype(mx.uint32),
            (draw, [sequence.sequence_id for sequence in self._sequences]),
        )
        mx.async_eval(self._inputs, *draw.arrays(), *(self._pool_arrays() if seals else ()))
        if seals:
            self._seal_filled()
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        ready = self._ready(tokens, before)
        ready += [Ready(self._sequences[0].sequence_id, token) for token in forced[1:]]
        if self.drafts.wanted:
            self.drafts.note(self._sequences, tokens)
            self.drafts.note_step(len(self._sequences))
        self._advance([len(forced) or 1] * len(self._sequences))
        return ready

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

    def _advance(self, computed: Sequence[int]) -> None:
        """Counts the tokens of each sequence that a step has computed."""
        for sequence, count in zip(self._sequences, computed, strict=True):
            sequence.begun, sequence.fed = sequence.fed or count > 1, True
            sequence.length += count
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()

    def _step_ahead(self, inputs: mx.array, drafts: list[list[int]]) -> list[Ready]:
        """As `step`, but computes a draft after each input; see `drafts.py`. Waits for what is drawn."""
        assert not isinstance(self._caches, UnbatchedSequences)
        if self._settles_always:
            # The step in flight still writes into the open blocks that are read here.
            mx.synchronize()
        self._forced = ()
        first: list[int] = inputs.tolist()  # type: ignore[assignment]
        tokens = [[token, *draft] for token, draft in zip(first, drafts, strict=True)]
        logits = self._logits_of_all(self._caches, tokens)
        sampler = self._sampler.ahead(drafts)
        draw = sampler(logits, self._masks(inputs, logits, [0, *accumulate(map(len, tokens))]))
        ready, checked = self._ready(first, self._draw), check(self._sequences, drafts, draw)
        lengths = [sequence.length + count for sequence, count in zip(self._sequences, checked.computed, strict=True)]
        kv_cache.take_back(self._caches, lengths, clean=not checked.sound)
        sampler.keep(checked.last)
        self._sampler, self._draw = sampler, (draw, checked.owners)
        self._inputs = draw.tokens[mx.array(checked.last)].astype(mx.uint32)
        self.drafts.note_wide(checked)
        self._advance(checked.computed)
        return ready + checked.ready

    def _logits_of_all(self, caches: list[Any], tokens: Sequence[Sequence[int]]) -> mx.array:
        """Launches the model for some tokens of every sequence, in a padded batch as for prompts.

        Returns:
            (tokens, vocabulary), the logits after each of them, sequence after sequence.
        """
        parts = [sequence.part(each) for sequence, each in zip(self._sequences, tokens, strict=True)]
        width = max(map(len, tokens))
        width = padded_width(width) if self.batched_prefill else width
        padding = [width - len(each) for each in tokens]
        if self.batched_prefill:
            for cache in caches:
                cache.prepare(lengths=[len(each) for each in tokens], right_padding=padding)
        padded = mx.array([[*each, *[0] * pad] for each, pad in zip(tokens, padding, strict=True)], mx.uint32)
        logits = self._model(padded, cache=caches, **self._inputs_besides(parts, width))
        if self.batched_prefill:
            for cache in caches:
                cache.finalize()
        real = [index * width + at for index, each in enumerate(tokens) for at in range(len(each))]
        return logits.reshape(-1, logits.shape[-1])[mx.array(real)]

    def _logits(self, inputs: mx.array | Sequence[int]) -> mx.array:
        """Launches the model for one token of every sequence, `(sequences,)`, or for several of the only one."""
        caches = self._caches
        if not isinstance(inputs, mx.array):
            (sequence,) = self._sequences
            if self._settles_always:
                # The step in flight still writes into the open blocks that are read here.
                mx.synchronize()
            extra = self._inputs_besides([SequencePart(inputs, sequence.length, sequence.pictures)], len(inputs))
            return self._model(mx.array([inputs], mx.uint32), cache=caches, **extra)[:, -1, :]
        if isinstance(caches, UnbatchedSequences):
            return caches.step(
                self._model, inputs, lambda sequence: self._besides(self._sequences[sequence : sequence + 1])
            )
        extra = self._besides(self._sequences)
        logits = None if self._compiled is None else self._compiled(inputs, caches, extra)
        return self._model(inputs[:, None], cache=caches, **extra)[:, -1, :] if logits is None else logits

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

    def _besides(self, sequences: Sequence[ExecutorSequence]) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches for a step of these sequences."""
        vision = self._loaded.vision
        return (
            {}
            if vision is None
            else vision.steps(
                [sequence.length for sequence in sequences], [sequence.pictures for sequence in sequences]
            )
        )

    def _masks(
        self, inputs: mx.array | Sequence[int], logits: mx.array, places: Sequence[int] | None = None
    ) -> SequenceMasks | None:
        """Returns which tokens the sequences with grammars may draw next. Reads the inputs, which are as for `_logits`,
        while the model computes their `logits`.

        Args:
            places: of every sequence, its place in what is sampled; None if that is the sequence's number.
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
        masks = self._make_masks([(places[index] if places else index, grammar) for index, grammar in constrained])
        if masks is not None and len(self._sequences) == 1:
            self._forced = self._forced_after(self._sequences[0].length + len(tokens[0]), masks.words[0])
        return masks

    def check(self) -> None:
        """Checks the pool: see `BlockPool.check`."""
        if self._loaded.pool is not None:
            self._loaded.pool.check()

    @property
    def leaving(self) -> int:
        """How many sequences have left whose KV stays here until the next step."""
        return len(self._leaving)

    @on_device()
    def give_back(self, bytes_max: int) -> None:
        """Shrinks the pool to `bytes_max` bytes, or to the slots that are held; blocks may get other slots. Only
        between two steps."""
        pool = self._loaded.pool
        if pool is None:
            return
        mx.synchronize()
        pool.shrink(bytes_max)

    def _settle(self) -> None:
        """Waits for the step in flight before blocks are written: MLX would copy arrays that the step still reads."""
        if self._settles:
            mx.synchronize()

    def _seal_filled(self) -> None:
        """Seals the blocks that a kernel has filled in the step that was just launched."""
        if self._settles_always:
            mx.synchronize()
        if isinstance(self._caches, UnbatchedSequences):
            self._caches.seal_filled()
        else:
            kv_cache.seal_filled(self._caches)
        mx.async_eval(self._pool_arrays())
        if self._settles_always:
            # The next step writes into the arrays from which blocks are sealed here.
            mx.synchronize()

    def _pool_arrays(self) -> list[mx.array]:
        return [] if self._loaded.pool is None else self._loaded.pool.arrays()

    def holds(self, sequence_id: str) -> bool:
        """Whether the sequence has usable KV."""
        if (sequence := self._coming.get(sequence_id)) is not None:
            return sequence.failure is None
        return sequence_id not in self._leaving and any(
            sequence.sequence_id == sequence_id for sequence in self._sequences
        )

    def length(self, sequence_id: str) -> int:
        """Returns how many tokens of a sequence in any state have KV."""
        sequence = self._coming.get(sequence_id)
        return (self._sequences[self._index(sequence_id)] if sequence is None else sequence).length

    @on_device()
    def cut(self, sequence_id: str, spans: Sequence[tuple[int, int]]) -> list[Slab | PooledBlock]:
        """Returns a sequence's KV for spans [start, stop) of its tokens: blocks in the pool as they are, all else as
        copies."""
        if self._settles_always:
            mx.synchronize()
        spec, length = self._loaded.spec, self.length(sequence_id)
        # Stacks copy a span of all sequences and stay until the next step, so they are used for few spans only.
        stacks = self._on_gpu and len(spans) <= STACKED_SPANS_MAX
        single, caches = self._coming.get(sequence_id), self._caches
        if single is None and isinstance(caches, UnbatchedSequences):
            view = SequenceView(spec, caches.sequences[self._index(sequence_id)], None, length)
        elif single is None:
            assert not isinstance(caches, UnbatchedSequences)
            view = SequenceView(spec, caches, self._index(sequence_id), length, self._stacks if stacks else None)
        elif single.together is None:
            view = SequenceView(spec, single.caches, None, length)
        else:
            batch = single.together
            view = SequenceView(
                spec, batch.caches, batch.sequences[sequence_id], length, batch.stacks if stacks else None
            )
        cuts = [view.cut(start, stop) for start, stop in spans]
        kv_cache.evaluate(cuts)
        return cuts

    @on_device()
    def adopt(self, records: Records) -> list[PooledBlock]:
        """Puts blocks from the disk into the pool, which the model must have.

        Raises:
            ValueError: as `into_pool`.
        """
        assert self._loaded.pool is not None
        self._settle()
        blocks = kv_cache.into_pool(self._loaded.pool, records)
        mx.async_eval(self._pool_arrays())
        return blocks

    @on_device()
    def copied(self, kept: Slab | PooledBlock) -> Slab:
        """Returns a copy of a block for the disk; its arrays are being computed."""
        if isinstance(kept, Slab):
            return kept
        assert self._loaded.pool is not None
        slab = kv_cache.out_of_pool(self._loaded.spec, self._loaded.pool, kept)
        kv_cache.evaluate([slab])
        return slab

    def leave(self, sequence_ids: Sequence[str]) -> None:
        """Removes sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            if (sequence := self._coming.pop(sequence_id, None)) is not None:
                sequence.leave()
        gone = set(sequence_ids)
        self._leaving.update(sequence.sequence_id for sequence in self._sequences if sequence.sequence_id in gone)
        if self._sequences and len(self._leaving) == len(self._sequences):
            self._forget()

    def reset(self) -> None:
        """Forgets every sequence and every block, after the device has failed."""
        self._coming.clear()
        self._forget()
        if self._loaded.pool is not None:
            self._loaded.pool.reset()

    def clear_batch(self) -> None:
        """Forgets every decoding sequence and every sequence that was about to join. Used after a step failed."""
        self.leave(list(self._joining()))
        self._forget()

    def _forget(self) -> None:
        self._leaving.clear()
        self._sequences: list[ExecutorSequence] = []
        self._caches: list[Any] | UnbatchedSequences = []
        self._stacks = Stacks()
        self._inputs: mx.array | None = None
        # What was drawn, and of which sequence it is; None for drafts that are wrong.
        self._draw: tuple[Draw, list[str | None]] | None = None
        # The next tokens of the only sequence, at least two, if its grammar allows no others; the first is its input.
        self._forced: Sequence[int] = ()
        self._sampler = self.make_sampler()
        self.drafts.pause()

    def _change_batch(self) -> None:
        """Removes sequences that left and appends sequences that join."""
        if self._leaving or self._joining():
            self.drafts.pause()
            if self._settles_always:
                mx.synchronize()
        if self._leaving:
            keep = [
                index for index, sequence in enumerate(self._sequences) if sequence.sequence_id not in self._leaving
            ]
            if isinstance(self._caches, UnbatchedSequences):
                self._caches.keep(keep)
            else:
                kv_cache.keep(self._caches, keep)
            assert self._inputs is not None
            self._inputs = self._inputs[mx.array(keep)]
            self._sampler.keep(keep)
            self._sequences = [self._sequences[index] for index in keep]
            self._leaving.clear()
        for batch, sequences in arriving(self._joining(), unbatched=self._loaded.unbatched):
            inputs = mx.array([sequence.tokens[-1] for sequence in sequences], dtype=mx.uint32)
            if self._inputs is None:
                self._caches, self._inputs = batch, inputs
            else:
                if isinstance(self._caches, UnbatchedSequences):
                    self._caches.extend(batch)
                else:
                    kv_cache.extend(self._caches, batch)
                self._inputs = mx.concatenate([self._inputs, inputs])
            for sequence in sequences:
                prompt = len(sequence.tokens) - sequence.drawn
                self._sampler.add(sequence.sampling, sequence.tokens[:prompt], sequence.tokens[prompt:])
                self.drafts.join(sequence)
                sequence.decode()
                self._sequences.append(self._coming.pop(sequence.sequence_id))

    def _joining(self) -> dict[str, ExecutorSequence]:
        return {
            sequence_id: sequence for sequence_id, sequence in self._coming.items() if sequence.stage is Stage.JOINING
        }

    def _index(self, sequence_id: str) -> int:
        return next(index for index, sequence in enumerate(self._sequences) if sequence.sequence_id == sequence_id)
