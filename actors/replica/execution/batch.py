"""A replica's sequences and their KV, and the calls of the model. No sampling (`executor.py`), and no policy.

Everything here runs on one thread, because a lazy MLX array can be evaluated only on the thread that made it. Methods
that compute or wait may raise `DeviceFailed`; then `reset` must follow.

If other processes have other layers of the model, each of them has a batch too, and does the calls marked `replayed` in
the same order. So all of them have the same sequences, each with its own layers' KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import on_cuda, on_gpu
from ..device.device_errors import on_device
from ..kernels.decode_views import padded_count
from ..kv import caches as kv_cache
from ..kv.caches import PooledBlock, Records, Slab
from ..kv.sequence_view import SequenceView, Stacks
from ..kv.unbatched import UnbatchedSequences
from .compiled_step import CompiledStep
from .drafts import padded_width
from .loaded_model import LoadedModel
from .padding import CALL_TOKENS, CALL_TOKENS_ELSEWHERE, batches_of, padded_tokens
from .pieces import IN_ONE_PIECE
from .sequence_states import ExecutorSequence, Stage, Together, arriving
from .vision import SequencePart, SequencePictures

T = TypeVar("T")
P = ParamSpec("P")

CLEAR_EVERY_STEPS = 512
STACKED_SPANS_MAX = 16

CLEAR_EVERY_TOKENS = 8192
"""Prefilled tokens after which MLX's cache of freed buffers is emptied; decoding cannot use many of them."""


class Followers(Protocol):
    """The processes that have the other layers of the model."""

    def lead(self, call: str, given: Sequence[Any], named: Mapping[str, Any], run: Callable[[], T]) -> T:
        """Lets them do a call of `Batch`, and does it here.

        Args:
            run: does it here.
        """
        ...


def replayed(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Marks a call that the batches of all processes do."""

    @wraps(method)
    def call(self: Batch, *given: P.args, **named: P.kwargs) -> T:
        run = partial(method, self, *given, **named)
        return run() if self.followers is None else self.followers.lead(method.__name__, given, named, run)

    vars(call)["replayed"] = True
    return call


class Batch:
    """The sequences in prefill and the batch of decoding sequences.

    With `batched_prefill` prompts run as padded batches, even a single prompt: a short prompt alone leaves a GPU idle,
    and without a mask array cuDNN makes a plan for every new length. A CPU gains nothing from it, and mlx-lm's Mamba
    layers would take the padding into their state.

    Attributes:
        followers: have the other layers of the model; None if it has all.
        workspace_bytes: the most temporary memory that a prefill has needed.
        pieces: a piece ends after each layer of a prompt, so that requests are served during self-tests.
    """

    def __init__(self, loaded: LoadedModel, followers: Followers | None = None) -> None:
        self.followers = followers
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
        self.pieces = IN_ONE_PIECE
        self.workspace_bytes = 0
        self._steps = 0
        Batch.forget(self)

    # Prefill.

    @replayed
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

    @replayed
    @on_device()
    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Computes the KV of some sequences' next tokens, (sequence id, tokens) each.

        Raises:
            Exception: whatever the model raises. `length` tells which sequences are done. The others may be prefilled
                again; if the caches of one were being changed, it fails again.
        """
        sequences = [(self._coming[sequence_id], tokens) for sequence_id, tokens in work]
        self._settle()
        mx.reset_peak_memory()
        if self.batched_prefill:
            call_tokens = CALL_TOKENS if on_cuda() else CALL_TOKENS_ELSEWHERE
            for batch in batches_of([(sequence.length, len(tokens)) for sequence, tokens in sequences], call_tokens):
                self._prefill_together([sequences[number] for number in batch])
            sequences = []
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
        caches = kv_cache.merge([sequence.own() for sequence, _ in sequences])
        parts = [sequence.part(tokens) for sequence, tokens in sequences]
        kv_cache.set_bidirectional(caches, [part.bidirectional for part in parts])
        given = [tokens for _, tokens in sequences]
        self._launch_padded(caches, parts, given, padded_tokens(max(map(len, given))))
        kv_cache.set_bidirectional(caches, [])
        self._evaluate(caches)
        # Sequences that are prefilled together mostly join the batch together, and extracting one costs two copies a
        # layer.
        together = Together(
            caches, {sequence.sequence_id: index for index, (sequence, _) in enumerate(sequences)}, len(sequences)
        )
        for sequence, tokens in sequences:
            sequence.caches, sequence.together, sequence.length = [], together, sequence.length + len(tokens)

    def _launch_padded(
        self, caches: Sequence[Any], parts: Sequence[SequencePart], tokens: Sequence[Sequence[int]], width: int
    ) -> mx.array:
        """Launches the model for some tokens of each sequence, padded to `width`.

        Returns:
            (sequences, width, vocabulary), the logits.
        """
        lengths = [len(each) for each in tokens]
        padding = [width - length for length in lengths]
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=padding)
        padded = mx.array([[*each, *[0] * pad] for each, pad in zip(tokens, padding, strict=True)], mx.uint32)
        logits = self._model(padded, cache=caches, **self._inputs_besides(parts, width))
        for cache in caches:
            cache.finalize()
        return logits

    # Joining and leaving.

    @replayed
    def line_up(self, sequence_id: str) -> None:
        """Lets a prefilled sequence join the batch at the next `change`. Sequences join in the order of these calls."""
        sequence = self._coming[sequence_id] = self._coming.pop(sequence_id)
        sequence.stage = Stage.JOINING

    @replayed
    @on_device()
    def change(self) -> tuple[list[int], list[ExecutorSequence]]:
        """Removes sequences that left, and appends those that join.

        Returns:
            The numbers of the sequences that stay, and the sequences that have joined.
        """
        self._stacks = Stacks()
        if self._settles_always:
            mx.synchronize()
        keep = [index for index, sequence in enumerate(self._sequences) if sequence.sequence_id not in self._leaving]
        if self._leaving:
            if isinstance(self._caches, UnbatchedSequences):
                self._caches.keep(keep)
            else:
                kv_cache.keep(self._caches, keep)
            self._sequences = [self._sequences[index] for index in keep]
            self._leaving.clear()
        joined = []
        for batch, sequences in arriving(self._joining(), unbatched=self._loaded.unbatched):
            if not self._sequences:
                self._caches = batch
            elif isinstance(self._caches, UnbatchedSequences):
                self._caches.extend(batch)
            else:
                kv_cache.extend(self._caches, batch)
            for sequence in sequences:
                sequence.decode()
                self._sequences.append(self._coming.pop(sequence.sequence_id))
                joined.append(sequence)
        return keep, joined

    @replayed
    def leave(self, sequence_ids: Sequence[str]) -> None:
        """Removes sequences; unknown ids are ignored."""
        self._remove(sequence_ids)

    def _remove(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            if (sequence := self._coming.pop(sequence_id, None)) is not None:
                sequence.leave()
        gone = set(sequence_ids)
        self._leaving.update(sequence.sequence_id for sequence in self._sequences if sequence.sequence_id in gone)
        if self._sequences and len(self._leaving) == len(self._sequences):
            self.forget()

    @replayed
    def reset(self) -> None:
        """Forgets every sequence and every block, after the device has failed."""
        self._coming.clear()
        self.forget()
        if self._loaded.pool is not None:
            self._loaded.pool.reset()

    @replayed
    def clear_batch(self) -> None:
        """Forgets every decoding sequence and every sequence that was about to join. Used after a step failed."""
        self._remove(list(self._joining()))
        self.forget()

    def forget(self) -> None:
        """Forgets the batch; sequences in prefill stay. Called within other calls."""
        self._leaving.clear()
        self._sequences: list[ExecutorSequence] = []
        self._caches: list[Any] | UnbatchedSequences = []
        self._stacks = Stacks()

    def _joining(self) -> dict[str, ExecutorSequence]:
        return {
            sequence_id: sequence for sequence_id, sequence in self._coming.items() if sequence.stage is Stage.JOINING
        }

    # Decode steps.

    @property
    def _seals(self) -> bool:
        """Whether blocks become full in the next step."""
        return any(sequence.length % BLOCK_TOKENS == BLOCK_TOKENS - 1 for sequence in self._sequences)

    @replayed
    def compute(self, inputs: mx.array | Sequence[int]) -> mx.array:
        """Launches the model for one token of every sequence, `(sequences,)`, or for several of the only one. Then
        `seal_filled` must follow if blocks become full, and `advance`.

        Returns:
            `(sequences, vocabulary)`, the logits after the last token of each.
        """
        self._stacks = Stacks()
        if self._seals:
            self._settle()
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

    @replayed
    def compute_ahead(self, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Launches the model for some tokens of every sequence, which fill no block: as a recorded step, or else in a
        padded batch as for prompts. Then `take_back` and `advance` must follow.

        Returns:
            (tokens, vocabulary), the logits after each of them, sequence after sequence.
        """
        self._stacks = Stacks()
        caches = self._caches
        assert not isinstance(caches, UnbatchedSequences)
        if self._settles_always:
            # The step in flight still writes into the open blocks that are read here.
            mx.synchronize()
        if self._compiled is not None and self.takes_drafts:
            logits = self._compute_new(self._compiled, caches, tokens)
            if logits is not None:
                return logits
        parts = [sequence.part(each) for sequence, each in zip(self._sequences, tokens, strict=True)]
        width = max(map(len, tokens))
        if self.batched_prefill:
            width = padded_width(width)
            logits = self._launch_padded(caches, parts, tokens, width)
        else:
            # Only a sequence that is alone has a draft then.
            besides = self._inputs_besides(parts, width)
            logits = self._model(mx.array([list(each) for each in tokens], mx.uint32), cache=caches, **besides)
        real = [index * width + at for index, each in enumerate(tokens) for at in range(len(each))]
        return logits.reshape(-1, logits.shape[-1])[mx.array(real)]

    def _compute_new(
        self, step: CompiledStep, caches: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> mx.array | None:
        new, given = [len(each) for each in tokens], [token for each in tokens for token in each]
        extra: dict[str, Any] = {}
        if (vision := self._loaded.vision) is not None:
            owners = [sequence for sequence, each in zip(self._sequences, tokens, strict=True) for _ in each]
            places = [s.length + at for s, each in zip(self._sequences, tokens, strict=True) for at in range(len(each))]
            more = padded_count(len(given)) - len(given)
            pictures = [sequence.pictures for sequence in owners]
            extra = vision.steps(places + [0] * more, pictures + [None] * more)
        return step(mx.array(given, mx.uint32), caches, extra, new)

    @replayed
    def take_back(self, lengths: Sequence[int], *, clean: bool) -> None:
        """As `PagedKVCache.take_back`, for every layer."""
        assert not isinstance(self._caches, UnbatchedSequences)
        kv_cache.take_back(self._caches, lengths, clean=clean)

    @replayed
    def seal_filled(self) -> None:
        """Seals the blocks that became full in the step that was just launched."""
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

    @replayed
    def advance(self, computed: Sequence[int]) -> None:
        """Counts the tokens of each sequence that a step has computed."""
        for sequence, count in zip(self._sequences, computed, strict=True):
            sequence.begun, sequence.fed = sequence.fed or count > 1, True
            sequence.length += count
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()

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

    def _settle(self) -> None:
        """Waits for the step in flight before blocks are written: MLX would copy arrays that the step still reads."""
        if self._settles:
            mx.synchronize()

    def _pool_arrays(self) -> list[mx.array]:
        return [] if self._loaded.pool is None else self._loaded.pool.arrays()

    # KV in and out.

    @property
    def leaving(self) -> int:
        """How many sequences have left whose KV stays here until the next step."""
        return len(self._leaving)

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

    @property
    def takes_drafts(self) -> bool:
        """Whether a step computes drafts of any lengths, without padding all sequences to one width. The batch must
        have a sequence."""
        caches = self._caches
        if self._compiled is None or not self._loaded.way.drafts or isinstance(caches, UnbatchedSequences):
            return False
        return caches[0].takes_drafts

    @replayed
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
        """Puts blocks from the disk into the pool, which the model must have, and all of its layers.

        Raises:
            ValueError: as `into_pool`.
        """
        assert self._loaded.pool is not None and self.followers is None
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

    @replayed
    @on_device()
    def give_back(self, bytes_max: int) -> None:
        """Shrinks the pool to `bytes_max` bytes, or to the slots that are held; blocks may get other slots. Only
        between two steps."""
        pool = self._loaded.pool
        if pool is None:
            return
        mx.synchronize()
        pool.shrink(bytes_max)

    def check(self) -> None:
        """Checks the pool: see `BlockPool.check`."""
        if self._loaded.pool is not None:
            self._loaded.pool.check()

    def _index(self, sequence_id: str) -> int:
        return next(index for index, sequence in enumerate(self._sequences) if sequence.sequence_id == sequence_id)
