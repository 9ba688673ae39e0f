"""Converts slabs to named numpy arrays for the disk, and back.

A part's name is its layer and kind: `3.key_codes` and the other fields of a sealed block, or `3.keys` and `3.values` of
an open one, or `3.state.0` of a recurrent layer. Shapes are those of the slab's arrays, with a first axis of one row.
Dtypes are equal too, but bfloat16, which numpy lacks, is stored as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..kv.caches import LayerKind, LayerKV, Layers, ModelCacheSpec, Slab
from ..kv.sealing import Plain, Quantized, Sealed

_PAIR = ("keys", "values")

_NOTHING = "nothing"
"""The part of a block between two snapshots of a model whose layers are all recurrent: an entry must have one."""


def to_parts(spec: ModelCacheSpec, slab: Slab) -> dict[str, np.ndarray]:
    """Returns the slab's arrays by name, in the order of layers. They must be evaluated already."""
    parts: dict[str, np.ndarray] = {}
    states = iter(slab.states or ())
    for index, (layer, entry) in enumerate(zip(spec.layers, slab.layers, strict=True)):
        if entry is not None:
            names = entry._fields if isinstance(entry, Sealed) else _PAIR
            parts |= {f"{index}.{name}": to_numpy(array) for name, array in zip(names, entry, strict=True)}
        elif layer.kind is LayerKind.RECURRENT and slab.states is not None:
            arrays = enumerate(next(states))
            parts |= {f"{index}.state.{number}": to_numpy(array) for number, array in arrays}
    return parts or {_NOTHING: np.zeros(1, np.uint8)}


@dataclass
class _Stack:
    """A part of several like layers, `(layers, ...)`, of which the rows `places` have been read."""

    array: np.ndarray
    places: list[int] = field(default_factory=list)


class SlabReader:
    """Builds the slabs of entries from their parts, which may come in any order.

    Every slab has memory of its own, so that each can be freed alone. On a GPU like layers share an array, so that rows
    are opened faster.

    Args:
        count: number of entries.
        stacked: whether like layers share an array.
    """

    def __init__(self, spec: ModelCacheSpec, count: int, *, stacked: bool = False) -> None:
        self._spec = spec
        self._parts: list[dict[str, mx.array]] = [{} for _ in range(count)]
        self._stacks: list[dict[Layers, dict[str, _Stack]]] = [{} for _ in range(count)]
        several = [layers for layers in spec.alike if stacked and len(layers) > 1]
        self._places = {str(index): (layers, place) for layers in several for place, index in enumerate(layers)}

    def take(self, name: str, indexes: Sequence[int], array: np.ndarray) -> None:
        """Takes one part of several entries.

        Args:
            array: `(entries, ...)` in a dtype of the disk; `array[i]` belongs to entry `indexes[i]`.
        """
        if name == _NOTHING:
            return
        layer, _, rest = name.partition(".")
        for row, index in enumerate(indexes):
            if layer not in self._places or not self._stack(index, *self._places[layer], rest, array[row]):
                self._parts[index][name] = to_mlx(array[row])

    def _stack(self, index: int, layers: Layers, place: int, name: str, array: np.ndarray) -> bool:
        """Copies a layer's part, `(1, ...)`, into the stack of like layers. Returns False if its shape or dtype
        differs."""
        stacks = self._stacks[index].setdefault(layers, {})
        if name not in stacks:
            stacks[name] = _Stack(np.empty((len(layers), *array.shape[1:]), array.dtype))
        stack = stacks[name]
        if array.shape[:1] != (1,) or array.shape[1:] != stack.array.shape[1:] or array.dtype != stack.array.dtype:
            return False
        stack.array[place] = array[0]
        stack.places.append(place)
        return True

    def slab(self, index: int, tokens: int, window_from: int = 0) -> Slab:
        """Builds the slab of entry `index`, which has `tokens` tokens, and evaluates it. Call it once per entry.

        Raises:
            ValueError: the parts do not match the model's layers.
        """
        left, self._parts[index] = self._parts[index], {}
        stacks, self._stacks[index] = self._stacks[index], {}
        entries: dict[Layers, LayerKV] = {}
        for layers, parts in stacks.items():
            whole = {name: to_mlx(stack.array) for name, stack in parts.items() if len(stack.places) == len(layers)}
            entry = _entry(whole, "") if len(whole) == len(parts) else None
            if entry is not None:
                entries[layers] = entry
                continue
            for name, stack in parts.items():
                left |= {f"{layers[place]}.{name}": to_mlx(stack.array[place : place + 1]) for place in stack.places}
        several = {number for layers in entries for number in layers}
        states: list[list[mx.array]] = []
        for number, layer in enumerate(self._spec.layers):
            if layer.kind is LayerKind.RECURRENT:
                state: list[mx.array] = []
                while (array := left.pop(f"{number}.state.{len(state)}", None)) is not None:
                    state.append(array)
                if state:
                    states.append(state)
            elif number not in several:
                entry = _entry(left, f"{number}.")
                if entry is not None:
                    entries[number,] = entry
                elif not layer.window:
                    raise ValueError(f"layer {number} has no KV")
        recurrent = sum(layer.kind is LayerKind.RECURRENT for layer in self._spec.layers)
        if left or len(states) not in (0, recurrent):
            raise ValueError(f"not a slab of this model: {', '.join(sorted(left)[:3]) or 'a state is missing'}")
        slab = Slab.of(len(self._spec.layers), entries, tokens, window_from, states or None)
        mx.eval(slab.arrays())
        return slab


def _entry(parts: dict[str, mx.array], prefix: str) -> LayerKV | None:
    """Removes a layer's arrays, named with the prefix, from `parts`. Returns them as KV, or None if they are
    incomplete."""
    for kind, names in ((Quantized, Quantized._fields), (Plain, Plain._fields), (None, _PAIR)):
        arrays = [parts.pop(prefix + name) for name in names if prefix + name in parts]
        if len(arrays) == len(names):
            return kind._make(arrays) if kind is not None else (arrays[0], arrays[1])
    return None


def to_numpy(array: mx.array) -> np.ndarray:
    """Returns an evaluated array as it is stored: of the same shape and dtype, but uint16 for bfloat16."""
    return np.array(array.view(mx.uint16)) if array.dtype == mx.bfloat16 else np.array(array)


def to_mlx(array: np.ndarray) -> mx.array:
    """Returns a stored array as MLX has it: of the same shape and dtype, but bfloat16 for uint16."""
    made = mx.array(array)
    return made.view(mx.bfloat16) if array.dtype == np.uint16 else made
