"""A replica's sequences and their KV, and the calls of the model. No sampling (`executor.py`), and no policy.

Everything here runs on one thread, because a lazy MLX array can be evaluated only on the thread that made it. Methods
that compute or wait may raise `DeviceFailed`; then `reset` must follow.

If other processes have other layers of the model, each of them has a batch too, and does the calls marked `replayed` in
the same order. So all of them have the same sequences, each with its own layers' KV. Prompts are then computed in
pieces, and decoding sequences in micro-batches, so that processes compute at the same time (`Followers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device_errors import on_device
from ..kernels.decode_views import padded_count, padded_rows
from ..kv import caches as kv_cache
from ..kv.caches import PooledBlock, Record, Records, Slab
from ..kv.sequence_view import SequenceView, Stacks
from ..kv.unbatched import UnbatchedSequences
from .drafts import padded_width
from .followers import Followers, Parts, replayed
from .loaded_model import LoadedModel
from .media.language_inputs import SequencePart
from .micro_batches import TWO
from .prefilling import Prefilling
from .recorded.compiled_step import CompiledStep
from .recorded.layer_outputs import LayerOutputs
from .sequence_states import ExecutorSequence, MicroBatch, Stage, arriving

CLEAR_EVERY_STEPS = 512
STACKED_SPANS_MAX = 16


class Batch(Prefilling):
    """The sequences in prefill and the batch of decoding sequences.

    Args:
        followers: have the other layers of the model; None if it has all.

        outputs: layers whose outputs in decode steps are wanted; None for none.

    Attributes:
        hidden: what these layers gave for the tokens of the last decode step, sequence after sequence, `(tokens,
            dimensions)`; None if that is not known.
        parts: of a follower: its KV on disk. None for the leader, whose KV on disk is the engine's.
    """

    def __init__(
        self, loaded: LoadedModel, followers: Followers | None = None, outputs: LayerOutputs | None = None
    ) -> None:
        super().__init__(loaded, followers)
        self._outputs = outputs
        self.hidden: mx.array | None = None
        self.parts: Parts | None = None
        # What the leader itself has read of what all processes adopt.
        self._read_here: Any = None
        self._compiled: CompiledStep | None = None
        if loaded.way.compiled and not loaded.unbatched:
            # A part of a model records what it computes between its connections.
            record: Any = getattr(self._model, "recorded", None)
            self._compiled = (
                CompiledStep(self._model, loaded.deferral, loaded.adapters.adapted, loaded.fusions, outputs)
                if record is None
                else record(loaded.deferral, loaded.fusions)
            )
        self._micro_batches: list[Any] = [MicroBatch()]
        # The number of the micro-batch that decode steps are about.
        self._selected = 0
        self._steps = 0

    def _new_micro_batch(self) -> MicroBatch:
        return MicroBatch()

    @property
    def _now(self) -> Any:
        """The micro-batch that decode steps are about."""
        return self._micro_batches[self._selected]

    @property
    def _sequences(self) -> list[ExecutorSequence]:
        return self._now.sequences

    @property
    def _caches(self) -> list[Any] | UnbatchedSequences:
        return self._now.caches

    # Joining and leaving.

    @replayed
    def line_up(self, sequence_id: str, micro_batch: int = 0) -> None:
        """Lets a prefilled sequence join a micro-batch at the next `change` of it. Sequences join in the order of these
        calls."""
        sequence = self._coming[sequence_id] = self._coming.pop(sequence_id)
        sequence.stage, sequence.micro_batch = Stage.JOINING, micro_batch

    @replayed
    def select(self, micro_batch: int) -> None:
        """Says which micro-batch the following calls of a decode step are about. All calls up to `cut` are such.

        Raises:
            ValueError: there is no such micro-batch.
        """
        if not 0 <= micro_batch < TWO:
            raise ValueError(f"there is no micro-batch {micro_batch}")
        while micro_batch >= len(self._micro_batches):
            self._micro_batches.append(self._new_micro_batch())
        self._selected = micro_batch

    @replayed
    @on_device()
    def change(self) -> tuple[list[int], list[ExecutorSequence]]:
        """Removes sequences that left, and appends those that join.

        Returns:
            The numbers of the sequences that stay, and the sequences that have joined.
        """
        now = self._now
        now.stacks = Stacks()
        if self._settles_always:
            mx.synchronize()
        keep = [index for index, sequence in enumerate(now.sequences) if sequence.sequence_id not in now.leaving]
        if now.leaving:
            self._keep(now, keep)
            now.leaving.clear()
        joined = []
        for batch, sequences in arriving(self._joining(), unbatched=self._loaded.unbatched):
            if not now.sequences:
                now.caches = batch
            elif isinstance(now.caches, UnbatchedSequences):
                now.caches.extend(batch)
            else:
                kv_cache.extend(now.caches, batch)
            for sequence in sequences:
                sequence.decode()
                now.sequences.append(self._coming.pop(sequence.sequence_id))
                joined.append(sequence)
        return keep, joined

    @replayed
    @on_device()
    def move(self, sequence_ids: Sequence[str], micro_batch: int) -> None:
        """Takes sequences out of the selected micro-batch. They join another one at its next `change`, which must
        follow."""
        now, moved = self._now, set(sequence_ids)
        if self._settles_always:
            mx.synchronize()
        stay = [index for index, each in enumerate(now.sequences) if each.sequence_id not in moved]
        for index, sequence in enumerate(now.sequences):
            if sequence.sequence_id in moved:
                caches = now.caches
                single = isinstance(caches, UnbatchedSequences)
                sequence.caches = caches.sequences[index] if single else kv_cache.extract(caches, index)
                sequence.stage, sequence.micro_batch = Stage.JOINING, micro_batch
                self._coming[sequence.sequence_id] = sequence
        if all(now.sequences[index].sequence_id in now.leaving for index in stay):
            self._micro_batches[self._selected] = self._new_micro_batch()
        else:
            self._keep(now, stay)

    def _keep(self, batch: Any, indices: Sequence[int]) -> None:
        """Keeps only these of a micro-batch's sequences."""
        if isinstance(batch.caches, UnbatchedSequences):
            batch.caches.keep(indices)
        else:
            kv_cache.keep(batch.caches, indices)
        batch.sequences = [batch.sequences[index] for index in indices]

    @replayed
    def leave(self, sequence_ids: Sequence[str]) -> None:
        """Removes sequences; unknown ids are ignored."""
        self._remove(sequence_ids)

    def _remove(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            if (sequence := self._coming.pop(sequence_id, None)) is not None:
                sequence.leave()
        gone = set(sequence_ids)
        for number, each in enumerate(self._micro_batches):
            each.leaving.update(sequence.sequence_id for sequence in each.sequences if sequence.sequence_id in gone)
            if each.sequences and len(each.leaving) == len(each.sequences):
                self._micro_batches[number] = self._new_micro_batch()

    @replayed
    def reset(self) -> None:
        """Forgets every sequence and every block, after the device has failed."""
        self._coming.clear()
        self._unlaunched, self._prefilling = [], False
        self.ahead.forget()
        self.forget()
        if self._loaded.pool is not None:
            self._loaded.pool.reset()

    @replayed
    def clear_batch(self) -> None:
        """Forgets every decoding sequence and every sequence that was about to join. Used after a step failed."""
        self._remove([each.sequence_id for each in self._coming.values() if each.stage is Stage.JOINING])
        self.forget()

    def forget(self) -> None:
        """Forgets the decoding sequences; those in prefill stay. Called within other calls."""
        self._micro_batches, self._selected = [self._new_micro_batch()], 0

    def _joining(self) -> dict[str, ExecutorSequence]:
        """Returns the sequences that join the selected micro-batch at its next `change`."""
        return {
            sequence_id: sequence
            for sequence_id, sequence in self._coming.items()
            if sequence.stage is Stage.JOINING and sequence.micro_batch == self._selected
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
        self._now.stacks = Stacks()
        self._end_prefill()
        if self._seals:
            self._settle()
        caches = self._caches
        if not isinstance(inputs, mx.array):
            (sequence,) = self._sequences
            if self._settles_always:
                # The step in flight still writes into the open blocks that are read here.
                mx.synchronize()
            extra = self._inputs_besides([SequencePart(inputs, sequence.length, sequence.pictures)], len(inputs))
            with self._adapted([sequence]), self._noting() as hidden:
                logits = self._model(mx.array([inputs], mx.uint32), cache=caches, **extra)[:, -1, :]
            self.hidden = hidden[0][0] if hidden else None
            return logits
        if isinstance(caches, UnbatchedSequences):
            return caches.step(self._model_alone, inputs)
        sequences = self._sequences
        numbers = [sequence.adapter for sequence in sequences]
        if self._compiled is not None:
            more = padded_rows(len(sequences)) - len(sequences)
            logits = self._compiled(inputs, caches, self._besides(sequences, more), None, numbers)
            if logits is not None:
                self.hidden = self._compiled.hidden
                return logits
        with self._adapted(sequences), self._noting() as hidden:
            logits = self._model(inputs[:, None], cache=caches, **self._besides(sequences))[:, -1, :]
        self.hidden = hidden[0][:, 0] if hidden else None
        return logits

    def _noting(self) -> AbstractContextManager[list[mx.array]]:
        """As `LayerOutputs.noted`; the list stays empty if no outputs are wanted."""
        return nullcontext([]) if self._outputs is None else self._outputs.noted()

    def _model_alone(self, number: int, inputs: mx.array, caches: Sequence[Any]) -> mx.array:
        """Launches the model for tokens `(1, 1)` of one of the unbatched sequences. Returns `(1, 1, vocabulary)`."""
        sequences = self._sequences[number : number + 1]
        with self._adapted(sequences):
            return self._model(inputs, cache=caches, **self._besides(sequences))

    @replayed
    def compute_ahead(self, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Launches the model for some tokens of every sequence: as a recorded step, or else in a padded batch as for
        prompts. If there are several of a sequence, they fill no block. Then `seal_filled` must follow if blocks become
        full, `take_back` and `advance`.

        Returns:
            (tokens, vocabulary), the logits after each of them, sequence after sequence.
        """
        self._now.stacks = Stacks()
        self._end_prefill()
        if self._seals:
            self._settle()
        caches = self._caches
        assert not isinstance(caches, UnbatchedSequences)
        if self._settles_always:
            # The step in flight still writes into the open blocks that are read here.
            mx.synchronize()
        if self._compiled is not None and self.takes_drafts:
            logits = self._compute_new(self._compiled, caches, tokens)
            if logits is not None:
                self.hidden = self._compiled.hidden
                return logits
        parts = [sequence.part(each) for sequence, each in zip(self._sequences, tokens, strict=True)]
        width = max(map(len, tokens))
        if self.batched_prefill:
            width = padded_width(width)
            with self._adapted(self._sequences), self._noting() as hidden:
                logits = self._launch_padded(caches, parts, tokens, width)
        else:
            # Only a sequence that is alone has a draft then.
            besides = self._inputs_besides(parts, width)
            with self._adapted(self._sequences), self._noting() as hidden:
                logits = self._model(mx.array([list(each) for each in tokens], mx.uint32), cache=caches, **besides)
        real = mx.array([index * width + at for index, each in enumerate(tokens) for at in range(len(each))])
        self.hidden = hidden[0].reshape(-1, hidden[0].shape[-1])[real] if hidden else None
        return logits.reshape(-1, logits.shape[-1])[real]

    def _compute_new(
        self, step: CompiledStep, caches: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> mx.array | None:
        new, given = [len(each) for each in tokens], [token for each in tokens for token in each]
        extra: dict[str, Any] = {}
        numbers = [s.adapter for s, each in zip(self._sequences, tokens, strict=True) for _ in each]
        if (inputs := self._loaded.language_inputs) is not None:
            owners = [sequence for sequence, each in zip(self._sequences, tokens, strict=True) for _ in each]
            places = [s.length + at for s, each in zip(self._sequences, tokens, strict=True) for at in range(len(each))]
            more = padded_count(len(given)) - len(given)
            pictures = [sequence.pictures for sequence in owners]
            extra = inputs.of_steps(places + [0] * more, pictures + [None] * more)
        return step(given, caches, extra, new, numbers)

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

    def _besides(self, sequences: Sequence[ExecutorSequence], more: int = 0) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches for a step of these sequences, and of `more` that are
        padding."""
        inputs = self._loaded.language_inputs
        if inputs is None:
            return {}
        lengths, pictures = [each.length for each in sequences], [each.pictures for each in sequences]
        return inputs.of_steps(lengths + [0] * more, pictures + [None] * more)

    def _pool_arrays(self) -> list[mx.array]:
        return [] if self._loaded.pool is None else self._loaded.pool.arrays()

    # KV in and out.

    @property
    def leaving(self) -> int:
        """How many sequences have left whose KV stays here until the next step."""
        return sum(len(each.leaving) for each in self._micro_batches)

    def holds(self, sequence_id: str) -> bool:
        """Whether the sequence has usable KV."""
        if (sequence := self._coming.get(sequence_id)) is not None:
            return sequence.failure is None
        return any(
            sequence.sequence_id == sequence_id and sequence_id not in each.leaving
            for each in self._micro_batches
            for sequence in each.sequences
        )

    def length(self, sequence_id: str) -> int:
        """Returns how many tokens of a sequence in any state have KV."""
        if (sequence := self._coming.get(sequence_id)) is not None:
            return sequence.length
        micro_batch, index = self._place(sequence_id)
        return micro_batch.sequences[index].length

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
        spec, length = self._loaded.spec, self.length(sequence_id)
        single = self._coming.get(sequence_id)
        if self._settles_always and (single is None or any(stop - start != BLOCK_TOKENS for start, stop in spans)):
            # Blocks of a prompt may still be computed: they are not read here.
            mx.synchronize()
        # Stacks copy a span of all sequences and stay until the next step, so they are used for few spans only.
        stacks = self._on_gpu and len(spans) <= STACKED_SPANS_MAX
        if single is None:
            micro_batch, index = self._place(sequence_id)
            if isinstance(micro_batch.caches, UnbatchedSequences):
                view = SequenceView(spec, micro_batch.caches.sequences[index], None, length)
            else:
                view = SequenceView(spec, micro_batch.caches, index, length, micro_batch.stacks if stacks else None)
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
        if self.followers is None:
            return self._adopt(records)
        self._read_here = records
        return self.adopt_part(records.reading, len(records.windows))

    @replayed
    @on_device()
    def adopt_part(self, reading: str, count: int) -> list[PooledBlock]:
        """Puts the next `count` blocks of a reading into the pool: each process its own part. Raises as `adopt`."""
        runs = [self._read_here] if self.parts is None else self.parts.blocks(reading, count)
        self._read_here = None
        return [block for run in runs for block in self._adopt(run)]

    def _adopt(self, records: Records) -> list[PooledBlock]:
        assert self._loaded.pool is not None
        self._end_prefill()
        self._settle()
        blocks = kv_cache.into_pool(self._loaded.pool, records)
        mx.async_eval(self._pool_arrays())
        return blocks

    def adopt_read(self, reading: str, slabs: list[Slab], blocks: int, tails: Sequence[bytes]) -> None:
        """As `adopt_slabs`, with the leader's own."""
        self._read_here = slabs
        self.adopt_slabs(reading, blocks, list(tails))

    @replayed
    def adopt_slabs(self, reading: str, blocks: int, tails: Sequence[bytes]) -> list[Slab]:
        """Takes what a reading has outside of the pool: its first `blocks` blocks, then its tails with these packed
        tokens. Each process takes its own part."""
        slabs = self._read_here if self.parts is None else self.parts.slabs(reading, blocks, tails)
        self._read_here = None
        return slabs

    @replayed
    def forget_read(self, reading: str) -> None:
        """Ends a reading: its parts that were not used are forgotten."""
        if self.parts is not None:
            self.parts.forget(reading)

    @replayed
    def save(
        self,
        owner: str,
        root: bytes,
        scope: str,
        chain: Sequence[bytes],
        items: Sequence[Sequence[Any]],
        limits: Mapping[str, int | None],
    ) -> None:
        """Has the followers write their parts of KV to their nodes' disks.

        Args:
            owner, root, scope, chain, limits: as in `WriteJob`.
            items: id, parent, tokens and KV of each item, as in `Unsaved`.
        """
        if self.parts is not None:
            self.parts.save(owner, root, scope, chain, items, limits)

    @on_device()
    def copied(self, kept: Sequence[Slab | PooledBlock]) -> list[Slab | Record]:
        """Returns copies of blocks for the disk; their arrays are being computed. Slabs are no part of the pool and
        stay as they are."""
        blocks = [each for each in kept if isinstance(each, PooledBlock)]
        if blocks and self._settles_always and self._prefilling:
            # One may be among the blocks that are being computed.
            mx.synchronize()
        pool = self._loaded.pool
        made = kv_cache.out_of_pool(self._loaded.spec, pool, blocks) if pool is not None else []
        kv_cache.evaluate(made)
        copies = iter(made)
        return [next(copies) if isinstance(each, PooledBlock) else each for each in kept]

    @replayed
    @on_device()
    def give_back(self, bytes_max: int) -> None:
        """Shrinks the pool to `bytes_max` bytes, or to the slots that are held; blocks may get other slots. Only
        between two steps."""
        pool = self._loaded.pool
        if pool is None:
            return
        self._end_prefill()
        mx.synchronize()
        pool.shrink(bytes_max)

    def check(self) -> None:
        """Checks the pool: see `BlockPool.check`."""
        if self._loaded.pool is not None:
            self._loaded.pool.check()

    def _place(self, sequence_id: str) -> tuple[Any, int]:
        """Returns a decoding sequence's micro-batch and its number there. It may have left, and may have come again."""
        found = [
            (sequence_id in each.leaving, number, index)
            for number, each in enumerate(self._micro_batches)
            for index, sequence in enumerate(each.sequences)
            if sequence.sequence_id == sequence_id
        ]
        _, number, index = min(found)
        return self._micro_batches[number], index
