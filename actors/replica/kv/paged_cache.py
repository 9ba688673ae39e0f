"""A paged cache of sealed blocks and an open tail, for one sequence or a batch; replaces mlx-lm's caches in any model.

The position law: a query attends to the full blocks before its own block as sealed, and inside its own block to keys
and values in full precision. So what a sequence computes depends only on its tokens, not on chunks or batches.

Sealed blocks are in the pool (`pool.py`), and a sequence's block tables say where. The open blocks of a layer are
arrays of the batch: column c of sequence s is position 256 * (lengths[s] // 256) + c.

A prefill chunk gets its sequences' blocks dequantized, followed by the open ones, as plain arrays, and `make_mask` says
which of them a query may see. Blocks that the chunk fills are there twice, unless sealed blocks are kept as computed.
In a decode step, if the model's attention goes through `attention.py`, `view` says where the blocks are: each sequence
reads its own blocks in place, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..kernels import block_kernels, decode_kernel, sealing
from ..kernels.decode_views import DecodeView, KernelStep, KernelView, NewTokens, padded_rows
from ..kernels.prefill_kernel import Chunk
from ..kernels.sealing import Sealed, SealPolicy
from .paged_batch import PagedBatch, Reads
from .pool import BlockTable, SlotGroup, slots_of
from .steps import Step, mask_of, seen_of, step_of

JOINED_MAX = 2**31 - 1
"""The most elements of an array that is concatenated along its tokens, because Metal counts destinations in 32 bits
from the array's begin. A larger array is concatenated from such arrays along its first axis, where Metal counts from
the begin of each."""


class PagedKVCache:
    """The KV of one layer for one sequence or several.

    Args:
        layer: its number in the model, which says where in the pool its blocks are.
        window: how many of the last tokens a query attends to; 0 for all.
        lengths: tokens of every sequence.
        batch: with the other layers.

    Attributes:
        view: what attention reads after the last `update_and_fetch`; None if it reads what that returned.
        chunk: where its sequences' tokens are in what that returned.
        was_shared: whether another layer has asked for this one's KV.
    """

    def __init__(
        self, layer: int, policy: SealPolicy, window: int = 0, *, lengths: Sequence[int] = (0,), batch: PagedBatch
    ) -> None:
        self.layer = layer
        self.policy = policy
        self.window = window
        self.lengths = list(lengths)
        self.batch = batch
        self.view: DecodeView | KernelView | None = None
        self.chunk: Chunk | None = None
        self._group, self._place = batch.pool.of(layer)
        self._number = batch.pool.groups.index(self._group)
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._ragged: list[int] | None = None
        # Whether a kernel can write into the open blocks' arrays: contiguous, of whole blocks, with no other reference.
        self._writable = False
        # The lengths before the last step, and its numbers, if blocks became full in it and are not sealed yet.
        self._filled: tuple[list[int], Step] | None = None
        self._fetch: Callable[[], tuple[mx.array, mx.array]] | None = None
        self.was_shared = False

    # What a model calls.

    @property
    def offset(self) -> Any:
        """The position of every sequence's next token."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        return self._once("offset", lambda: on_device(self.lengths))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """(sequences, 1, N, columns) bool, true where a query may look; None where every query may look everywhere,
        "causal" where each sees the columns up to its own."""
        step = self._step(N)
        if self._reads_in_place(N, step):
            return None
        alike = not self._ragged and len(set(self.lengths)) == 1 and step.columns == step.opened[0] + N
        if N > 1 and step.exact and alike and not (window_size or return_array or self.batch.bidirectional):
            # The columns are the positions.
            return "causal"
        what = ("mask", self._number, N, window_size)
        runs = self.batch.bidirectional
        mask = self._once(what, lambda: mask_of(step, self.lengths, step.first, N, window_size or 0, runs))
        if mask is not None:
            self.batch.note_mask(self._number, mask, window_size or 0)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends (sequences, kv_heads, N, dim) keys and values; returns those that attention gets."""
        count = keys.shape[2]
        step = self._step(count)
        assert self._filled is None, "full blocks are sealed before the next token"
        if self._by_kernel(count):
            self.view = None
            if self._keys is None or self._values is None:
                self._keys, self._values = keys[:, :, :0], values[:, :, :0]
            view = KernelView(keys, values, self.kernel_step())
            self.end_kernel_step()
            return self._fetched(lambda: self._viewed(view))
        self._writable = False
        if self._keys is not None:
            self._keys, self._values = self._open()
        in_place = self._reads_in_place(count, step)
        index = self._table(step) if step.used and not in_place else None
        flat = self._flat(step, keys.shape[1]) if in_place else None
        seen = self._once(("seen", self.window), lambda: seen_of(step, self.window)) if in_place else None
        # While these refer to an array, it cannot be changed in place.
        self.view = self._fetch = None
        if self._keys is None or self._values is None:
            self._keys = keys[:, :, :0]
            self._values = values[:, :, :0]
        rest: Sequence[mx.array] = ()
        if self._ragged is not None and self._group.kernels:
            old = (self._keys, self._values) if any(step.opened) else None
            joined, rest = block_kernels.append(old, (keys, values), step.opened, step.full, step.columns)
            self._keys, self._values = joined
        elif count == 1:
            self._append_step(keys, values, step.opened)
        elif not any(step.opened):
            self._keys, self._values = keys, values
            self._fit(step.columns)
        elif self._ragged is None and len(self.lengths) == 1:
            self._keys = mx.concatenate([self._keys[:, :, : step.opened[0]], keys], axis=2)
            self._values = mx.concatenate([self._values[:, :, : step.opened[0]], values], axis=2)
            self._fit(step.columns)
        else:
            self._append_ragged(keys, values, step)
        open_keys, open_values = self._keys[:, :, : step.columns], self._values[:, :, : step.columns]
        before, self.lengths = self.lengths, step.after
        sealed = 0 if index is None else BLOCK_TOKENS * step.used
        self.chunk = Chunk(before, self._new(count), step.first, sealed, step.exact)
        self._seal(before, step, rest)
        if flat is not None:
            view = DecodeView(open_keys, open_values, seen, self._group.layer(self._place), **flat)
            return self._fetched(lambda: self._viewed(view))
        if index is not None:
            return self._fetched(lambda: self._unsealed(index, open_keys, open_values))
        return self._fetched(lambda: (open_keys, open_values))

    def reads_in_place(self, count: int) -> bool:
        """Whether attention reads blocks where they are after `update_and_fetch` of `count` tokens a sequence."""
        return self._reads_in_place(count, self._step(count))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns again what the last `update_and_fetch` did, for another layer that attends to it too."""
        assert self._fetch is not None, "layers share KV that is not kept for them"
        self.was_shared = True
        return self._fetch()

    def _fetched(self, fetch: Callable[[], tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
        # It refers to a prompt's arrays, which may be large.
        self._fetch = fetch if self.batch.pool.shares else None
        return fetch()

    def _viewed(self, view: DecodeView | KernelView) -> tuple[mx.array, mx.array]:
        self.view = view
        return view.keys, view.values

    def _unsealed(self, index: mx.array, open_keys: mx.array, open_values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the blocks in the slots of `index` and the open blocks after them, as plain arrays."""
        if self._group.kernels and self.policy.quantizes:
            pool, order = self._group.layer(self._place), self._group.written(self._place)
            return block_kernels.unseal(pool, index, open_keys, open_values, self.policy, order)
        sealed = self._group.gather(self._place, index)
        before = sealing.unseal(sealed, self.policy, open_values.shape[3], open_keys.dtype)
        return _with_open(before[0], open_keys), _with_open(before[1], open_values)

    # What the executor calls.

    @property
    def group(self) -> int:
        """The number of the layer's group in the pool."""
        return self._number

    @property
    def takes_drafts(self) -> bool:
        """Whether `kernel_step` may be asked for several new tokens of a sequence. The layer must have a token."""
        assert self._keys is not None and self._values is not None
        return decode_kernel.takes_drafts((self._keys.shape[3], self._values.shape[3]))

    def kernel_step(self, new: Sequence[int] | None = None, *, padded: bool = False) -> KernelStep:
        """What the kernel reads and writes for some new tokens. The open blocks become arrays that the kernel can write
        into in place; MLX would copy them, because the step in flight still reads them.

        Args:
            new: how many each sequence has, all in its open block, which only one alone may fill; None for one each.
            padded: whether there are open blocks, and one token each, for `padded_rows` sequences.
        """
        assert self._keys is not None and self._values is not None
        rows = padded_rows(len(self.lengths)) if padded else len(self.lengths)
        what = ("kernel", self._number, rows, None if new is None else tuple(new))
        read = self._once(what, lambda: self._new_tokens(self._step(1), new, rows))
        if not self._writable or self._keys.shape[0] < rows:
            self._keys, self._values = self._open()
            self._fit(BLOCK_TOKENS, rows)
            self._keys, self._values = mx.contiguous(self._keys), mx.contiguous(self._values)
            self._writable = True
        if self._group.is_written(self._place):
            pool = self._group.layer(self._place)
        else:
            sizes = self._keys.shape[1], self._keys.shape[3], self._values.shape[3]
            pool = block_kernels.empty_slot(*sizes, self._keys.dtype, self.policy)
        return KernelStep((self._keys, self._values), pool, read, self._group.written(self._place))

    def end_kernel_step(self, new: Sequence[int] | None = None) -> None:
        """Counts the tokens that the kernel appends to the sequences, `new` as for `kernel_step`. `seal_filled` must
        follow once a step that fills blocks is launched, not before: MLX does not know that the kernel writes the
        arrays from which blocks are sealed."""
        step = self._step(1)
        self._filled = (self.lengths, step) if any(step.full) else None
        if new is None:
            # All layers of a step share it.
            self.lengths = step.after
        else:
            self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]

    def seal_filled(self) -> None:
        """Seals blocks that became full in the last kernel's step."""
        if self._filled is not None:
            (before, step), self._filled = self._filled, None
            self._seal(before, step)

    def writes(self) -> bool:
        """Whether kernels do as plain operations: seal blocks, write them where other kernels read them, and put tokens
        into open blocks. The layer must have a token."""
        assert self._keys is not None and self._values is not None
        shapes = [(1, tail.shape[1], 2 * BLOCK_TOKENS, tail.shape[3]) for tail in (self._keys, self._values)]
        keys, values = (mx.random.normal(shape).astype(self._keys.dtype) for shape in shapes)
        # As keys of real models are: far from zero on one side.
        keys = keys - mx.arange(keys.shape[3]).astype(keys.dtype)
        sealed, plain = (sealing.seal(keys, values, self.policy, kernels=kernels) for kernels in (True, False))
        if not sealing.are_alike(sealed, plain):
            return False
        fresh = slots_of(sealed, 2)
        group = SlotGroup([self.layer], kernels=True)
        slots = group.take(3)
        numbers = mx.array([slot.number for slot in slots], mx.uint32)
        group.write(0, numbers[:2], fresh)
        pairs = [(array[numbers[:2]], new) for array, new in zip(group.layer(0), fresh, strict=True)]
        if self.policy.quantizes:
            group.seal(0, numbers[2:], (keys, values), [(0, 1)], self.policy)
            mx.eval(group.arrays())
            pairs += [(array[slots[2].number], new[1]) for array, new in zip(group.layer(0), fresh, strict=True)]
        new, old = (keys, values), (keys[:, :, :BLOCK_TOKENS], values[:, :, :BLOCK_TOKENS])
        joined, rest = block_kernels.append(old, new, [100], [1], 3 * BLOCK_TOKENS)
        stacked = block_kernels.stack(old, (keys[:, :, :9], values[:, :, :9]), 2)
        for at, array in enumerate(new):
            behind = mx.concatenate([array[:, :, :100], array], axis=2)
            pairs.append((joined[at][:, :, : behind.shape[2]], behind))
            pairs.append((rest[at], behind[:, :, BLOCK_TOKENS : 2 * BLOCK_TOKENS]))
            pairs += [(stacked[at][:1], old[at]), (stacked[at][1:, :, :9], array[:, :, :9])]
        mx.eval(group.arrays())
        return all(mx.array_equal(one, other) for one, other in pairs)

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        """Announces that the next call has this many tokens of every sequence, with padding after them."""
        self._ragged = list(lengths)

    def finalize(self) -> None:
        """Ends the padding."""
        self._ragged = None

    def take_back(self, lengths: Sequence[int], *, clean: bool) -> None:
        """Shortens every sequence to so many tokens, within its open block.

        Args:
            clean: fills the places of the others with zeros. It is needed if they may have NaN, which spreads even if
                it is masked.
        """
        assert all(left // BLOCK_TOKENS == now // BLOCK_TOKENS for left, now in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)
        if clean and self._keys is not None:
            self._keys, self._values = self._open()
            opened = mx.array([length % BLOCK_TOKENS for length in lengths])[:, None, None, None]
            kept = mx.arange(self._keys.shape[2])[:, None] < opened
            self._keys, self._values = mx.where(kept, self._keys, 0), mx.where(kept, self._values, 0)

    @property
    def state(self) -> list[mx.array]:
        """Returns the arrays to evaluate after a call."""
        arrays = [] if self._keys is None or self._values is None else [self._keys, self._values]
        if self._group.is_written(self._place):
            arrays += [*self._group.layer(self._place), self._group.written(self._place)]
        return arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the open blocks."""
        return 0 if self._keys is None or self._values is None else self._keys.nbytes + self._values.nbytes

    def tail(self, sequences: int | slice, count: int) -> tuple[mx.array, mx.array]:
        """Returns keys and values of the first `count` tokens of the sequences' open blocks, as views."""
        span = slice(sequences, sequences + 1) if isinstance(sequences, int) else sequences
        assert count <= max(length % BLOCK_TOKENS for length in self.lengths[span])
        keys, values = self._open()
        return keys[span, :, :count], values[span, :, :count]

    def restore(self, tail: tuple[mx.array, mx.array] | None, length: int) -> None:
        """Fills an empty cache of one sequence, whose block tables have been filled, with its open tail."""
        self.lengths, self._writable = [length], False
        self._keys, self._values = tail if tail is not None else (None, None)

    def extract(self, sequence: int, batch: PagedBatch) -> PagedKVCache:
        """Returns the sequence as a cache of its own in `batch`, with a copy of its open block."""
        cache = PagedKVCache(self.layer, self.policy, self.window, lengths=[self.lengths[sequence]], batch=batch)
        if self._keys is not None:
            keys, values = self.tail(sequence, self.lengths[sequence] % BLOCK_TOKENS)
            cache._keys, cache._values = sealing.copied(keys), sealing.copied(values)
        return cache

    def filter(self, sequences: Sequence[int]) -> None:
        """Keeps these sequences, in this order. The batch keeps their tables."""
        self.lengths = [self.lengths[sequence] for sequence in sequences]
        self._writable = False
        if self._keys is not None and self._values is not None:
            whole = self._steps_by_kernel and self._keys.shape[2] == self._values.shape[2] == BLOCK_TOKENS
            more = padded_rows(len(sequences)) - len(sequences) if whole else 0
            indices = _rows(*sequences, *[*sequences[:1]] * more)
            self._keys, self._values, self._writable = self._keys[indices], self._values[indices], whole

    @staticmethod
    def merge(caches: Sequence[PagedKVCache], batch: PagedBatch) -> PagedKVCache:
        """Merges sequences' open blocks into one cache, in a batch that has their tables."""
        first = caches[0]
        lengths = [length for cache in caches for length in cache.lengths]
        merged = PagedKVCache(first.layer, first.policy, first.window, lengths=lengths, batch=batch)
        if any(cache._keys is not None for cache in caches):
            sequences = [len(cache.lengths) for cache in caches]
            opened = [cache._open() if cache._keys is not None else (None, None) for cache in caches]
            merged._keys = sealing.rows_joined([keys for keys, _ in opened], sequences, axis=2)
            merged._values = sealing.rows_joined([values for _, values in opened], sequences, axis=2)
        return merged

    def extend(self, other: PagedKVCache) -> None:
        """Appends the sequences of another batch's cache. The batch appends their tables."""
        arrays = self._keys, self._values, other._keys, other._values
        if self._steps_by_kernel and all(each is not None and 0 < each.shape[2] <= BLOCK_TOKENS for each in arrays):
            lengths = [*self.lengths, *other.lengths]
            self._keys, self._values = block_kernels.stack(self._open(), other._open(), padded_rows(len(lengths)))
            self.lengths, self._writable = lengths, True
            return
        merged = PagedKVCache.merge([self, other], self.batch)
        self.lengths, self._keys, self._values = merged.lengths, merged._keys, merged._values
        self._writable = False

    # Inside.

    @property
    def _steps_by_kernel(self) -> bool:
        return self.batch.reads is Reads.KERNEL and self._group.kernels

    def _open(self) -> tuple[mx.array, mx.array]:
        """Returns the open blocks without those that no sequence has."""
        assert self._keys is not None and self._values is not None
        rows = len(self.lengths)
        if self._keys.shape[0] == rows:
            return self._keys, self._values
        return self._keys[:rows], self._values[:rows]

    def _once(self, what: Any, make: Callable[[], Any]) -> Any:
        return self.batch.get(self.lengths, self._ragged, what, make)

    def _step(self, count: int) -> Step:
        padded, exact = self._ragged is not None, not self.policy.quantizes
        return self._once(
            ("step", self.window, count),
            lambda: step_of(self.lengths, self.window, self._new(count), padded=padded, exact=exact),
        )

    def _reads_in_place(self, count: int, step: Step) -> bool:
        reads = self.batch.reads is Reads.IN_PLACE and step.used > 0 and count == 1 and self._ragged is None
        return reads or self._by_kernel(count)

    def _by_kernel(self, count: int) -> bool:
        return count == 1 and self.batch.reads is Reads.KERNEL and self._ragged is None

    def _new_tokens(self, step: Step, new: Sequence[int] | None, rows: int) -> NewTokens:
        self._reach(step)
        stop = [length // BLOCK_TOKENS for length in self.lengths]
        slots, starts = self.batch.blocks(self._number, step.first, stop)
        assert self._keys is not None
        return NewTokens.of(slots, starts, self.lengths, step.first, self.window, self._keys.shape[1], new, rows)

    def _new(self, count: int) -> list[int]:
        return self._ragged or [count] * len(self.lengths)

    def _tables(self) -> list[BlockTable]:
        return [sequence[self._number] for sequence in self.batch.tables]

    def _table(self, step: Step) -> mx.array:
        """Returns slots, (sequences, step.used) uint32. If a sequence has fewer, its last one is repeated, or a slot of
        zeros is used."""

        def make() -> mx.array:
            self._reach(step)
            found = []
            for table, first in zip(self._tables(), step.first, strict=True):
                numbers = table.numbers(first, first + step.used)
                if missing := step.used - len(numbers):
                    # Not another sequence's slot: it may have NaN, which spreads even if it is masked.
                    numbers += [numbers[-1] if numbers else self.batch.blank(self._number)] * missing
                found.append(numbers)
            return mx.array(found, dtype=mx.uint32)

        return self._once(("table", self._number), make)

    def _flat(self, step: Step, kv_heads: int) -> dict[str, Any]:
        """Returns the parts of a `DecodeView` that are the same for all layers of the group."""

        def make() -> dict[str, Any]:
            tables = zip(self._tables(), step.first, self.lengths, strict=True)
            numbers = [table.numbers(first, length // BLOCK_TOKENS) for table, first, length in tables]
            owners = [sequence for sequence, those in enumerate(numbers) for _ in those]
            slots = mx.array([number for sequence in numbers for number in sequence], mx.uint32) + 0
            sequences = mx.array(owners, mx.uint32) + 0
            behind = heads = None
            if self.window:
                starts = [
                    (first + at) * BLOCK_TOKENS
                    for those, first in zip(numbers, step.first, strict=True)
                    for at in range(len(those))
                ]
                ends = mx.array(
                    [
                        self.lengths[sequence] - self.window - start
                        for sequence, start in zip(owners, starts, strict=True)
                    ]
                )
                behind = mx.arange(BLOCK_TOKENS) <= ends[:, None, None, None]
            if step.exact:
                heads = heads_of(sequences, slots, kv_heads)
            return {
                "slots": slots,
                "sequences": sequences,
                "counts": [len(those) for those in numbers],
                "behind": behind,
                "heads": heads,
            }

        return self._once(("flat", self._number), make)

    def _reach(self, step: Step) -> None:
        """Takes slots for the blocks that the step fills, and drops those that none of its queries can see."""
        for table, first, after in zip(self._tables(), step.first, step.after, strict=True):
            table.drop(first)
            table.reach(after // BLOCK_TOKENS, self._group)

    def _append_step(self, keys: mx.array, values: mx.array, opened: list[int]) -> None:
        """Appends one token a sequence, each at its own place in the tail."""
        # With more columns, a sequence that fills its block would take the others' tails with it.
        self._fit(BLOCK_TOKENS)
        assert self._keys is not None and self._values is not None
        place = opened[0]
        if opened.count(place) == len(opened):
            span = (slice(None), slice(None), slice(place, place + 1))
            self._keys, self._values = sealing.put(self._keys, span, keys), sealing.put(self._values, span, values)
            return
        places = self._once("places", lambda: on_device(opened)[:, None, None, None])
        self._keys = mx.put_along_axis(self._keys, places, keys, axis=2)
        self._values = mx.put_along_axis(self._values, places, values, axis=2)

    def _append_ragged(self, keys: mx.array, values: mx.array, step: Step) -> None:
        """Appends several tokens a sequence, of different numbers and at different places."""
        assert self._keys is not None and self._values is not None
        before = max(step.opened)
        if len(step.opened) == 1:
            # The same as below, with operations for which CUDA needs to compile no kernel.
            self._keys = mx.concatenate([self._keys[:, :, :before], keys], axis=2)
            self._values = mx.concatenate([self._values[:, :, :before], values], axis=2)
            self._fit(step.columns)
            return

        def make() -> mx.array:
            places = mx.arange(step.columns)[None]
            starts = mx.array(step.opened)[:, None]
            last = before + keys.shape[2] - 1
            return mx.where(places < starts, places, mx.minimum(before + places - starts, last))[:, None, :, None]

        places = self._once("gather", make)
        self._keys = mx.take_along_axis(mx.concatenate([self._keys[:, :, :before], keys], axis=2), places, axis=2)
        self._values = mx.take_along_axis(mx.concatenate([self._values[:, :, :before], values], axis=2), places, axis=2)

    def _fit(self, columns: int, rows: int = 0) -> None:
        """Gives the tail this many columns: padded prompts leave more than a block has. And at least so many rows."""
        assert self._keys is not None and self._values is not None
        more, rows = columns - self._keys.shape[2], max(0, rows - self._keys.shape[0])
        if more > 0 or rows:
            widths = [(0, rows), (0, 0), (0, max(0, more)), (0, 0)]
            self._keys, self._values = mx.pad(self._keys, widths), mx.pad(self._values, widths)
        if more < 0:
            self._keys, self._values = self._keys[:, :, :columns], self._values[:, :, :columns]

    def _seal(self, before: list[int], step: Step, rest: Sequence[mx.array] = ()) -> None:
        """Seals the blocks that became full in a step of sequences with these lengths before it.

        Args:
            rest: keys and values of the columns after these blocks; empty if they are yet to be copied.
        """
        most = max(step.full, default=0)
        if not most:
            return
        assert self._keys is not None and self._values is not None
        sequences = [sequence for sequence, full in enumerate(step.full) if full]
        slots = self._fresh_slots(step, before, sequences)
        if self._group.kernels and self.policy.quantizes:
            places = [(sequence, block) for sequence in sequences for block in range(step.full[sequence])]
            self._group.seal(self._place, slots, (self._keys, self._values), places, self.policy)
        else:
            self._group.write(self._place, slots, self._sealed(step, sequences, most))
        if rest:
            self._keys, self._values = rest
        elif step.rest is not None:
            self._keys = mx.take_along_axis(self._keys, step.rest, axis=2)
            self._values = mx.take_along_axis(self._values, step.rest, axis=2)
        elif self._keys.shape[2] > BLOCK_TOKENS:
            # A copy, because a view would keep the whole chunk alive.
            stop = most * BLOCK_TOKENS
            self._keys = sealing.copied(self._keys[:, :, stop:])
            self._values = sealing.copied(self._values[:, :, stop:])

    def _sealed(self, step: Step, sequences: list[int], most: int) -> Sealed:
        """Returns the blocks that became full, sequence after sequence; of these sequences at most `most` each."""
        keys, values = self._open()
        if len(sequences) < len(step.full):
            which = (
                slice(sequences[0], sequences[-1] + 1)
                if sequences[-1] - sequences[0] + 1 == len(sequences)
                else mx.array(sequences)
            )
            keys, values = keys[which], values[which]
        # All sequences at once: a device takes as long for an operation on one sequence as on all.
        fresh = slots_of(sealing.seal(keys, values, self.policy, blocks=most), most)
        # If a sequence fills fewer blocks, its others are not blocks.
        real = [
            index * most + block for index, sequence in enumerate(sequences) for block in range(step.full[sequence])
        ]
        if len(real) < len(sequences) * most:
            which = mx.array(real, mx.uint32)
            fresh = fresh._make(array[which] for array in fresh)
        return fresh

    def _fresh_slots(self, step: Step, before: list[int], sequences: Sequence[int]) -> mx.array:
        def make() -> mx.array:
            self._reach(step)
            tables = self._tables()
            starts = [before[sequence] // BLOCK_TOKENS for sequence in sequences]
            found = [
                tables[sequence].numbers(start, start + step.full[sequence])
                for sequence, start in zip(sequences, starts, strict=True)
            ]
            return mx.array([number for numbers in found for number in numbers], mx.uint32)

        return self.batch.get(before, self._ragged, ("fresh", self._number), make)


def _with_open(before: mx.array, opened: mx.array) -> mx.array:
    """Concatenates blocks and open blocks, (sequences, kv_heads, tokens, dim), along the tokens."""
    if before.size + opened.size <= JOINED_MAX:
        return mx.concatenate([before, opened], axis=2)
    sequences, heads, tokens, dim = before.shape
    at_once = max(1, JOINED_MAX // ((tokens + opened.shape[2]) * dim))
    pairs = before.flatten(0, 1), opened.flatten(0, 1)
    spans = [slice(first, first + at_once) for first in range(0, sequences * heads, at_once)]
    parts = [mx.concatenate([array[span] for array in pairs], axis=1) for span in spans]
    return mx.concatenate(parts, axis=0).reshape(sequences, heads, -1, dim)


@lru_cache(256)
def _rows(*rows: int) -> mx.array:
    return mx.array(rows, mx.uint32)


def on_device(numbers: list[int]) -> mx.array:
    """Returns numbers that every layer reads, as an array in the device's memory. Otherwise the device would read the
    host's memory each time."""
    return mx.array(numbers) + 0


def heads_of(sequences: mx.array, slots: mx.array, kv_heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """As `DecodeView.heads`."""
    heads, blocks = mx.arange(kv_heads, dtype=mx.uint32), mx.arange(slots.size, dtype=mx.uint32)
    return tuple(numbers[:, None] * kv_heads + heads for numbers in (sequences, slots, blocks))  # type: ignore[return-value]
