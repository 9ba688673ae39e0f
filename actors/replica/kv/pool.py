"""The block pool: it has each of a replica's sealed blocks once, however many sequences read it.

Layers with equal specs form a *group*. For every layer a group has one array of slots per kind of array, and a slot is
one sealed block of all layers of the group, in the same bytes as on disk and on the wire. A running sequence reads its
slots through a block table; cached prefixes, restores and other sequences hold the same slots. A slot is free when its
`Slot` object has no references any more, so joining, leaving and forking copy no sealed KV.

Arrays of one layer, for S slots (`sealing.py` says what they mean):

    keys      codes (S, kv_heads, key_dim, 256 * bits / 32), uint32    scales, biases (S, kv_heads, key_dim, 4)
    values    codes (S, kv_heads, 256, padded * bits / 32), uint32     scales, biases (S, kv_heads, 256, padded / group)

or, as computed,

    keys      (S, kv_heads, key_dim, 256)
    values    (S, kv_heads, 256, value_dim)
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels import block_kernels, sealing
from ..kernels.sealing import Sealed, SealPolicy, token_axes

GROW_MIN, GROW_FRACTION = 16, 0.25
"""A full group grows by at least this many slots, and by at least this part of its slots, within its limit."""

GROW_LIMIT_FRACTION, GROW_BYTES = 1 / 16, 8 * 2**30
"""On a GPU it also grows by at least this part of its limit, but not by more than so many bytes for this reason: each
time all its blocks are copied, and recorded decode steps are recorded again."""

REPLACED_BYTES = 64 * 2**20
"""Arrays of this many bytes together are replaced at once on a GPU, if they are small: each time is a wait."""

CHECKS, CHECK_PAUSE_S = 100, 0.01
"""How often a group is counted, with pauses between, before a mismatch counts as an error."""


class Field(NamedTuple):
    """An array of a block in its record: bytes [start, stop), and its shape and dtype."""

    start: int
    stop: int
    dtype: mx.Dtype
    shape: tuple[int, ...]

    def of(self, records: mx.array) -> mx.array:
        """Returns the field of `(blocks, nbytes) uint8`, as `(blocks, *shape[1:])`."""
        return records[:, self.start : self.stop].view(self.dtype).reshape(-1, *self.shape[1:])


class LayerFields(NamedTuple):
    """A layer's arrays in a record, in the order of the fields of its kind of block."""

    kind: type[Sealed]
    fields: list[Field]


class Slot:
    """A place in the pool. It is free again when the last reference to this object is dropped, on any thread."""

    __slots__ = ("__weakref__", "_freed", "number")

    def __init__(self, number: int, freed: deque[int]) -> None:
        self.number = number
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.number)


class SlotGroup:
    """The slots of a group of layers.

    Attributes:
        layers: their numbers in the model.
        kernels: whether blocks are written by `block_kernels.write`.
        slot_bytes: bytes of a slot, over all layers; if not given, 0 until the first block is written.
        capacity_max: beyond this number of slots it grows only by what is missing.
    """

    def __init__(self, layers: Sequence[int], *, kernels: bool = False, slot_bytes: int = 0) -> None:
        self.layers = tuple(layers)
        self.kernels = kernels
        self.capacity_max: float = inf
        self._told_bytes = slot_bytes
        # By layer, as `written`.
        nothing = mx.zeros((1,), mx.uint32)
        mx.eval(nothing)
        self._written = [nothing] * len(self.layers)
        self.capacity = 0
        self._seen_bytes = 0
        self._kind: type[Sealed] | None = None
        self._arrays: list[list[mx.array] | None] = [None] * len(self.layers)
        self._free: deque[int] = deque()
        self._taken: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._blank: weakref.ref[Slot] | None = None
        self._layouts: dict[int, LayerFields] = {}

    @property
    def taken(self) -> int:
        """How many slots are held."""
        return self.capacity - len(self._free)

    @property
    def slot_bytes(self) -> int:
        return self._told_bytes or self._seen_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the group's arrays, free slots included."""
        return self.capacity * self.slot_bytes

    def take(self, count: int) -> list[Slot]:
        """Returns free slots; the group grows if there are too few."""
        missing = count - len(self._free)
        if missing > 0:
            step = max(GROW_MIN, int(self.capacity * GROW_FRACTION))
            if self.kernels and self.capacity_max < inf:
                most = GROW_BYTES // max(1, self.slot_bytes)
                step = max(step, min(most, int(self.capacity_max * GROW_LIMIT_FRACTION)))
            self._grow(int(max(missing, min(step, self.capacity_max - self.capacity))))
        slots = [Slot(self._free.popleft(), self._free) for _ in range(count)]
        self._taken.update(slots)
        return slots

    def reserve(self, count: int) -> None:
        """Grows until `count` slots are free."""
        if count > len(self._free):
            self._grow(count - len(self._free))

    def blank(self) -> Slot:
        """Returns a slot of zeros, the same one for as long as it is held. Sequences with fewer blocks than others read
        it as padding: any other slot may have NaN, which a mask does not turn into zero."""
        slot = None if self._blank is None else self._blank()
        if slot is None:
            (slot,) = self.take(1)
            self._blank = weakref.ref(slot)
            if self._kind is not None:
                target = mx.array([slot.number], mx.uint32)
                for place, arrays in enumerate(self._arrays):
                    if arrays is not None:
                        zeros = [mx.zeros((1, *array.shape[1:]), array.dtype) for array in arrays]
                        self.write(place, target, self._kind._make(zeros))
        return slot

    def is_written(self, place: int) -> bool:
        """Whether the group's layer number `place` has had a block."""
        return self._arrays[place] is not None

    def layer(self, place: int) -> Sealed:
        """Returns all slots of the group's layer number `place`, in the module's shapes."""
        arrays = self._arrays[place]
        assert arrays is not None and self._kind is not None, "a slot is held that was never written"
        return self._kind._make(arrays)

    def write(self, place: int, slots: mx.array, blocks: Sealed) -> None:
        """Puts blocks of a layer into slots.

        Args:
            slots: (n,) uint32, their numbers.
            blocks: n of them, in the module's shapes.
        """
        arrays = self._begun(place, type(blocks), [(array.shape, array.dtype) for array in blocks])
        if self.kernels:
            self._written[place] = block_kernels.write(blocks._make(arrays), slots, blocks, self._written[place])
            return
        for array, new in zip(arrays, blocks, strict=True):
            # In place, because nothing else refers to the array.
            array[slots] = new

    def seal(
        self,
        place: int,
        slots: mx.array,
        tokens: tuple[mx.array, mx.array],
        places: Sequence[tuple[int, int]],
        policy: SealPolicy,
    ) -> None:
        """Seals blocks of a layer into slots by a kernel, which the pool must have, if the policy has codes.

        Args:
            slots: (n,) uint32, their numbers.
            tokens: keys and values, (sequences, kv_heads, columns, dim).
            places: n pairs of a sequence, and the number of a block among its columns.
        """
        keys, values = tokens
        sizes = keys.shape[1], keys.shape[3], values.shape[3]
        like = block_kernels.empty_slot(*sizes, keys.dtype, policy)
        arrays = self._begun(place, type(like), [(array.shape, array.dtype) for array in like])
        self._written[place] = sealing.seal_into(
            like._make(arrays), slots, keys, values, places, policy, self._written[place]
        )

    def write_records(
        self, slots: Sequence[Slot], layers: Sequence[LayerFields], records: np.ndarray | mx.array
    ) -> None:
        """Copies blocks from their records into slots. Nothing that reads or writes the pool may be in flight.

        Args:
            layers: of all layers of the group.
            records: `(blocks, nbytes) uint8`; if this is a NumPy array, it is copied at once.

        Raises:
            ValueError: their shapes or dtypes differ from those of earlier blocks.
        """
        if len(layers) != len(self.layers):
            raise ValueError("the record lacks some layers of a group")
        numbers = [slot.number for slot in slots]
        begun = [
            self._begun(place, kind, [(field.shape, field.dtype) for field in fields])
            for place, (kind, fields) in enumerate(layers)
        ]
        if isinstance(records, mx.array):
            target = mx.array(numbers, mx.uint32)
            starts = [[field.start for field in fields] for _, fields in layers]
            aligned = all(start % 4 == 0 for start in [*itertools.chain(*starts), records.shape[1]])
            for place, (kind, fields) in enumerate(layers):
                if self.kernels and aligned:
                    pool, order = kind._make(begun[place]), self._written[place]
                    self._written[place] = block_kernels.write_records(pool, target, records, starts[place], order)
                else:
                    self.write(place, target, kind._make(field.of(records) for field in fields))
            return
        # A run of slots is copied to faster.
        first, last = numbers[0], numbers[-1]
        target = slice(first, last + 1) if numbers == list(range(first, last + 1)) else numbers
        seen = [[array.view(mx.uint8) for array in arrays] for arrays in begun]
        mx.eval(begun, seen)
        for arrays, layer in zip(seen, layers, strict=True):
            for array, field in zip(arrays, layer.fields, strict=True):
                # A view of the pool's own memory. Nothing else reads these slots yet.
                np.asarray(array).reshape(self.capacity, -1)[target] = records[:, field.start : field.stop]

    def _begun(
        self, place: int, kind: type[Sealed], like: Sequence[tuple[tuple[int, ...], mx.Dtype]]
    ) -> list[mx.array]:
        """Returns a layer's arrays, made of zeros if there are none yet.

        Args:
            like: shapes and dtypes of one or more blocks' arrays.

        Raises:
            ValueError: the layer's slots are of another kind.
        """
        arrays = self._arrays[place]
        if arrays is None:
            arrays = [mx.zeros((self.capacity, *shape[1:]), dtype=dtype) for shape, dtype in like]
            self._arrays[place], self._kind = arrays, kind
            self._seen_bytes += sum(math.prod(shape[1:]) * dtype.size for shape, dtype in like)
        if kind is not self._kind or any(
            array.shape[1:] != tuple(shape[1:]) or array.dtype != dtype
            for array, (shape, dtype) in zip(arrays, like, strict=True)
        ):
            raise ValueError("blocks of a layer have other shapes than its slots")
        return arrays

    def written(self, place: int) -> mx.array:
        """Returns `(1,) uint32`, a zero that is computed after all writes into the layer's slots. Who reads slots takes
        it, as `gpu_kernels.py` says."""
        return self._written[place]

    def gather(self, place: int, table: mx.array) -> Sealed:
        """Copies a layer's blocks, in the order of block tables.

        Args:
            table: (sequences, blocks) uint32, slot numbers.

        Returns:
            The sequences' blocks, in the shapes of `sealing.py`.
        """
        sequences, blocks = table.shape
        pool, numbers = self.layer(place), table.reshape(-1) + self._written[place]
        parts = zip(pool, token_axes(pool), strict=True)
        return pool._make(_joined(array[numbers], sequences, blocks, axis) for array, axis in parts)

    def read_records(self, place: int, slots: mx.array) -> tuple[mx.array, LayerFields]:
        """Copies blocks of a layer. Not views: as long as one existed, a write would copy the whole array.

        Args:
            slots: (n,) uint32, their numbers.

        Returns:
            `(n, nbytes) uint8`, and where each array is in a row.
        """
        pool, order = self.layer(place), self._written[place]
        sizes = [array.nbytes // self.capacity for array in pool]
        if self.kernels and all(size % 4 == 0 for size in sizes):
            records = block_kernels.read_records(pool, slots, order)
        else:
            numbers = slots + order
            records = mx.concatenate([array[numbers].reshape(slots.size, -1).view(mx.uint8) for array in pool], axis=1)
        if (layout := self._layouts.get(place)) is None:
            ends = itertools.accumulate(sizes)
            fields = [
                Field(end - size, end, array.dtype, (1, *array.shape[1:]))
                for array, size, end in zip(pool, sizes, ends, strict=True)
            ]
            layout = self._layouts[place] = LayerFields(type(pool), fields)
        return records, layout

    def _grow(self, more: int) -> None:
        mx.eval(self._written)
        self._replace(lambda array: mx.concatenate([array, mx.zeros((more, *array.shape[1:]), dtype=array.dtype)]))
        self._free.extend(range(self.capacity, self.capacity + more))
        self.capacity += more

    def shrink(self, capacity: int) -> None:
        """Gives slots at the end back, down to `capacity` or to the number of held slots. Blocks there move to free
        slots, so slots get other numbers. Nothing that reads or writes the pool may be in flight."""
        free, held = sorted(self._free), list(self._taken)
        if len(free) + len(held) != self.capacity:
            # Another thread is just dropping the last reference to a slot.
            return
        capacity = max(capacity, len(held))
        if capacity >= self.capacity:
            return
        places = iter([number for number in free if number < capacity])
        moves = {slot: next(places) for slot in held if slot.number >= capacity}
        source = list(range(capacity))
        for slot, number in moves.items():
            source[number] = slot.number
        index = mx.array(source, mx.uint32)
        mx.eval(self._written)
        self._replace(lambda array: array[index])
        for slot, number in moves.items():
            slot.number = number
        self._free.clear()
        self._free.extend(places)
        self.capacity = capacity

    def reset(self) -> None:
        """Forgets all slots and their contents. Slots that are still held do not belong to this group any more."""
        nothing = mx.zeros((1,), mx.uint32)
        mx.eval(nothing)
        self._written = [nothing] * len(self.layers)
        self._arrays = [None] * len(self.layers)
        self._free, self._taken, self._blank = deque(), weakref.WeakSet(), None
        self.capacity = self._seen_bytes = 0
        self._kind = None
        self._layouts = {}

    def _replace(self, make: Callable[[mx.array], mx.array]) -> None:
        made = list[mx.array]()
        for arrays in filter(None, self._arrays):
            for kind in range(len(arrays)):
                arrays[kind] = make(arrays[kind])
                made.append(arrays[kind])
                # Few at a time, so that little is held twice.
                if not self.kernels or sum(array.nbytes for array in made) >= REPLACED_BYTES:
                    self._settle(made)
        self._settle(made)

    @staticmethod
    def _settle(made: list[mx.array]) -> None:
        """Computes arrays, and drops what they were made of: MLX would keep it for later."""
        mx.eval(made)
        made.clear()
        mx.clear_cache()

    def arrays(self) -> list[mx.array]:
        """Returns everything that the group computes with."""
        return [*self._written, *(array for arrays in self._arrays for array in arrays or ())]

    def check(self) -> None:
        """Checks that every slot is either free or held, and only once.

        Raises:
            AssertionError: a slot is neither, or both.
        """
        # While garbage collection on another thread frees a slot, the slot is neither for a moment.
        for left in reversed(range(CHECKS)):
            held = Counter(slot.number for slot in list(self._taken))
            free = Counter(list(self._free))
            # A slot whose last reference is just being dropped may be in both.
            if held | free == Counter(range(self.capacity)):
                return
            if left:
                time.sleep(CHECK_PAUSE_S)
        raise AssertionError(f"{self.capacity} slots, of which {len(held)} are held and {len(free)} free")


def _joined(array: mx.array, sequences: int, blocks: int, axis: int) -> mx.array:
    """(sequences * blocks, heads, a, b) -> (sequences, heads, a, b), blocks after each other along `axis`; a copy."""
    _, heads, a, b = array.shape
    split = array.reshape(sequences, blocks, heads, a, b)
    if axis == 2:
        return split.transpose(0, 2, 1, 3, 4).reshape(sequences, heads, blocks * a, b)
    return split.transpose(0, 2, 3, 1, 4).reshape(sequences, heads, a, blocks * b)


def slots_of(sealed: Sealed, blocks: int) -> Sealed:
    """Splits sequences' blocks into slots, sequence after sequence: the inverse of `SlotGroup.gather`.

    Args:
        sealed: (sequences, heads, ...), `blocks` blocks of each sequence.
    """
    found = []
    for array, axis in zip(sealed, token_axes(sealed), strict=True):
        sequences, heads, a, b = array.shape
        if axis == 2:
            split = array.reshape(sequences, heads, blocks, a // blocks, b).transpose(0, 2, 1, 3, 4)
        else:
            split = array.reshape(sequences, heads, a, blocks, b // blocks).transpose(0, 3, 1, 2, 4)
        found.append(split.reshape(sequences * blocks, *split.shape[2:]))
    return sealed._make(found)


class BlockPool:
    """All groups of a model's sealed layers.

    Args:
        slot_bytes: of each group; None if that is only known when blocks are written.

    Attributes:
        shares: whether layers attend to other layers' KV.
        moves: how often slots may have got other numbers.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[int]],
        *,
        kernels: bool = False,
        slot_bytes: Sequence[int] | None = None,
        shares: bool = False,
    ) -> None:
        self.kernels = kernels
        self.shares = shares
        self.moves = 0
        layers = list(groups)
        self.groups = tuple(
            SlotGroup(each, kernels=kernels, slot_bytes=nbytes)
            for each, nbytes in zip(layers, slot_bytes or [0] * len(layers), strict=True)
        )
        self._of = {layer: (group, place) for group in self.groups for place, layer in enumerate(group.layers)}

    def of(self, layer: int) -> tuple[SlotGroup, int]:
        """Returns a layer's group, and the layer's place in it."""
        return self._of[layer]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the slots that are held."""
        return sum(group.taken * group.slot_bytes for group in self.groups)

    def limit(self, bytes_max: int) -> None:
        """Lets the groups grow within `bytes_max` bytes together, and beyond that only by what is missing."""
        more = (bytes_max - self.nbytes) // len(self.groups)
        for group in self.groups:
            group.capacity_max = group.capacity + more // group.slot_bytes if group.slot_bytes else inf

    def shrink(self, bytes_max: int) -> None:
        """Gives slots back until the pool has `bytes_max` bytes, or as few as possible; groups with the most free bytes
        come first. As `SlotGroup.shrink`."""
        self.moves += 1
        for group in sorted(self.groups, key=lambda group: (group.taken - group.capacity) * group.slot_bytes):
            excess = self.nbytes - bytes_max
            if excess > 0 and group.slot_bytes:
                group.shrink(group.capacity - -(-excess // group.slot_bytes))

    def reset(self) -> None:
        """As `SlotGroup.reset`, for every group."""
        self.moves += 1
        for group in self.groups:
            group.reset()

    def arrays(self) -> list[mx.array]:
        return [array for group in self.groups for array in group.arrays()]

    def counts(self) -> dict[str, int]:
        """Slots of all groups, and how many of them are free."""
        free = sum(group.capacity - group.taken for group in self.groups)
        return {"slots": sum(group.capacity for group in self.groups), "slots_free": free}

    def check(self) -> None:
        """As `SlotGroup.check`, for every group."""
        for group in self.groups:
            group.check()


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one group: `slots[i]` is block `first + i`; earlier blocks are outside of the window."""

    slots: list[Slot]
    first: int = 0

    def fork(self) -> BlockTable:
        return BlockTable(list(self.slots), self.first)

    def reach(self, stop: int, group: SlotGroup) -> None:
        """Takes slots for all blocks before `stop`. Every layer calls this; only the first call takes any."""
        missing = stop - self.first - len(self.slots)
        if missing > 0:
            self.slots += group.take(missing)

    def drop(self, first: int) -> None:
        """Drops the blocks before `first`."""
        gone = min(first - self.first, len(self.slots))
        if gone > 0:
            del self.slots[:gone]
        self.first = max(self.first, first)

    def numbers(self, start: int, stop: int) -> list[int]:
        """Returns the slot numbers of blocks [start, stop)."""
        return [slot.number for slot in self.slots[start - self.first : stop - self.first]]
