"""The messages between nodes on a stream of blocks, packed and parsed. Pure.

::

    frame    4 bytes length, then sealed (`link_auth.FrameSeal`) msgpack: a kind, and its fields

    find(model, chain, tail parent, tail tokens, tails_max)  ──►  found(lease_s, blocks, tails)
    fetch(model, ids)   ──►  batch(signatures, entries)
                             parts(runs) + the bytes of run after run    … layer after layer
                             end(failures)
    renew()             ──►  renewed(lease_s)
    anything            ──►  error(message), and the connection ends

A run is one part of several entries, which are named by their positions in the fetch. The bytes after `parts` are
sealed in records (`link_auth.records`). A whole entry must match the digest in `found`. Memory is only allocated for
announcements that agree with earlier ones.

Every `read_…` function raises `InvalidRecord` for anything but what its `pack_…` function returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgpack

from .....cluster.errors import InvalidRecord
from ....protocol.block_ids import BLOCK_TOKENS
from ....protocol.entries import (
    DIGEST_BYTES,
    DTYPES,
    ID_BYTES,
    NAME_BYTES_MAX,
    PARTS_MAX,
    RANK_MAX,
    TAIL_TOKENS_MAX,
    Location,
    Part,
    checked_meta,
)

CHAIN_MAX = 8192
"""Blocks of one pull; two million tokens."""

TAILS_MAX = 8
FETCH_MAX = 64
REQUEST_BYTES_MAX = 2**20
ANSWER_BYTES_MAX = 16 * 2**20
RUNS_MAX = 256
"""Runs of one frame of parts."""

LENGTH_BYTES = 4
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


@dataclass(frozen=True)
class RenewRequest:
    pass


Request = FindRequest | FetchRequest | RenewRequest


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


class Signature(NamedTuple):
    """The parts of an entry, and its writer's metadata."""

    parts: tuple[Part, ...]
    meta: dict[str, str]


class Coming(NamedTuple):
    """One entry of a fetch: the number of its signature (-1 if it fails), its packed tokens, and why it fails."""

    signature: int
    tokens: bytes
    reason: str


def pack(*fields: Any) -> bytes:
    """Returns the payload of a frame."""
    return cast(bytes, msgpack.packb(fields))


def pack_request(request: Request) -> bytes:
    if isinstance(request, FindRequest):
        chain = b"".join(request.chain)
        return pack("find", request.model, chain, request.tail_parent, request.tail_tokens, request.tails_max)
    if isinstance(request, FetchRequest):
        return pack("fetch", request.model, b"".join(request.ids))
    return pack("renew")


def read_request(payload: bytes) -> Request:
    """Parses what `pack_request` returns."""
    kind, fields = _unpacked(payload)
    if kind == "find" and len(fields) == 5:
        model, chain, parent, tokens, tails_max = fields
        if not isinstance(tokens, bytes) or len(tokens) % 4 or len(tokens) > 4 * TAIL_TOKENS_MAX:
            raise InvalidRecord(f"a tail has up to {TAIL_TOKENS_MAX} tokens of 4 bytes")
        return FindRequest(
            _bytes(model, ID_BYTES), _ids(chain, CHAIN_MAX), _bytes(parent, ID_BYTES), tokens, _number(tails_max, 8)
        )
    if kind == "fetch" and len(fields) == 2:
        ids = _ids(fields[1], FETCH_MAX)
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRecord("a fetch names entries, each once")
        return FetchRequest(_bytes(fields[0], ID_BYTES), ids)
    if kind == "renew" and not fields:
        return RenewRequest()
    raise InvalidRecord(f"{kind!r:.40} is no request")


def pack_found(lease_s: float, blocks: Sequence[Described | None], tails: Sequence[tuple[bytes, Described]]) -> bytes:
    """Packs the answer to `find`; `tails` are (packed tokens, description)."""
    rows = [None if block is None else block[1:] for block in blocks]
    return pack("found", lease_s, rows, [[tokens, *tail] for tokens, tail in tails])


def read_found(
    fields: Sequence[Any], chain: Sequence[bytes]
) -> tuple[float, list[Described | None], list[tuple[bytes, Described]]]:
    """Returns the lease in seconds, blocks and tails. Raises `InvalidRecord` unless they answer a find of `chain`."""
    if len(fields) != 3 or not isinstance(fields[1], list) or not isinstance(fields[2], list):
        raise InvalidRecord("an answer has other fields")
    lease_s, rows, tails = fields
    if len(rows) != len(chain) or len(tails) > TAILS_MAX:
        raise InvalidRecord("the answer is to another request")
    blocks = [
        None if row is None else _described([block, *_list(row, 4)]) for block, row in zip(chain, rows, strict=True)
    ]
    ends = [(_tokens(_list(tail, 6)[0], tail=True), _described(tail[1:])) for tail in tails]
    return _seconds(lease_s), blocks, ends


def read_renewed(fields: Sequence[Any]) -> float:
    """Returns the lease in seconds."""
    return _seconds(fields[0] if len(fields) == 1 else None)


def pack_batch(signatures: Sequence[Signature], entries: Sequence[Coming]) -> bytes:
    kinds = [[[list(part) for part in signature.parts], signature.meta] for signature in signatures]
    return pack("batch", kinds, [[entry.signature, entry.tokens, entry.reason[:_REASON_MAX]] for entry in entries])


def read_batch(fields: Sequence[Any], count: int) -> tuple[list[Signature], list[Coming]]:
    """Returns the signatures and announced entries of a fetch of `count` entries."""
    if len(fields) != 2 or not isinstance(fields[0], list) or not isinstance(fields[1], list):
        raise InvalidRecord("a batch has other fields")
    if len(fields[0]) > count or len(fields[1]) != count:
        raise InvalidRecord("the batch is of another fetch")
    signatures = [Signature(_parts(_list(kind, 2)[0]), checked_meta(kind[1])) for kind in fields[0]]
    coming = []
    for row in fields[1]:
        signature, tokens, reason = _list(row, 3)
        if signature == -1:
            coming.append(Coming(-1, b"", _reason(reason)))
        else:
            coming.append(Coming(_number(signature, len(signatures) - 1), _tokens(tokens), ""))
    return signatures, coming


class Run(NamedTuple):
    """A part's name, and the positions of the fetch's entries whose bytes follow, in order."""

    name: str
    rows: list[int]


def pack_parts(runs: Sequence[Run]) -> bytes:
    return pack("parts", runs)


def read_parts(fields: Sequence[Any], count: int) -> list[Run]:
    """Returns the runs that follow, for a fetch of `count` entries."""
    if len(fields) != 1 or not isinstance(fields[0], list) or not 1 <= len(fields[0]) <= RUNS_MAX:
        raise InvalidRecord(f"1 to {RUNS_MAX} runs are wanted")
    return [_run(_list(run, 2), count) for run in fields[0]]


def pack_end(failures: Sequence[tuple[int, str]]) -> bytes:
    return pack("end", [[row, reason[:_REASON_MAX]] for row, reason in failures])


def read_end(fields: Sequence[Any], count: int) -> dict[int, str]:
    """Returns why entries of a fetch of `count` failed while they were sent, by position."""
    if len(fields) != 1 or not isinstance(fields[0], list) or len(fields[0]) > count:
        raise InvalidRecord("an end has other fields")
    return {_number(_list(row, 2)[0], count - 1): _reason(row[1]) for row in fields[0]}


def read_error(fields: Sequence[Any]) -> str:
    return _reason(fields[0] if fields else "")


def read_answer(payload: bytes) -> tuple[str, list[Any]]:
    """Returns the kind and the fields of an answer."""
    return _unpacked(payload)


def _unpacked(payload: bytes) -> tuple[str, list[Any]]:
    try:
        fields = msgpack.unpackb(payload)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRecord(f"a message cannot be read: {error}") from None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        raise InvalidRecord("a message is a kind and its fields")
    return fields[0], fields[1:]


def _described(row: Sequence[Any]) -> Described:
    entry, digest, nbytes, window_from, snapshot = row
    if not isinstance(snapshot, bool):
        raise InvalidRecord("an entry's snapshot flag is a boolean")
    return Described(
        _bytes(entry, ID_BYTES),
        _bytes(digest, DIGEST_BYTES),
        _number(nbytes, 2**62),
        _number(window_from, 2**32),
        snapshot,
    )


def _parts(rows: Any) -> tuple[Part, ...]:
    if not isinstance(rows, list) or not 1 <= len(rows) <= PARTS_MAX:
        raise InvalidRecord(f"an entry has 1 to {PARTS_MAX} parts")
    parts = []
    for row in rows:
        name, dtype, shape = _list(row, 3)
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and 1 <= len(name) <= NAME_BYTES_MAX
        if not plain or not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidRecord(f"part {name!r:.80} has an unknown name or dtype")
        if not isinstance(shape, list) or len(shape) > RANK_MAX:
            raise InvalidRecord(f"part {name} has no shape of up to {RANK_MAX} axes")
        parts.append(Part(name, dtype, tuple(_number(length, 2**40) for length in shape)))
    if len({part.name for part in parts}) != len(parts):
        raise InvalidRecord("an entry has a part twice")
    return tuple(parts)


def _run(row: Sequence[Any], count: int) -> Run:
    name, rows = row
    if not isinstance(name, str) or not isinstance(rows, list):
        raise InvalidRecord("a run is a part's name and its entries")
    numbers = [_number(row, count - 1) for row in rows]
    if not numbers or len(set(numbers)) != len(numbers):
        raise InvalidRecord("a run names at least one entry, each once")
    return Run(name, numbers)


def _tokens(value: Any, *, tail: bool = False) -> bytes:
    count = len(value) // 4 if isinstance(value, bytes) and len(value) % 4 == 0 else 0
    if not 1 <= count <= max(TAIL_TOKENS_MAX, BLOCK_TOKENS):
        raise InvalidRecord(f"{count} tokens are no {'tail' if tail else 'entry'}")
    return value


def _ids(packed: Any, count_max: int) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes) or len(packed) % ID_BYTES or len(packed) > count_max * ID_BYTES:
        raise InvalidRecord(f"up to {count_max} ids of {ID_BYTES} bytes are wanted")
    return tuple(packed[start : start + ID_BYTES] for start in range(0, len(packed), ID_BYTES))


def _list(value: Any, length: int) -> list[Any]:
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


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 3600:
        raise InvalidRecord(f"a lease is a number of seconds, not {value!r:.40}")
    return float(value)


def _reason(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRecord("a reason is a text")
    # For the log: one short line.
    return "".join(sign if sign.isprintable() else " " for sign in value[:_REASON_MAX])
