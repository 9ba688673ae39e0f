"""Which adapter each row of a call of the model has, and how layers add their adapters' outputs.

A row without an adapter gets the layer's own output, with the same bits. Rows with one get what mlx-lm's layer computes
for that adapter alone. There are two ways to add it:

    in groups   the rows of one adapter are computed together, adapter by adapter. On a CPU always, with matrices of
                their own rank: what a row gets does not depend on the other rows, to the last bit. On a GPU if rows
                have many tokens, or if there is only one adapter.
    gathered    each row is multiplied with its own matrices out of a stack of all adapters, whose ranks are padded
                with zeros. On a GPU for few tokens a row, where launching a product for every adapter would take
                longer, and in recorded steps, for which the numbers of adapters are an input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import mlx.core as mx
from cachetools import LRUCache

GATHERED_TOKENS_MAX = 8
"""Up to so many tokens a row are gathered on a GPU."""

BATCHES_MAX = 64
"""The rows of how many batches are kept: a batch's steps have the same ones."""


class Change(Protocol):
    """What the adapters add to the outputs of one layer."""

    def alone(self, number: int, x: mx.array) -> mx.array | None:
        """Returns what the adapter adds for inputs `(rows, tokens, ...)`; None for nothing."""
        ...

    def gathered(self, numbers: mx.array, x: mx.array, *, copies: bool) -> mx.array:
        """Returns what each row's adapter adds, zeros for the number 0.

        Args:
            numbers: `(rows,)` uint32.
            x: `(rows, tokens, ...)`.
            copies: see `Adapted`.
        """
        ...


class Rows:
    """The adapters' numbers of a call's rows, 0 for none.

    Args:
        numbers: `(rows,)`; an array of uint32 if they are not known while a step is recorded, and then rows are
            gathered.
        gathers, copies: as for `Adapted`.
    """

    def __init__(self, numbers: Sequence[int] | mx.array, *, gathers: bool = True, copies: bool = False) -> None:
        self._count, self._copies = len(numbers), copies
        self._groups: list[tuple[int, list[int]]] = []
        if isinstance(numbers, mx.array):
            self._numbers, self._bare, self._gathers = numbers, True, True
        else:
            distinct = sorted(set(numbers) - {0})
            self._groups = [(number, [row for row, own in enumerate(numbers) if own == number]) for number in distinct]
            self._numbers = mx.array(list(numbers), mx.uint32)
            self._bare, self._gathers = 0 in numbers, gathers and len(distinct) > 1
        self._indices = {number: mx.array(rows, mx.uint32) for number, rows in self._groups}

    def add(self, y: mx.array, x: mx.array, change: Change) -> mx.array:
        """Returns a layer's outputs with those of the adapters.

        Args:
            y: the layer's own outputs `(rows, tokens, outputs)`, in the model's dtype.
            x: its inputs, `(rows, tokens, inputs)`, or token ids `(rows, tokens)`.

        Raises:
            ValueError: the inputs have another number of rows.
        """
        if x.shape[0] != self._count or x.ndim < 2:
            raise ValueError(f"a layer with adapters gets inputs {x.shape} for {self._count} sequences")
        if self._gathers and x.shape[1] <= GATHERED_TOKENS_MAX:
            added = y + change.gathered(self._numbers, x, copies=self._copies).astype(y.dtype)
            if not self._bare:
                return added
            return mx.where((self._numbers > 0).reshape(-1, *[1] * (y.ndim - 1)), added, y)
        for number, rows in self._groups:
            whole = len(rows) == self._count
            indices = self._indices[number]
            if (more := change.alone(number, x if whole else x[indices])) is not None:
                y = y + more if whole else y.at[indices].add(more)
        return y


class Adapted:
    """The adapters of the call that is made now. Used on the engine's thread.

    Args:
        gathers: whether few tokens of many rows are computed with stacked adapters.
        copies: whether each row's matrices are copied out of the stack first; None: unless this is Metal, for which MLX
            has kernels that read them in place.

    Attributes:
        rows: of the call; None if no row has an adapter.
    """

    def __init__(self, *, gathers: bool, copies: bool | None = None) -> None:
        self.rows: Rows | None = None
        self.gathers = gathers
        self.copies = not mx.metal.is_available() if copies is None else copies
        self._known: LRUCache[tuple[int, ...], Rows] = LRUCache(BATCHES_MAX)

    def calling(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        """Returns a context in which the model is called for rows with these adapters."""
        if not any(numbers):
            return nullcontext()
        key = tuple(numbers)
        rows = self._known.get(key)
        if rows is None:
            rows = self._known[key] = Rows(key, gathers=self.gathers, copies=self.copies)
        return self.using(rows)

    def recording(self, numbers: mx.array) -> AbstractContextManager[None]:
        """As `calling`, for numbers `(rows,)`, uint32, that are an input of a recorded step."""
        return self.using(Rows(numbers, copies=self.copies))

    def group_always(self) -> None:
        """Computes rows in groups from now on, and records no steps with adapters."""
        self.gathers = False
        self._known.clear()

    @contextmanager
    def using(self, rows: Rows) -> Iterator[None]:
        """A context in which the model is called for these rows."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None
