"""Rewrites a segment without its dead entries, so that their bytes leave the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protocol.entries import Entry, Failure, SegmentRecord, unpack_tokens
from .index import IndexRow
from .io import DiskIO
from .segment_reader import StoredEntry, read_entries
from .segments import STORE_SESSION, write_tagged


@dataclass(frozen=True)
class Rewritten:
    """The new file, None if no entry was left; `rows[slot]` is the old row of its entry."""

    record: SegmentRecord | None
    rows: list[IndexRow]
    failures: list[Failure]


def rewrite(root: Path, key: bytes, rows: Sequence[IndexRow], *, epoch: int, now_s: float, io: DiskIO) -> Rewritten:
    """Writes the entries at `rows`, all of one segment, into a new file. Needs no lock.

    Raises:
        DiskFull, DiskError: nothing is left behind.
    """
    read = read_entries(root, key, [row.location for row in rows])
    kept = [(row, stored) for row, stored in zip(rows, read, strict=True) if isinstance(stored, StoredEntry)]
    failures = [stored for stored in read if isinstance(stored, Failure)]
    if not kept:
        return Rewritten(None, [], failures)
    record = write_tagged(
        root,
        key,
        kept[0][0].model,
        [_entry(row, stored) for row, stored in kept],
        [row.record.owners for row, _ in kept],
        session=STORE_SESSION,
        epoch=epoch,
        now_s=now_s,
        meta=kept[0][1].meta,
        io=io,
    )
    return Rewritten(record, [row for row, _ in kept], failures)


def _entry(row: IndexRow, stored: StoredEntry) -> Entry:
    entry = row.record
    return Entry(
        id=entry.id,
        parent=entry.parent,
        tokens=unpack_tokens(entry.tokens),
        parts=stored.parts,
        tail=entry.tail,
        window_from=entry.window_from,
        snapshot=entry.snapshot,
    )
