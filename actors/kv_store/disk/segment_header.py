"""The header of a segment file, which has everything that the index needs. Pure.

::

    8 bytes    length of the sealed part, little-endian
    32 bytes   MAC of the file's name and of the sealed part, which is checked before anything is parsed
    sealed     msgpack of (format, record, msgpack of the parts, zeros up to a multiple of 64 bytes of the file)
    data       entry after entry; in an entry, part after part, in the order of `parts` and without gaps

So an entry is one contiguous record, of the bytes that memory and the wire have, and neighbours are read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgpack

from ....cluster.errors import CorruptSegment, InvalidRecord
from ...protocol.entries import DTYPES, MAC_BYTES, PARTS_MAX, RANK_MAX, Location, Part, SegmentRecord, mac, same_mac

FORMAT = "satchel.segment.3"
HEADER_BYTES_MAX = 16 * 2**20
LENGTH_BYTES = 8
_ALIGNMENT = 64


@dataclass(frozen=True)
class Header:
    """A verified header.

    Attributes:
        record: the writer's record; its `nbytes` is the file's size.
        parts: name, dtype and shape of one entry's parts, in order.
        start: the byte at which the first entry begins.
        size: bytes of one entry.
    """

    record: SegmentRecord
    parts: tuple[Part, ...]
    start: int
    size: int

    def offset(self, slot: int) -> int:
        """Returns the byte at which an entry begins."""
        return self.start + slot * self.size

    def holds(self, location: Location) -> bool:
        """Returns whether the entry that the location names is there."""
        entries = self.record.entries
        stored = entries[location.slot] if 0 <= location.slot < len(entries) else None
        return (
            self.record.model == location.model
            and stored is not None
            and (
                (stored.id, stored.digest, stored.tokens, stored.parent, stored.tail)
                == (location.id, location.digest, location.tokens, location.parent, location.tail)
            )
        )


def build(record: SegmentRecord, parts: Sequence[Part], key: bytes, size: int = 0) -> bytes:
    """Returns the beginning of the file, up to its data, filled up to `size` bytes. `record.nbytes` is not used.

    Raises:
        InvalidRecord: the header is over `HEADER_BYTES_MAX`, or over `size`.
    """
    described = {name: value for name, value in record.to_wire().items() if name not in ("name", "nbytes")}
    tables = msgpack.packb([tuple(part) for part in parts])
    sealed = cast(bytes, msgpack.packb((FORMAT, described, tables, b"")))[:-2]
    fixed = LENGTH_BYTES + MAC_BYTES + len(sealed) + 5
    padding = size - fixed if size else -fixed % _ALIGNMENT
    if not 0 <= padding <= HEADER_BYTES_MAX - fixed:
        raise InvalidRecord(f"a segment's header of {fixed} bytes is over {size or HEADER_BYTES_MAX}")
    # The last field in msgpack's longest form, so that it fills any room.
    sealed += b"\xc6" + padding.to_bytes(4, "big") + bytes(padding)
    return len(sealed).to_bytes(LENGTH_BYTES, "little") + mac(key, b"segment", record.name.encode(), sealed) + sealed


def length_of(first: bytes, file_bytes: int) -> int:
    """Returns how many bytes follow the first 8, up to the data. Raises `CorruptSegment` if that is impossible."""
    length = MAC_BYTES + int.from_bytes(first, "little")
    if len(first) != LENGTH_BYTES or not MAC_BYTES < length <= min(HEADER_BYTES_MAX, file_bytes) - LENGTH_BYTES:
        raise CorruptSegment(f"a header of {length} bytes cannot be in a file of {file_bytes}")
    return length


def parse(raw: bytes, name: str, file_bytes: int, key: bytes) -> Header:
    """Parses the header `raw` (without its length) of the file `name`. Raises `CorruptSegment` if it is not valid."""
    proof, sealed = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not same_mac(proof, mac(key, b"segment", name.encode(), sealed)):
        raise CorruptSegment("the header was changed, or is of another file or key")
    try:
        return _parsed(msgpack.unpackb(sealed), name, file_bytes, LENGTH_BYTES + len(raw))
    except (InvalidRecord, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        # The MAC is valid, so the writer was a newer or broken version.
        raise CorruptSegment(f"the header is inconsistent: {error}") from None


def _parsed(fields: Any, name: str, file_bytes: int, start: int) -> Header:
    form, described, tables, _ = fields
    if form != FORMAT:
        raise CorruptSegment(f"the format is {form}, not {FORMAT}")
    record = SegmentRecord.from_wire({**described, "name": name, "nbytes": file_bytes})
    parts, size = _parts(tables)
    if any(entry.nbytes != size for entry in record.entries) or start + size * len(record.entries) != file_bytes:
        raise CorruptSegment(f"the file has {file_bytes} bytes, its header describes others")
    return Header(record, parts, start, size)


@lru_cache(64)
def _parts(tables: bytes) -> tuple[tuple[Part, ...], int]:
    """Returns the parts of an entry, and its bytes. Files of one model have the same few."""
    parts = tuple(Part(part, dtype, tuple(shape)) for part, dtype, shape in msgpack.unpackb(tables))
    if not 1 <= len(parts) <= PARTS_MAX or not all(map(_is_sound, parts)):
        raise CorruptSegment("a part has an unknown dtype or an invalid shape")
    return parts, sum(part.nbytes for part in parts)


def _is_sound(part: Part) -> bool:
    sizes = len(part.shape) <= RANK_MAX and all(isinstance(size, int) and size >= 0 for size in part.shape)
    return isinstance(part.name, str) and part.dtype in DTYPES and sizes
