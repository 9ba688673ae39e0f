"""A cache of sealed blocks and an open tail, for one row or a batch; stands in for mlx-lm's caches in any model.

The position law: a query attends to the full blocks before its own block as sealed, and inside its own block to keys
and values in full precision. So what a row computes depends on its tokens alone, not on chunks or company.

A layer's arrays, for rows of different lengths; the first `first[r]` blocks of a row are dropped, behind a window:

    sealed    whole blocks, left-aligned: column c of row r is position 256 * first[r] + c
    tail      the open block in full precision: column c is position 256 * (lengths[r] // 256) + c

`update_and_fetch` gives attention `[sealed, tail, new]` as plain arrays, the sealed ones dequantized, and `make_mask`
says which of them a query may see. MLX is lazy: where `attention.py` computes with the sealed arrays themselves, the
dequantized ones are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..kv_store.blocks import BLOCK_TOKENS
from . import sealing
from .sealing import Sealed, SealPolicy

Choose = Callable[[int, int], bool]
"""Whether a decode step of (rows, sealed tokens a row) multiplies codes directly; see `attention.py`."""


class Shared:
    """What all layers of a batch have in common: `direct`, and what they compute alike in a step, kept until the rows'
    lengths change."""

    def __init__(self, direct: Choose | None = None) -> None:
        self.direct = direct
        self._key: Any = None
        self._kept: dict[Any, Any] = {}

    def get(self, key: Any, what: Any, make: Callable[[], Any]) -> Any:
        if key != self._key:
            self._key, self._kept = key, {}
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]


@dataclass(frozen=True)
class View:
    """What attention reads in one call: `sealed` blocks, then keys and values in full precision. `plain_keys` is the
    array that the model was given instead."""

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
        first: blocks of every row that are dropped.
        shared: with the other layers.
        view: what the last `update_and_fetch` gave; None where nothing of it is sealed.
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

    # What a model calls.

    @property
    def offset(self) -> Any:
        """The position of every row's next token."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        return self._once("offset", lambda: mx.array(self.lengths))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """(rows, 1, N, columns), true where a query may look; None where every query may look everywhere."""
        return self._once(("mask", N, window_size, tuple(self.first)), lambda: self._make_mask(N, window_size or 0))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (rows, kv_heads, N, dim) keys and values; returns all of them."""
        count = keys.shape[2]
        new = self._new(count)
        # What it refers to could not be changed in place.
        self.view = None
        if self._keys is None or self._values is None:
            self._keys = keys[:, :, :0]
            self._values = values[:, :, :0]
        used = self._sealed_columns(count) // BLOCK_TOKENS
        if count == 1:
            self._append_step(keys, values)
        elif len(self.lengths) == 1:
            self._keys = mx.concatenate([self._keys[:, :, : self._open(0)], keys], axis=2)
            self._values = mx.concatenate([self._values[:, :, : self._open(0)], values], axis=2)
        else:
            self._append_ragged(keys, values)
        columns = max(self._open(row) + more for row, more in enumerate(new))
        open_keys, open_values = self._keys[:, :, :columns], self._values[:, :, :columns]
        self._seal_full(new)
        if used:
            assert self._sealed is not None
            sealed = sealing.blocks_of(self._sealed, 0, used)
            before_keys, before_values = sealing.unseal(sealed, self.policy, values.shape[3], keys.dtype)
            keys = mx.concatenate([before_keys, open_keys], axis=2)
            values = mx.concatenate([before_values, open_values], axis=2)
            self.view = View(sealed, open_keys, open_values, keys)
        else:
            keys, values = open_keys, open_values
        self._drop()
        return keys, values

    # What the executor calls.

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        """The next call brings this many tokens of every row, and padding after them."""
        self._ragged = list(lengths)

    def finalize(self) -> None:
        """The padding is over."""
        self._ragged = None

    @property
    def state(self) -> list[mx.array]:
        arrays = [] if self._keys is None or self._values is None else [self._keys, self._values]
        return [*arrays, *(self._sealed or ())]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def blocks(self, row: int, start: int, stop: int) -> Sealed | None:
        """Blocks [start, stop) of the row, counted from its first token, as a view; None where one is dropped."""
        if start < self.first[row] or self._sealed is None:
            return None
        assert stop * BLOCK_TOKENS <= self.lengths[row]
        first = self.first[row]
        return sealing.blocks_of(sealing.rows_of(self._sealed, slice(row, row + 1)), start - first, stop - first)

    def tail(self, row: int, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first `count` tokens of the row's open block, as views."""
        assert self._keys is not None and self._values is not None and count <= self._open(row)
        return self._keys[row : row + 1, :, :count], self._values[row : row + 1, :, :count]

    def restore(self, sealed: Sealed | None, tail: tuple[mx.array, mx.array] | None, length: int) -> None:
        """Fill an empty cache of one row with its last sealed blocks and its open tail."""
        held = 0 if sealed is None else sealed.tokens // BLOCK_TOKENS
        self.lengths, self.first = [length], [length // BLOCK_TOKENS - held]
        self._sealed = sealed
        self._keys, self._values = tail if tail is not None else (None, None)

    def extract(self, row: int) -> SealedKVCache:
        """The row as a cache of its own, which shares no memory with this one."""
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
        """Keep these rows, in this order."""
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
        """Rows' caches as one; this one's memory is its own."""
        lengths = [length for cache in caches for length in cache.lengths]
        merged = SealedKVCache(caches[0].policy, caches[0].window, lengths=lengths, shared=shared)
        merged.first = [first for cache in caches for first in cache.first]
        merged._gather(caches)
        return merged

    def extend(self, other: SealedKVCache) -> None:
        """Append the rows of another batch."""
        merged = SealedKVCache.merge([self, other])
        self.lengths, self.first = merged.lengths, merged.first
        self._sealed, self._keys, self._values = merged._sealed, merged._keys, merged._values

    def trim_to(self, row: int, length: int) -> None:
        """Forget what follows the row's first `length` tokens.

        Raises:
            ValueError: that is inside a sealed block, of which full precision is gone, or in a dropped one.
        """
        inside = length // BLOCK_TOKENS != self.lengths[row] // BLOCK_TOKENS and length % BLOCK_TOKENS
        if length > self.lengths[row] or inside or length // BLOCK_TOKENS < self.first[row]:
            raise ValueError(f"a row of {self.lengths[row]} tokens cannot be cut to {length}")
        self.lengths[row] = length

    # Inside.

    def _once(self, what: Any, make: Callable[[], Any]) -> Any:
        return self.shared.get((tuple(self.lengths), self._ragged and tuple(self._ragged)), what, make)

    def _open(self, row: int) -> int:
        return self.lengths[row] % BLOCK_TOKENS

    def _new(self, count: int) -> list[int]:
        return self._ragged or [count] * len(self.lengths)

    def _held(self) -> int:
        """The most sealed blocks that a row has."""
        held = (length // BLOCK_TOKENS - first for length, first in zip(self.lengths, self.first, strict=True))
        return max(held, default=0)

    def _sealed_columns(self, count: int) -> int:
        """How many columns of sealed blocks the queries of the next `count` tokens see."""
        last = [length + more - 1 for length, more in zip(self.lengths, self._new(count), strict=True)]
        return BLOCK_TOKENS * max(max(0, p // BLOCK_TOKENS - first) for p, first in zip(last, self.first, strict=True))

    def _make_mask(self, count: int, window: int) -> mx.array | None:
        new = self._new(count)
        sealed = self._sealed_columns(count)
        opened = max(self._open(row) + more for row, more in enumerate(new))
        lengths = self.lengths
        alike = len(set(lengths)) == 1 and len(set(self.first)) == 1
        if count == 1 and alike and not (window and self.first[0] * BLOCK_TOKENS <= lengths[0] - window):
            return None
        ends = mx.array([length + more - 1 for length, more in zip(lengths, new, strict=True)])
        # A query in the padding sees what the row's last one sees: with nothing to see it would be no number.
        queries = mx.minimum(mx.array(lengths)[:, None] + mx.arange(count)[None], ends[:, None])[:, None, :, None]
        blocks = queries // BLOCK_TOKENS * BLOCK_TOKENS
        starts = mx.array([first * BLOCK_TOKENS for first in self.first])[:, None, None, None]
        bases = mx.array([length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths])[:, None, None, None]
        before = starts + mx.arange(sealed)
        inside = bases + mx.arange(opened)
        seen_before = before < blocks
        seen_inside = (inside >= blocks) & (inside <= queries)
        if window:
            seen_before = seen_before & (before > queries - window)
            seen_inside = seen_inside & (inside > queries - window)
        return mx.concatenate([seen_before, seen_inside], axis=3) if sealed else seen_inside

    def _append_step(self, keys: mx.array, values: mx.array) -> None:
        """One token a row, each at its own place in the tail."""
        opened = [self._open(row) for row in range(len(self.lengths))]
        self._reserve(BLOCK_TOKENS)
        assert self._keys is not None and self._values is not None
        if len(set(opened)) == 1:
            start = self._once("place", lambda: mx.array([opened[0]]))
            self._keys = mx.slice_update(self._keys, keys, start, axes=(2,))
            self._values = mx.slice_update(self._values, values, start, axes=(2,))
            return
        places = self._once("places", lambda: mx.array(opened)[:, None, None, None])
        self._keys = mx.put_along_axis(self._keys, places, keys, axis=2)
        self._values = mx.put_along_axis(self._values, places, values, axis=2)

    def _append_ragged(self, keys: mx.array, values: mx.array) -> None:
        """Several tokens a row, of different numbers and at different places."""
        opened = [self._open(row) for row in range(len(self.lengths))]
        before, columns = max(opened), max(o + n for o, n in zip(opened, self._new(keys.shape[2]), strict=True))

        def make() -> mx.array:
            places = mx.arange(columns)[None]
            starts = mx.array(opened)[:, None]
            return mx.where(places < starts, places, before + places - starts)[:, None, :, None]

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

    def _seal_full(self, new: Sequence[int]) -> None:
        """Count the new tokens, and seal the blocks that are full now."""
        assert self._keys is not None and self._values is not None
        opened = [self._open(row) for row in range(len(self.lengths))]
        self.lengths = [length + more for length, more in zip(self.lengths, new, strict=True)]
        full = [(o + more) // BLOCK_TOKENS for o, more in zip(opened, new, strict=True)]
        if not any(full):
            return
        before = [
            length // BLOCK_TOKENS - f - first for length, f, first in zip(self.lengths, full, self.first, strict=True)
        ]
        if len(full) == 1:
            stop = full[0] * BLOCK_TOKENS
            fresh = sealing.seal(self._keys[:, :, :stop], self._values[:, :, :stop], self.policy)
            self._sealed = (
                fresh if not before[0] or self._sealed is None else sealing.join_tokens([self._sealed, fresh])
            )
            # A copy: the whole chunk would stay alive with it.
            self._keys, self._values = (
                sealing.copied(self._keys[:, :, stop:]),
                sealing.copied(self._values[:, :, stop:]),
            )
            return
        # Neighbours that are alike in one go: a device takes as long for each operation on one row as on all.
        for start, end in _runs(list(zip(full, before, strict=True))):
            if full[start]:
                span = (slice(start, end), slice(None), slice(0, full[start] * BLOCK_TOKENS))
                self._place(start, before[start], sealing.seal(self._keys[span], self._values[span], self.policy))
        if self._keys.shape[2] > BLOCK_TOKENS:
            rest = mx.array([count * BLOCK_TOKENS for count in full])[:, None] + mx.arange(BLOCK_TOKENS)[None]
            rest = mx.minimum(rest, self._keys.shape[2] - 1)[:, None, :, None]
            self._keys = mx.take_along_axis(self._keys, rest, axis=2)
            self._values = mx.take_along_axis(self._values, rest, axis=2)

    def _place(self, row: int, block: int, fresh: Sealed) -> None:
        needed = max(self._held(), block + fresh.tokens // BLOCK_TOKENS)
        if self._sealed is None:
            rows = len(self.lengths)
            empty = (mx.zeros((rows, *array.shape[1:]), dtype=array.dtype) for array in fresh)
            self._sealed = Sealed(*empty)
        if self._sealed.tokens < needed * BLOCK_TOKENS:
            self._sealed = sealing.pad_blocks(self._sealed, needed)
        self._sealed = sealing.place(self._sealed, row, block, fresh)

    def _drop(self) -> None:
        """Let go of blocks that no later query will see."""
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
        self._sealed = _stack(rows, [1] * len(rows))

    def _gather(self, caches: Sequence[SealedKVCache]) -> None:
        """Take over the arrays of `caches`, whose rows these are."""
        held = self._held()
        blocks = [
            None if cache._sealed is None else sealing.blocks_of(cache._sealed, 0, cache._held()) for cache in caches
        ]
        self._sealed = _stack(blocks, [len(cache.lengths) for cache in caches]) if held else None
        columns = max((cache._keys.shape[2] for cache in caches if cache._keys is not None), default=None)
        if columns is None:
            return
        self._keys = _pad_columns([cache._keys for cache in caches], caches, columns)
        self._values = _pad_columns([cache._values for cache in caches], caches, columns)


def _runs(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Ranges of equal items."""
    starts = [index for index in range(len(items)) if index == 0 or items[index] != items[index - 1]]
    return list(zip(starts, [*starts[1:], len(items)], strict=True))


def _stack(parts: Sequence[Sealed | None], rows: Sequence[int]) -> Sealed | None:
    """Rows of different numbers of blocks as one batch; None where none has any."""
    longest = max((part for part in parts if part is not None), key=lambda part: part.tokens, default=None)
    if longest is None:
        return None
    blocks = longest.tokens // BLOCK_TOKENS
    filled = [
        Sealed(*(mx.zeros((count, *array.shape[1:]), dtype=array.dtype) for array in longest))
        if part is None
        else sealing.pad_blocks(part, blocks)
        for part, count in zip(parts, rows, strict=True)
    ]
    return sealing.join_rows(filled)


def _pad_columns(tails: Sequence[mx.array | None], caches: Sequence[SealedKVCache], columns: int) -> mx.array:
    some = next(tail for tail in tails if tail is not None)
    parts = []
    for tail, cache in zip(tails, caches, strict=True):
        if tail is None:
            tail = mx.zeros((len(cache.lengths), some.shape[1], 0, some.shape[3]), dtype=some.dtype)
        parts.append(mx.pad(tail, [(0, 0), (0, 0), (0, columns - tail.shape[2]), (0, 0)]))
    return mx.concatenate(parts, axis=0)
