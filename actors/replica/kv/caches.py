"""Moves a row's KV into and out of MLX's caches: restore a prefix, merge rows into a batch, copy blocks out.

`ModelCacheSpec` is read from a model's own caches; nothing else knows architectures. Three kinds of layers are kept
for reuse. A *full* layer has KV for every token, a *window* layer for the last ones, and a *recurrent* layer has one
state for all tokens so far; a copy of it is a *snapshot*. With a sealing policy full and window layers keep whole
blocks sealed and the open block in full precision; without one everything is in full precision.

Shapes: keys of one layer are `(rows, kv_heads, tokens, key_dim)`, values `(rows, kv_heads, tokens, value_dim)`, in the
model's dtype; a row's own caches and slabs have one row. `sealing.py` gives the shapes of sealed blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ...protocol.block_ids import BLOCK_TOKENS
from . import sealing
from .prefix import ReuseRule
from .sealed_cache import Choose, SealedKVCache, Shared
from .sealing import Sealed, SealPolicy, sealed_token_bytes

SNAPSHOT_TOKENS_MAX = 4096


Layers = tuple[int, ...]
"""Indices of layers, ascending."""


class LayerKind(Enum):
    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"
    OTHER = "other"


@dataclass(frozen=True)
class LayerSpec:
    """The memory of one layer. A token costs `token_bytes` in a full or window layer, in the latter for at most
    `window` tokens; a recurrent layer costs `state_bytes`. A `sealed` layer's open block costs `open_bytes` more."""

    kind: LayerKind
    window: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    open_bytes: int = 0
    sealed: bool = False


@dataclass(frozen=True)
class ModelCacheSpec:
    """The kinds of a model's layers and what they cost.

    Attributes:
        bytes_per_token: in the layers that grow with every token; at least 1.
        bytes_per_row: windows, states and open blocks, independent of the row's length.
        policy: how full and window layers are sealed; None if they are not.
    """

    layers: tuple[LayerSpec, ...]
    bytes_per_token: int
    bytes_per_row: int
    policy: SealPolicy | None = None

    @property
    def reusable(self) -> bool:
        """Whether prefixes can be kept: the KV of every layer can be copied out."""
        return all(layer.kind is not LayerKind.OTHER for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(layer.kind is LayerKind.RECURRENT for layer in self.layers)

    @property
    def rule(self) -> ReuseRule:
        """What a kept prefix must have to be enough for every layer."""
        return ReuseRule(window=max((layer.window for layer in self.layers), default=0), recurrent=self.recurrent)

    @property
    def alike(self) -> list[Layers]:
        """Full and window layers, grouped by equal specs."""
        kinds: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.kind in (LayerKind.FULL, LayerKind.WINDOW):
                kinds.setdefault(layer, []).append(index)
        return [tuple(layers) for layers in kinds.values()]

    @property
    def snapshot_tokens(self) -> int:
        """Tokens between the snapshots of a long prompt: so many that a snapshot is no larger than the KV between."""
        states = sum(layer.state_bytes for layer in self.layers)
        blocks = -(-states // (self.bytes_per_token * BLOCK_TOKENS))
        return min(max(2, blocks) * BLOCK_TOKENS, SNAPSHOT_TOKENS_MAX)

    def describe(self) -> str:
        """Returns the layers as text, such as `4 full, 20 window of 512; q4`."""
        names = [f"window of {layer.window}" if layer.window else layer.kind.value for layer in self.layers]
        kinds = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        return f"{kinds}; {self.policy.name if self.policy is not None else 'fp16'}"


def _read_layer(cache: Any, tokens: int, policy: SealPolicy | None) -> LayerSpec:
    if type(cache) is ArraysCache:
        return LayerSpec(LayerKind.RECURRENT, state_bytes=cache.nbytes)
    if not _has_kv(cache):
        return LayerSpec(LayerKind.OTHER, token_bytes=cache.nbytes // max(tokens, 256))
    window: int = getattr(cache, "max_size", 0)
    kind = LayerKind.WINDOW if window else LayerKind.FULL
    per_token = sum(array.shape[1] * array.shape[3] * array.itemsize for array in (cache.keys, cache.values))
    if policy is None:
        return LayerSpec(kind, window, per_token)
    sealed = sealed_token_bytes(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], policy)
    return LayerSpec(kind, window, sealed, open_bytes=BLOCK_TOKENS * per_token, sealed=True)


def _has_kv(cache: Any) -> bool:
    return type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0)


def _is_latent(cache: Any) -> bool:
    """Whether the layer keeps one latent head for keys and values, as DeepSeek V3's; sealing that is not measured."""
    return cache.keys.shape[1] == 1 and cache.values.shape[1] == 1 and cache.keys.shape[3] != cache.values.shape[3]


def read_spec(caches: Sequence[Any], tokens: int, policy: SealPolicy | None = None) -> ModelCacheSpec:
    """Returns the spec of a model from its caches, which hold `tokens` tokens of one row.

    Args:
        policy: how to seal. All layers share a mask, so all or none are sealed.

    Raises:
        ValueError: rows of such caches cannot be batched.
    """
    for cache in caches:
        if not hasattr(cache, "merge") or getattr(cache, "keep", 0):
            raise ValueError(f"its layers keep a {type(cache).__name__}, of which there is no batch")
    kv = [cache for cache in caches if _has_kv(cache)]
    others = [cache for cache in caches if not _has_kv(cache) and type(cache) is not ArraysCache]
    if not kv or others or any(map(_is_latent, kv)):
        policy = None
    layers = tuple(_read_layer(cache, tokens, policy) for cache in caches)
    per_token = sum(layer.token_bytes for layer in layers if not layer.window)
    per_row = sum(layer.token_bytes * layer.window + layer.state_bytes + layer.open_bytes for layer in layers)
    return ModelCacheSpec(layers, max(1, per_token), per_row, policy)


def new_caches(spec: ModelCacheSpec, own: Sequence[Any], direct: Choose | None) -> list[Any]:
    """Returns empty caches for one row, in place of the model's `own`.

    Args:
        direct: see `Choose`; None if decode steps always dequantize.
    """
    if spec.policy is None:
        return list(own)
    shared = Shared(direct)
    return [
        SealedKVCache(spec.policy, layer.window, shared=shared) if layer.sealed else cache
        for layer, cache in zip(spec.layers, own, strict=True)
    ]


LayerKV = Sealed | tuple[mx.array, mx.array]
"""KV of a layer in a slab: a sealed block, or `(keys, values)`. KV of several layers has one row per layer."""


@dataclass(frozen=True)
class Slab:
    """The KV of some consecutive tokens of one row.

    Attributes:
        layers: KV of every layer; None for a recurrent one. Window layers lack the first `window_from` tokens, and are
            None if those are all.
        tokens: number of tokens.
        states: a snapshot of the recurrent layers' arrays after the last token, or None. Each has one row; the other
            axes and the dtype are the model's.
        stacks: the KV of several layers in one array, `(layers, kv_heads, tokens, dim)`. `layers` has views of it.
    """

    layers: list[LayerKV | None]
    tokens: int
    window_from: int = 0
    states: list[list[mx.array]] | None = None
    stacks: Mapping[Layers, LayerKV] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        count: int,
        entries: Mapping[Layers, LayerKV],
        tokens: int,
        window_from: int = 0,
        states: list[list[mx.array]] | None = None,
    ) -> Slab:
        """Makes a slab of a model with `count` layers.

        Args:
            entries: KV by the layers that share an array, one row per layer.
        """
        layers: list[LayerKV | None] = [None] * count
        for together, entry in entries.items():
            for place, index in enumerate(together):
                layers[index] = _row_of(entry, place) if len(together) > 1 else entry
        return cls(layers, tokens, window_from, states, {key: entries[key] for key in entries if len(key) > 1})

    def entry(self, layers: Layers) -> LayerKV | None:
        """Returns the KV of these layers, one row per layer; None if the slab lacks it or has it in other stacks."""
        return self.layers[layers[0]] if len(layers) == 1 else self.stacks.get(layers)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of all layers and states, in the shapes and dtypes of the class's attributes."""
        kv = [array for entry in self.layers if entry is not None for array in entry]
        return kv + [array for state in self.states or () for array in state]


@dataclass(frozen=True)
class BlockRun(Slab):
    """Consecutive whole blocks as one slab. Only full layers are joined; the KV of the others is in `blocks`.

    It shares no memory with `blocks`, so each of those may be freed while others stay.
    """

    blocks: tuple[Slab, ...] = ()


def _row_of(entry: Any, row: int) -> Any:
    """Returns a row of KV, whose arrays have rows on the first axis, as a view with one row; None for None."""
    if entry is None:
        return None
    arrays = [array[row : row + 1] for array in entry]
    return Sealed(*arrays) if isinstance(entry, Sealed) else tuple(arrays)


def restore(spec: ModelCacheSpec, caches: Sequence[Any], slabs: Sequence[Slab], tail: Slab | None, used: int) -> None:
    """Fills a row's empty `caches` with whole slabs and the first `used` tokens of a tail, which the spec's rule must
    allow.

    Layers that share an array in every slab are joined together: a GPU takes as long for one as for all.
    """
    total = sum(slab.tokens for slab in slabs) + used
    if total == 0:
        return
    tail = tail if used else None
    states = iter((tail or slabs[-1]).states or [])
    for layers in _together(spec, slabs, tail):
        layer = spec.layers[layers[0]]
        if layer.kind is LayerKind.RECURRENT:
            caches[layers[0]].cache = list(next(states))
            continue
        held = _with_layers(slabs, layers)
        if layer.sealed:
            # A window's blocks are separate slabs, because runs join only full layers.
            first = max(0, total - layer.window + 1) // BLOCK_TOKENS if layer.window else 0
            _restore_sealed([caches[index] for index in layers], layers, held[first:], tail, total)
            continue
        wanted = min(total, layer.window) if layer.window else total
        pair = _last_tokens(layers, held, tail, used, wanted)
        for place, index in enumerate(layers):
            keys, values = _row_of(pair, place)
            more = (0, layer.window, keys.shape[2]) if layer.window else ()
            caches[index].state = (keys, values, total, *more)


def _together(spec: ModelCacheSpec, slabs: Sequence[Slab], tail: Slab | None) -> list[Layers]:
    """Returns all layers, grouped if they share an array in every slab that has them."""
    last = tail or slabs[-1]
    groups: list[Layers] = []
    for layers in last.stacks:
        sources = [*_with_layers(slabs, layers), last]
        if all(layers in slab.stacks or slab.layers[layers[0]] is None for slab in sources):
            groups.append(layers)
    grouped = {index for layers in groups for index in layers}
    return groups + [(index,) for index in range(len(spec.layers)) if index not in grouped]


def _with_layers(slabs: Sequence[Slab], layers: Layers) -> list[Slab]:
    """Returns the slabs, with runs that have not joined these layers replaced by their blocks."""
    held: list[Slab] = []
    for slab in slabs:
        held += slab.blocks if isinstance(slab, BlockRun) and slab.layers[layers[0]] is None else [slab]
    return held


def _restore_sealed(
    caches: Sequence[SealedKVCache], layers: Layers, blocks: Sequence[Slab], tail: Slab | None, total: int
) -> None:
    used, entry = total % BLOCK_TOKENS, tail and tail.entry(layers)
    opened = (entry[0][:, :, :used], entry[1][:, :, :used]) if entry is not None else None
    parts: Any = [block.entry(layers) for block in blocks]
    sealed = sealing.join_tokens(parts) if parts else None
    for place, cache in enumerate(caches):
        cache.restore(_row_of(sealed, place), _row_of(opened, place), total)


def _last_tokens(
    layers: Layers, slabs: Sequence[Slab], tail: Slab | None, used: int, wanted: int
) -> tuple[mx.array, mx.array]:
    """Returns keys and values of the last `wanted` tokens, `(layers, kv_heads, wanted, dim)` in the model's dtype."""
    parts: list[tuple[mx.array, mx.array]] = []
    sources = [(slab, slab.tokens) for slab in slabs]
    if tail is not None:
        sources.append((tail, used))
    for slab, stop in reversed(sources):
        if wanted <= 0:
            break
        pair = slab.entry(layers)
        assert pair is not None and not isinstance(pair, Sealed), "the rule promised this layer's KV"
        # A window layer's arrays begin later than the slab.
        missing = slab.tokens - pair[0].shape[2]
        start = max(0, stop - wanted)
        span = (..., slice(start - missing, stop - missing), slice(None))
        parts.append(pair if start == missing and stop == slab.tokens else (pair[0][span], pair[1][span]))
        wanted -= stop - start
    parts.reverse()
    return mx.concatenate([keys for keys, _ in parts], axis=2), mx.concatenate([values for _, values in parts], axis=2)


def merge(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Merges rows' caches (one per layer) into the caches of one batch, in order."""
    direct = next((cache.shared.direct for cache in rows[0] if isinstance(cache, SealedKVCache)), None)
    shared = Shared(direct)
    return [
        SealedKVCache.merge(caches, shared) if isinstance(caches[0], SealedKVCache) else caches[0].merge(list(caches))
        for caches in zip(*rows, strict=True)
    ]


def extend(batch: Sequence[Any], other: Sequence[Any]) -> None:
    """Appends the rows of another batch."""
    for cache, more in zip(batch, other, strict=True):
        cache.extend(more)


def keep(batch: Sequence[Any], rows: Sequence[int]) -> None:
    """Keeps only these rows, in this order."""
    indices = mx.array(list(rows))
    for cache in batch:
        cache.filter(rows if isinstance(cache, SealedKVCache) else indices)


def extract(batch: Sequence[Any], row: int) -> list[Any]:
    """Returns copies of a row's caches."""
    caches = [cache.extract(row) for cache in batch]
    shared = Shared()
    for cache, source in zip(caches, batch, strict=True):
        if isinstance(cache, SealedKVCache):
            shared.direct, cache.shared = source.shared.direct, shared
    return caches


def evaluate(slabs: Sequence[Slab]) -> None:
    """Launches the computation of the slabs' copies, so that they do not keep their sources alive."""
    mx.async_eval([array for slab in slabs for array in slab.arrays()])
