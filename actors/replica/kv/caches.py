"""Moves a sequence's KV into and out of MLX's caches: restore a prefix, merge sequences into a batch, copy blocks out.

`ModelCacheSpec` is read from a model's own caches; nothing else depends on architectures. Three kinds of layers can be
reused. A *full* layer has KV for every token, a *window* layer for the last ones, and a *recurrent* layer has one state
that stands for all tokens so far; a copy of it is a *snapshot*. In full and window layers whole blocks are sealed and
in the pool, and the open block is in full precision. If a model cannot be sealed, its own caches have everything.

Shapes: keys of one layer are `(sequences, kv_heads, tokens, key_dim)`, values `(sequences, kv_heads, tokens,
value_dim)`, in the model's dtype; in a sequence's own caches and in slabs the first axis is 1. `sealing.py` gives the
shapes of sealed blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, islice
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from ...patches import window_in_order
from ...protocol.block_ids import BLOCK_TOKENS
from ..kernels.sealing import Sealed, SealPolicy, sealed_token_bytes
from .paged_cache import PagedBatch, PagedKVCache, Reads
from .pool import BlockPool, BlockTable, LayerFields, Slot
from .prefix import ReuseRule
from .steps import first_block

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
    """The memory of one layer. In a full layer a token costs `token_bytes`, in a window layer too, but for at most
    `window` tokens; a recurrent layer costs `state_bytes`. A `sealed` layer's open block costs `open_bytes` more.
    `heads` is how many heads its KV has; 0 if it has none."""

    kind: LayerKind
    window: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    open_bytes: int = 0
    sealed: bool = False
    heads: int = 0

    @property
    def sequence_bytes(self) -> int:
        """What a sequence costs in it whatever its length: its window, its state and its open block."""
        return _window_bytes(self) + self.state_bytes + self.open_bytes


@dataclass(frozen=True)
class ModelCacheSpec:
    """The kinds of a model's layers and what they cost.

    Attributes:
        bytes_per_token: bytes in the layers that grow with every token; at least 1.
        bytes_per_sequence: bytes of windows, states and open blocks, which do not depend on the sequence's length.
        policy: how full and window layers are sealed; None if they are not.
        kept: whether KV may be reused, as far as the model's layers allow it.
        shares: whether layers attend to other layers' KV.
    """

    layers: tuple[LayerSpec, ...]
    bytes_per_token: int
    bytes_per_sequence: int
    policy: SealPolicy | None = None
    kept: bool = True
    shares: bool = False

    @property
    def reusable(self) -> bool:
        """Whether prefixes can be kept: the KV of every layer can be copied out."""
        return self.kept and all(layer.kind is not LayerKind.OTHER for layer in self.layers)

    @property
    def open_sequence_bytes(self) -> int:
        """The part of `bytes_per_sequence` that is not in the pool."""
        windows = sum(layer.token_bytes * layer.window for layer in self.layers if not layer.sealed)
        return windows + sum(layer.state_bytes + layer.open_bytes for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(layer.kind is LayerKind.RECURRENT for layer in self.layers)

    @property
    def rule(self) -> ReuseRule:
        """What a cached prefix must have so that every layer can reuse it."""
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
        """Tokens between the snapshots of a long prompt: as many as make a snapshot no larger than the KV between
        two."""
        states = sum(layer.state_bytes for layer in self.layers)
        blocks = -(-states // (self.bytes_per_token * BLOCK_TOKENS))
        return min(max(2, blocks) * BLOCK_TOKENS, SNAPSHOT_TOKENS_MAX)

    def describe(self) -> str:
        """Returns the layers as text, such as `4 full, 20 window of 512; q4`."""
        names = [f"window of {layer.window}" if layer.window else layer.kind.value for layer in self.layers]
        kinds = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        return f"{kinds}; {self.policy.name if self.policy is not None else 'fp16'}"


def _read_layer(cache: Any, tokens: int, policy: SealPolicy | None) -> LayerSpec:
    if is_recurrent(cache):
        return LayerSpec(LayerKind.RECURRENT, state_bytes=cache.nbytes)
    if not _has_kv(cache):
        return LayerSpec(LayerKind.OTHER, token_bytes=cache.nbytes // max(tokens, 256))
    window: int = cache.chunk_size if _is_chunked(cache) else getattr(cache, "max_size", 0)
    kind = LayerKind.WINDOW if window else LayerKind.FULL
    per_token = sum(array.shape[1] * array.shape[3] * array.itemsize for array in (cache.keys, cache.values))
    _, heads, _, key_dim = cache.keys.shape
    if policy is None:
        return LayerSpec(kind, window, per_token, heads=heads)
    sealed = sealed_token_bytes(heads, key_dim, cache.values.shape[3], policy, cache.keys.itemsize)
    return LayerSpec(kind, window, sealed, open_bytes=BLOCK_TOKENS * per_token, sealed=True, heads=heads)


def _window_bytes(layer: LayerSpec) -> int:
    """Bytes of a sequence's window. A sealed window may begin and end inside of a block."""
    blocks = -(-layer.window // BLOCK_TOKENS) + 1
    return layer.token_bytes * (blocks * BLOCK_TOKENS if layer.sealed and layer.window else layer.window)


def is_recurrent(cache: Any) -> bool:
    """Whether the cache is of a recurrent layer. mlx-lm and mlx-vlm each have a class of that name; mlx-vlm's models
    need mlx-vlm's, which does more."""
    return type(cache).__name__ == "ArraysCache"


def _has_kv(cache: Any) -> bool:
    return type(cache) is KVCache or _is_chunked(cache) or (type(cache) is RotatingKVCache and cache.keep == 0)


def _is_chunked(cache: Any) -> bool:
    """Whether tokens only see tokens of their own chunk: never more than a window of the same length has."""
    return type(cache) is ChunkedKVCache


def in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Returns the keys and values of the last tokens in a sequence's own cache of a window layer, in order, `(1,
    kv_heads, tokens, dim)` each."""
    if _is_chunked(cache):
        return cache.keys_and_values()
    return window_in_order(cache)


def joins(cache: Any) -> bool:
    """Whether caches of this kind can be merged into a batch."""
    return hasattr(cache, "merge") and not getattr(cache, "keep", 0)


def _is_latent(cache: Any) -> bool:
    """Whether the layer has one latent head for keys and values, as in DeepSeek V3; its quality when sealed is not
    measured."""
    return cache.keys.shape[1] == 1 and cache.values.shape[1] == 1 and cache.keys.shape[3] != cache.values.shape[3]


def read_spec(caches: Sequence[Any], tokens: int, policy: SealPolicy | None = None) -> ModelCacheSpec:
    """Returns the spec of a model from its caches, which hold `tokens` tokens of one sequence.

    Args:
        policy: how to seal. All layers share a mask, so all or none are sealed.
    """
    kv = [cache for cache in caches if _has_kv(cache)]
    others = [cache for cache in caches if not _has_kv(cache) and not is_recurrent(cache)]
    if not kv or others or any(_is_latent(cache) or _is_chunked(cache) for cache in kv):
        policy = None
    layers = tuple(_read_layer(cache, tokens, policy) for cache in caches)
    per_token = sum(layer.token_bytes for layer in layers if not layer.window)
    per_sequence = sum(layer.sequence_bytes for layer in layers)
    return ModelCacheSpec(layers, max(1, per_token), per_sequence, policy)


def new_pool(spec: ModelCacheSpec, *, kernels: bool = False) -> BlockPool | None:
    """Returns an empty pool for the model's sealed layers; None if none is sealed.

    Args:
        kernels: as for `SlotGroup`.
    """
    if spec.policy is None:
        return None
    sizes = [sum(spec.layers[layer].token_bytes for layer in layers) * BLOCK_TOKENS for layers in spec.alike]
    return BlockPool(spec.alike, kernels=kernels, slot_bytes=sizes, shares=spec.shares)


def new_caches(spec: ModelCacheSpec, own: Sequence[Any], pool: BlockPool | None, reads: Reads) -> list[Any]:
    """Returns empty caches for one sequence; layers that are not sealed keep the model's `own`."""
    if spec.policy is None or pool is None:
        return list(own)
    batch = PagedBatch.of_sequences(pool, 1, reads)
    return [
        PagedKVCache(index, spec.policy, layer.window, batch=batch) if layer.sealed else cache
        for index, (layer, cache) in enumerate(zip(spec.layers, own, strict=True))
    ]


@dataclass(frozen=True)
class PooledBlock:
    """A sealed block of all layers, in the pool.

    Attributes:
        slots: by group of the pool; None for window layers that have left it behind.
        states: as in `Slab`.
    """

    slots: tuple[Slot | None, ...]
    nbytes: int
    window_from: int = 0
    states: list[list[mx.array]] | None = None
    tokens: int = BLOCK_TOKENS

    def arrays(self) -> list[mx.array]:
        """Returns the arrays that are not in the pool."""
        return [array for state in self.states or () for array in state]


COPIED_TOGETHER = 16
"""The most blocks that are copied out of the pool as one array: a file has as many."""

LayerKV = Sealed | tuple[mx.array, mx.array]
"""KV of a layer in a slab: a sealed block, or `(keys, values)`. KV of several layers has a row per layer on the first
axis."""


@dataclass(frozen=True)
class Slab:
    """The KV of some consecutive tokens of one sequence.

    Attributes:
        layers: KV of every layer; None for a recurrent one. Window layers lack the first `window_from` tokens, and are
            None if they lack all.
        tokens: number of tokens.
        states: a snapshot of the recurrent layers' arrays after the last token, or None. The first axis of each is
            1; the other axes and the dtype are the model's.
    """

    layers: list[LayerKV | None]
    tokens: int
    window_from: int = 0
    states: list[list[mx.array]] | None = None

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
            entries: KV by the layers that share an array, with a row per layer on the first axis.
        """
        layers: list[LayerKV | None] = [None] * count
        for together, entry in entries.items():
            for place, index in enumerate(together):
                layers[index] = _row_of(entry, place) if len(together) > 1 else entry
        return cls(layers, tokens, window_from, states)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of all layers and states, in the shapes and dtypes of the class's attributes."""
        kv = [array for entry in self.layers if entry is not None for array in entry]
        return kv + [array for state in self.states or () for array in state]


def _row_of(entry: LayerKV, row: int) -> LayerKV:
    """Returns one row of the first axis of KV's arrays, as a view with a first axis of 1."""
    arrays = [array[row : row + 1] for array in entry]
    return entry._make(arrays) if isinstance(entry, Sealed) else (arrays[0], arrays[1])


def restore(
    spec: ModelCacheSpec, caches: Sequence[Any], blocks: Sequence[Slab | PooledBlock], tail: Slab | None, used: int
) -> None:
    """Fills empty `caches` with whole blocks and the first `used` tokens of a tail. The spec's rule must allow that.

    Blocks in the pool are shared, not copied.
    """
    total = sum(block.tokens for block in blocks) + used
    if total == 0:
        return
    tail = tail if used else None
    states = (tail or blocks[-1]).states or []
    if spec.policy is not None:
        _restore_pooled(spec, caches, blocks, tail, total)
    else:
        _restore_slabs(spec, caches, [block for block in blocks if isinstance(block, Slab)], tail, used)
    recurrent = (cache for layer, cache in zip(spec.layers, caches, strict=True) if layer.kind is LayerKind.RECURRENT)
    for cache, state in zip(recurrent, states, strict=False):
        cache.cache = list(state)


def _restore_pooled(
    spec: ModelCacheSpec, caches: Sequence[Any], blocks: Sequence[Slab | PooledBlock], tail: Slab | None, total: int
) -> None:
    batch = batch_of(caches)
    assert batch is not None
    for number, group in enumerate(batch.pool.groups):
        first = first_block(total, spec.layers[group.layers[0]].window)
        held = [block.slots[number] for block in blocks[first:] if isinstance(block, PooledBlock)]
        slots = [slot for slot in held if slot is not None]
        assert first + len(slots) == len(blocks), "the rule promised this layer's KV"
        batch.tables[0][number] = BlockTable(slots, first)
    for index, cache in enumerate(caches):
        if isinstance(cache, PagedKVCache):
            entry = tail.layers[index] if tail is not None else None
            used = total % BLOCK_TOKENS
            cache.restore((entry[0][:, :, :used], entry[1][:, :, :used]) if entry is not None else None, total)


def _restore_slabs(
    spec: ModelCacheSpec, caches: Sequence[Any], slabs: Sequence[Slab], tail: Slab | None, used: int
) -> None:
    total = sum(slab.tokens for slab in slabs) + used
    for index, layer in enumerate(spec.layers):
        if layer.kind is LayerKind.RECURRENT:
            continue
        wanted = min(total, layer.window) if layer.window else total
        keys, values = _last_tokens(index, slabs, tail, used, wanted)
        more = (0, layer.window, keys.shape[2]) if layer.window else ()
        if _is_chunked(caches[index]):
            more = (layer.window, total - keys.shape[2])
        caches[index].state = (keys, values, total, *more)


def _last_tokens(
    layer: int, slabs: Sequence[Slab], tail: Slab | None, used: int, wanted: int
) -> tuple[mx.array, mx.array]:
    """Returns a layer's keys and values of the last `wanted` tokens, in the model's dtype."""
    parts: list[tuple[mx.array, mx.array]] = []
    sources = [(slab, slab.tokens) for slab in slabs]
    if tail is not None:
        sources.append((tail, used))
    for slab, stop in reversed(sources):
        if wanted <= 0:
            break
        pair = slab.layers[layer]
        assert pair is not None and not isinstance(pair, Sealed), "the rule promised this layer's KV"
        # A window layer's arrays may begin later than the slab.
        missing = slab.tokens - pair[0].shape[2]
        start = max(0, stop - wanted)
        span = (..., slice(start - missing, stop - missing), slice(None))
        parts.append(pair if start == missing and stop == slab.tokens else (pair[0][span], pair[1][span]))
        wanted -= stop - start
    parts.reverse()
    return mx.concatenate([keys for keys, _ in parts], axis=2), mx.concatenate([values for _, values in parts], axis=2)


def batch_of(caches: Sequence[Any]) -> PagedBatch | None:
    """Returns what the sealed layers of a batch have in common; None if none is sealed."""
    return next((cache.batch for cache in caches if isinstance(cache, PagedKVCache)), None)


def merge(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """Merges sequences' caches (one a layer) into the caches of one batch, in order. The sources must not be used
    afterwards."""
    batches = [batch for caches in sequences if (batch := batch_of(caches)) is not None]
    merged = None
    if batches:
        tables = [table for batch in batches for table in batch.tables]
        merged = PagedBatch(batches[0].pool, tables, batches[0].reads)
    return [
        PagedKVCache.merge(caches, merged)
        if merged is not None and isinstance(caches[0], PagedKVCache)
        else caches[0].merge(list(caches))
        for caches in zip(*sequences, strict=True)
    ]


def extend(batch: Sequence[Any], other: Sequence[Any]) -> None:
    """Appends the sequences of another batch."""
    ours, theirs = batch_of(batch), batch_of(other)
    if ours is not None and theirs is not None:
        ours.extend(theirs)
    for cache, more in zip(batch, other, strict=True):
        cache.extend(more)


def keep(batch: Sequence[Any], sequences: Sequence[int]) -> None:
    """Keeps only these sequences."""
    if (pooled := batch_of(batch)) is not None:
        pooled.keep(sequences)
    indices = mx.array(list(sequences))
    for cache in batch:
        cache.filter(sequences if isinstance(cache, PagedKVCache) else indices)


def set_bidirectional(batch: Sequence[Any], runs: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Sets which tokens of the sequences attend to each other in the next call of the model: [start, stop) of each
    run."""
    if (pooled := batch_of(batch)) is not None:
        pooled.set_bidirectional(runs)


def take_back(batch: Sequence[Any], lengths: Sequence[int], *, clean: bool) -> None:
    """As `PagedKVCache.take_back`, for every layer of a batch in which all are sealed."""
    for cache in batch:
        cache.take_back(lengths, clean=clean)


def seal_filled(batch: Sequence[Any]) -> None:
    """Seals blocks that became full in a launched step, if that step did not seal them itself."""
    for cache in batch:
        if isinstance(cache, PagedKVCache):
            cache.seal_filled()


def extract(batch: Sequence[Any], sequence: int) -> list[Any]:
    """Returns a sequence of a batch as caches of its own."""
    pooled = batch_of(batch)
    own = None
    if pooled is not None:
        own = PagedBatch(pooled.pool, [[table.fork() for table in pooled.tables[sequence]]], pooled.reads)
    return [
        cache.extract(sequence, own) if own is not None and isinstance(cache, PagedKVCache) else cache.extract(sequence)
        for cache in batch
    ]


@dataclass(frozen=True)
class Records:
    """Sealed blocks as they lie on disk.

    Attributes:
        data: `(blocks, nbytes) uint8`; an MLX array if a GPU copies it into the pool.
        layers: where each layer's arrays are; None for window layers that are beyond these blocks, and layers that are
            not in the pool.
        windows: each block's `window_from`.
        states: each block's states, as in `Slab`.
        coming: how many blocks there are including later runs; room for all is made at once.
        reading: what the followers of a divided model read their parts of these blocks for; "" without followers.
    """

    data: np.ndarray | mx.array
    layers: Sequence[LayerFields | None]
    windows: Sequence[int]
    states: Sequence[list[list[mx.array]] | None]
    coming: int = 0
    reading: str = ""


def into_pool(pool: BlockPool, records: Records) -> list[PooledBlock]:
    """Puts blocks from the disk into slots.

    Raises:
        ValueError: they are not blocks of this pool's layers.
    """
    data, count, taken = records.data, len(records.windows), []
    for group in pool.groups:
        layers = [records.layers[layer] for layer in group.layers]
        if not any(layers):
            taken.append([None] * count)
            continue
        group.reserve(records.coming)
        slots = group.take(count)
        group.write_records(slots, [layer for layer in layers if layer is not None], data)
        taken.append(slots)
    return [
        PooledBlock(slots, data.shape[1], window_from, states)
        for slots, window_from, states in zip(zip(*taken, strict=True), records.windows, records.states, strict=True)
    ]


@dataclass(frozen=True)
class Record:
    """A copy of a sealed block as it lies on disk: a row of `records`, in which others may be too."""

    records: Records
    row: int
    tokens: int = BLOCK_TOKENS

    @property
    def window_from(self) -> int:
        return self.records.windows[self.row]

    @property
    def states(self) -> list[list[mx.array]] | None:
        return self.records.states[self.row]

    @property
    def data(self) -> mx.array:
        """`(blocks, nbytes) uint8`, all rows of `records`."""
        assert isinstance(self.records.data, mx.array)
        return self.records.data

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to be computed."""
        return [self.data, *(array for state in self.states or () for array in state)]


def out_of_pool(spec: ModelCacheSpec, pool: BlockPool, blocks: Sequence[PooledBlock]) -> list[Record]:
    """Returns copies of blocks for the disk, in order, not evaluated. Neighbours of the same layers are copied
    together, up to `COPIED_TOGETHER`."""
    copies: list[Record] = []
    for _, alike in groupby(blocks, lambda block: [slot is None for slot in block.slots]):
        while some := list(islice(alike, COPIED_TOGETHER)):
            records = _records(spec, pool, some)
            copies += [Record(records, row) for row in range(len(some))]
    return copies


def _records(spec: ModelCacheSpec, pool: BlockPool, blocks: Sequence[PooledBlock]) -> Records:
    """Returns copies of blocks that have slots in the same groups."""
    layers: list[LayerFields | None] = [None] * len(spec.layers)
    read: dict[int, mx.array] = {}
    for number, group in enumerate(pool.groups):
        slots = [slot.number for block in blocks if (slot := block.slots[number]) is not None]
        if slots:
            taken = mx.array(slots, mx.uint32)
            for place, layer in enumerate(group.layers):
                read[layer], layers[layer] = group.read_records(place, taken)
    start = 0
    for layer in sorted(read):
        found = layers[layer]
        assert found is not None
        fields = [field._replace(start=field.start + start, stop=field.stop + start) for field in found.fields]
        layers[layer] = LayerFields(found.kind, fields)
        start += read[layer].shape[1]
    data = mx.concatenate([read[layer] for layer in sorted(read)], axis=1)
    return Records(data, layers, [block.window_from for block in blocks], [block.states for block in blocks])


def evaluate(cuts: Sequence[Slab | PooledBlock | Record]) -> None:
    """Begins to compute the copies, so that they do not keep their sources alive."""
    mx.async_eval([array for cut in cuts for array in cut.arrays()])
