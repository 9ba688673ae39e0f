"""Converts KV to named numpy arrays for the disk, and back. Whole blocks go from their records straight into the pool.

A part's name is its layer and kind: `3.key_codes` and the other fields of a sealed block, or `3.keys` and `3.values` of
an open one, or `3.state.0` of a recurrent layer. Shapes are those of the slab's arrays, with a first axis of
1. Dtypes are equal too, but bfloat16, which numpy lacks, is stored as uint16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

import mlx.core as mx
import numpy as np

from ...protocol.entries import DTYPES, Part
from ..device.device import on_cuda
from ..kernels.sealing import Plain, Quantized, Sealed
from ..kv.caches import LayerKind, LayerKV, ModelCacheSpec, Record, Records, Slab
from ..kv.pool import Field, LayerFields

logger = logging.getLogger(__name__)

_PAIR = ("keys", "values")

_NOTHING = "nothing"
"""The one part of a block between two snapshots if all layers of a model are recurrent: an entry must have a part."""

_DTYPES = {
    np.dtype(np.uint8): mx.uint8,
    np.dtype(np.uint16): mx.bfloat16,
    np.dtype(np.uint32): mx.uint32,
    np.dtype(np.uint64): mx.uint64,
    np.dtype(np.int8): mx.int8,
    np.dtype(np.int16): mx.int16,
    np.dtype(np.int32): mx.int32,
    np.dtype(np.int64): mx.int64,
    np.dtype(np.float16): mx.float16,
    np.dtype(np.float32): mx.float32,
}
_STORED = {dtype: stored for stored, dtype in _DTYPES.items()}


def to_parts(spec: ModelCacheSpec, kept: Slab | Record) -> dict[str, np.ndarray]:
    """Returns the arrays of a slab or a record by name, without copying. They must be evaluated already.

    States come last: they may have any size, and a GPU needs the KV at the same place in every record.
    """
    parts = _parts_of_record(kept) if isinstance(kept, Record) else _parts_of_slab(kept)
    recurrent = [index for index, layer in enumerate(spec.layers) if layer.kind is LayerKind.RECURRENT]
    for index, state in zip(recurrent, kept.states or (), strict=kept.states is not None):
        parts |= {f"{index}.state.{number}": to_numpy(array) for number, array in enumerate(state)}
    return completed(parts)


def completed(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an entry's arrays, of which it must have one."""
    return parts or {_NOTHING: np.zeros(1, np.uint8)}


def _parts_of_slab(slab: Slab) -> dict[str, np.ndarray]:
    arrays: dict[str, mx.array] = {}
    for index, entry in enumerate(slab.layers):
        if entry is not None:
            names = entry._fields if isinstance(entry, Sealed) else _PAIR
            arrays |= {f"{index}.{name}": array for name, array in zip(names, entry, strict=True)}
    if on_cuda() and _go_together():
        return in_one_piece(arrays)
    return {name: to_numpy(array) for name, array in arrays.items()}


@cache
def _go_together() -> bool:
    """Whether MLX can do `in_one_piece` on this device. Computed once."""
    arrays = {"0": mx.ones((1, 2, 3), mx.bfloat16), "1": mx.arange(5, dtype=mx.uint32)}
    try:
        mx.eval(arrays)
        together = in_one_piece(arrays)
        return all(np.array_equal(together[name], to_numpy(array)) for name, array in arrays.items())
    except (RuntimeError, ValueError) as error:
        logger.warning("open blocks leave the card array by array: %s", error)
        return False


def in_one_piece(arrays: Mapping[str, mx.array]) -> dict[str, np.ndarray]:
    """As `to_numpy`, of many arrays. They leave a card together: one by one each would take 0.1 ms, in which no other
    Python runs."""
    if not arrays:
        return {}
    row = to_numpy(mx.concatenate([array.reshape(-1).view(mx.uint8) for array in arrays.values()]))
    ends = accumulate(array.nbytes for array in arrays.values())
    return {
        name: row[end - array.nbytes : end].view(_STORED[array.dtype]).reshape(array.shape)
        for (name, array), end in zip(arrays.items(), ends, strict=True)
    }


def _parts_of_record(record: Record) -> dict[str, np.ndarray]:
    row = to_numpy(record.data)[record.row]
    return {
        f"{index}.{name}": row[field.start : field.stop].view(_STORED[field.dtype]).reshape(field.shape)
        for index, layer in enumerate(record.records.layers)
        if layer is not None
        for name, field in zip(layer.kind._fields, layer.fields, strict=True)
    }


def whole(kept: Slab | Record) -> memoryview | None:
    """Returns all bytes of what `to_parts` returns, in order, if they lie so in memory."""
    if not isinstance(kept, Record) or kept.states is not None:
        return None
    return to_numpy(kept.data)[kept.row].data


class Layout:
    """Where a model's arrays are in the records of entries with equal parts.

    Args:
        parts: of each entry, in order.

    Raises:
        ValueError: they do not match the model's layers.
    """

    def __init__(self, spec: ModelCacheSpec, parts: Sequence[Part]) -> None:
        fields: dict[str, Field] = {}
        start = 0
        for part in parts:
            stop = start + part.nbytes
            fields[part.name] = Field(start, stop, _DTYPES[DTYPES[part.dtype]], part.shape)
            start = stop
        fields.pop(_NOTHING, None)
        # A GPU can only read numbers at multiples of their sizes.
        self._aligned = all(field.start % field.dtype.size == 0 for field in fields.values())
        self.layers: list[tuple[type[Sealed] | None, list[Field]] | None] = []
        self._states: list[list[Field]] = []
        for number, layer in enumerate(spec.layers):
            if layer.kind is LayerKind.RECURRENT:
                state: list[Field] = []
                while (field := fields.pop(f"{number}.state.{len(state)}", None)) is not None:
                    state.append(field)
                self._states += [state] if state else []
                self.layers.append(None)
                continue
            found = _kind_of(fields, f"{number}.")
            if found is None and not layer.window:
                raise ValueError(f"layer {number} has no KV")
            self.layers.append(found)
        recurrent = sum(layer.kind is LayerKind.RECURRENT for layer in spec.layers)
        if fields or len(self._states) not in (0, recurrent):
            raise ValueError(f"not a slab of this model: {', '.join(sorted(fields)[:3]) or 'a state is missing'}")

    def slab(self, data: np.ndarray, tokens: int, window_from: int = 0) -> Slab:
        """Returns the entry of `data`, `(nbytes,) uint8`, as a slab with memory of its own, evaluated."""
        whole = mx.array(data) if self._aligned else None

        def array(field: Field) -> mx.array:
            if whole is None:
                return mx.array(data[field.start : field.stop]).view(field.dtype).reshape(field.shape)
            return whole[field.start : field.stop].view(field.dtype).reshape(field.shape)

        layers: list[LayerKV | None] = []
        for found in self.layers:
            arrays = [array(field) for field in found[1]] if found is not None else []
            kind = found[0] if found is not None else None
            layers.append(kind._make(arrays) if kind is not None else (arrays[0], arrays[1]) if arrays else None)
        states = [[array(field) for field in state] for state in self._states]
        slab = Slab(layers, tokens, window_from, states or None)
        # No other thread could evaluate what this one leaves lazy.
        mx.eval(slab.arrays())
        return slab

    def records(
        self, data: np.ndarray, windows: Sequence[int], coming: int = 0, buffers: DeviceBuffers | None = None
    ) -> Records:
        """Returns sealed blocks, `(blocks, nbytes) uint8`, as the pool takes them.

        Args:
            data: may be overwritten afterwards if there are `buffers`.
            windows: each block's `window_from`.
            coming: as in `Records`.
            buffers: the buffers that have `data`, for a GPU.

        Raises:
            ValueError: a layer is not sealed.
        """
        layers: list[LayerFields | None] = []
        for found in self.layers:
            if found is not None and found[0] is None:
                raise ValueError("blocks of a model with a pool are sealed")
            layers.append(LayerFields(found[0], found[1]) if found is not None and found[0] is not None else None)
        states: list[list[list[mx.array]] | None] = [None] * len(data)
        if self._states:
            states = [
                [
                    [
                        mx.array(record[field.start : field.stop]).view(field.dtype).reshape(field.shape)
                        for field in state
                    ]
                    for state in self._states
                ]
                for record in data
            ]
        mx.eval(states)
        return Records(data if buffers is None else buffers.moved(data), layers, windows, states, coming)


class DeviceBuffers:
    """MLX's own memory, into which files are read and from which a GPU copies. Thread-safe."""

    def __init__(self) -> None:
        self._arrays: dict[int, mx.array] = {}

    def make(self, count: int, nbytes: int) -> np.ndarray:
        """Returns a buffer, `(count, nbytes) uint8`."""
        array = mx.zeros((count, nbytes), mx.uint8, stream=mx.cpu)
        mx.eval(array)
        buffer = np.asarray(array)
        self._arrays[buffer.ctypes.data] = array
        return buffer

    def moved(self, data: np.ndarray) -> mx.array:
        """Returns a copy of a buffer's first records in the GPU's own memory, evaluated."""
        array = self._arrays.get(data.ctypes.data)
        whole = mx.array(data) if array is None else array[: len(data)]
        # This moves all pages to the card at once; reading fields one by one would move them in thousands of pieces.
        moved = whole + mx.array(0, mx.uint8)
        mx.eval(moved)
        return moved


def _kind_of(fields: dict[str, Field], prefix: str) -> tuple[type[Sealed] | None, list[Field]] | None:
    """Removes a layer's fields, named with the prefix. Returns their kind, None for an open pair, or None if they are
    incomplete."""
    for kind, names in ((Quantized, Quantized._fields), (Plain, Plain._fields), (None, _PAIR)):
        if all(prefix + name in fields for name in names):
            return kind, [fields.pop(prefix + name) for name in names]
    return None


def to_numpy(array: mx.array) -> np.ndarray:
    """Returns an evaluated array as it is stored: of the same shape and dtype, but uint16 for bfloat16. It shares the
    array's memory."""
    seen = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(seen)
    return np.asarray(seen)


def to_mlx(array: np.ndarray) -> mx.array:
    """Returns a stored array as MLX has it: of the same shape and dtype, but bfloat16 for uint16."""
    made = mx.array(array)
    return made.view(mx.bfloat16) if array.dtype == np.uint16 else made
