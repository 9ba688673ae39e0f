"""The messages between nodes on a stream of blocks, packed and parsed. Pure.

::

    find(model, chain, tail parent, tail tokens, tails_max)  ──►  found(blocks, tails)
    fetch(model, ids)   ──►  for each id, in order: entry(tokens, layout), its bytes, and sent(); or gone(reason), also
                             instead of sent()
    anything            ──►  error(reason), and the connection ends

A message is a frame of msgpack: a kind, and its fields. An entry's bytes are those of its parts, in the layout's order;
they must match the size and the digest that `found` gave. So memory is only allocated for what was announced.

Every `read_…` function raises `InvalidRecord` for anything but what its `pack_…` function returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgpack
import xxhash

from ....cluster.errors import InvalidRecord
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import (
    DIGEST_BYTES,
    DTYPES,
    ID_BYTES,
    NAME_BYTES_MAX,
    PARTS_MAX,
    RANK_MAX,
    TAIL_TOKENS_MAX,
    EntryDigest,
    Location,
    Part,
    checked_meta,
    part_digest,
)

CHAIN_MAX = 8192
"""Blocks of one pull; two million tokens."""

TAILS_MAX = 8
FETCH_MAX = 64
MESSAGE_BYTES_MAX = 4 * 2**20
_REASON_MAX = 200


@dataclass(frozen=True)
class FindRequest:
    """`chain` are the ids of blocks in order; `tail_tokens` are packed as by `entries.pack_tokens`."""

    model: bytes
    chain: tuple[bytes, ...]
    tail_parent: bytes
    tail_tokens: bytes
    tails_max: int


@dataclass(frozen=True)
class FetchRequest:
    model: bytes
    ids: tuple[bytes, ...]


Request = FindRequest | FetchRequest


class Described(NamedTuple):
    """An entry that the source offers: what a received one must match, and its bytes."""

    id: bytes
    digest: bytes
    nbytes: int
    window_from: int
    snapshot: bool

    @classmethod
    def of(cls, location: Location) -> Described:
        return cls(location.id, location.digest, location.nbytes, location.window_from, location.snapshot)


class Layout:
    """What an entry's bytes are: its parts, in order, and its writer's metadata.

    Attributes:
        nbytes: of the whole entry.
        packed: what `read_entry` makes a layout of.
    """

    def __init__(self, parts: Sequence[Part], meta: Mapping[str, str]) -> None:
        self.parts, self.meta = tuple(parts), dict(meta)
        self.sizes = [part.nbytes for part in self.parts]
        self.nbytes = sum(self.sizes)
        self.packed = pack(self.parts, self.meta)
        self.digest_of = EntryDigest(self.parts)


class Digesting:
    """The digest of one entry, while its bytes pass."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._hash = layout, xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self._done = 0  # bytes of the next part

    def update(self, data: memoryview) -> None:
        start, sizes, digests = 0, self._layout.sizes, self._digests
        while len(digests) < len(sizes) and len(data) - start >= (missing := sizes[len(digests)] - self._done):
            part = data[start : start + missing]
            start += missing
            if self._done:
                self._hash.update(part)
                digests.append(self._hash.digest())
                self._hash.reset()
                self._done = 0
            else:
                digests.append(part_digest(part))
        if start < len(data):
            self._hash.update(data[start:])
            self._done += len(data) - start

    def digest(self) -> bytes:
        """Returns the digest (16 bytes), after all bytes."""
        self.update(memoryview(b""))
        return self._layout.digest_of(self._digests)


def pack(*fields: Any) -> bytes:
    """Returns the payload of a message."""
    return cast(bytes, msgpack.packb(fields))


def unpack(payload: bytes | memoryview) -> tuple[str, list[Any]]:
    """Returns the kind and the fields of a message."""
    fields = _unpacked(payload)
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        raise InvalidRecord("a message is a kind and its fields")
    return fields[0], fields[1:]


def pack_request(request: Request) -> bytes:
    if isinstance(request, FetchRequest):
        return pack("fetch", request.model, b"".join(request.ids))
    chain = b"".join(request.chain)
    return pack("find", request.model, chain, request.tail_parent, request.tail_tokens, request.tails_max)


def read_request(payload: bytes | memoryview) -> Request:
    """Parses what `pack_request` returns."""
    kind, fields = unpack(payload)
    if kind == "find":
        model, chain, parent, tokens, tails_max = _row(fields, 5)
        packed = tokens if tokens == b"" else _tokens(tokens)
        ids = _ids(chain, CHAIN_MAX)
        return FindRequest(
            _bytes(model, ID_BYTES), ids, _bytes(parent, ID_BYTES), packed, _number(tails_max, TAILS_MAX)
        )
    if kind == "fetch":
        model, packed = _row(fields, 2)
        ids = _ids(packed, FETCH_MAX)
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRecord("a fetch names entries, each once")
        return FetchRequest(_bytes(model, ID_BYTES), ids)
    raise InvalidRecord(f"{kind!r:.40} is no request")


def pack_found(blocks: Sequence[Described | None], tails: Sequence[tuple[bytes, Described]]) -> bytes:
    """Packs the answer to `find`; `tails` are (packed tokens, description)."""
    rows = [None if block is None else block[1:] for block in blocks]
    return pack("found", rows, [[tokens, *tail] for tokens, tail in tails])


def read_found(
    fields: Sequence[Any], chain: Sequence[bytes]
) -> tuple[list[Described | None], list[tuple[bytes, Described]]]:
    """Returns blocks and tails. Raises `InvalidRecord` unless they answer a find of `chain`."""
    rows, tails = _row(fields, 2)
    if not isinstance(rows, list) or not isinstance(tails, list) or len(rows) != len(chain) or len(tails) > TAILS_MAX:
        raise InvalidRecord("the answer is to another request")
    blocks = [None if row is None else _described(block, _row(row, 4)) for block, row in zip(chain, rows, strict=True)]
    ends = [_row(tail, 6) for tail in tails]
    return blocks, [(_tokens(tokens), _described(entry, rest)) for tokens, entry, *rest in ends]


def pack_entry(tokens: bytes, layout: Layout) -> bytes:
    return pack("entry", tokens, layout.packed)


def read_entry(fields: Sequence[Any]) -> tuple[bytes, Layout]:
    """Returns the packed tokens and the layout of the entry whose bytes follow."""
    tokens, packed = _row(fields, 2)
    if not isinstance(packed, bytes):
        raise InvalidRecord("a layout is packed")
    return _tokens(tokens), _layout(packed)


def read_reason(fields: Sequence[Any]) -> str:
    """Returns the reason of `gone` or `error` as one short line."""
    reason = fields[0] if len(fields) == 1 else None
    if not isinstance(reason, str):
        raise InvalidRecord("a reason is a text")
    return "".join(sign if sign.isprintable() else " " for sign in reason[:_REASON_MAX])


@lru_cache(maxsize=64)
def _layout(packed: bytes) -> Layout:
    # Blocks of one model have the same hundreds of parts, so they are parsed once.
    rows, meta = _row(_unpacked(packed), 2)
    if not isinstance(rows, list) or not 1 <= len(rows) <= PARTS_MAX:
        raise InvalidRecord(f"an entry has 1 to {PARTS_MAX} parts")
    parts = []
    for name, dtype, shape in (_row(row, 3) for row in rows):
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and 1 <= len(name) <= NAME_BYTES_MAX
        if not plain or not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidRecord(f"part {name!r:.80} has an unknown name or dtype")
        if not isinstance(shape, list) or len(shape) > RANK_MAX:
            raise InvalidRecord(f"part {name} has no shape of up to {RANK_MAX} axes")
        parts.append(Part(name, dtype, tuple(_number(length, 2**40) for length in shape)))
    if len({part.name for part in parts}) != len(parts):
        raise InvalidRecord("an entry has a part twice")
    return Layout(parts, checked_meta(meta))


def _unpacked(payload: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(payload)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRecord(f"a message cannot be read: {error}") from None


def _described(entry: Any, row: Sequence[Any]) -> Described:
    digest, nbytes, window_from, snapshot = row
    if not isinstance(snapshot, bool):
        raise InvalidRecord("an entry's snapshot flag is a boolean")
    numbers = _number(nbytes, 2**62), _number(window_from, 2**32)
    return Described(_bytes(entry, ID_BYTES), _bytes(digest, DIGEST_BYTES), *numbers, snapshot)


def _tokens(value: Any) -> bytes:
    count = len(value) // 4 if isinstance(value, bytes) and len(value) % 4 == 0 else 0
    if not 1 <= count <= max(TAIL_TOKENS_MAX, BLOCK_TOKENS):
        raise InvalidRecord(f"{count} tokens are neither a block nor a tail")
    return cast(bytes, value)


def _ids(packed: Any, count_max: int) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes) or len(packed) % ID_BYTES or len(packed) > count_max * ID_BYTES:
        raise InvalidRecord(f"up to {count_max} ids of {ID_BYTES} bytes are wanted")
    return tuple(packed[start : start + ID_BYTES] for start in range(0, len(packed), ID_BYTES))


def _row(value: Any, length: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise InvalidRecord(f"a row of {length} values is wanted")
    return value


def _bytes(value: Any, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise InvalidRecord(f"{length} bytes are wanted")
    return value


def _number(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidRecord(f"a number from 0 to {most} is wanted, not {value!r:.40}")
    return value
