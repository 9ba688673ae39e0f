"""The MLX side of a replica: rows' caches, prefill chunks, and the batched decode step. No policy.

Everything here runs on one thread, because a lazy MLX array can be evaluated only on the thread that made it. What
computes or waits may raise `DeviceFailed`; then `reset` is to follow.

Decode steps are pipelined: `step` launches the computation of token t+1 of every row, then returns token t, which is
ready. So the Python work between two steps overlaps with the device's. If rows have grammars, their masks are made of
token t between the launch of the model and that of sampling. A row that is alone, and whose grammar leaves it no choice
for several tokens, gets these in one step; its words are the same. The first input of a row that joins is the last
token of its prompt. Joins and leaves take effect together at the next step, because each copies the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import Sampling, TokenLogprobs
from ..device.device import on_gpu, size_class
from ..device.device_errors import on_device
from ..kv import caches as kv_cache
from ..kv.attention import FEW_QUERIES
from ..kv.caches import PooledBlock, Records, Slab
from ..kv.paged_cache import PagedKVCache
from ..kv.sequence_view import RowView, Stacks
from ..kv.unbatched import RowsApart
from .compiled_step import CompiledStep
from .grammar import MaskMaker, RowGrammar, RowMasks
from .loaded_model import LoadedModel
from .pieces import IN_ONE_PIECE
from .sampling import BatchSampler, Draw
from .sequence_states import ExecutorRow, Stage, Together
from .vision import RowPart, RowPictures

CLEAR_EVERY_STEPS = 512
STACKED_SPANS_MAX = 16
PADDING_MAX = 2.0
"""How many times its tokens a padded batch of prompts may have."""

SHAPE_TOKENS = 64
"""Batches of prompts are padded to a `size_class` of this."""

FORCED_MAX = 8
"""Tokens of one step: so many cost a device little more than one."""

FORCED_HISTORY_MAX = 4096
"""Tokens before them, for each token that is spared a step: a chunk unpacks a row's blocks, where a step reads them in
place."""

CLEAR_EVERY_TOKENS = 8192
"""Prefilled tokens after which MLX's cache of freed buffers is emptied; decoding cannot use many of them."""


@dataclass(frozen=True)
class Ready:
    """A row's next token; `logprobs` if the row asked for them. If not `sound`, its logit was not a finite number; if
    there is a `grammar_error`, the row's grammar could not be followed. The token is meaningless in both cases."""

    row_id: str
    token: int
    sound: bool = True
    logprobs: TokenLogprobs | None = None
    grammar_error: str = ""

    @property
    def failure(self) -> str:
        """Why the token is meaningless, "" if it is not."""
        return self.grammar_error if self.sound else "the model's output is not a number"


def padded_tokens(longest: int) -> int:
    """Returns to how many tokens a batch of prompts is padded."""
    return SHAPE_TOKENS * size_class(-(-longest // SHAPE_TOKENS))


class BatchExecutor:
    """The rows in prefill and the batch of decoding rows. Used by the engine.

    With `batched_prefill` prompts run as padded batches, even a single one: a short prompt alone leaves a GPU idle, and
    without a mask array cuDNN makes a plan for every new length. A CPU gains nothing from it, and mlx-lm's Mamba layers
    would take the padding into their state.

    Attributes:
        workspace_bytes: the most that a prefill has needed for a moment, beyond what it left.
        make_sampler: makes the `BatchSampler` of a batch, or what trials put in its place.
        pieces: where others are served between two layers of a prompt, as in trials.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._on_gpu = on_gpu()
        batched = self._on_gpu and loaded.spec.reusable and not loaded.spec.recurrent
        self.batched_prefill = batched and not loaded.apart
        pool = loaded.pool
        # CUDA runs evaluations one after the other, whatever they read and write.
        self._settles = pool is not None and not (pool.kernels and mx.cuda.is_available())
        # On Metal MLX does not know of what kernels write into arrays that they read.
        self._settles_always = self._settles and pool is not None and pool.kernels
        self._compiled = (
            CompiledStep(self._model, loaded.deferral) if loaded.way.compiled and not loaded.apart else None
        )
        # Rows before they decode; `_rows` are those of the batch.
        self._coming: dict[str, ExecutorRow] = {}
        self._leaving: set[str] = set()
        self._since_clear = 0
        self._make_masks = MaskMaker()
        self.make_sampler: Callable[[], Any] = lambda: BatchSampler(loaded.vocabulary_size, loaded.eos_token_ids)
        self.pieces = IN_ONE_PIECE
        self.workspace_bytes = 0
        self._steps = 0
        self._forget()

    @on_device()
    def open(
        self,
        row_id: str,
        blocks: Sequence[Slab | PooledBlock],
        tail: Slab | None,
        tail_tokens: int,
        pictures: RowPictures | None = None,
    ) -> None:
        """Makes caches for a row and restores the known part of its prompt.

        Args:
            blocks: KV of consecutive tokens from the prompt's begin.
            tail: KV after them, of which the first `tail_tokens` tokens are used.
        """
        caches = self._loaded.new_caches()
        kv_cache.restore(self._loaded.spec, caches, blocks, tail, tail_tokens)
        length = sum(block.tokens for block in blocks) + tail_tokens
        self._coming[row_id] = ExecutorRow(row_id, length, caches, pictures)

    @on_device()
    def prefill(self, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Computes the KV of some rows' next tokens, (row id, tokens) each.

        Raises:
            Exception: whatever the model raises. `length` tells which rows are done. The others may be tried again; a
                row whose caches were being changed fails again.
        """
        rows = [(self._coming[row_id], tokens) for row_id, tokens in work]
        self._settle()
        mx.reset_peak_memory()
        while self.batched_prefill and rows:
            count = self._count_together(rows)
            self._prefill_together(rows[:count])
            rows = rows[count:]
        for row, tokens in rows:
            if row.failure is not None:
                raise row.failure
            caches, inputs = row.own(), mx.array([list(tokens)], mx.uint32)
            part = row.part(tokens)
            kv_cache.see_both_ways(caches, [part.both_ways])
            try:
                self._model(inputs, cache=caches, **self._inputs_besides([part], len(tokens)))
                # The logits are not evaluated, so the output layer is not computed.
                self._evaluate(caches)
            except Exception as error:
                row.failure = error
                raise
            kv_cache.see_both_ways(caches, [])
            row.length += len(tokens)
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

    def _inputs_besides(self, parts: Sequence[RowPart], width: int) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches, for a padded batch of `width` tokens."""
        vision = self._loaded.vision
        return {} if vision is None else vision.inputs(parts, width)

    @staticmethod
    def _count_together(rows: Sequence[tuple[ExecutorRow, Sequence[int]]]) -> int:
        """Returns how many of these rows, from the first on, are the next batch: as many as have little padding."""
        lengths = [len(tokens) for _, tokens in rows]
        held = [row.length for row, _ in rows]
        places = len(rows) * max(lengths), len(rows) * max(held)
        if places[0] > PADDING_MAX * sum(lengths) or places[1] > PADDING_MAX * (sum(held) + sum(lengths)):
            return 1
        if padded_tokens(max(lengths)) <= FEW_QUERIES:
            return len(rows)
        # A power of two, for few different shapes: CUDA makes a plan for every new one.
        return 1 << (len(rows).bit_length() - 1)

    def _prefill_together(self, rows: Sequence[tuple[ExecutorRow, Sequence[int]]]) -> None:
        lengths = [len(tokens) for _, tokens in rows]
        longest = padded_tokens(max(lengths))
        padding = [longest - length for length in lengths]
        caches = kv_cache.merge([row.own() for row, _ in rows])
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=padding)
        parts = [row.part(tokens) for row, tokens in rows]
        kv_cache.see_both_ways(caches, [part.both_ways for part in parts])
        extra = self._inputs_besides(parts, longest)
        self._model(
            mx.array([[*tokens, *[0] * pad] for (_, tokens), pad in zip(rows, padding, strict=True)], mx.uint32),
            cache=caches,
            **extra,
        )
        for cache in caches:
            cache.finalize()
        kv_cache.see_both_ways(caches, [])
        self._evaluate(caches)
        # Rows prefilled together mostly join the batch together, and extracting a row costs two copies a layer.
        together = Together(caches, {row.row_id: index for index, (row, _) in enumerate(rows)}, len(rows))
        for row, tokens in rows:
            row.caches, row.together, row.length = [], together, row.length + len(tokens)

    def join(
        self, row_id: str, tokens: Sequence[int], sampling: Sampling, drawn: int, grammar: RowGrammar | None = None
    ) -> None:
        """Moves a prefilled row into the batch at the next step.

        Args:
            tokens: all tokens of the row; the last one is its first input.
            drawn: how many of them were generated (before a preemption, or on a replica that was lost).
            grammar: what the row follows, at any earlier state of it; None for nothing.
        """
        # Rows join in this order.
        row = self._coming[row_id] = self._coming.pop(row_id)
        row.join(tokens, sampling, drawn, grammar, self._loaded.eos_token_ids.union(sampling.stop_token_ids))

    @on_device()
    def first(self) -> list[Ready]:
        """Returns the first tokens of rows that have just joined, so that they can be delivered before the next step is
        launched; that step returns them again. Empty if this would delay more rows than have just joined."""
        rows = [(index, row) for index, row in enumerate(self._rows) if row.row_id not in self._leaving]
        begun = [(index, row) for index, row in rows if row.fed and not row.begun]
        if not begun or 2 * len(begun) < len(rows) or self._inputs is None or self._draw is None:
            return []
        tokens: list[int] = self._inputs.tolist()  # type: ignore[assignment]
        drawn = _read(*self._draw)
        return [Ready(row.row_id, tokens[index], *drawn[row.row_id], row.grammar_error) for index, row in begun]

    @on_device()
    def drawn(self, row_id: str) -> Ready | None:
        """Returns a decoding row's last token, which the next step would return; None if it has none yet."""
        if self._inputs is None or self._draw is None or row_id in self._coming:
            return None
        tokens: list[int] = self._inputs.tolist()  # type: ignore[assignment]
        for token, row in zip(tokens, self._rows, strict=True):
            if row.row_id == row_id and row.fed and row_id not in self._leaving:
                return Ready(row_id, token, *_read(*self._draw)[row_id], row.grammar_error)
        return None

    @on_device()
    def step(self) -> list[Ready]:
        """Runs one decode step for the whole batch.

        Returns:
            The tokens of the step before; rows that have just joined have none yet.
        """
        self._stacks = Stacks()
        self._change_batch()
        inputs, before = self._inputs, self._draw
        if inputs is None:
            return []
        seals = any(row.length % BLOCK_TOKENS == BLOCK_TOKENS - 1 for row in self._rows)
        if seals:
            self._settle()
        forced, self._forced = self._forced if len(self._rows) == 1 else (), ()
        if forced:
            self._sampler.passed(forced[1:])
        logits = self._logits(forced or inputs)
        draw = self._sampler(logits, self._masks(forced or inputs, logits))
        self._inputs, self._draw = draw.tokens.astype(mx.uint32), (draw, [row.row_id for row in self._rows])
        mx.async_eval(self._inputs, *draw.arrays(), *(self._pool_arrays() if seals else ()))
        if seals:
            self._seal_filled()
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        drawn = {} if before is None else _read(*before)
        ready = [
            Ready(row.row_id, token, *drawn[row.row_id], "" if row.grammar is None else row.grammar.failure)
            for row, token in zip(self._rows, tokens, strict=True)
            if row.fed
        ]
        ready += [Ready(self._rows[0].row_id, token) for token in forced[1:]]
        for row in self._rows:
            row.begun, row.fed = row.fed, True
            row.length += len(forced) or 1
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        return ready

    def _logits(self, inputs: mx.array | Sequence[int]) -> mx.array:
        """Launches the model for one token of every row, `(rows,)`, or for several of the only one."""
        caches = self._caches
        if not isinstance(inputs, mx.array):
            (row,) = self._rows
            if self._settles_always:
                # The step in flight writes into the open blocks that are read here.
                mx.synchronize()
            extra = self._inputs_besides([RowPart(inputs, row.length, row.pictures)], len(inputs))
            return self._model(mx.array([inputs], mx.uint32), cache=caches, **extra)[:, -1, :]
        if isinstance(caches, RowsApart):
            return caches.step(self._model, inputs, lambda row: self._besides(self._rows[row : row + 1]))
        extra = self._besides(self._rows)
        logits = None if self._compiled is None else self._compiled(inputs, caches, extra)
        return self._model(inputs[:, None], cache=caches, **extra)[:, -1, :] if logits is None else logits

    def _forced_after(self, length: int, mask: np.ndarray) -> Sequence[int]:
        """Returns the tokens that follow the first `length` of the only row, whose next one `mask`, `(words,) uint32`,
        limits; () if they are no two, or cannot come together."""
        (row,) = self._rows
        # The step that fills a block has one token.
        most = min(FORCED_MAX, row.tokens_max - length, BLOCK_TOKENS - 1 - length % BLOCK_TOKENS)
        caches = self._caches
        paged = not isinstance(caches, RowsApart) and all(isinstance(cache, PagedKVCache) for cache in caches)
        # CUDA would make a plan for every length, or compute them padded.
        if row.grammar is None or not paged or mx.cuda.is_available() or not self._sampler.can_pass():
            return ()
        found = list(takewhile(lambda token: token not in row.ends, row.grammar.forced(mask, most)))
        return found if (len(found) - 1) * FORCED_HISTORY_MAX > length else ()

    def _besides(self, rows: Sequence[ExecutorRow]) -> dict[str, Any]:
        """Returns the model's inputs besides tokens and caches for a step of these rows."""
        vision = self._loaded.vision
        return {} if vision is None else vision.steps([row.length for row in rows], [row.pictures for row in rows])

    def _masks(self, inputs: mx.array | Sequence[int], logits: mx.array) -> RowMasks | None:
        """Reads the inputs, as for `_logits`, for the rows with grammars, while the model computes `logits` of them;
        returns what these rows may draw next."""
        if not any(row.grammar is not None for row in self._rows):
            return None
        mx.async_eval(logits)
        bound = [(index, row.grammar) for index, row in enumerate(self._rows) if row.grammar is not None]
        tokens = [[token] for token in inputs.tolist()] if isinstance(inputs, mx.array) else [inputs]  # type: ignore[union-attr]
        for index, grammar in bound:
            if self._rows[index].fed:
                for token in tokens[index]:
                    grammar.follow(token)
        masks = self._make_masks(bound)
        if masks is not None and len(self._rows) == 1:
            self._forced = self._forced_after(self._rows[0].length + len(tokens[0]), masks.words[0])
        return masks

    def check(self) -> None:
        """Checks the pool: see `BlockPool.check`."""
        if self._loaded.pool is not None:
            self._loaded.pool.check()

    @property
    def leaving(self) -> int:
        """Rows that have left, but whose KV is here until the next step."""
        return len(self._leaving)

    @on_device()
    def give_back(self, bytes_max: int) -> None:
        """Shrinks the pool to `bytes_max` bytes or to what is held; blocks get other slots. Only between two steps."""
        pool = self._loaded.pool
        if pool is None:
            return
        mx.synchronize()
        pool.shrink(bytes_max)

    def _settle(self) -> None:
        """Waits for the step in flight before blocks are written: MLX would copy arrays that it still reads."""
        if self._settles:
            mx.synchronize()

    def _seal_filled(self) -> None:
        """Seals the blocks that a kernel has filled in the step that was just launched."""
        if self._settles_always:
            mx.synchronize()
        if isinstance(self._caches, RowsApart):
            self._caches.seal_filled()
        else:
            kv_cache.seal_filled(self._caches)
        mx.async_eval(self._pool_arrays())
        if self._settles_always:
            # The next step writes into what is sealed here.
            mx.synchronize()

    def _pool_arrays(self) -> list[mx.array]:
        return [] if self._loaded.pool is None else self._loaded.pool.arrays()

    def holds(self, row_id: str) -> bool:
        """Whether the row has usable KV."""
        if (row := self._coming.get(row_id)) is not None:
            return row.failure is None
        return row_id not in self._leaving and any(row.row_id == row_id for row in self._rows)

    def length(self, row_id: str) -> int:
        """Returns how many tokens of a row in any state have KV."""
        row = self._coming.get(row_id)
        return (self._rows[self._index(row_id)] if row is None else row).length

    @on_device()
    def cut(self, row_id: str, spans: Sequence[tuple[int, int]]) -> list[Slab | PooledBlock]:
        """Returns a row's KV for spans [start, stop) of its tokens: blocks in the pool as they are, else copies."""
        if self._settles_always:
            mx.synchronize()
        spec, length = self._loaded.spec, self.length(row_id)
        # Stacks copy all rows of a span and stay until the next step, so they are for a few spans only.
        stacks = self._on_gpu and len(spans) <= STACKED_SPANS_MAX
        single, caches = self._coming.get(row_id), self._caches
        if single is None and isinstance(caches, RowsApart):
            view = RowView(spec, caches.rows[self._index(row_id)], None, length)
        elif single is None:
            assert not isinstance(caches, RowsApart)
            view = RowView(spec, caches, self._index(row_id), length, self._stacks if stacks else None)
        elif single.together is None:
            view = RowView(spec, single.caches, None, length)
        else:
            batch = single.together
            view = RowView(spec, batch.caches, batch.rows[row_id], length, batch.stacks if stacks else None)
        cuts = [view.cut(start, stop) for start, stop in spans]
        kv_cache.evaluate(cuts)
        return cuts

    @on_device()
    def adopt(self, records: Records) -> list[PooledBlock]:
        """Blocks that come from the disk, put into the pool, which the model must have.

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
        """A block as the disk takes it; its arrays are being computed."""
        if isinstance(kept, Slab):
            return kept
        assert self._loaded.pool is not None
        slab = kv_cache.out_of_pool(self._loaded.spec, self._loaded.pool, kept)
        kv_cache.evaluate([slab])
        return slab

    def leave(self, row_ids: Sequence[str]) -> None:
        """Removes rows; unknown ids are ignored."""
        for row_id in row_ids:
            if (row := self._coming.pop(row_id, None)) is not None:
                row.leave()
        gone = set(row_ids)
        self._leaving.update(row.row_id for row in self._rows if row.row_id in gone)
        if self._rows and len(self._leaving) == len(self._rows):
            self._forget()

    def reset(self) -> None:
        """Forgets every row and every block, after the device has failed."""
        self._coming.clear()
        self._forget()
        if self._loaded.pool is not None:
            self._loaded.pool.reset()

    def clear_batch(self) -> None:
        """Forgets every decoding row and every row that was about to join. Used after a step failed."""
        self.leave(list(self._joining()))
        self._forget()

    def _forget(self) -> None:
        self._leaving.clear()
        self._rows: list[ExecutorRow] = []
        self._caches: list[Any] | RowsApart = []
        self._stacks = Stacks()
        self._inputs: mx.array | None = None
        self._draw: tuple[Draw, list[str]] | None = None
        # The next tokens of a row that is alone, two at least, if they are known: the first is its input.
        self._forced: Sequence[int] = ()
        self._sampler = self.make_sampler()

    def _change_batch(self) -> None:
        """Removes rows that left and appends rows that join."""
        if self._settles_always and (self._leaving or self._joining()):
            mx.synchronize()
        if self._leaving:
            keep = [index for index, row in enumerate(self._rows) if row.row_id not in self._leaving]
            if isinstance(self._caches, RowsApart):
                self._caches.keep(keep)
            else:
                kv_cache.keep(self._caches, keep)
            assert self._inputs is not None
            self._inputs = self._inputs[mx.array(keep)]
            self._sampler.keep(keep)
            self._rows = [self._rows[index] for index in keep]
            self._leaving.clear()
        for batch, rows in self._arriving():
            inputs = mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
            if self._inputs is None:
                self._caches, self._inputs = batch, inputs
            else:
                if isinstance(self._caches, RowsApart):
                    self._caches.extend(batch)
                else:
                    kv_cache.extend(self._caches, batch)
                self._inputs = mx.concatenate([self._inputs, inputs])
            for row in rows:
                prompt = len(row.tokens) - row.drawn
                self._sampler.add(row.sampling, row.tokens[:prompt], row.tokens[prompt:])
                row.decode()
                self._rows.append(self._coming.pop(row.row_id))

    def _joining(self) -> dict[str, ExecutorRow]:
        return {row_id: row for row_id, row in self._coming.items() if row.stage is Stage.JOINING}

    def _arriving(self) -> list[tuple[Any, list[ExecutorRow]]]:
        """Returns the rows that join now, as batches: rows prefilled together stay one batch, the others are merged."""
        arriving: list[tuple[Any, list[ExecutorRow]]] = []
        joining = self._joining()
        for row in list(joining.values()):
            together = row.together
            if together is None or not together.rows.keys() <= joining.keys():
                continue
            if len(together.rows) < together.size:
                kv_cache.keep(together.caches, list(together.rows.values()))
            members = [joining.pop(row_id) for row_id in together.rows]
            arriving.append((together.caches, members))
            for member in members:
                member.together = None
        if joining:
            single = list(joining.values())
            own = [row.own() for row in single]
            arriving.append((RowsApart(own) if self._loaded.apart else kv_cache.merge(own), single))
        return arriving

    def _index(self, row_id: str) -> int:
        return next(index for index, row in enumerate(self._rows) if row.row_id == row_id)


def _read(draw: Draw, row_ids: Sequence[str]) -> dict[str, tuple[bool, TokenLogprobs | None]]:
    """Returns by row whether its token is sound, and its logprobs; waits for the device."""
    sound: list[bool] = draw.sound.tolist()  # type: ignore[assignment]
    return dict(zip(row_ids, zip(sound, draw.logprobs(), strict=True), strict=True))
