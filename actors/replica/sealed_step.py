"""What all layers of a batch compute alike in one call: its numbers, and the masks that follow from them.

The arguments are those of the caches: `lengths` are the rows' tokens before the call, of which the first `first` blocks
are dropped, and `new` are the tokens that every row brings.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..kv_store.blocks import BLOCK_TOKENS

COLUMNS = 64
"""Of a batch with padding: a device prepares itself for every new number of them."""


def on_device(numbers: list[int]) -> mx.array:
    """What every layer will read: made by the device, which would go to the host's memory for it each time."""
    return mx.array(numbers) + 0


@dataclass(frozen=True)
class Step:
    """The numbers of one call.

    Attributes:
        opened: tokens in every row's open block before.
        after: the rows' lengths after.
        held: sealed blocks of every row before.
        full: blocks that every row fills.
        used: sealed blocks that the longest row's queries see.
        columns: of the tail with the new tokens.
        rest: (rows, 1, 256, 1), which of them follow the blocks that are filled; None where none do, or in one row.
    """

    opened: list[int]
    after: list[int]
    held: list[int]
    full: list[int]
    used: int
    columns: int
    rest: mx.array | None


def step_of(lengths: list[int], first: list[int], new: list[int], width: int | None = None) -> Step:
    """The numbers of a call; where rows are padded to a `width`, as many columns as a multiple of `COLUMNS`."""
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
    """(rows, 1, count, columns), true where a query may look; None where every query may look everywhere.

    Args:
        count: queries of every row, of which those after its `new` are padding.
        window: how many of the last tokens a query attends to; 0 for all.
    """
    alike = len(set(lengths)) == 1 and len(set(first)) == 1
    if count == 1 and alike and not (window and first[0] * BLOCK_TOKENS <= lengths[0] - window):
        return None
    before, after = mx.array(lengths)[:, None], mx.array(step.after)[:, None]
    # A query in the padding sees what the row's last one sees: with nothing to see it would be no number.
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
