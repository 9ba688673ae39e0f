"""Cuts a sequence's KV out of caches. Sealed blocks are taken from the pool without a copy; all else is copied in few
operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..kernels import sealing
from .caches import LayerKind, LayerKV, Layers, ModelCacheSpec, PooledBlock, Slab, batch_of, in_order
from .paged_cache import PagedKVCache
from .pool import Slot

STACK_BYTES_MAX = 256 * 2**20
"""The most bytes that are copied of all sequences of a batch to cut out one."""


class Stacks:
    """Copies of token spans of all layers and sequences of a batch, from which several sequences' slabs are cut.

    A GPU takes as long for an operation on one block of one sequence and layer as on those of all sequences and layers,
    and sequences often end in the same step. Valid until the batch's caches change.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, list[mx.array]] = {}

    def sequence(self, span: Any, columns: Sequence[Columns], sequence: int) -> list[mx.array]:
        """Returns copies of one sequence's part of `columns`.

        Args:
            span: a key for the token span and the layers; the copies of all sequences are kept under it.
            columns: the arrays of each layer, all of equal shapes, `(sequences, ...)`.

        Returns:
            An array `(layers, ...)` for each kind, in its dtype.
        """
        if span not in self._kept:
            sequences = columns[0][0].shape[0]
            self._kept[span] = [array.reshape(len(columns), sequences, *array.shape[1:]) for array in _stacked(columns)]
        return [sealing.copied(array[:, sequence]) for array in self._kept[span]]


Columns = Sequence[mx.array]
"""A token span of one layer's arrays: keys and values, `(sequences, kv_heads, ...)`."""


def _stacked(columns: Sequence[Columns]) -> list[mx.array]:
    """Returns copies of layers' arrays of equal shapes, concatenated to `(layers * sequences, ...)`."""
    if len(columns) == 1:
        return [sealing.copied(array) for array in columns[0]]
    return [mx.concatenate(list(same), axis=0) for same in zip(*columns, strict=True)]


class SequenceView:
    """One sequence in caches, from which the executor cuts slabs.

    Args:
        caches: a batch's caches, or one sequence's own (then `sequence` is None).
        length: how many tokens have KV.
        stacks: the batch's stacks, if its sequences are cut together.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        caches: Sequence[Any],
        sequence: int | None,
        length: int,
        stacks: Stacks | None = None,
    ) -> None:
        self._spec = spec
        self._length = length
        self._sequences = slice(sequence or 0, (sequence or 0) + 1)
        self._batch = batch_of(caches)
        self._stacks = stacks
        self._states: list[list[mx.array]] = []
        # Per layer: a sealed cache, or keys and values (of this sequence or of all) with the position of their first
        # token.
        self._layers: list[PagedKVCache | tuple[mx.array, mx.array, int] | None] = []
        padding: int | None = 0 if sequence is None else None
        for layer, cache in zip(spec.layers, caches, strict=True):
            if layer.kind is LayerKind.RECURRENT:
                self._layers.append(None)
                self._states.append([array[self._sequences] for array in cache.cache if array is not None])
            elif layer.sealed:
                self._layers.append(cache)
            elif layer.window:
                single = cache if sequence is None else cache.extract(sequence)
                keys, values = in_order(single)
                self._layers.append((keys, values, length - keys.shape[2]))
            else:
                if padding is None:
                    # Read once: it is the same in every layer, and reading it waits for the device.
                    padding = int(cache.left_padding[sequence].item())
                self._layers.append((cache.keys, cache.values, -padding))

    def cut(self, start: int, stop: int) -> Slab | PooledBlock:
        """Returns the KV of tokens [start, stop). It has a snapshot if it ends where the sequence does.

        If layers are sealed, the span must be one whole block, or a part of the open block from its begin.
        """
        if self._batch is not None and stop - start == BLOCK_TOKENS:
            return self._block(start // BLOCK_TOKENS, stop)
        return self._slab(start, stop)

    def _block(self, number: int, stop: int) -> PooledBlock:
        assert self._batch is not None
        slots: list[Slot | None] = []
        nbytes = 0
        for group, table in zip(self._batch.pool.groups, self._batch.tables[self._sequences.start], strict=True):
            held = table.first <= number
            slots.append(table.slots[number - table.first] if held else None)
            nbytes += group.slot_bytes if held else 0
        states = self._snapshot(stop)
        nbytes += sum(array.nbytes for state in states or () for array in state)
        return PooledBlock(tuple(slots), nbytes, 0 if None not in slots else BLOCK_TOKENS, states)

    def _snapshot(self, stop: int) -> list[list[mx.array]] | None:
        """Returns copies of the recurrent layers' states; None if these are not the states after `stop` tokens."""
        if not self._states or stop != self._length:
            return None
        return [[sealing.copied(array) for array in state] for state in self._states]

    def _slab(self, start: int, stop: int) -> Slab:
        """Returns a copy of the KV of tokens [start, stop), not evaluated."""
        window_from = 0
        for layer, held in zip(self._spec.layers, self._layers, strict=True):
            if layer.window and isinstance(held, tuple):
                window_from = max(window_from, min(stop, held[2]) - start)
        columns_of: dict[int, Columns] = {}
        for index, (layer, held) in enumerate(zip(self._spec.layers, self._layers, strict=True)):
            if isinstance(held, PagedKVCache):
                columns_of[index] = self._tail(held, self._sequences, start, stop)
                continue
            first = start + window_from if layer.window else start
            if held is None or first >= stop:
                continue
            keys, values, origin = held
            sequences = slice(0, 1) if layer.window else self._sequences
            span = (sequences, slice(None), slice(first - origin, stop - origin))
            columns_of[index] = (keys[span], values[span])
        copies = self._copies(columns_of, start, stop)
        return Slab.of(len(self._layers), copies, stop - start, window_from, self._snapshot(stop))

    def _tail(self, cache: PagedKVCache, sequences: slice, start: int, stop: int) -> Columns:
        whole = self._length // BLOCK_TOKENS * BLOCK_TOKENS
        assert start == whole, "only the open block can be cut"
        return cache.tail(sequences, stop - start)

    def _copies(self, columns_of: dict[int, Columns], start: int, stop: int) -> dict[Layers, LayerKV]:
        """Copies layers of equal shapes and windows into shared arrays: they are kept and freed together, and an
        operation on all layers takes a device as long as on one."""
        alike: dict[Any, list[int]] = {}
        for index, columns in columns_of.items():
            shapes = [(*array.shape, array.dtype) for array in columns]
            alike.setdefault((self._spec.layers[index].window, *shapes), []).append(index)
        entries: dict[Layers, LayerKV] = {}
        for layers in alike.values():
            copies = self._stack(layers, start, stop) or _stacked([columns_of[index] for index in layers])
            entries[tuple(layers)] = (copies[0], copies[1])
        return entries

    def _stack(self, layers: Sequence[int], start: int, stop: int) -> list[mx.array] | None:
        """Returns copies by way of `stacks`, each `(layers, ...)`; None if that would not pay."""
        if self._stacks is None or any(self._spec.layers[index].window for index in layers):
            return None
        whole: list[Columns] = []
        for index in layers:
            held = self._layers[index]
            if not isinstance(held, PagedKVCache) or len(held.lengths) == 1:
                return None
            whole.append(self._tail(held, slice(None), start, stop))
        if len(whole) * sum(array.nbytes for array in whole[0]) > STACK_BYTES_MAX:
            return None
        return self._stacks.sequence((start, stop, *layers), whole, self._sequences.start)
