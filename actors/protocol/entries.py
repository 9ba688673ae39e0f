"""KV entries as bytes: ids, hashes, MACs, and the records that travel between processes. Pure.

An *entry* is a block or a tail: named arrays, and the tokens whose KV they are. The process that computed it hashes it;
every reader compares. A MAC under the home's key protects each record, so that a damaged or foreign file is never
accepted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import msgpack
import numpy as np
import xxhash

from ...cluster.errors import InvalidRecord
from .block_ids import BLOCK_TOKENS

ID_BYTES = 32
DIGEST_BYTES = 16
KEY_BYTES = 32
MAC_BYTES = 32
OWNER_BYTES = 16
TENANT_BYTES = 8

NOBODY = bytes(OWNER_BYTES)
"""The tag of the owner "": no agent in particular."""

ENTRIES_MAX = 16
"""Entries in one segment file."""

TAIL_TOKENS_MAX = 8192
PARTS_MAX = 8192
NAME_BYTES_MAX = 256
RANK_MAX = 8
OWNERS_MAX = 1024
"""The most owners of one entry. If more agents have used it, it belongs to no agent in particular."""

META_BYTES_MAX = 65_536

DTYPES = {
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4)},
}
"""By safetensors' names. bfloat16 travels as U16; the segment's `meta` names such parts."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def mac(key: bytes, *fields: bytes) -> bytes:
    """Returns the keyed hash (32 bytes) of `fields`, each prefixed with its length."""
    hasher = hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=b"satchel.kv.mac.1")
    for part in fields:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def same_mac(left: bytes, right: bytes) -> bool:
    return hmac.compare_digest(left, right)


def tenant_tag(key: bytes, tenant: str) -> bytes:
    """Returns the prefix (8 bytes) of the tags of a tenant's agents."""
    return mac(key, b"tenant", tenant.encode("utf-8", "surrogatepass"))[:TENANT_BYTES]


def owner_tag(key: bytes, owner: str) -> bytes:
    """Returns the tag (16 bytes) of an owner on disk, so that no KV file has an agent's name. Tags of one tenant have
    the same prefix."""
    if not owner:
        return NOBODY
    own = mac(key, b"owner", owner.encode("utf-8", "surrogatepass"))
    return tenant_tag(key, owner.partition("/")[0]) + own[: OWNER_BYTES - TENANT_BYTES]


def crowd_tag(owner: bytes) -> bytes:
    """Returns the tag for no agent in particular of an owner's tenant."""
    return owner[:TENANT_BYTES].ljust(OWNER_BYTES, b"\0")


def is_crowd(owner: bytes) -> bool:
    """Returns whether the tag stands for no agent in particular, of one tenant or of all."""
    return owner == crowd_tag(owner)


def tenant_of_tag(owner: bytes) -> bytes:
    """Returns the `tenant_tag` at the beginning of an owner's tag; b"" for `NOBODY`."""
    return b"" if owner == NOBODY else owner[:TENANT_BYTES]


TOKEN_BYTES = 4
"""Size of a packed token id."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Returns token ids as little-endian 32-bit numbers.

    Raises:
        InvalidRecord: they are not numbers from 0 below 2^32.
    """
    try:
        wide = np.asarray(tokens, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRecord(f"token ids are whole numbers: {error}") from None
    if wide.ndim != 1 or (wide.size and not 0 <= wide.min() <= wide.max() < 2**32):
        raise InvalidRecord("token ids are a list of 32-bit numbers")
    return wide.astype("<u4").tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


def tail_id(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the id (32 bytes) of the tail of `tokens` after `parent`; it never equals a block's."""
    return _tail_id(parent, pack_tokens(tokens))


def _tail_id(parent: bytes, packed: bytes) -> bytes:
    hasher = hashlib.sha256(b"satchel.tail.1")
    for part in (parent, packed):
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


class Reusable(Protocol):
    """KV of some tokens, in memory or on a disk. Window layers lack its first `window_from` tokens; `snapshot` is
    whether it has the recurrent state after its last token."""

    @property
    def window_from(self) -> int: ...

    @property
    def snapshot(self) -> bool: ...


def adds_to(new: Reusable, old: Reusable) -> bool:
    """Returns whether `new` can be used in cases in which `old`, KV of the same tokens, cannot."""
    return new.window_from < old.window_from or (new.snapshot and not old.snapshot)


class Part(NamedTuple):
    """Name, safetensors' dtype code and shape of one array of an entry."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Entry:
    """The KV of `tokens` after `parent`, as a replica computed it.

    Attributes:
        id, parent: 32 bytes each; the parent of a first block is the root's id.
        tail: False for a block, whose tokens are exactly 256.
        parts: arrays by name, in the order of layers; their dtypes are those of `DTYPES`.
        owners: agents' keys, such as `default/alice`; "" is no agent in particular.
        window_from, snapshot: as in `Reusable`.
        data: all bytes of the parts, in order, if they lie so in memory: one piece is hashed and written faster.
    """

    id: bytes
    parent: bytes
    tokens: Sequence[int]
    parts: Mapping[str, np.ndarray]
    tail: bool = False
    owners: tuple[str, ...] = ("",)
    window_from: int = 0
    snapshot: bool = False
    data: memoryview | None = None

    @classmethod
    def of_tail(cls, parent: bytes, tokens: Sequence[int], parts: Mapping[str, np.ndarray], **more: Any) -> Entry:
        """Returns a tail, whose id follows from its parent and tokens."""
        return cls(tail_id(parent, tokens), parent, tokens, parts, tail=True, **more)


def signature(arrays: Mapping[str, np.ndarray]) -> tuple[Part, ...]:
    """Returns names, dtypes and shapes of arrays of any shape, in order.

    Raises:
        InvalidRecord: an array cannot be stored.
    """
    return checked_parts([(name, _CODES.get(array.dtype), array.shape) for name, array in arrays.items()])


def checked_parts(rows: Any) -> tuple[Part, ...]:
    """Returns the parts of an entry, of rows of three values.

    Raises:
        InvalidRecord: an entry cannot have these parts.
    """
    if not isinstance(rows, list | tuple) or not 1 <= len(rows) <= PARTS_MAX:
        raise InvalidRecord(f"an entry has 1 to {PARTS_MAX} parts")
    try:
        parts = {name: Part(name, dtype, tuple(shape)) for name, dtype, shape in rows}
    except (TypeError, ValueError):
        raise InvalidRecord("a part is a name, a dtype and a shape") from None
    if len(parts) != len(rows):
        raise InvalidRecord("an entry has a part twice")
    for name, dtype, shape in parts.values():
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and 1 <= len(name) <= NAME_BYTES_MAX
        if not plain or not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidRecord(f"part {name!r:.80} has a name or dtype that is not stored")
        if len(shape) > RANK_MAX:
            raise InvalidRecord(f"part {name} has more than {RANK_MAX} axes")
        for length in shape:
            if type(length) is not int or not 0 <= length < 2**40:
                raise InvalidRecord(f"part {name} has an axis of no possible length")
    return tuple(parts.values())


def flat_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array of any shape and dtype in C order; copies only if they are in another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class EntryDigest:
    """Computes entries' digests: xxh3-128 over the names, dtypes and shapes of all parts, and all their bytes.

    Args:
        parts: those of every entry to be hashed. There are hundreds, so they are encoded once.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._begun = xxhash.xxh3_128(b"".join(map(_described, parts)))

    def begun(self) -> xxhash.xxh3_128:
        """Returns a hash that takes an entry's bytes, in order and in pieces of any size."""
        return self._begun.copy()

    def __call__(self, *pieces: memoryview | bytes) -> bytes:
        """Returns the digest (16 bytes) of the entry with these bytes."""
        hashing = self.begun()
        for piece in pieces:
            hashing.update(piece)
        return hashing.digest()


class EntryLayout:
    """What the bytes of entries are: their parts, in order, and their writer's metadata.

    Attributes:
        nbytes: of a whole entry.
        packed: the form on disk and on the wire, which `unpacked` reads.
        digest_of: computes an entry's digest.

    Raises:
        InvalidRecord: entries cannot have these parts or this metadata.
    """

    def __init__(self, parts: Sequence[Part], meta: Mapping[str, str]) -> None:
        self.parts, self.meta = checked_parts(parts), checked_meta(meta)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.packed = cast(bytes, msgpack.packb((self.parts, self.meta)))
        self.digest_of = EntryDigest(self.parts)

    @staticmethod
    @lru_cache(maxsize=64)
    def unpacked(packed: bytes) -> EntryLayout:
        """Returns the layout with these `packed` bytes. Entries of one model have the same hundreds of parts, so they
        are parsed once. Raises `InvalidRecord`."""
        try:
            parts, meta = msgpack.unpackb(packed)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise InvalidRecord(f"a layout cannot be read: {error}") from None
        return EntryLayout(parts, meta)


def _described(part: Part) -> bytes:
    name = part.name.encode()
    numbers = (len(name), len(part.shape), *part.shape)
    return b"".join(number.to_bytes(8, "big") for number in numbers) + name + part.dtype.encode().ljust(4)


@dataclass(frozen=True)
class EntryRecord:
    """An entry in the index. `tokens` is packed, `owners` are tags, `nbytes` is the size of its arrays."""

    id: bytes
    parent: bytes
    tail: bool
    tokens: bytes
    digest: bytes
    window_from: int
    snapshot: bool
    nbytes: int
    owners: tuple[bytes, ...] = field(default=(NOBODY,), compare=False)

    def facts(self) -> bytes:
        """Returns everything but the owners, as bytes."""
        return cast(
            bytes,
            msgpack.packb(
                (
                    self.id,
                    self.parent,
                    self.tail,
                    self.tokens,
                    self.digest,
                    self.window_from,
                    self.snapshot,
                    self.nbytes,
                )
            ),
        )

    @classmethod
    def from_facts(cls, facts: bytes, owners: tuple[bytes, ...]) -> EntryRecord:
        """Returns the record of which `facts` returned these bytes. Call `checked` on it if no MAC covers them.

        Raises:
            InvalidRecord: they are not such bytes.
        """
        try:
            values = msgpack.unpackb(facts)
        except (ValueError, msgpack.UnpackException) as error:
            raise InvalidRecord(f"an entry's facts cannot be read: {error}") from None
        if not isinstance(values, list) or len(values) != 8:
            raise InvalidRecord("an entry has eight facts")
        return cls(*values, owners=owners)

    def checked(self) -> EntryRecord:
        """Returns this record.

        Raises:
            InvalidRecord: a value is impossible.
        """
        for value, length in ((self.id, ID_BYTES), (self.parent, ID_BYTES), (self.digest, DIGEST_BYTES)):
            _bytes_of(value, length)
        packed = self.tokens if isinstance(self.tokens, bytes) else b""
        count = len(packed) // 4
        fits = 1 <= count <= TAIL_TOKENS_MAX if self.tail is True else count == BLOCK_TOKENS and self.tail is False
        if len(packed) % 4 or not fits:
            raise InvalidRecord(f"{count} tokens are neither a block nor a tail")
        if self.tail and self.id != _tail_id(self.parent, packed):
            raise InvalidRecord("a tail's id does not follow from its parent and tokens")
        if not isinstance(self.snapshot, bool):
            raise InvalidRecord("an entry has a snapshot or has none")
        _count_of(self.window_from, 2**32)
        _count_of(self.nbytes, 2**62)
        if not isinstance(self.owners, tuple) or not 1 <= len(self.owners) <= OWNERS_MAX:
            raise InvalidRecord(f"an entry has 1 to {OWNERS_MAX} owners")
        for owner in self.owners:
            _bytes_of(owner, OWNER_BYTES)
        return self


@dataclass(frozen=True)
class SegmentRecord:
    """A complete segment file, as its writer describes it to the store.

    Attributes:
        name: the file's name in its model's folder.
        nbytes: the file's size.
        model: the model id, 32 bytes.
        epoch: the store's, as its `DiskSession` gave it.
        written_s: by the writer's clock, for people; only a rebuilt index is ordered by it.
        meta: facts about all parts that readers need, such as which are bfloat16.
    """

    name: str
    nbytes: int
    model: bytes
    epoch: int
    written_s: float
    meta: Mapping[str, str]
    entries: tuple[EntryRecord, ...]

    @property
    def tenant(self) -> bytes:
        """The owners' `tenant_tag`; b"" for no agent in particular."""
        return next((tenant for entry in self.entries if (tenant := tenant_of_tag(entry.owners[0]))), b"")

    def to_wire(self) -> dict[str, Any]:
        """Returns plain data for msgpack."""
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "model": self.model,
            "epoch": self.epoch,
            "written_s": self.written_s,
            "meta": dict(self.meta),
            "entries": [[entry.facts(), b"".join(entry.owners)] for entry in self.entries],
        }

    @classmethod
    def from_wire(cls, data: Any) -> SegmentRecord:
        """Returns the record of which `to_wire` returned `data`.

        Raises:
            InvalidRecord: `data` is anything else.
        """
        if not isinstance(data, dict) or set(data) != set(cls.__dataclass_fields__):
            raise InvalidRecord("a segment record has other fields")
        if not isinstance(data["name"], str) or len(data["name"]) > NAME_BYTES_MAX:
            raise InvalidRecord("a segment's name is a short text")
        _bytes_of(data["model"], ID_BYTES)
        _count_of(data["nbytes"], 2**62)
        _count_of(data["epoch"], 2**62)
        entries = data["entries"]
        if not isinstance(entries, list | tuple) or not 1 <= len(entries) <= ENTRIES_MAX:
            raise InvalidRecord(f"a segment has 1 to {ENTRIES_MAX} entries")
        records = tuple(_entry_of(entry) for entry in entries)
        if len({record.id for record in records}) != len(records):
            raise InvalidRecord("a segment has an entry twice")
        written_s = data["written_s"]
        if not isinstance(written_s, int | float) or isinstance(written_s, bool):
            raise InvalidRecord("a segment's time is in seconds")
        return cls(
            data["name"],
            data["nbytes"],
            data["model"],
            data["epoch"],
            float(written_s),
            checked_meta(data["meta"]),
            records,
        )


@dataclass(frozen=True, kw_only=True)
class Location(EntryRecord):
    """Where an entry is, and what a reader must find there. Compare `tokens` after a hit. Has no owners."""

    model: bytes
    name: str
    slot: int

    @classmethod
    def of(cls, record: EntryRecord, model: bytes, name: str, slot: int) -> Location:
        """Returns the location of an entry in a model's file."""
        return cls(**{**vars(record), "owners": (NOBODY,)}, model=model, name=name, slot=slot)

    def to_wire(self) -> dict[str, Any]:
        """Returns plain data for msgpack."""
        return {name: value for name, value in vars(self).items() if name != "owners"}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Location:
        """Returns the location of which `to_wire` returned `data`.

        Raises:
            InvalidRecord: `data` has other fields.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise InvalidRecord(f"not a location: {error}") from None


@dataclass(frozen=True)
class Failure:
    """An entry that could not be read: its file or slot is `missing`, or else it is corrupt."""

    location: Location
    reason: str
    missing: bool


def checked_meta(meta: Any) -> dict[str, str]:
    """Returns a copy of `meta`.

    Raises:
        InvalidRecord: it is not a table of texts, or too large.
    """
    if not isinstance(meta, Mapping):
        raise InvalidRecord("a segment's meta is a table of texts")
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in meta.items()):
        raise InvalidRecord("a segment's meta is a table of texts")
    try:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in meta.items())
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"a segment's meta is no text: {error}") from None
    if size > META_BYTES_MAX:
        raise InvalidRecord(f"a segment's meta is over {META_BYTES_MAX} bytes")
    return dict(meta)


def split_owners(packed: bytes) -> tuple[bytes, ...]:
    """Returns the tags in `packed`, which has one after the other.

    Raises:
        InvalidRecord: it is not made of whole tags.
    """
    if not isinstance(packed, bytes) or not packed or len(packed) % OWNER_BYTES:
        raise InvalidRecord("owners are tags of 16 bytes")
    return tuple(packed[start : start + OWNER_BYTES] for start in range(0, len(packed), OWNER_BYTES))


def _entry_of(data: Any) -> EntryRecord:
    if not isinstance(data, list | tuple) or len(data) != 2 or not isinstance(data[0], bytes):
        raise InvalidRecord("an entry is its facts and its owners")
    return EntryRecord.from_facts(data[0], split_owners(data[1])).checked()


def _bytes_of(value: Any, length: int) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        raise InvalidRecord(f"expected {length} bytes, got {value!r:.80}")


def _count_of(value: Any, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise InvalidRecord(f"expected a number from 0 below {limit}, got {value!r:.80}")
