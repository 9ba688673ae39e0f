"""The footer of a segment file, which has everything that the index needs. Pure.

::

    data       entry after entry; in an entry, part after part, in the order of the layout and without gaps
    sealed     msgpack of (format, record, layout)
    32 bytes   MAC of the file's name and of the sealed part, which is checked before anything is parsed
    8 bytes    length of the sealed part, little-endian

So an entry is one contiguous record, of the bytes that memory and the wire have, and neighbours are read at once. What
a file has need not be known before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgpack

from ....cluster.errors import CorruptSegment, InvalidRecord
from ...protocol.entries import MAC_BYTES, EntryLayout, Location, SegmentRecord, mac, same_mac

FORMAT = "satchel.segment.4"
FOOTER_BYTES_MAX = 16 * 2**20
END_BYTES = MAC_BYTES + 8
"""The MAC and the length."""


@dataclass(frozen=True)
class Footer:
    """A verified footer. `record` is the writer's; its `nbytes` is the file's size."""

    record: SegmentRecord
    layout: EntryLayout

    def offset(self, slot: int) -> int:
        """Returns the byte at which an entry begins."""
        return slot * self.layout.nbytes

    def holds(self, location: Location) -> bool:
        """Returns whether the entry that the location names is there."""
        entries = self.record.entries
        if self.record.model != location.model or not 0 <= location.slot < len(entries):
            return False
        return entries[location.slot].facts() == location.facts()


def build(record: SegmentRecord, layout: EntryLayout, key: bytes) -> bytes:
    """Returns what follows the data. `record.nbytes` is not used.

    Raises:
        InvalidRecord: it is over `FOOTER_BYTES_MAX`.
    """
    # The layout has the metadata.
    described = {name: value for name, value in record.to_wire().items() if name not in ("name", "nbytes", "meta")}
    sealed = cast(bytes, msgpack.packb((FORMAT, described, layout.packed)))
    if len(sealed) > FOOTER_BYTES_MAX:
        raise InvalidRecord(f"a segment's footer of {len(sealed)} bytes is over {FOOTER_BYTES_MAX}")
    return sealed + mac(key, b"segment", record.name.encode(), sealed) + len(sealed).to_bytes(8, "little")


def length_of(end: bytes, file_bytes: int) -> int:
    """Returns how many bytes of the sealed part precede the file's last `END_BYTES`. Raises `CorruptSegment` if that is
    impossible."""
    length = int.from_bytes(end[MAC_BYTES:], "little")
    if len(end) != END_BYTES or not 0 < length <= min(FOOTER_BYTES_MAX, file_bytes - END_BYTES):
        raise CorruptSegment(f"a footer of {length} bytes cannot be in a file of {file_bytes}")
    return length


def parse(sealed: bytes, end: bytes, name: str, file_bytes: int, key: bytes) -> Footer:
    """Parses the footer of the file `name`. Raises `CorruptSegment` if it is not valid."""
    if not same_mac(end[:MAC_BYTES], mac(key, b"segment", name.encode(), sealed)):
        raise CorruptSegment("the footer was changed, or is of another file or key")
    try:
        form, described, packed = msgpack.unpackb(sealed)
        if form != FORMAT:
            raise CorruptSegment(f"the format is {form}, not {FORMAT}")
        layout = EntryLayout.unpacked(packed)
        record = SegmentRecord.from_wire({**described, "name": name, "nbytes": file_bytes, "meta": layout.meta})
    except (InvalidRecord, ValueError, TypeError, msgpack.UnpackException) as error:
        # The MAC is valid, so the writer was a newer or broken version.
        raise CorruptSegment(f"the footer is inconsistent: {error}") from None
    data = layout.nbytes * len(record.entries)
    if any(entry.nbytes != layout.nbytes for entry in record.entries) or data + len(sealed) + END_BYTES != file_bytes:
        raise CorruptSegment(f"the file has {file_bytes} bytes, its footer describes others")
    return Footer(record, layout)
