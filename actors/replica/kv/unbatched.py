"""Rows that decode in the same steps, but are computed one by one, for models that compute otherwise in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .caches import seal_filled


class RowsApart:
    """What stands for a batch's caches: every row has its own.

    Attributes:
        rows: a row's caches, one a layer.
    """

    def __init__(self, rows: Sequence[list[Any]]) -> None:
        self.rows = list(rows)

    def extend(self, other: RowsApart) -> None:
        """Appends the rows of another batch."""
        self.rows += other.rows

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]

    def seal_filled(self) -> None:
        """As `caches.seal_filled`."""
        for caches in self.rows:
            seal_filled(caches)

    def step(self, model: Any, inputs: mx.array, besides: Callable[[int], dict[str, Any]]) -> mx.array:
        """Returns the logits `(rows, vocabulary)` after one token of every row, `inputs` `(rows,)`.

        Args:
            besides: given a row's number, the model's other inputs for it.
        """
        logits = [
            model(inputs[row : row + 1, None], cache=caches, **besides(row))[:, -1, :]
            for row, caches in enumerate(self.rows)
        ]
        return mx.concatenate(logits, axis=0)
