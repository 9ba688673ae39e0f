"""Which copy of an entry is live. Everything runs inside a transaction of the index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...protocol.entries import OWNERS_MAX, EntryRecord, SegmentRecord, adds_to, crowd_tag, is_crowd
from .index import Index, IndexRow


@dataclass(frozen=True)
class SegmentPlacement:
    """The result of adding a segment's entries.

    Attributes:
        kept: ids whose live copy is in this segment.
        dropped: ids that entries of other segments serve.
        retracted: ids of other entries that are gone.
        refused: ids of copies without an owner.
    """

    kept: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    retracted: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)


def place(
    index: Index,
    number: int,
    record: SegmentRecord,
    *,
    certain: bool,
    tails_max: int,
    without: Mapping[bytes, Collection[bytes]] | None = None,
    heirs: Mapping[bytes, Collection[bytes]] | None = None,
) -> SegmentPlacement:
    """Adds the entries of the new segment `number`. The first copy of an id stays live, unless a later one adds to it.

    Other copies become dead rows, so that their bytes can be found. A tail is dropped if a longer one begins with it,
    but only if all of its owners own the longer one too. Otherwise forgetting an owner would leave its tokens in an
    entry of another owner.

    Args:
        certain: whether the record names all owners.
        tails_max: tails of one parent; the oldest is dropped.
        without: by entry id, tags of owners that may not have the entry. Without other owners it becomes a dead row.
        heirs: by entry id, tags of further owners, which the record does not name.
    """
    placed = SegmentPlacement()
    without, heirs = without or {}, heirs or {}
    for slot, entry in enumerate(record.entries):
        known = _union(entry.owners, tuple(heirs.get(entry.id, ())))
        owners = tuple(tag for tag in known if tag not in without.get(entry.id, ()))
        if not owners:
            index.add(IndexRow(number, record.name, record.model, slot, False, certain, entry))
            placed.refused.append(entry.id)
            continue
        entry = replace(entry, owners=owners)
        row = IndexRow(number, record.name, record.model, slot, True, certain, entry)
        old = index.live(entry.id)
        if old is None:
            index.remove_unreadable(entry.id)
            if entry.tail and not _make_room(index, row, tails_max, placed):
                row = replace(row, live=False)
        elif old.model == record.model and adds_to(entry, old.record):
            index.kill(old)
            owners = _union(entry.owners, old.record.owners)
            row = replace(row, certain=certain and old.certain, record=replace(entry, owners=owners))
        else:
            add_owners(index, old, entry.owners)
            row = replace(row, live=False)
        index.add(row)
        (placed.kept if row.live else placed.dropped).append(entry.id)
    return placed


def add_owners(index: Index, row: IndexRow, owners: Sequence[bytes]) -> bool:
    """Adds owners to a row. Returns whether that changed it."""
    union = _union(row.record.owners, owners)
    if union == row.record.owners:
        return False
    index.add(replace(row, record=replace(row.record, owners=union)))
    return True


def remove_owner(index: Index, row: IndexRow, owner: bytes) -> bool:
    """Removes an owner from a row. Returns whether owners are left; if not, the row becomes dead.

    Dead rows, and rows whose owners may be incomplete, are given up in any case: erasing takes precedence over reuse.
    """
    rest = tuple(tag for tag in row.record.owners if tag != owner)
    if row.live and row.certain and rest:
        index.add(replace(row, record=replace(row.record, owners=rest)))
        return True
    if row.live:
        index.kill(row)
    return False


def set_owners(index: Index, row: IndexRow, owners: Sequence[bytes]) -> None:
    """Sets the complete owners of a row; a crowd tag that it has stays."""
    known = _union([tag for tag in row.record.owners if is_crowd(tag)], owners)
    index.add(replace(row, certain=True, record=replace(row.record, owners=known)))


def _union(owners: Sequence[bytes], more: Sequence[bytes]) -> tuple[bytes, ...]:
    union = tuple(dict.fromkeys((*owners, *more)))
    if len(union) <= OWNERS_MAX:
        return union
    # So many owners are replaced by a crowd tag, with which the entry stays if any of them is forgotten.
    crowd = next(filter(is_crowd, union), crowd_tag(union[0]))
    some = {crowd, *[tag for tag in union if tag != crowd][: OWNERS_MAX - 1]}
    return tuple(tag for tag in dict.fromkeys((*union, crowd)) if tag in some)


def _make_room(index: Index, row: IndexRow, tails_max: int, placed: SegmentPlacement) -> bool:
    """Drops the tails that the new one replaces. Returns False if an older one serves the new one's tokens."""
    entry = row.record
    siblings = [other for other in index.live_tails(entry.parent) if other.model == row.model]
    if any(_serves(other.record, entry) for other in siblings):
        return False
    stay = []
    for other in siblings:
        if _serves(entry, other.record):
            index.kill(other)
            placed.retracted.append(other.record.id)
        else:
            stay.append(other)
    # Later segments have higher numbers, unless the highest was removed. That is good enough here.
    for other in sorted(stay, key=lambda other: other.segment)[: max(0, len(stay) + 1 - tails_max)]:
        index.kill(other)
        placed.retracted.append(other.record.id)
    return True


def _serves(longer: EntryRecord, shorter: EntryRecord) -> bool:
    """Returns whether the longer tail can be used in place of the shorter one."""
    return (
        longer.tokens.startswith(shorter.tokens)
        and not shorter.snapshot
        and longer.window_from <= shorter.window_from
        and set(shorter.owners) <= set(longer.owners)
    )


class Changes:
    """Ids added and removed since the last `take`. An id is never in both."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()
        self._gone: set[bytes] = set()

    def note(self, come: Sequence[bytes], gone: Sequence[bytes]) -> list[bytes]:
        """Adds changes. Returns `gone`."""
        self._come.update(come)
        self._gone.difference_update(come)
        self._gone.update(gone)
        self._come.difference_update(gone)
        return list(gone)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the sorted ids (added, removed) and clears both."""
        taken = sorted(self._come), sorted(self._gone)
        self._come, self._gone = set(), set()
        return taken
