"""What a decode step's attention reads in one layer: by plain operations (`DecodeView`) or by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import size_class
from .head_transform import NOTHING, HeadTransform
from .sealing import Sealed

WARPS = 4
"""Of a group of the kernel's threads."""

GROUPS_WANTED = 1024
"""So many groups of threads keep a large device busy."""


@dataclass(frozen=True)
class DecodeView:
    """What a decode step's attention reads in one layer.

    Attributes:
        keys, values: (rows, kv_heads, columns, dim), the open blocks; also what the model was given.
        seen: (rows, 1, 1, columns) bool, which of the columns count; None for all.
        pool: the layer's slots.
        slots: (n,) uint32, the sealed blocks of all rows, row after row.
        rows: (n,) uint32, whose they are.
        counts: how many of them each row has.
        behind: (n, 1, 1, 256) bool, which of their tokens are behind the window; None for none.
        heads: for blocks as computed, (n, kv_heads) uint32 each: their heads' numbers among those of all rows, of all
            slots, and of the n blocks.
    """

    keys: mx.array
    values: mx.array
    seen: mx.array | None
    pool: Sealed
    slots: mx.array
    rows: mx.array
    counts: list[int]
    behind: mx.array | None
    heads: tuple[mx.array, mx.array, mx.array] | None = None


@dataclass(frozen=True)
class RowBlocks:
    """What the kernel reads of the rows of a batch, equal for all layers of a group.

    Attributes:
        slots: (n,) uint32, the sealed blocks of all rows, row after row.
        numbers: (5 * rows + 3 + count,) int32, one after the other: the number of rows; tokens in each row's open
            block, with the new one; how many of its tokens from its first block on are behind the window; its tokens
            without the new one; `rows + 1` numbers, where each row's blocks begin in `slots`; `rows + 1` numbers, where
            its groups of threads begin, in all `count` ones of a KV head; and whose they are, -1 for padding, of which
            there is none if each row has one group.
        rows: their number.
    """

    slots: mx.array
    numbers: mx.array
    rows: int

    @property
    def count(self) -> int:
        """Groups of threads of a KV head."""
        return self.numbers.shape[0] - 5 * self.rows - 3

    @classmethod
    def of(
        cls,
        slots: mx.array,
        starts: Sequence[int],
        lengths: Sequence[int],
        hidden: Sequence[int],
        kv_heads: int,
    ) -> RowBlocks:
        """Divides the rows' units among groups of threads, so that a long row has many.

        Args:
            starts, lengths, hidden: as in `numbers`.
            kv_heads: of a layer.
        """
        opened = [length % BLOCK_TOKENS + 1 for length in lengths]
        units = [
            4 * (end - start) + -(-tokens // 32) for (start, end), tokens in zip(pairwise(starts), opened, strict=True)
        ]
        each = WARPS * max(1, round(sum(units) * kv_heads / (GROUPS_WANTED * WARPS)))
        counts = [-(-count // each) for count in units]
        owners = [row for row, count in enumerate(counts) for _ in range(count)]
        if len(owners) > len(counts):
            owners += [-1] * (size_class(len(owners)) - len(owners))
        jobs = [0, *accumulate(counts)]
        numbers = [len(counts), *opened, *hidden, *lengths, *starts, *jobs, *owners]
        return cls(slots, mx.array(numbers, mx.int32), len(counts))


@dataclass(frozen=True)
class KernelStep:
    """What a decode step's kernel reads in one layer, and where it appends each row's new token.

    Attributes:
        tails: (rows, kv_heads, 256, dim), the open blocks' keys and values.
        pool: the layer's slots.
        rows: what it reads of each row.
        written: (1,) uint32, as `SlotGroup.written`.
    """

    tails: tuple[mx.array, mx.array]
    pool: Sealed
    rows: RowBlocks
    written: mx.array


@dataclass(frozen=True)
class KernelView:
    """A layer in such a step; `keys` and `values`, (rows, kv_heads, 1, dim), are the new token's, and also what the
    model was given. `transform` takes the channels of a head and returns what the model has left to the kernel to do
    with queries and keys; it is called once both are made."""

    keys: mx.array
    values: mx.array
    step: KernelStep
    transform: Callable[[int], HeadTransform] = lambda dim: NOTHING
