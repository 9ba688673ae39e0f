"""The shapes in which prompts attend on CUDA, so that cuDNN needs few plans.

MLX has cuDNN make a plan for every new shape of queries, keys and mask, which takes 60 to 100 ms on an H200. So a call
attends for one sequence at a time, its queries are cut into pieces of a few sizes, and its columns (the keys) are
padded to classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.block_ids import BLOCK_TOKENS

PIECES = (2048, 1024, 512, 256)
"""Queries of a piece."""

CLASSES_AN_OCTAVE = 4
"""Column classes between a power of two and the next. With 4 a class has at most a quarter more than it needs, on
average a tenth, and there are 32 classes up to 131,072 tokens."""


@dataclass(frozen=True)
class Piece:
    """Some of a sequence's queries.

    Attributes:
        start, stop: the queries `[start, stop)`.
        size: to how many queries the piece is padded; 0 if it is computed without a plan, by `attend_few`.
    """

    start: int
    stop: int
    size: int


def padded_blocks(blocks: int) -> int:
    """Returns the smallest class of columns that is at least `blocks`, in blocks."""
    step = max(1, (1 << max(0, blocks - 1).bit_length()) // (2 * CLASSES_AN_OCTAVE))
    return -(-blocks // step) * step


def is_padded(columns: int) -> bool:
    """Whether this many columns are a class, so that plans for them are used again."""
    return columns % BLOCK_TOKENS == 0 and padded_blocks(columns // BLOCK_TOKENS) * BLOCK_TOKENS == columns


def pieces_of(count: int, few: int) -> list[Piece]:
    """Cuts a sequence's queries into pieces.

    Args:
        count: how many there are.
        few: a rest of at most so many queries is computed without a plan; a larger one is padded.
    """
    rest = count % PIECES[-1]
    planned = count - rest if 0 < rest <= few else count
    pieces, start = list[Piece](), 0
    left = -(-planned // PIECES[-1]) * PIECES[-1]
    for size in PIECES:
        while left >= size:
            pieces.append(Piece(start, min(start + size, planned), size))
            start, left = start + size, left - size
    if planned < count:
        pieces.append(Piece(planned, count, 0))
    return pieces
