"""A row's KV in and out of MLX's caches: restore a prefix, merge rows into a batch, cut blocks out again.

`ModelCacheSpec` is read from a model's own caches; nothing else knows architectures. Three kinds of layers are kept
for reuse. A *full* layer has KV for every token, a *window* layer for the last ones, and a *recurrent* layer has one
state that stands for all tokens so far; a copy of it is a *snapshot*.

Shapes: keys and values of one layer are (1, kv_heads, tokens, head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ..kv_store.blocks import BLOCK_TOKENS
from .prefix import ReuseRule

SNAPSHOT_TOKENS_MAX = 4096


class LayerKind(Enum):
    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"
    OTHER = "other"


@dataclass(frozen=True)
class LayerSpec:
    """One layer. A token costs `token_bytes` in a full or window layer, the latter for at most `window` tokens; a
    recurrent layer costs `state_bytes`."""

    kind: LayerKind
    window: int = 0
    token_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelCacheSpec:
    """What a model's layers keep.

    Attributes:
        bytes_per_token: of the layers that grow with every token; at least 1.
        bytes_per_row: of the windows and states that a row has whatever its length.
    """

    layers: tuple[LayerSpec, ...]
    bytes_per_token: int
    bytes_per_row: int

    @property
    def reusable(self) -> bool:
        """Whether prefixes can be kept: no layer is of a kind that cannot be cut."""
        return all(layer.kind is not LayerKind.OTHER for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(layer.kind is LayerKind.RECURRENT for layer in self.layers)

    @property
    def rule(self) -> ReuseRule:
        """When a kept prefix is enough for every layer."""
        return ReuseRule(window=max((layer.window for layer in self.layers), default=0), recurrent=self.recurrent)

    @property
    def snapshot_tokens(self) -> int:
        """How far apart the snapshots of a long prompt are: as far as they weigh no more than the KV between them."""
        states = sum(layer.state_bytes for layer in self.layers)
        blocks = -(-states // (self.bytes_per_token * BLOCK_TOKENS))
        return min(max(2, blocks) * BLOCK_TOKENS, SNAPSHOT_TOKENS_MAX)

    def describe(self) -> str:
        """The layers in words, such as `4 full, 20 window of 512`."""
        names = [f"window of {layer.window}" if layer.window else layer.kind.value for layer in self.layers]
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _read_layer(cache: Any, tokens: int) -> LayerSpec:
    if type(cache) is ArraysCache:
        return LayerSpec(LayerKind.RECURRENT, state_bytes=cache.nbytes)
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        assert cache.keys is not None and cache.values is not None
        per_token = sum(array.shape[1] * array.shape[3] * array.itemsize for array in (cache.keys, cache.values))
        window = cache.max_size if isinstance(cache, RotatingKVCache) else 0
        return LayerSpec(LayerKind.WINDOW if window else LayerKind.FULL, window, per_token)
    return LayerSpec(LayerKind.OTHER, token_bytes=cache.nbytes // max(tokens, 256))


def read_spec(caches: Sequence[Any], tokens: int) -> ModelCacheSpec:
    """The spec of a model from caches that hold `tokens` tokens.

    Raises:
        ValueError: rows of such caches cannot be decoded together.
    """
    for cache in caches:
        if not hasattr(cache, "merge") or getattr(cache, "keep", 0):
            raise ValueError(f"its layers keep a {type(cache).__name__}, of which there is no batch")
    layers = tuple(_read_layer(cache, tokens) for cache in caches)
    per_token = sum(layer.token_bytes for layer in layers if not layer.window)
    per_row = sum(layer.token_bytes * layer.window + layer.state_bytes for layer in layers)
    return ModelCacheSpec(layers, max(1, per_token), per_row)


@dataclass(frozen=True)
class Slab:
    """The KV of some consecutive tokens.

    Attributes:
        layers: (keys, values) of every layer; None for a recurrent one. Those of window layers lack the first
            `window_from` tokens, and are None where that is all of them.
        tokens: how many.
        states: the recurrent layers' arrays after the last token, or None where nobody took a snapshot there.
    """

    layers: list[tuple[mx.array, mx.array] | None]
    tokens: int
    window_from: int = 0
    states: list[list[mx.array]] | None = None

    @property
    def nbytes(self) -> int:
        pairs = sum(pair[0].nbytes + pair[1].nbytes for pair in self.layers if pair is not None)
        return pairs + sum(array.nbytes for state in self.states or () for array in state)


def restore(spec: ModelCacheSpec, caches: Sequence[Any], slabs: Sequence[Slab], tail: Slab | None, used: int) -> None:
    """Fill empty `caches` with whole slabs and the first `used` tokens of a tail, which the spec's rule allows."""
    total = sum(slab.tokens for slab in slabs) + used
    if total == 0:
        return
    states = iter((tail if tail is not None and used else slabs[-1]).states or [])
    for index, (layer, cache) in enumerate(zip(spec.layers, caches, strict=True)):
        if layer.kind is LayerKind.RECURRENT:
            cache.cache = list(next(states))
            continue
        wanted = min(total, layer.window) if layer.window else total
        keys, values = _last_tokens(index, slabs, tail, used, wanted)
        if layer.window:
            cache.state = (keys, values, total, 0, layer.window, keys.shape[2])
        else:
            cache.state = (keys, values, total)


def _last_tokens(
    layer: int, slabs: Sequence[Slab], tail: Slab | None, used: int, wanted: int
) -> tuple[mx.array, mx.array]:
    parts: list[tuple[mx.array, mx.array]] = []
    sources = [(slab, slab.tokens) for slab in slabs]
    if tail is not None and used:
        sources.append((tail, used))
    for slab, stop in reversed(sources):
        if wanted <= 0:
            break
        pair = slab.layers[layer]
        assert pair is not None, "the rule promised this layer's KV"
        # A window layer's arrays begin later than the slab.
        missing = slab.tokens - pair[0].shape[2]
        start = max(0, stop - wanted)
        span = (..., slice(start - missing, stop - missing), slice(None))
        parts.append(pair if start == missing and stop == slab.tokens else (pair[0][span], pair[1][span]))
        wanted -= stop - start
    parts.reverse()
    return mx.concatenate([keys for keys, _ in parts], axis=2), mx.concatenate([values for _, values in parts], axis=2)


def merge(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Rows' caches (one a layer) as the caches of one batch, in order."""
    return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]


def extend(batch: Sequence[Any], other: Sequence[Any]) -> None:
    """Append the rows of another batch."""
    for cache, more in zip(batch, other, strict=True):
        cache.extend(more)


def _copy(array: mx.array) -> mx.array:
    # With one head a slice is already contiguous and would keep the whole cache alive.
    return mx.contiguous(array) if array.shape[1] > 1 else array + mx.zeros((), dtype=array.dtype)


class RowView:
    """One row of caches, to cut slabs out of.

    Args:
        caches: a batch's caches, or one row's own (then `row` is None).
        length: how many tokens have KV.
    """

    def __init__(self, spec: ModelCacheSpec, caches: Sequence[Any], row: int | None, length: int) -> None:
        self._spec = spec
        self._length = length
        self._rows = slice(row or 0, (row or 0) + 1)
        self._states: list[list[mx.array]] = []
        # Per layer: keys and values, of this row or of all, and the position of their first token.
        self._layers: list[tuple[mx.array, mx.array, int] | None] = []
        padding: int | None = 0 if row is None else None
        for layer, cache in zip(spec.layers, caches, strict=True):
            if layer.kind is LayerKind.RECURRENT:
                self._layers.append(None)
                self._states.append([array[self._rows] for array in cache.cache if array is not None])
            elif layer.window:
                single = cache if row is None else cache.extract(row)
                keys, values = single._temporal_order(single.keys), single._temporal_order(single.values)
                self._layers.append((keys, values, length - keys.shape[2]))
            else:
                if padding is None:
                    # The same in every layer, and costs a wait for the device.
                    padding = int(cache.left_padding[row].item())
                self._layers.append((cache.keys, cache.values, -padding))

    def slab(self, start: int, stop: int) -> Slab:
        """A copy of the tokens [start, stop), not evaluated. It has a snapshot if they end where the row does."""
        window_from = 0
        for layer, held in zip(self._spec.layers, self._layers, strict=True):
            if layer.window and held is not None:
                window_from = max(window_from, min(stop, held[2]) - start)
        pairs: list[tuple[mx.array, mx.array] | None] = []
        for layer, held in zip(self._spec.layers, self._layers, strict=True):
            first = start + window_from if layer.window else start
            if held is None or first >= stop:
                pairs.append(None)
                continue
            keys, values, origin = held
            rows = slice(0, 1) if layer.window else self._rows
            span = (rows, slice(None), slice(first - origin, stop - origin))
            pairs.append((_copy(keys[span]), _copy(values[span])))
        states = None
        if self._states and stop == self._length:
            states = [[array + mx.zeros((), dtype=array.dtype) for array in state] for state in self._states]
        return Slab(pairs, stop - start, window_from, states)


def evaluate(slabs: Sequence[Slab]) -> None:
    """Begin computing the slabs' copies, so that they do not hold on to what they were cut from."""
    arrays = [array for slab in slabs for pair in slab.layers if pair is not None for array in pair]
    arrays += [array for slab in slabs for state in slab.states or () for array in state]
    mx.async_eval(arrays)
