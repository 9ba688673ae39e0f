"""What a decode step's attention reads in one layer: with plain operations (`DecodeView`) or with a kernel."""

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
"""Warps of a group of the kernel's threads."""

GROUPS_WANTED = 1024
"""This many groups of threads keep a large device busy."""


@dataclass(frozen=True)
class DecodeView:
    """What a decode step's attention reads in one layer.

    Attributes:
        keys, values: (sequences, kv_heads, columns, dim), the open blocks; the model got the same arrays.
        seen: (sequences, 1, 1, columns) bool, which of the columns are visible; None for all.
        pool: the layer's slots.
        slots: (n,) uint32, the sealed blocks of all sequences, sequence after sequence.
        sequences: (n,) uint32, the sequence of each block.
        counts: how many blocks each sequence has.
        behind: (n, 1, 1, 256) bool, which of the blocks' tokens are outside of the window; None for none.
        heads: for blocks as computed, (n, kv_heads) uint32 each: their heads' numbers among the heads of all sequences,
            of all slots, and of the n blocks.
    """

    keys: mx.array
    values: mx.array
    seen: mx.array | None
    pool: Sealed
    slots: mx.array
    sequences: mx.array
    counts: list[int]
    behind: mx.array | None
    heads: tuple[mx.array, mx.array, mx.array] | None = None


@dataclass(frozen=True)
class SequenceBlocks:
    """What the kernel reads of the sequences of a batch, equal for all layers of a group.

    Attributes:
        slots: (n,) uint32, the sealed blocks of all sequences, sequence after sequence.
        numbers: (5 * sequences + 3 + count,) int32, one after another: the number of sequences; each sequence's tokens
            in its open block, with the new one; how many of its tokens, from its first block on, are outside of the
            window; its tokens without the new one; `sequences + 1` numbers that say where its blocks begin in `slots`;
            `sequences + 1` numbers that say where its groups of threads begin, among all `count` groups of a KV head;
            and for every group its sequence, or -1 for padding, which is only used if a sequence has several groups.
        sequences: how many there are.
    """

    slots: mx.array
    numbers: mx.array
    sequences: int

    @property
    def count(self) -> int:
        """The number of groups of threads of a KV head."""
        return self.numbers.shape[0] - 5 * self.sequences - 3

    @classmethod
    def of(
        cls,
        slots: mx.array,
        starts: Sequence[int],
        lengths: Sequence[int],
        hidden: Sequence[int],
        kv_heads: int,
    ) -> SequenceBlocks:
        """Divides the sequences' units among groups of threads, so that a long sequence gets many.

        Args:
            starts, lengths, hidden: as in `numbers`.
            kv_heads: the KV heads of a layer.
        """
        opened = [length % BLOCK_TOKENS + 1 for length in lengths]
        units = [
            4 * (end - start) + -(-tokens // 32) for (start, end), tokens in zip(pairwise(starts), opened, strict=True)
        ]
        each = WARPS * max(1, round(sum(units) * kv_heads / (GROUPS_WANTED * WARPS)))
        counts = [-(-count // each) for count in units]
        owners = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
        if len(owners) > len(counts):
            owners += [-1] * (size_class(len(owners)) - len(owners))
        jobs = [0, *accumulate(counts)]
        numbers = [len(counts), *opened, *hidden, *lengths, *starts, *jobs, *owners]
        return cls(slots, mx.array(numbers, mx.int32), len(counts))


@dataclass(frozen=True)
class KernelStep:
    """What a decode step's kernel reads in one layer, and where it appends each sequence's new token.

    Attributes:
        tails: (sequences, kv_heads, 256, dim), the open blocks' keys and values.
        pool: the layer's slots.
        sequences: what the kernel reads of each sequence.
        written: (1,) uint32, as `SlotGroup.written`.
    """

    tails: tuple[mx.array, mx.array]
    pool: Sealed
    sequences: SequenceBlocks
    written: mx.array


@dataclass(frozen=True)
class KernelView:
    """A layer in such a step. `keys` and `values`, (sequences, kv_heads, 1, dim), are the new token's; the model got
    the same arrays. `transform` takes the channels of a head and returns the operations on queries and keys that the
    model has left to the kernel; it is called once both are made."""

    keys: mx.array
    values: mx.array
    step: KernelStep
    transform: Callable[[int], HeadTransform] = lambda dim: NOTHING
