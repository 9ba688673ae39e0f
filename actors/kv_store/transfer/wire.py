"""The messages between nodes on a stream of blocks, packed and parsed. Pure.

::

    find(model, chain, tail parent, tail tokens, tails_max)  ──►  found(blocks, tails)
    fetch(model, ids)   ──►  for each id, in order: entry(record, layout) and its bytes; or gone(reason)
    anything            ──►  error(reason), and the connection ends

A message is a frame of msgpack: a kind, and its fields. An entry's bytes are those of its parts, in the layout's order;
they must have the size that `found` gave and match the record's digest. So memory is only allocated for what was
announced. If they cannot be sent to their end, the connection ends.

Every `read_…` function raises `InvalidRecord` for anything but what its `pack_…` function returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgpack

from ....cluster.errors import InvalidRecord
from ...protocol.entries import ID_BYTES, NOBODY, TAIL_TOKENS_MAX, TOKEN_BYTES, EntryLayout, EntryRecord, Location

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


class Offered(NamedTuple):
    """An entry that the source has: its size in bytes, and what it can be used for (`entries.Reusable`)."""

    nbytes: int
    window_from: int
    snapshot: bool

    @classmethod
    def of(cls, location: Location) -> Offered:
        return cls(location.nbytes, location.window_from, location.snapshot)


def pack(*fields: Any) -> bytes:
    """Returns the payload of a message."""
    return cast(bytes, msgpack.packb(fields))


def unpack(payload: bytes | memoryview) -> tuple[str, list[Any]]:
    """Returns the kind and the fields of a message."""
    try:
        fields = msgpack.unpackb(payload)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRecord(f"a message cannot be read: {error}") from None
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
        if not isinstance(tokens, bytes) or len(tokens) % TOKEN_BYTES or len(tokens) > TOKEN_BYTES * TAIL_TOKENS_MAX:
            raise InvalidRecord(f"a tail is of up to {TAIL_TOKENS_MAX} tokens")
        ids = _ids(chain, CHAIN_MAX)
        return FindRequest(_id(model), ids, _id(parent), tokens, _number(tails_max, TAILS_MAX))
    if kind == "fetch":
        model, packed = _row(fields, 2)
        ids = _ids(packed, FETCH_MAX)
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRecord("a fetch names entries, each once")
        return FetchRequest(_id(model), ids)
    raise InvalidRecord(f"{kind!r:.40} is no request")


def pack_found(blocks: Sequence[Offered | None], tails: Sequence[tuple[int, Offered]]) -> bytes:
    """Packs the answer to `find`; `tails` are (how many of the named tokens, what there is)."""
    return pack("found", blocks, [[count, *tail] for count, tail in tails])


def read_found(fields: Sequence[Any], request: FindRequest) -> tuple[list[Offered | None], list[tuple[int, Offered]]]:
    """Returns blocks and tails. Raises `InvalidRecord` unless they answer the request."""
    rows, ends = _row(fields, 2)
    blocks = [None if row is None else _offered(row) for row in _row(rows, len(request.chain))]
    if not isinstance(ends, list) or len(ends) > request.tails_max:
        raise InvalidRecord("more tails than were asked for")
    tails = [(count, _offered(rest)) for count, *rest in (_row(end, 4) for end in ends)]
    if any(not _number(count, len(request.tail_tokens) // TOKEN_BYTES) for count, _ in tails):
        raise InvalidRecord("a tail has a token at least")
    return blocks, tails


def pack_entry(record: EntryRecord, layout: EntryLayout) -> bytes:
    """Packs what precedes an entry's bytes: everything in the index except its owners."""
    return pack("entry", record.facts(), layout.packed)


def read_entry(fields: Sequence[Any]) -> tuple[EntryRecord, EntryLayout]:
    """Returns the record, without owners, and the layout of the entry whose bytes follow."""
    facts, packed = _row(fields, 2)
    if not isinstance(facts, bytes) or not isinstance(packed, bytes):
        raise InvalidRecord("a record and a layout are packed")
    record, layout = EntryRecord.from_facts(facts, (NOBODY,)).checked(), EntryLayout.unpacked(packed)
    if record.nbytes != layout.nbytes:
        raise InvalidRecord("an entry has another size than its parts")
    return record, layout


def read_reason(fields: Sequence[Any]) -> str:
    """Returns the reason of `gone` or `error` as one short line."""
    reason = fields[0] if len(fields) == 1 else None
    if not isinstance(reason, str):
        raise InvalidRecord("a reason is a text")
    return "".join(sign if sign.isprintable() else " " for sign in reason[:_REASON_MAX])


def _offered(row: Any) -> Offered:
    nbytes, window_from, snapshot = _row(row, 3)
    if not isinstance(snapshot, bool):
        raise InvalidRecord("an entry's snapshot flag is a boolean")
    return Offered(_number(nbytes, 2**62), _number(window_from, 2**32), snapshot)


def _ids(packed: Any, count_max: int) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes) or len(packed) % ID_BYTES or len(packed) > count_max * ID_BYTES:
        raise InvalidRecord(f"up to {count_max} ids of {ID_BYTES} bytes are wanted")
    return tuple(packed[start : start + ID_BYTES] for start in range(0, len(packed), ID_BYTES))


def _row(value: Any, length: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise InvalidRecord(f"a list of {length} values is wanted")
    return value


def _id(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise InvalidRecord(f"{ID_BYTES} bytes are wanted")
    return value


def _number(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidRecord(f"a number from 0 to {most} is wanted, not {value!r:.40}")
    return value
