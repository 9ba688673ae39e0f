"""What all layers of a batch of sequences have in common: block tables, and results of a step that layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..kernels.decode_views import padded_count
from .pool import BlockPool, BlockTable, Slot
from .query_pieces import Piece

SLOTS_MIN = 64
"""A kernel gets at least this many slots, with padding, so that there are few shapes."""


class Reads(Enum):
    """How decode steps read sealed blocks."""

    DEQUANTIZED = "dequantized"
    IN_PLACE = "in place"
    KERNEL = "by a kernel"


class PagedBatch:
    """What all layers of a batch have in common: the block tables of its sequences, and results of a step that layers
    share, which are kept until the sequences' lengths change.

    Args:
        tables: every sequence's tables, one per group of the pool.

    Attributes:
        bidirectional: for every sequence, [start, stop) of the tokens of its next chunk that attend to each other;
            empty for none.
    """

    def __init__(
        self, pool: BlockPool, tables: Sequence[Sequence[BlockTable]], reads: Reads = Reads.DEQUANTIZED
    ) -> None:
        self.pool = pool
        self.tables = [list(sequence) for sequence in tables]
        self.reads = reads
        # The last mask of each group's layers, and its window; None if it does not follow from positions alone.
        self._masks: dict[int, tuple[mx.array, int | None]] = {}
        self.bidirectional: list[Sequence[tuple[int, int]]] = []
        self._blocks: dict[int, tuple[Any, tuple[mx.array, list[int]]]] = {}
        self._blanks: dict[int, Slot] = {}
        self._lengths: list[int] | None = None
        self._ragged: list[int] | None = None
        self._kept: dict[Any, Any] = {}
        self._moves = pool.moves

    @classmethod
    def of_sequences(cls, pool: BlockPool, sequences: int, reads: Reads = Reads.DEQUANTIZED) -> PagedBatch:
        """Returns empty sequences."""
        return cls(pool, [[BlockTable([]) for _ in pool.groups] for _ in range(sequences)], reads)

    def get(self, lengths: list[int], ragged: list[int] | None, what: Any, make: Callable[[], Any]) -> Any:
        """Returns what an earlier layer computed for these lengths, or else what `make` computes. A list of lengths is
        never changed in place, so the same list object need not be compared by value."""
        self._follow_moves()
        if (lengths is not self._lengths and lengths != self._lengths) or ragged != self._ragged:
            self._lengths, self._ragged, self._kept = lengths, ragged, {}
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]

    def blocks(self, group: int, first: Sequence[int], stop: Sequence[int]) -> tuple[mx.array, list[int]]:
        """Returns blocks [first, stop) of every sequence in a group: their slots, `(n,) uint32`, sequence after
        sequence, with padding at the end; and `sequences + 1` numbers that say where each sequence's slots begin. These
        are kept from step to step, because there may be thousands."""
        self._follow_moves()
        asked = (list(first), list(stop))
        known, made = self._blocks.get(group, (None, None))
        if made is None or known != asked:
            sequences = [sequence[group].numbers(*span) for sequence, *span in zip(self.tables, *asked, strict=True)]
            slots = [number for numbers in sequences for number in numbers]
            starts = [0, *accumulate(map(len, sequences))]
            # Padding is never read, so a power of two costs nothing, and few steps have to be recorded.
            slots += [0] * (padded_count(max(len(slots), SLOTS_MIN)) - len(slots))
            made = mx.array(slots, mx.uint32) + 0, starts
            self._blocks[group] = asked, made
        return made

    def blank(self, group: int) -> int:
        """Returns the number of a group's slot of zeros, which the batch holds from now on."""
        self._blanks[group] = self.pool.groups[group].blank()
        return self._blanks[group].number

    def set_bidirectional(self, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Sets `bidirectional` for the next call of the model."""
        wanted = [*runs] if any(runs) else []
        if wanted or self.bidirectional:
            self.bidirectional = wanted
            self._lengths = None

    def note_mask(self, group: int, mask: mx.array, window: int) -> None:
        """Remembers the last mask that a group's layers were given, and its window, 0 for none."""
        self._masks[group] = mask, None if self.bidirectional else window

    def window_of(self, group: int, mask: mx.array) -> int | None:
        """Returns the window of the last mask that a group's layers were given, 0 for none; None if `mask` is another
        one, or if tokens attend to each other in it."""
        made, window = self._masks.get(group, (None, None))
        return window if made is mask else None

    def whole_mask(self, group: int, mask: mx.array, columns: int) -> mx.array:
        """Returns a mask `(sequences, 1, queries, columns)` in its original size, if a model has cut it to the columns
        for which its sequences have tokens."""
        made, _ = self._masks.get(group, (None, None))
        cut = made is not None and mask.shape == (*made.shape[:3], mask.shape[3]) and mask.shape[3] < columns
        return made if made is not None and cut and made.shape[3] == columns else mask

    def bias(self, mask: mx.array, dtype: mx.Dtype) -> mx.array:
        """Returns a mask as numbers to add to scores, computed once for all layers that get it."""
        what = ("bias", id(mask))
        if what not in self._kept:
            self._kept[what] = mask, _bias(mask, dtype)
        return self._kept[what][1]

    def piece_bias(self, mask: mx.array, sequence: int, piece: Piece, dtype: mx.Dtype) -> mx.array:
        """As `bias`, for a piece of a sequence's queries, padded with queries that see everything: (1, 1, piece.size,
        columns), contiguous."""
        what = ("bias", id(mask), sequence, piece)
        if what not in self._kept:
            bias = _bias(mask[min(sequence, len(mask) - 1), 0, piece.start : piece.stop], dtype)
            missing = piece.size - (piece.stop - piece.start)
            padded = mx.pad(bias, [(0, missing), (0, 0)]) if missing else bias
            self._kept[what] = mask, padded[None, None]
        return self._kept[what][1]

    def keep(self, sequences: Sequence[int]) -> None:
        """Keeps these sequences, in this order."""
        self.tables = [self.tables[sequence] for sequence in sequences]
        self.forget()

    def forget(self) -> None:
        """Forgets shared results about sequences and slots, which have changed."""
        self._lengths, self._kept, self._blocks, self._masks = None, {}, {}, {}

    def _follow_moves(self) -> None:
        if self._moves != self.pool.moves:
            self._moves = self.pool.moves
            self.forget()

    def extend(self, other: PagedBatch) -> None:
        """Appends another batch's sequences."""
        self.tables += other.tables
        self.forget()


def _bias(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    # Not the least number: kernels multiply it by log2(e), which would be infinite.
    return mx.where(mask, 0.0, mx.finfo(dtype).min / 4).astype(dtype)
