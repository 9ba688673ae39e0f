"""Slabs as named arrays for the disk, and back.

A part is called by its layer and what it is: `3.key_codes` and the other fields of `Sealed`, or `3.keys` and `3.values`
in full precision, or `3.state.0` of a recurrent layer. bfloat16, which numpy does not know, travels as 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from .kv_cache import Entry, LayerKind, ModelCacheSpec, Slab
from .sealing import Sealed

_PAIR = ("keys", "values")


def to_parts(spec: ModelCacheSpec, slab: Slab) -> dict[str, np.ndarray]:
    """The slab's arrays by name, in the order of layers. They must have been evaluated."""
    parts: dict[str, np.ndarray] = {}
    states = iter(slab.states or ())
    for index, (layer, entry) in enumerate(zip(spec.layers, slab.layers, strict=True)):
        if entry is not None:
            names = Sealed._fields if isinstance(entry, Sealed) else _PAIR
            parts |= {f"{index}.{name}": _to_numpy(array) for name, array in zip(names, entry, strict=True)}
        elif layer.kind is LayerKind.RECURRENT and slab.states is not None:
            arrays = enumerate(next(states))
            parts |= {f"{index}.state.{number}": _to_numpy(array) for number, array in arrays}
    return parts


def from_parts(spec: ModelCacheSpec, parts: Mapping[str, np.ndarray], tokens: int, window_from: int = 0) -> Slab:
    """The slab of `tokens` tokens that `to_parts` made these of.

    Raises:
        ValueError: it is a slab of other layers.
    """
    left = {name: _to_mlx(array) for name, array in parts.items()}
    layers: list[Entry | None] = []
    states: list[list[mx.array]] = []
    for index, layer in enumerate(spec.layers):
        if layer.kind is LayerKind.RECURRENT:
            state: list[mx.array] = []
            while (array := left.pop(f"{index}.state.{len(state)}", None)) is not None:
                state.append(array)
            if state:
                states.append(state)
            layers.append(None)
            continue
        sealed = [left.pop(f"{index}.{name}", None) for name in Sealed._fields]
        pair = [left.pop(f"{index}.{name}", None) for name in _PAIR]
        if not any(array is None for array in sealed):
            layers.append(Sealed(*(array for array in sealed if array is not None)))
        elif pair[0] is not None and pair[1] is not None:
            layers.append((pair[0], pair[1]))
        elif layer.window:
            layers.append(None)
        else:
            raise ValueError(f"layer {index} has no KV")
    recurrent = sum(layer.kind is LayerKind.RECURRENT for layer in spec.layers)
    if left or len(states) not in (0, recurrent):
        raise ValueError(f"not a slab of this model: {', '.join(sorted(left)[:3]) or 'a state is missing'}")
    return Slab(layers, tokens, window_from, states or None)


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16)) if array.dtype == mx.bfloat16 else np.array(array)


def _to_mlx(array: np.ndarray) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if array.dtype == np.uint16 else made
