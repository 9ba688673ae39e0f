"""What a decode step's attention reads in one layer: with plain operations (`DecodeView`) or with a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import size_class
from .head_transform import NOTHING, HeadTransform
from .sealing import Sealed

WARPS = 4
"""Warps of a group of the kernel's threads."""

UNITS_OF_ONE = 200
"""Up to about so many units of all its KV heads, a token has a group of threads for every `WARPS` of them; with more, a
group has more, as the square root of their number. So few sequences keep a large device busy, and many do not begin too
many groups: measured on an H200 with 1 to 32 sequences of 1,500 to 30,000 tokens."""

NEW_MOST = 16
"""The most new tokens of a sequence in a step: the next one and its draft."""


def padded_count(tokens: int) -> int:
    """Returns to how many tokens a step is padded in which sequences have several: a power of two, for few shapes."""
    return 1 << (tokens - 1).bit_length()


def padded_rows(sequences: int) -> int:
    """Returns to how many sequences a recorded step is padded, so that not every join and leave needs another graph.
    Kernels multiply with weights for eight at a time."""
    return padded_count(sequences) if sequences <= 8 else -(-sequences // 8) * 8


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
class NewTokens:
    """What the kernel reads of the new tokens of a step and of their sequences, equal for all layers of a group.

    Attributes:
        slots: (n,) uint32, the sealed blocks of all sequences, sequence after sequence.
        numbers: (8 * tokens + 2 + count,) int32, one after another: the number of tokens; for every token how many
            tokens its open block has, itself the last; how many tokens, from the first block on that it sees, are
            outside of its window; its position; its sequence; how many new tokens its sequence has up to itself; where
            the blocks that it sees begin and end in `slots`; then `tokens + 1` numbers that say where each token's
            groups of threads begin, among all `count` groups of a KV head; and for every group its token, or -1 for
            padding.
        tokens: how many there are, with padding at the end, which has no groups.
        most: the most new tokens of a sequence for which the kernel has room, 1 or `NEW_MOST`.
    """

    slots: mx.array
    numbers: mx.array
    tokens: int
    most: int = 1

    @property
    def count(self) -> int:
        """The number of groups of threads of a KV head."""
        return self.numbers.shape[0] - 8 * self.tokens - 2

    @classmethod
    def of(
        cls,
        slots: mx.array,
        starts: Sequence[int],
        lengths: Sequence[int],
        first: Sequence[int],
        window: int,
        kv_heads: int,
        new: Sequence[int] | None = None,
        rows: int = 0,
    ) -> NewTokens:
        """Divides the tokens' units among groups of threads, so that a token of a long sequence gets many. How those of
        a token are divided does not depend on other tokens, and so neither do the bits of its attention.

        Args:
            starts: where each sequence's blocks begin in `slots`, and where the last's end.
            lengths: the sequences' tokens without the new ones.
            first: the number of each sequence's first block in `slots`.
            window: how many of the last tokens a token attends to; 0 for all.
            kv_heads: the KV heads of a layer.
            new: how many new tokens each sequence has, up to `NEW_MOST`, all in its open block; None for one each. If
                it is given, their number is padded.
            rows: to how many tokens one each is padded.
        """
        counts = [1] * len(lengths) if new is None else new
        owners = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
        nth = [at for count in counts for at in range(count)]
        places = [lengths[sequence] + at for sequence, at in zip(owners, nth, strict=True)]
        opened = [lengths[sequence] % BLOCK_TOKENS + at + 1 for sequence, at in zip(owners, nth, strict=True)]
        begins, ends = [starts[sequence] for sequence in owners], [starts[sequence + 1] for sequence in owners]
        hidden = [0] * len(owners)
        if window:
            hidden = [
                max(0, place + 1 - window - first[sequence] * BLOCK_TOKENS)
                for sequence, place in zip(owners, places, strict=True)
            ]
            # Blocks that only the sequence's tokens before it see are none of a token's own.
            unseen = [
                min(count // BLOCK_TOKENS, end - begin) for count, begin, end in zip(hidden, begins, ends, strict=True)
            ]
            begins = [begin + count for begin, count in zip(begins, unseen, strict=True)]
            hidden = [count - BLOCK_TOKENS * those for count, those in zip(hidden, unseen, strict=True)]
        units = [4 * (end - begin) + -(-tokens // 32) for begin, end, tokens in zip(begins, ends, opened, strict=True)]
        groups = [-(-count // _units_of_a_group(count, kv_heads)) for count in units]
        padding = max(0, (rows if new is None else padded_count(len(owners))) - len(owners))
        of_groups = [token for token, count in enumerate(groups) for _ in range(count)]
        whole = len(of_groups) == len(groups)
        # As many groups as tokens say that each token has one.
        wanted = len(groups) + padding if whole else size_class(max(len(of_groups), len(groups) + padding + 1))
        of_groups += [-1] * (wanted - len(of_groups))
        jobs = [0, *accumulate(groups)]
        jobs += [jobs[-1]] * padding
        columns = (opened, hidden, places, owners, [at + 1 for at in nth], begins, ends)
        padded = [number for column in columns for number in (*column, *[0] * padding)]
        numbers = [len(owners) + padding, *padded, *jobs, *of_groups]
        return cls(slots, mx.array(numbers, mx.int32), len(owners) + padding, 1 if new is None else NEW_MOST)


def _units_of_a_group(units: int, kv_heads: int) -> int:
    return WARPS * max(1, round(sqrt(units * kv_heads / UNITS_OF_ONE)))


@dataclass(frozen=True)
class KernelStep:
    """What a decode step's kernel reads in one layer, and where it appends each sequence's new tokens.

    Attributes:
        tails: (sequences, kv_heads, 256, dim), the open blocks' keys and values, and more that are padding.
        pool: the layer's slots.
        read: what the kernel reads of each new token.
        written: (1,) uint32, as `SlotGroup.written`.
    """

    tails: tuple[mx.array, mx.array]
    pool: Sealed
    read: NewTokens
    written: mx.array


@dataclass(frozen=True)
class KernelView:
    """A layer in such a step. `keys` and `values`, (tokens, kv_heads, 1, dim), are the new tokens'; the model got the
    same arrays. `transform` takes the channels of a head and returns the operations on queries and keys that the
    model has left to the kernel; it is called once both are made."""

    keys: mx.array
    values: mx.array
    step: KernelStep
    transform: Callable[[int], HeadTransform] = lambda dim: NOTHING
