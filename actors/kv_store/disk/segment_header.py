"""The header of a segment file: a safetensors header whose metadata has everything that the index needs. Pure.

::

    8 bytes   length of the header
    {"__metadata__":{"mac":"<64 hex digits>",     the MAC covers the file's name and the rest of the header,
     "format":…, "record":…, "digests":…},        and is checked before anything is parsed
     "<part>":{"dtype":…,"shape":[entries,…],"data_offsets":[…]}, …}  spaces up to a multiple of 64 bytes
    data      part after part, in order; in a part, entry after entry

So the n entries of a part are contiguous, and any safetensors reader can open the file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ....cluster.errors import CorruptSegment, InvalidRecord
from ...protocol.entries import DIGEST_BYTES, DTYPES, MAC_BYTES, EntryDigest, Part, SegmentRecord, mac, same_mac

FORMAT = "satchel.segment.2"
HEADER_BYTES_MAX = 16 * 2**20
LENGTH_BYTES = 8
_ALIGNMENT = 64
_OPENING = b'{"__metadata__":{"mac":"'
_SEALED_FROM = len(_OPENING) + 2 * MAC_BYTES


@dataclass(frozen=True)
class Header:
    """A verified header.

    Attributes:
        record: the writer's record; its `nbytes` is the file's size.
        parts: name, dtype and shape of one entry's parts, in order.
        offsets: the byte at which each part begins in the file.
        digests: `digests[part][slot]`, 16 bytes each.
    """

    record: SegmentRecord
    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    digests: tuple[tuple[bytes, ...], ...]


def build(record: SegmentRecord, parts: Sequence[Part], digests: Sequence[Sequence[bytes]], key: bytes) -> bytes:
    """Returns the beginning of the file, up to its data.

    Args:
        record: its `nbytes` is not used.
        digests: `digests[part][slot]`.

    Raises:
        InvalidRecord: the header is over `HEADER_BYTES_MAX`.
    """
    described = {name: value for name, value in record.to_wire().items() if name not in ("name", "nbytes")}
    metadata = {
        "format": FORMAT,
        "record": base64.b64encode(msgpack.packb(described) or b"").decode(),
        "digests": base64.b64encode(b"".join(digest for row in digests for digest in row)).decode(),
    }
    tensors: dict[str, Any] = {}
    end, count = 0, len(record.entries)
    for part in parts:
        start, end = end, end + part.nbytes * count
        tensors[part.name] = {"dtype": part.dtype, "shape": [count, *part.shape], "data_offsets": [start, end]}
    compact = (",", ":")
    rest = '",' + json.dumps(metadata, separators=compact)[1:] + "," + json.dumps(tensors, separators=compact)[1:]
    sealed = rest.encode()
    sealed += b" " * (-(LENGTH_BYTES + _SEALED_FROM + len(sealed)) % _ALIGNMENT)
    length = _SEALED_FROM + len(sealed)
    if length > HEADER_BYTES_MAX:
        raise InvalidRecord(f"a segment's header of {length} bytes is over {HEADER_BYTES_MAX}")
    proof = mac(key, b"segment", record.name.encode(), sealed).hex().encode()
    return length.to_bytes(LENGTH_BYTES, "little") + _OPENING + proof + sealed


def length_of(first: bytes, file_bytes: int) -> int:
    """Returns the header's length in bytes, given the first 8 bytes of the file. Raises `CorruptSegment` if that is
    impossible."""
    if len(first) != LENGTH_BYTES:
        raise CorruptSegment("the file is shorter than a header")
    length = int.from_bytes(first, "little")
    if not _SEALED_FROM < length <= min(HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES):
        raise CorruptSegment(f"a header of {length} bytes cannot be in a file of {file_bytes}")
    return length


def parse(raw: bytes, name: str, file_bytes: int, key: bytes) -> Header:
    """Parses the header `raw` (without its length) of the file `name`. Raises `CorruptSegment` if it is not valid."""
    opening, proof, sealed = raw[: len(_OPENING)], raw[len(_OPENING) : _SEALED_FROM], raw[_SEALED_FROM:]
    if opening != _OPENING or not same_mac(proof, mac(key, b"segment", name.encode(), sealed).hex().encode()):
        raise CorruptSegment("the header was changed, or is of another file or key")
    try:
        return _parsed(json.loads(raw), name, file_bytes, LENGTH_BYTES + len(raw))
    except (InvalidRecord, ValueError, KeyError, TypeError, binascii.Error, msgpack.UnpackException) as error:
        # The MAC is valid, so the writer was a newer or broken version.
        raise CorruptSegment(f"the header is inconsistent: {error}") from None


def _parsed(tables: dict[str, Any], name: str, file_bytes: int, data_start: int) -> Header:
    metadata = tables.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise CorruptSegment(f"the format is {metadata['format']}, not {FORMAT}")
    described = msgpack.unpackb(base64.b64decode(metadata["record"], validate=True))
    record = SegmentRecord.from_wire({**described, "name": name, "nbytes": file_bytes})
    count = len(record.entries)
    parts, offsets, end = [], [], 0
    for part_name, tensor in tables.items():
        start, stop = tensor["data_offsets"]
        lengths = tuple(tensor["shape"])
        sound = tensor["dtype"] in DTYPES and all(isinstance(length, int) and length >= 0 for length in lengths)
        if not sound or lengths[:1] != (count,):
            raise CorruptSegment(f"part {part_name} has an unknown dtype or an invalid shape")
        part = Part(part_name, tensor["dtype"], lengths[1:])
        if start != end or stop != start + part.nbytes * count:
            raise CorruptSegment(f"part {part_name} has wrong offsets")
        parts.append(part)
        offsets.append(data_start + start)
        end = stop
    if not parts or data_start + end != file_bytes:
        raise CorruptSegment(f"the file has {file_bytes} bytes, its header describes {data_start + end}")
    packed = base64.b64decode(metadata["digests"], validate=True)
    if len(packed) != DIGEST_BYTES * count * len(parts):
        raise CorruptSegment("the header has another number of digests")
    flat = [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
    rows = tuple(tuple(flat[index * count : (index + 1) * count]) for index in range(len(parts)))
    digest_of = EntryDigest(parts)
    for slot, (entry, digests) in enumerate(zip(record.entries, zip(*rows, strict=True), strict=True)):
        if entry.digest != digest_of(digests):
            raise CorruptSegment(f"entry {slot} does not match its digest")
    return Header(record, tuple(parts), tuple(offsets), rows)
