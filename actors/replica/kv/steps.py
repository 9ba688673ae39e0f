"""The numbers of a call of the model: the lengths of its sequences before and after it, and which columns its queries
may see.

Shapes and dtypes are those of `paged_cache.py`. On a GPU sequences are padded, so that there are few shapes. On a CPU
the number of columns is even: OpenBLAS does not multiply odd numbers (`blas.py`), and the other BLAS is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import as_numpy, on_gpu
from .query_pieces import padded_blocks

Runs = Sequence[tuple[int, int]]
"""Runs of a sequence's tokens, [start, stop) each."""


@dataclass(frozen=True)
class Step:
    """The numbers of one call.

    Attributes:
        opened: tokens in every sequence's open block before the call.
        after: the sequences' lengths after the call.
        first: the first block of every sequence that its queries can see.
        full: how many blocks every sequence fills.
        used: how many sealed blocks the longest sequence's queries see, with padding.
        columns: columns of the tail with the new tokens and padding; even on a CPU.
        rest: (sequences, 1, 256, 1), the columns of the tail that come after the filled blocks; None if there are none,
            or only one sequence.
        exact: whether sealed blocks are as computed, so that the blocks that the call fills need not be read as sealed.
    """

    opened: list[int]
    after: list[int]
    first: list[int]
    full: list[int]
    used: int
    columns: int
    rest: mx.array | None
    exact: bool = False


def first_block(length: int, window: int) -> int:
    """Returns the first block that the token after `length` tokens can see."""
    return min(max(0, length - window + 1), length) // BLOCK_TOKENS if window else 0


def step_of(lengths: list[int], window: int, new: list[int], *, padded: bool = False, exact: bool = False) -> Step:
    """Returns the numbers of a call. If sequences are `padded`, all columns together are padded to a class
    (`padded_blocks`): with sealed blocks if there are any, because these are dequantized for one layer at a time and
    then freed, while the tail stays."""
    opened = [length % BLOCK_TOKENS for length in lengths]
    ends = [o + more for o, more in zip(opened, new, strict=True)]
    full = [end // BLOCK_TOKENS for end in ends]
    after = [length + more for length, more in zip(lengths, new, strict=True)]
    first = [first_block(length, window) for length in lengths]
    ends_at = lengths if exact else [length - 1 for length in after]
    last = [max(0, length // BLOCK_TOKENS - dropped) for length, dropped in zip(ends_at, first, strict=True)]
    columns, used = max(ends, default=0), max(last, default=0)
    if padded:
        blocks = -(-columns // BLOCK_TOKENS)
        whole = padded_blocks(used + blocks)
        used, blocks = (whole - blocks, blocks) if used else (0, whole)
        columns = BLOCK_TOKENS * blocks
    if not on_gpu():
        columns += columns % 2
    rest = None
    if any(full) and max(new) > 1 and len(new) > 1:
        places = mx.array(full)[:, None] * BLOCK_TOKENS + mx.arange(BLOCK_TOKENS)
        rest = mx.minimum(places, columns - 1)[:, None, :, None]
    return Step(opened, after, first, full, used, columns, rest, exact)


def mask_of(
    step: Step, lengths: list[int], first: list[int], count: int, window: int, bidirectional: Sequence[Runs] = ()
) -> mx.array | None:
    """(sequences, 1, count, columns) bool, true where a query may look; None where every query may look everywhere.

    Args:
        count: queries of every sequence, of which those after its `new` are padding.
        window: how many of the last tokens a query attends to; 0 for all.
        bidirectional: for every sequence, the tokens that attend to each other, whatever the window; empty for none.
    """
    alike = len(set(lengths)) == 1 and len(set(first)) == 1
    behind = window and first[0] * BLOCK_TOKENS <= lengths[0] - window
    if count == 1 and alike and not behind and step.columns == step.opened[0] + 1:
        return None
    if count == 1 and alike and not behind and step.used == lengths[0] // BLOCK_TOKENS - first[0]:
        # The next token of each sequence sees all but the padding.
        sealed = step.used * BLOCK_TOKENS
        return mx.broadcast_to(
            mx.arange(sealed + step.columns) <= sealed + step.opened[0], (len(lengths), 1, 1, sealed + step.columns)
        )
    before, after = mx.array(lengths)[:, None], mx.array(step.after)[:, None]
    # A query in the padding sees what the sequence's last query sees: if it saw nothing, its result would be NaN.
    queries = mx.minimum(before + mx.arange(count)[None], after - 1)[:, None, :, None]
    opened = (before // BLOCK_TOKENS * BLOCK_TOKENS)[:, None, None]
    blocks = mx.broadcast_to(opened, queries.shape) if step.exact else queries // BLOCK_TOKENS * BLOCK_TOKENS
    inside = opened + mx.arange(step.columns)
    columns, known = inside, inside >= blocks
    if step.used:
        starts = mx.array([dropped * BLOCK_TOKENS for dropped in first])[:, None, None, None]
        sealed = starts + mx.arange(step.used * BLOCK_TOKENS)
        columns = mx.concatenate([sealed, inside], axis=3)
        known = mx.concatenate([sealed < blocks, known], axis=3)
    seen = columns <= queries
    if window:
        seen = seen & (columns > queries - window)
    if bidirectional:
        starts, stops = _own_runs(as_numpy(queries).reshape(len(lengths), count), bidirectional)
        seen = seen | ((columns >= starts) & (columns < stops))
    return seen & known


def _own_runs(queries: np.ndarray, bidirectional: Sequence[Runs]) -> tuple[mx.array, mx.array]:
    """Returns the run in which each query `(sequences, count)` is, as starts and stops, `(sequences, 1, count, 1)
    int32`; the stop is 0 if there is none."""
    starts, stops = np.zeros(queries.shape, np.int32), np.zeros(queries.shape, np.int32)
    for sequence, runs in enumerate(bidirectional):
        for start, stop in runs:
            inside = (queries[sequence] >= start) & (queries[sequence] < stop)
            starts[sequence, inside], stops[sequence, inside] = start, stop
    return mx.array(starts)[:, None, :, None], mx.array(stops)[:, None, :, None]


def seen_of(step: Step, window: int) -> mx.array | None:
    """Returns which columns of the tail a step of one token sees, (sequences, 1, 1, columns) bool; None for all."""
    if set(step.opened) == {step.columns - 1} and not window:
        return None
    opened, columns = mx.array(step.opened)[:, None, None, None], mx.arange(step.columns)
    seen = columns <= opened
    return seen & (columns > opened - window) if window else seen
