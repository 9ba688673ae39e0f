"""The part of a batch that prefills sequences: `batch.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..device.device import on_cuda, on_gpu
from ..device.device_errors import on_device
from ..device.temporary_memory import TEMPORARY
from ..kv import caches as kv_cache
from ..kv.caches import PooledBlock, Slab
from ..kv.paged_cache import Reads
from ..proving.pieces import IN_ONE_PIECE
from .followers import Followers, ShownPictures, replayed
from .loaded_model import LoadedModel
from .media.language_inputs import ImageEmbeddings, SequencePart, SequencePictures
from .padding import CALL_TOKENS, CALL_TOKENS_ELSEWHERE, batches_of, padded_tokens, pieces_of
from .prefill_ahead import Note, PrefillAhead
from .sequence_states import ExecutorSequence, Together

CLEAR_EVERY_TOKENS = 8192
"""Prefilled tokens after which MLX's cache of freed buffers is emptied; decoding cannot use many of them."""

SPARE_MOST = 2.0
"""On CUDA it is not emptied if it has at most this many times the temporary memory of a prefill: that takes 15 ms, and
the next prefill needs most of them again."""


class Prefilling:
    """The sequences in prefill.

    With `batched_prefill` prompts run as padded batches, even a single prompt: a short prompt alone leaves a GPU idle,
    and without a mask array cuDNN makes a plan for every new length. A CPU gains nothing from it, and mlx-lm's Mamba
    layers would take the padding into their state.

    Attributes:
        followers: have the other layers of the model; None if it has all.
        runs_ahead: whether prefills run ahead (`prefill_ahead.py`). One is waited for before the next is launched, so
            that the temporary memory of no two is needed at once.
        ahead: the prefill that does.
        workspace_bytes: the most temporary memory that a prefill has needed.
        pieces: a piece ends after each layer of a prompt, so that requests are served during self-tests.
    """

    def __init__(self, loaded: LoadedModel, followers: Followers | None) -> None:
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
        # Sequences that do not decode yet.
        self._coming: dict[str, ExecutorSequence] = {}
        self._since_clear = 0
        # Whether a prefill is in flight, and what of it is yet to be launched.
        self._prefilling = False
        self._unlaunched: list[Any] = []
        self.runs_ahead = False
        self.ahead = PrefillAhead()
        # Who is told how long the next prefill takes.
        self._note_next: Note | None = None
        self.pieces = IN_ONE_PIECE
        self.workspace_bytes = 0
        # Until then the process's peak may be that of tests.
        self._peak_is_own = False

    @replayed
    @on_device()
    def open(
        self,
        sequence_id: str,
        blocks: Sequence[Slab | PooledBlock],
        tail: Slab | None,
        tail_tokens: int,
        pictures: SequencePictures | None = None,
        adapter: bytes = b"",
    ) -> None:
        """Makes caches for a sequence and restores the known part of its prompt.

        Args:
            blocks: KV of consecutive tokens from the prompt's begin.
            tail: KV after them, of which the first `tail_tokens` tokens are used.
            adapter: the digest of the adapter that it is computed with, one of the model's; b"" for none.
        """
        number = self._loaded.adapters.number(adapter)
        caches = self._loaded.new_caches()
        kv_cache.restore(self._loaded.spec, caches, blocks, tail, tail_tokens)
        length = sum(block.tokens for block in blocks) + tail_tokens
        self._coming[sequence_id] = ExecutorSequence(sequence_id, length, caches, pictures, adapter=number)

    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Computes the KV of some sequences' next tokens, (sequence id, tokens) each.

        Raises:
            Exception: whatever the model raises. `length` tells which sequences are done. The others may be prefilled
                again; if the caches of one were being changed, it fails again.
        """
        self.prefill_seeing(work, ShownPictures() if self.followers is None else self._shown(work))

    @replayed
    @on_device()
    def prefill_seeing(self, work: Sequence[tuple[str, Sequence[int]]], shown: ShownPictures) -> None:
        """As `prefill`.

        Args:
            shown: what followers need of pictures for it.
        """
        note, self._note_next = self._note_next, None
        self.ahead.begin_call()
        self._settle()
        if self.followers is None:
            for sequence_id, embeddings in shown.sequences.items():
                self._pictures_of(sequence_id).embeddings.update(embeddings)
        for piece in pieces_of(work, self._piece_tokens(work)):
            self._prefill_piece([(self._coming[sequence_id], tokens) for sequence_id, tokens in piece])
        if self.followers is None:
            for sequence_id in shown.sequences:
                self._pictures_of(sequence_id).embeddings.clear()
        count = sum(len(tokens) for _, tokens in work)
        if not self.ahead.running:
            self._note_workspace()
        self.ahead.end_call(count, note)
        self._since_clear += count
        if self._since_clear >= CLEAR_EVERY_TOKENS:
            self._since_clear = 0
            if not on_cuda() or mx.get_cache_memory() > SPARE_MOST * self.workspace_bytes:
                mx.clear_cache()

    def time_next(self, note: Note) -> None:
        """Has `note` told the next prefill's tokens and how long it took, in seconds, once it is known to have ended;
        not if it fails."""
        self._note_next = note

    def _piece_tokens(self, work: Sequence[tuple[str, Sequence[int]]]) -> int | None:
        """Returns the most tokens of a piece; None if some of the tokens must be computed in one chunk."""
        for sequence_id, tokens in work:
            part = self._coming[sequence_id].part(tokens)
            unbroken = part.pictures.unbroken if part.pictures is not None else []
            if any(first < part.start + len(tokens) and part.start < end for first, end in unbroken):
                return None
        return self._loaded.piece_tokens

    def _shown(self, work: Sequence[tuple[str, Sequence[int]]]) -> ShownPictures:
        """Returns what layers need of pictures for these sequences' next tokens."""
        shown: dict[str, dict[int, ImageEmbeddings]] = {}
        for sequence_id, tokens in work:
            sequence = self._coming.get(sequence_id)
            if sequence is None or sequence.pictures is None:
                continue
            pictures, start, stop = sequence.pictures, sequence.length, sequence.length + len(tokens)
            for index in pictures.touched(start, stop):
                first, count = pictures.spans[index]
                part = pictures.embeddings[index].part(max(start - first, 0), min(stop - first, count))
                shown.setdefault(sequence_id, {})[index] = part
        return ShownPictures(shown)

    def _pictures_of(self, sequence_id: str) -> SequencePictures:
        pictures = self._coming[sequence_id].pictures
        assert pictures is not None, "a sequence without pictures is shown some"
        return pictures

    def _prefill_piece(self, sequences: Sequence[tuple[ExecutorSequence, Sequence[int]]]) -> None:
        if self.batched_prefill:
            call_tokens = CALL_TOKENS if on_cuda() else CALL_TOKENS_ELSEWHERE
            for batch in batches_of([(sequence.length, len(tokens)) for sequence, tokens in sequences], call_tokens):
                self._prefill_together([sequences[number] for number in batch])
            sequences = []
        for sequence, tokens in sequences:
            if sequence.failure is not None:
                raise sequence.failure
            self._begin_piece()
            caches, inputs = sequence.own(), mx.array([list(tokens)], mx.uint32)
            part = sequence.part(tokens)
            kv_cache.set_bidirectional(caches, [part.bidirectional])
            try:
                with self._adapted([sequence]):
                    self._model(inputs, cache=caches, **self._inputs_besides([part], len(tokens)))
                # The logits are not evaluated, so the output layer is not computed.
                self._evaluate(caches)
            except Exception as error:
                sequence.failure = error
                raise
            kv_cache.set_bidirectional(caches, [])
            sequence.length += len(tokens)

    def _evaluate(self, caches: Sequence[Any]) -> None:
        if self.runs_ahead:
            self.wait_for_prefill()
        with TEMPORARY.limited():
            self._launch(caches)

    @property
    def may_run_ahead(self) -> bool:
        """Whether the device computes everything in the order in which it was launched."""
        return self.batched_prefill and on_cuda() and self._loaded.way.reads is Reads.KERNEL

    def _launch(self, caches: Sequence[Any]) -> None:
        overlaps = self.followers is not None and self.followers.overlaps
        if self.pieces is not IN_ONE_PIECE and not overlaps:
            self.pieces.evaluate(caches)
        elif self.runs_ahead:
            mx.reset_peak_memory()
            found: list[Any] = [each for _, each in tree_flatten([cache.state for cache in caches])]
            self.ahead.launch([each for each in found if isinstance(each, mx.array)])
        elif overlaps:
            # What comes next is told to the followers before this is waited for.
            states = [cache.state for cache in caches]
            self._prefilling = True
            if self._on_gpu:
                mx.async_eval(states)
            else:
                # MLX launches only a few operations on a CPU without waiting for them.
                self._unlaunched = states
        else:
            mx.eval([cache.state for cache in caches])

    @on_device()
    def wait_for_prefill(self) -> None:
        """Waits for a prefill that runs ahead."""
        if self.ahead.running:
            self.ahead.wait()
            self._note_workspace()

    def follow_prefill(self) -> None:
        """Call it before each decode step. The second one behind a prefill that runs ahead waits for it: reading the
        first one's tokens would be waiting for it too."""
        if self.ahead.is_followed():
            self.wait_for_prefill()

    def _end_prefill(self) -> None:
        """Waits for the prefill in flight: what comes next writes its arrays."""
        if self._prefilling:
            states, self._unlaunched, self._prefilling = self._unlaunched, [], False
            mx.eval(states)
            # It must not keep them from being written in place.
            del states
            mx.synchronize()

    def _begin_piece(self) -> None:
        self._end_prefill()
        if not self.ahead.running:
            self._note_workspace()
            # From now on the peak is of what this engine has computed.
            self._peak_is_own = True
            mx.reset_peak_memory()

    def _note_workspace(self) -> None:
        if self._peak_is_own:
            self.workspace_bytes = max(self.workspace_bytes, mx.get_peak_memory() - mx.get_active_memory())

    def _inputs_besides(self, parts: Sequence[SequencePart], width: int) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches, for a padded batch of `width` tokens."""
        given = self._loaded.language_inputs
        return {} if given is None else given.of_parts(parts, width)

    def _prefill_together(self, sequences: Sequence[tuple[ExecutorSequence, Sequence[int]]]) -> None:
        self._begin_piece()
        caches = kv_cache.merge([sequence.own() for sequence, _ in sequences])
        parts = [sequence.part(tokens) for sequence, tokens in sequences]
        kv_cache.set_bidirectional(caches, [part.bidirectional for part in parts])
        given = [tokens for _, tokens in sequences]
        with self._adapted([sequence for sequence, _ in sequences]):
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

    def _adapted(self, sequences: Sequence[ExecutorSequence]) -> AbstractContextManager[None]:
        """Returns a context in which the model is called for these sequences, one a row, with their adapters."""
        return self._loaded.adapters.adapted.calling([sequence.adapter for sequence in sequences])

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

    def _settle(self) -> None:
        """Waits for the step in flight before blocks are written: MLX would copy arrays that the step still reads."""
        if self._settles:
            mx.synchronize()
