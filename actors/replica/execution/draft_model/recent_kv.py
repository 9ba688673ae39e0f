"""The KV of the last tokens of some sequences in a model that drafts for them.

A draft needs the last few hundred tokens only, and what is wrong here costs drafts and nothing else. So each layer has
one array for all sequences, of one size for each, in which a sequence's tokens begin at position 0. Nothing is sealed,
shared or kept. A token that was taken back is overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

SIZES = (256, 512, 1024)
"""How many tokens of each sequence there is room for: the smallest of these that is enough for all."""

ROOM = SIZES[-1]
"""The most tokens of a sequence, those that pad a call included."""


@dataclass(frozen=True)
class LayerShape:
    """Of one layer's KV."""

    heads: int
    key_dim: int
    value_dim: int


Layers = list[tuple[mx.array, mx.array]]
"""Keys `(sequences, heads, size, key_dim)` and values `(sequences, heads, size, value_dim)` of each layer."""


class _LayerCache:
    """What a model gets as a layer's cache in a call.

    Attributes:
        offset: the position of every sequence's next token, `(sequences,) int32`.
        arrays: the layer's keys and values.
    """

    def __init__(self, offset: mx.array, positions: mx.array, arrays: tuple[mx.array, mx.array]) -> None:
        self.offset, self.arrays = offset, arrays
        self._positions = positions

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Returns where each query may look, `(sequences, 1, N, size) bool`."""
        columns, own = mx.arange(self.arrays[0].shape[2]), self._positions[:, None, :, None]
        seen = columns <= own
        return seen & (columns > own - window_size) if window_size else seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        places = self._positions[:, None, :, None]
        given = zip(self.arrays, (keys, values), strict=True)
        kept, others = (mx.put_along_axis(array, places, new.astype(array.dtype), axis=2) for array, new in given)
        self.arrays = kept, others
        return kept, others


States = list[mx.array]
"""What a head that drafts gets and gives besides tokens and logits, `(sequences, tokens, dimensions)`; [] for a whole
model."""

Forward = Callable[[mx.array, States, Sequence[Any]], tuple[mx.array, States]]
"""Given tokens `(sequences, tokens)`, states and caches, returns logits `(sequences, tokens, vocabulary)` and states
after each token."""


def forward_of(model: Any) -> Forward:
    """Returns a whole model's."""
    return lambda tokens, states, caches: (model(tokens, cache=caches), [])


def caller(
    forward: Forward,
) -> Callable[[mx.array, mx.array, mx.array, Layers, States], tuple[mx.array, Layers, States]]:
    """Returns a function that computes the next tokens of all sequences.

    Its arguments are the tokens, `(sequences, count)`, of which a sequence's own come first; its lengths before,
    `(sequences,) int32`; the place of its last token in the call, `(sequences,)`; its KV; and states. It returns the
    logits after the last token of each, `(sequences, vocabulary)`; the KV with these tokens; and the states after the
    last ones, `(sequences, 1, dimensions)`.
    """

    def run(
        tokens: mx.array, lengths: mx.array, last: mx.array, layers: Layers, states: States
    ) -> tuple[mx.array, Layers, States]:
        positions = lengths[:, None] + mx.arange(tokens.shape[1])
        caches = [_LayerCache(lengths, positions, arrays) for arrays in layers]
        logits, after = forward(tokens, states, caches)
        chosen, *rest = [mx.take_along_axis(each, last[:, None, None], axis=1) for each in (logits, *after)]
        return chosen[:, 0], [cache.arrays for cache in caches], rest

    return run


class RecentKV:
    """KV of the last tokens of some sequences. The arrays have rows for a power of two of sequences.

    Args:
        shapes: of the layers, in `dtype`.
        call, step: as returned by `caller`; `step` is for one token of each sequence.

    Attributes:
        lengths: how many tokens each sequence has.
        layers: the arrays; [] without sequences.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: mx.Dtype,
        call: Any,
        step: Any,
        lengths: Sequence[int] = (),
        layers: Layers | None = None,
    ) -> None:
        self._shapes, self._dtype, self._call, self._step = shapes, dtype, call, step
        self.lengths = list(lengths)
        self.layers: Layers = layers or []
        self._states: States = []

    @property
    def size(self) -> int:
        """How many tokens of each sequence there is room for now."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def bare(self) -> RecentKV:
        """Returns one of the same model without sequences."""
        return RecentKV(self._shapes, self._dtype, self._call, self._step)

    def open(self) -> None:
        """Appends a sequence without tokens."""

        def zeros(heads: int, dim: int) -> mx.array:
            return mx.zeros((1, heads, max(self.size, SIZES[0]), dim), self._dtype)

        self._append(
            [0], [(zeros(each.heads, each.key_dim), zeros(each.heads, each.value_dim)) for each in self._shapes]
        )

    def join(self, other: RecentKV) -> None:
        """Appends the sequences of another one, which must not be used any more."""
        self._append(other.lengths, other.layers)

    def keep(self, indices: Sequence[int]) -> None:
        """Keeps only these sequences, in this order."""
        if list(indices) != [*range(len(self.lengths))]:
            self.lengths = [self.lengths[index] for index in indices]
            self.layers = _picked(self.layers, list(indices)) if indices else []

    def take(self, index: int) -> RecentKV:
        """Returns one with a copy of the KV of one sequence."""
        taken = _picked(self.layers, [index])
        return RecentKV(self._shapes, self._dtype, self._call, self._step, [self.lengths[index]], taken)

    def compute(self, tokens: Sequence[Sequence[int]], width: int, states: States | None = None) -> mx.array:
        """Launches the model for the next tokens of each sequence: at most `width` of each, or none. There must be room
        for `width` more tokens of each.

        Args:
            states: of these tokens, `(sequences, width, dimensions)`; None for a whole model.

        Returns:
            `(sequences, vocabulary)`, the logits after the last token of each; without meaning where there is none.
        """
        padded = [[*each, *[0] * (width - len(each))] for each in tokens]
        more = self._rows - len(padded)
        last = [max(0, len(each) - 1) for each in tokens] + [0] * more
        self._states = [mx.pad(each, [(0, more), (0, 0), (0, 0)]) if more else each for each in states or ()]
        logits = self._run(mx.array(padded + [[0] * width] * more, mx.uint32), mx.array(last))
        self.lengths = [length + len(each) for length, each in zip(self.lengths, tokens, strict=True)]
        return logits

    def compute_one(self, tokens: mx.array) -> mx.array:
        """As `compute`, for one token of each sequence, `(sequences,)`, which need not be evaluated. Its states are
        those after the last one."""
        if more := self._rows - tokens.shape[0]:
            tokens = mx.concatenate([tokens, mx.zeros((more,), tokens.dtype)])
        logits = self._run(tokens.astype(mx.uint32)[:, None], mx.zeros((self._rows,), mx.int32))
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate."""
        return [array for layer in self.layers for array in layer]

    @property
    def _rows(self) -> int:
        return padded_rows(len(self.lengths))

    def _run(self, tokens: mx.array, last: mx.array) -> mx.array:
        count = tokens.shape[1]
        size = next(size for size in SIZES if size >= max(self.lengths) + count)
        lengths = mx.array(self.lengths + [0] * (self._rows - len(self.lengths)), mx.int32)
        run, layers = self._step if count == 1 else self._call, _grown(self.layers, size)
        # So that the arrays can be changed in place.
        self.layers = []
        logits, self.layers, self._states = run(tokens, lengths, last.astype(mx.uint32), layers, self._states)
        return logits[: len(self.lengths)]

    def _append(self, lengths: Sequence[int], layers: Layers) -> None:
        before, size = len(self.lengths), max(self.size, layers[0][0].shape[2])
        self.lengths = [*self.lengths, *lengths]
        own, new = _grown(self.layers, size), _grown(layers, size)
        if own:

            def both(old: mx.array, more: mx.array) -> mx.array:
                return mx.concatenate([old[:before], more[: len(lengths)]])

            pairs = zip(own, new, strict=True)
            new = [(both(old[0], more[0]), both(old[1], more[1])) for old, more in pairs]
        self.layers = _picked(new, [*range(len(self.lengths))])


def padded_rows(sequences: int) -> int:
    """Returns how many rows the arrays of so many sequences have."""
    return 1 << (sequences - 1).bit_length() if sequences else 0


def _picked(layers: Layers, rows: list[int]) -> Layers:
    """Returns arrays of these rows, padded with copies of the first."""
    picked = mx.array(rows + rows[:1] * (padded_rows(len(rows)) - len(rows)))
    return [(keys[picked], values[picked]) for keys, values in layers]


def _grown(layers: Layers, size: int) -> Layers:
    """Returns the arrays with room for at least `size` tokens of each sequence."""

    def grown(array: mx.array) -> mx.array:
        more = size - array.shape[2]
        return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more > 0 else array

    return [(grown(keys), grown(values)) for keys, values in layers]
