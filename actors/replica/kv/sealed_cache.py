"""A layer's cache of sealed blocks and an open tail, for one row or a batch. Replaces mlx-lm's caches in any model.

The position law: a query attends to earlier blocks as sealed, and inside its own block to keys and values in full
precision. So what a row computes depends on its tokens alone, not on chunks or batch mates.

A layer's arrays hold rows of different lengths. The first `first[r]` blocks of row r are dropped, behind a window:

    sealed    whole blocks, left-aligned: column c of row r is position 256 * first[r] + c; see `sealing.py`
    tail      the open block in full precision: column c is position 256 * (lengths[r] // 256) + c;
              keys (rows, kv_heads, columns, key_dim) and values (rows, kv_heads, columns, value_dim), in the model's
              dtype. Columns behind a row's length are padding

`update_and_fetch` returns `[sealed, tail, new]` as plain arrays, the sealed ones dequantized, and `make_mask` says
which columns a query may see. MLX is lazy: if `attention.py` computes with the sealed arrays themselves, the
dequantized ones are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from . import sealing
from .sealing import Sealed, SealPolicy

Choose = Callable[[int, int], bool]
"""Says for (rows, sealed tokens per row) whether a decode step multiplies codes directly; see `attention.py`."""


COLUMNS = 64
"""A padded batch's tail has a multiple of this many columns: devices compile kernels for every new shape."""


class Shared:
    """State shared by all layers of a batch: `direct`, and values that all layers need in a step, such as masks, cached
    until the rows' lengths change. Lists of lengths never change in place, so identical ones need no comparison."""

    def __init__(self, direct: Choose | None = None) -> None:
        self.direct = direct
        self._lengths: list[int] | None = None
        self._ragged: list[int] | None = None
        self._kept: dict[Any, Any] = {}

    def get(self, lengths: list[int], ragged: list[int] | None, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the value cached under `key` for these lengths; makes it if there is none."""
        if (lengths is not self._lengths and lengths != self._lengths) or ragged != self._ragged:
            self._lengths, self._ragged, self._kept = lengths, ragged, {}
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True)
class View:
    """What attention reads in one call: `sealed` blocks, then the tail's `keys` and `values` in full precision, shapes
    as in the module's docstring. `plain_keys` is the array that the model got instead, to recognize its call."""

    sealed: Sealed
    keys: mx.array
    values: mx.array
    plain_keys: mx.array


class SealedKVCache:
    """The KV of one layer for one row or several.

    Args:
        window: how many of the last tokens a query attends to; 0 for all.
        lengths: tokens of every row.

    Attributes:
        first: number of dropped blocks of every row.
        shared: state shared with the other layers.
        view: what the last `update_and_fetch` returned; None if nothing of it is sealed.
    """

    def __init__(
        self, policy: SealPolicy, window: int = 0, *, lengths: Sequence[int] = (0,), shared: Shared | None = None
    ) -> None:
        self.policy = policy
        self.window = window
        self.lengths = list(lengths)
        self.first = [0] * len(self.lengths)
        self.view: View | None = None
        self.shared = shared or Shared()
        self._sealed: Sealed | None = None
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._ragged: list[int] | None = None

    # Called by the model.

    @property
    def offset(self) -> Any:
        """The position of every row's next token: an int for one row, else `(rows,) int32`."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        return self._once("offset", lambda: on_device(self.lengths))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Returns the mask of the next `N` queries of every row; call it before `update_and_fetch`.

        Returns:
            `(rows, 1, N, columns) bool`, True for columns that a query may see; None if it may see all.
        """
        step = self._step(N)
        key = ("mask", N, window_size, tuple(self.first))
        return self._once(key, lambda: mask_of(step, self.lengths, self.first, N, window_size or 0))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values, `(rows, kv_heads, N, dim)` in the model's dtype.

        Returns:
            All keys and values, `(rows, kv_heads, columns, dim)`: sealed blocks dequantized, then the tail.
        """
        count = keys.shape[2]
        step = self._step(count)
        # Arrays that the view refers to could not be changed in place.
        self.view = None
        if self._keys is None or self._values is None:
            self._keys = keys[:, :, :0]
            self._values = values[:, :, :0]
        if count == 1:
            self._append_step(keys, values, step.opened)
        elif not any(step.opened):
            self._keys, self._values = keys[:, :, : step.columns], values[:, :, : step.columns]
        elif self._ragged is None and len(self.lengths) == 1:
            self._keys = mx.concatenate([self._keys[:, :, : step.opened[0]], keys], axis=2)
            self._values = mx.concatenate([self._values[:, :, : step.opened[0]], values], axis=2)
        else:
            self._append_ragged(keys, values, step)
        open_keys, open_values = self._keys[:, :, : step.columns], self._values[:, :, : step.columns]
        self._seal_full(step)
        if step.used:
            assert self._sealed is not None
            sealed = sealing.blocks_of(self._sealed, 0, step.used)
            before_keys, before_values = sealing.unseal(sealed, self.policy, values.shape[3], keys.dtype)
            keys = mx.concatenate([before_keys, open_keys], axis=2)
            values = mx.concatenate([before_values, open_values], axis=2)
            self.view = View(sealed, open_keys, open_values, keys)
        else:
            keys, values = open_keys, open_values
        self._drop()
        return keys, values

    # Called by the executor.

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        """Announces that the next call has this many tokens per row, and padding after them."""
        self._ragged = list(lengths)

    def finalize(self) -> None:
        """Ends the padding that `prepare` announced."""
        self._ragged = None

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for evaluation."""
        arrays = [] if self._keys is None or self._values is None else [self._keys, self._values]
        return [*arrays, *(self._sealed or ())]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def blocks(self, rows: int | slice, start: int, stop: int) -> Sealed | None:
        """Returns a view of the rows' blocks [start, stop), counted from their first tokens; None if one is dropped.

        Several rows must not have dropped any. Some of them may have fewer blocks; the rest is undefined.
        """
        span = slice(rows, rows + 1) if isinstance(rows, int) else rows
        first = min(self.first[span])
        if start < max(self.first[span]) or self._sealed is None:
            return None
        assert stop * BLOCK_TOKENS <= max(self.lengths[span]) and (not first or len(self.first[span]) == 1)
        return sealing.blocks_of(sealing.rows_of(self._sealed, span), start - first, stop - first)

    def tail(self, rows: int | slice, count: int) -> tuple[mx.array, mx.array]:
        """Returns views of the rows' first `count` open keys and values, `(rows, kv_heads, count, dim)`."""
        span = slice(rows, rows + 1) if isinstance(rows, int) else rows
        assert self._keys is not None and self._values is not None
        assert count <= max(length % BLOCK_TOKENS for length in self.lengths[span])
        return self._keys[span, :, :count], self._values[span, :, :count]

    def restore(self, sealed: Sealed | None, tail: tuple[mx.array, mx.array] | None, length: int) -> None:
        """Fills an empty cache of one row.

        Args:
            sealed: the row's last whole blocks, one row; None if there are none.
            tail: keys and values of the open block, `(1, kv_heads, tokens, dim)`; None if it is empty.
            length: the row's tokens, including dropped ones.
        """
        held = 0 if sealed is None else sealed.tokens // BLOCK_TOKENS
        self.lengths, self.first = [length], [length // BLOCK_TOKENS - held]
        self._sealed = sealed
        self._keys, self._values = tail if tail is not None else (None, None)

    def extract(self, row: int) -> SealedKVCache:
        """Returns a row as a cache of its own, which shares no memory with this one."""
        cache = SealedKVCache(self.policy, self.window, lengths=[self.lengths[row]])
        held = self.lengths[row] // BLOCK_TOKENS - self.first[row]
        cache.first = [self.first[row]]
        if held:
            sealed = self.blocks(row, self.first[row], self.first[row] + held)
            assert sealed is not None
            cache._sealed = sealing.copy(sealed)
        if self._keys is not None:
            keys, values = self.tail(row, self._open(row))
            cache._keys, cache._values = sealing.copied(keys), sealing.copied(values)
        return cache

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self.first = [self.first[row] for row in rows]
        indices = mx.array(list(rows), dtype=mx.uint32)
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[indices], self._values[indices]
        if self._sealed is not None:
            rest, held = sealing.rows_of(self._sealed, indices), self._held()
            self._sealed = sealing.blocks_of(rest, 0, held) if held else None

    @staticmethod
    def merge(caches: Sequence[SealedKVCache], shared: Shared | None = None) -> SealedKVCache:
        """Returns a new cache with the rows of all caches."""
        lengths = [length for cache in caches for length in cache.lengths]
        merged = SealedKVCache(caches[0].policy, caches[0].window, lengths=lengths, shared=shared)
        merged.first = [first for cache in caches for first in cache.first]
        merged._gather(caches)
        return merged

    def extend(self, other: SealedKVCache) -> None:
        """Appends the rows of another batch."""
        merged = SealedKVCache.merge([self, other])
        self.lengths, self.first = merged.lengths, merged.first
        self._sealed, self._keys, self._values = merged._sealed, merged._keys, merged._values

    # Inside.

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        return self.shared.get(self.lengths, self._ragged, key, make)

    def _step(self, count: int) -> Step:
        key = ("step", count, self.window and tuple(self.first))
        width = count if self._ragged else None
        return self._once(key, lambda: step_of(self.lengths, self.first, self._new(count), width))

    def _open(self, row: int) -> int:
        return self.lengths[row] % BLOCK_TOKENS

    def _new(self, count: int) -> list[int]:
        return self._ragged or [count] * len(self.lengths)

    def _held(self) -> int:
        """Returns the largest number of sealed blocks of a row."""
        held = (length // BLOCK_TOKENS - first for length, first in zip(self.lengths, self.first, strict=True))
        return max(held, default=0)

    def _append_step(self, keys: mx.array, values: mx.array, opened: list[int]) -> None:
        """Appends one token per row, `(rows, kv_heads, 1, dim)`, each at its row's own place in the tail."""
        self._reserve(BLOCK_TOKENS)
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
        """Appends different numbers of tokens per row, padded to `(rows, kv_heads, N, dim)`, each row at its own
        place."""
        before = max(step.opened)

        def make() -> mx.array:
            places = mx.arange(step.columns)[None]
            starts = mx.array(step.opened)[:, None]
            last = before + keys.shape[2] - 1
            return mx.where(places < starts, places, mx.minimum(before + places - starts, last))[:, None, :, None]

        places = self._once("gather", make)
        assert self._keys is not None and self._values is not None
        self._keys = mx.take_along_axis(mx.concatenate([self._keys[:, :, :before], keys], axis=2), places, axis=2)
        self._values = mx.take_along_axis(mx.concatenate([self._values[:, :, :before], values], axis=2), places, axis=2)

    def _reserve(self, columns: int) -> None:
        assert self._keys is not None and self._values is not None
        more = columns - self._keys.shape[2]
        if more > 0:
            widths = [(0, 0), (0, 0), (0, more), (0, 0)]
            self._keys, self._values = mx.pad(self._keys, widths), mx.pad(self._values, widths)

    def _seal_full(self, step: Step) -> None:
        """Counts the new tokens, and seals the blocks that are full now."""
        assert self._keys is not None and self._values is not None
        self.lengths = step.after
        if not any(step.full):
            return
        stop = max(step.full) * BLOCK_TOKENS
        if len(step.full) == 1:
            fresh = sealing.seal(self._keys[:, :, :stop], self._values[:, :, :stop], self.policy)
            held = step.held[0] and self._sealed
            self._sealed = sealing.join_tokens([held, fresh]) if held else fresh
        else:
            self._seal_rows(step, stop)
        if step.rest is not None:
            self._keys = mx.take_along_axis(self._keys, step.rest, axis=2)
            self._values = mx.take_along_axis(self._values, step.rest, axis=2)
        elif self._keys.shape[2] > BLOCK_TOKENS:
            # A copy, because a view would keep the whole chunk alive.
            self._keys = sealing.copied(self._keys[:, :, stop:])
            self._values = sealing.copied(self._values[:, :, stop:])

    def _seal_rows(self, step: Step, stop: int) -> None:
        """Seals the first `stop` tail columns of all rows at once, because a device takes as long for one row as for
        all. A row that fills fewer blocks gets garbage behind them, masked until a block of its own replaces it."""
        assert self._keys is not None and self._values is not None
        rows = [row for row, full in enumerate(step.full) if full]
        if not any(step.held):
            self._sealed = sealing.seal(self._keys[:, :, :stop], self._values[:, :, :stop], self.policy)
            return
        which = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else mx.array(rows)
        fresh = sealing.seal(self._keys[which][:, :, :stop], self._values[which][:, :, :stop], self.policy)
        assert self._sealed is not None
        held = max(have + full for have, full in zip(step.held, step.full, strict=True))
        sealed = sealing.pad_blocks(self._sealed, max(held, self._sealed.tokens // BLOCK_TOKENS))
        for start, end in _runs([(row - index, step.held[row], step.full[row]) for index, row in enumerate(rows)]):
            row, full = rows[start], step.full[rows[start]]
            sealed = sealing.place(sealed, row, step.held[row], sealing.part_of(fresh, start, end, full))
        self._sealed = sealed

    def _drop(self) -> None:
        """Drops blocks that no later query will see."""
        if not self.window or self._sealed is None:
            return
        wanted = [max(0, length - self.window + 1) // BLOCK_TOKENS for length in self.lengths]
        wanted = [min(w, length // BLOCK_TOKENS) for w, length in zip(wanted, self.lengths, strict=True)]
        if wanted == self.first:
            return
        rows: list[Sealed | None] = []
        for row, (start, length) in enumerate(zip(wanted, self.lengths, strict=True)):
            stop = length // BLOCK_TOKENS
            rows.append(self.blocks(row, start, stop) if stop > start else None)
        self.first = wanted
        self._sealed = sealing.join_rows(rows, [1] * len(rows))

    def _gather(self, caches: Sequence[SealedKVCache]) -> None:
        """Joins the arrays of `caches`, which have this cache's rows."""
        rows = [len(cache.lengths) for cache in caches]
        blocks = [
            None if cache._sealed is None else sealing.blocks_of(cache._sealed, 0, cache._held()) for cache in caches
        ]
        self._sealed = sealing.join_rows(blocks, rows) if self._held() else None
        if any(cache._keys is not None for cache in caches):
            self._keys = sealing.rows_joined([cache._keys for cache in caches], rows, axis=2)
            self._values = sealing.rows_joined([cache._values for cache in caches], rows, axis=2)


def _runs(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Returns the ranges [start, end) of consecutive equal items."""
    starts = [index for index in range(len(items)) if index == 0 or items[index] != items[index - 1]]
    return list(zip(starts, [*starts[1:], len(items)], strict=True))


def on_device(numbers: list[int]) -> mx.array:
    """Returns `(numbers,) int32` in the device's memory, for numbers that every layer reads. Without the addition the
    device would read the host's memory each time."""
    return mx.array(numbers) + 0


@dataclass(frozen=True)
class Step:
    """Row lengths and block counts of one call of a layer.

    Attributes:
        opened: tokens in every row's open block before the call.
        after: the rows' lengths after it.
        held: sealed blocks of every row before it.
        full: blocks that every row fills in it.
        used: the most sealed blocks that a row's queries see.
        columns: columns of the tail with the new tokens.
        rest: `(rows, 1, 256, 1) int32`, the tail columns after each row's filled blocks, which become the new tail;
            None if no gather is needed: no block is filled, one token per row, or one row.
    """

    opened: list[int]
    after: list[int]
    held: list[int]
    full: list[int]
    used: int
    columns: int
    rest: mx.array | None


def step_of(lengths: list[int], first: list[int], new: list[int], width: int | None = None) -> Step:
    """Returns the `Step` of a call.

    Args:
        lengths: tokens of every row before.
        first: dropped blocks of every row.
        new: new tokens of every row.
        width: columns of a padded batch, whose tail is rounded up to a multiple of `COLUMNS`; None without padding.
    """
    opened = [length % BLOCK_TOKENS for length in lengths]
    ends = [o + more for o, more in zip(opened, new, strict=True)]
    full = [end // BLOCK_TOKENS for end in ends]
    after = [length + more for length, more in zip(lengths, new, strict=True)]
    last = [max(0, (length - 1) // BLOCK_TOKENS - dropped) for length, dropped in zip(after, first, strict=True)]
    columns = max(ends, default=0)
    if width is not None:
        columns = -(-columns // COLUMNS) * COLUMNS
        columns = columns if any(opened) else min(columns, width)
    rest = None
    if any(full) and max(new) > 1 and len(new) > 1:
        places = mx.array(full)[:, None] * BLOCK_TOKENS + mx.arange(BLOCK_TOKENS)
        rest = mx.minimum(places, columns - 1)[:, None, :, None]
    return Step(
        opened=opened,
        after=after,
        held=[length // BLOCK_TOKENS - dropped for length, dropped in zip(lengths, first, strict=True)],
        full=full,
        used=max(last, default=0),
        columns=columns,
        rest=rest,
    )


def mask_of(step: Step, lengths: list[int], first: list[int], count: int, window: int) -> mx.array | None:
    """Returns the mask of one call, over the columns of `update_and_fetch`.

    Args:
        lengths: tokens of every row before the call.
        first: dropped blocks of every row.
        count: queries of every row; those after its new tokens are padding.
        window: how many of the last tokens a query attends to; 0 for all.

    Returns:
        `(rows, 1, count, columns) bool`, True for columns that a query may see; None if it may see all.
    """
    alike = len(set(lengths)) == 1 and len(set(first)) == 1
    if count == 1 and alike and not (window and first[0] * BLOCK_TOKENS <= lengths[0] - window):
        return None
    before, after = mx.array(lengths)[:, None], mx.array(step.after)[:, None]
    # A query in the padding sees what the row's last one sees: with every column masked its result would be NaN.
    queries = mx.minimum(before + mx.arange(count)[None], after - 1)[:, None, :, None]
    blocks = queries // BLOCK_TOKENS * BLOCK_TOKENS
    inside = (before // BLOCK_TOKENS * BLOCK_TOKENS)[:, None, None] + mx.arange(step.columns)
    columns, seen = inside, (inside >= blocks) & (inside <= queries)
    if step.used:
        starts = mx.array([dropped * BLOCK_TOKENS for dropped in first])[:, None, None, None]
        sealed = starts + mx.arange(step.used * BLOCK_TOKENS)
        columns = mx.concatenate([sealed, inside], axis=3)
        seen = mx.concatenate([sealed < blocks, seen], axis=3)
    if window:
        seen = seen & (columns > queries - window)
    return seen
