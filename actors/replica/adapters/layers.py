"""Layers of a model that add what adapters add, and the adapters' matrices for them.

The formulas and the layout of the matrices are those of mlx-lm (`mlx_lm.tuner.lora`): a linear layer adds
`scale * (x A) B`, with A `(inputs, rank)` and B `(rank, outputs)`; an embedding adds `scale * A[ids] B`, with A
`(vocabulary, rank)` and B `(rank, dim)`, and as the output layer `scale * (x B') A'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from .rows import Adapted


@dataclass(frozen=True)
class Matrices:
    """One adapter's matrices for one layer: `a` `(inputs, rank)` or `(vocabulary, rank)`, `b` `(rank, outputs)`."""

    a: mx.array
    b: mx.array
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def times(self, x: mx.array) -> mx.array:
        """Returns what is added for `x` `(..., inputs)`, `(..., outputs)` in its dtype."""
        return self._scaled((x @ self.a) @ self.b, x)

    def looked_up(self, ids: mx.array) -> mx.array:
        """Returns what is added for token ids `(...)`, `(..., dim)`."""
        return self._scaled(self.a[ids] @ self.b, self.b)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns what is added to logits for `x` `(..., dim)`, `(..., vocabulary)` in its dtype."""
        return self._scaled((x @ self.b.T) @ self.a.T, x)

    def _scaled(self, z: mx.array, like: mx.array) -> mx.array:
        return (z if self.scale == 1.0 else self.scale * z).astype(like.dtype)


class Stack:
    """All adapters' matrices for one layer, evaluated.

    Args:
        matrices: by the adapter's number; adapters that leave the layer as it is are missing.
        count: how many adapters the model has.
        stacked: whether they are also needed as one array; then they are only kept there, with the scale in B.
    """

    def __init__(self, matrices: Mapping[int, Matrices], count: int, *, stacked: bool) -> None:
        self._a = self._b = None
        self._alone = dict(matrices)
        if stacked:
            self._a, self._b = _stacked(matrices, count)
            mx.eval(self._a, self._b)
            # Views of the stacks.
            self._alone = {number: Matrices(self._a[number], self._b[number], 1.0) for number in matrices}
        mx.eval([[each.a, each.b] for each in self._alone.values()])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        if self._a is not None and self._b is not None:
            return self._a.nbytes + self._b.nbytes
        return sum(each.a.nbytes + each.b.nbytes for each in self._alone.values())

    def alone(self, number: int) -> Matrices | None:
        """Returns an adapter's matrices; None if it has none for this layer."""
        return self._alone.get(number)

    @property
    def a(self) -> mx.array:
        """`(1 + adapters, inputs, most ranks)`; zeros at 0."""
        assert self._a is not None
        return self._a

    @property
    def b(self) -> mx.array:
        """`(1 + adapters, most ranks, outputs)`; zeros at 0."""
        assert self._b is not None
        return self._b


def _stacked(matrices: Mapping[int, Matrices], count: int) -> tuple[mx.array, mx.array]:
    first = next(iter(matrices.values()))
    most = max(each.rank for each in matrices.values())
    nothing = Matrices(
        mx.zeros((first.a.shape[0], most), first.a.dtype), mx.zeros((most, first.b.shape[1]), first.b.dtype), 1.0
    )
    a, b = [], []
    for number in range(count + 1):
        each = matrices.get(number, nothing)
        more = most - each.rank
        scaled = (each.b.astype(mx.float32) * each.scale).astype(each.b.dtype)
        a.append(mx.pad(each.a, [(0, 0), (0, more)]))
        b.append(mx.pad(scaled, [(0, more), (0, 0)]))
    return mx.stack(a), mx.stack(b)


def _product(x: mx.array, matrices: mx.array, numbers: mx.array, *, copies: bool) -> mx.array:
    """Multiplies each row with its own matrix.

    Args:
        x: `(rows, tokens, inputs)`.
        matrices: `(numbers, inputs, outputs)`.
        numbers: `(rows,)`.

    Returns:
        `(rows, tokens, outputs)`.
    """
    return x @ matrices[numbers] if copies else mx.gather_mm(x, matrices, rhs_indices=numbers)


class _OfStack:
    """What adapters add to outputs of one layer; a `Change`."""

    times: Callable[[Matrices, mx.array], mx.array]
    """What one adapter's matrices add for inputs."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def alone(self, number: int, x: mx.array) -> mx.array | None:
        matrices = self._stack.alone(number)
        return None if matrices is None else type(self).times(matrices, x)


class _Products(_OfStack):
    """Of a linear layer."""

    times = Matrices.times

    def gathered(self, numbers: mx.array, x: mx.array, *, copies: bool) -> mx.array:
        z = _product(x.reshape(x.shape[0], -1, x.shape[-1]), self._stack.a, numbers, copies=copies)
        z = _product(z, self._stack.b, numbers, copies=copies)
        return z.reshape(*x.shape[:-1], z.shape[-1])


class _LookUps(_OfStack):
    """Of an embedding."""

    times = Matrices.looked_up

    def gathered(self, numbers: mx.array, x: mx.array, *, copies: bool) -> mx.array:
        return _product(self._stack.a[numbers[:, None], x], self._stack.b, numbers, copies=copies)


class _Logits(_OfStack):
    """Of an embedding that is the output layer too."""

    times = Matrices.as_linear

    def gathered(self, numbers: mx.array, x: mx.array, *, copies: bool) -> mx.array:
        z = _product(x, self._stack.b.swapaxes(1, 2), numbers, copies=copies)
        return _product(z, self._stack.a.swapaxes(1, 2), numbers, copies=copies)


class _AdaptedLinear:
    """A layer with adapters, as a base before the layer's own class. It notes whether it was called for adapters."""

    adapted: Adapted
    products: _Products
    called: bool

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        if (rows := self.adapted.rows) is None:
            return y
        self.called = True
        return rows.add(y, x, self.products)


class _AdaptedEmbedding:
    """As `_AdaptedLinear`, for an embedding that may be the output layer too."""

    adapted: Adapted
    look_ups: _LookUps
    logits: _Logits
    called: bool

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        if (rows := self.adapted.rows) is None:
            return y
        self.called = True
        return rows.add(y, x, self.look_ups)

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = super().as_linear(x)  # type: ignore[misc]
        return y if (rows := self.adapted.rows) is None else rows.add(y, x, self.logits)


@cache
def _kind(kind: type[Any], base: type[Any]) -> type[Any]:
    return type(f"Adapted{kind.__name__}", (base, kind), {})


def adapt(layer: Any, stack: Stack, adapted: Adapted) -> None:
    """Makes a layer of a model one with adapters. Without adapters it computes the same bits as before.

    Args:
        layer: a linear layer, an embedding, or what has taken its place at load (`joined.py`, `few_rows.py`).
        adapted: says which adapters the rows of a call have.
    """
    embeds = isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
    recast(layer, _kind(type(layer), _AdaptedEmbedding if embeds else _AdaptedLinear))
    layer.adapted, layer.called = adapted, False
    if embeds:
        layer.look_ups, layer.logits = _LookUps(stack), _Logits(stack)
    else:
        layer.products = _Products(stack)
