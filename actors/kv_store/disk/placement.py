"""Which copy of an entry answers for its id. All of it inside a transaction of the index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...protocol.entries import OWNERS_MAX, EntryRecord, SegmentRecord, adds_to, crowd_tag, is_crowd
from .index import Index, Row


@dataclass(frozen=True)
class Placed:
    """What became of a segment's entries.

    Attributes:
        kept: ids that its copies answer for.
        dropped: ids that others serve.
        retracted: ids of other entries that no longer answer.
        refused: ids of copies that nobody may have.
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
) -> Placed:
    """Enter the entries of the new segment `number`: the first copy of an id stays, unless a later one adds to it.

    A copy that answers for nothing is entered too, so that its bytes can be found. A tail that another one begins with
    is served by that one; it goes only if everybody who owns it owns the longer one too, for else forgetting one owner
    would leave his tokens in what another one still has.

    Args:
        certain: whether the record names all owners.
        tails_max: of one parent; the oldest goes.
        without: by ids, tags of owners that may not have the entry. What nobody else has is entered as a dead row.
        heirs: by ids, tags of owners that the record does not name.
    """
    placed = Placed()
    without, heirs = without or {}, heirs or {}
    for slot, entry in enumerate(record.entries):
        known = _union(entry.owners, tuple(heirs.get(entry.id, ())))
        owners = tuple(tag for tag in known if tag not in without.get(entry.id, ()))
        if not owners:
            index.add(Row(number, record.name, record.model, slot, False, certain, entry))
            placed.refused.append(entry.id)
            continue
        entry = replace(entry, owners=owners)
        row = Row(number, record.name, record.model, slot, True, certain, entry)
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


def add_owners(index: Index, row: Row, owners: Sequence[bytes]) -> bool:
    """Let more owners have the entry. Returns whether that changed anything."""
    union = _union(row.record.owners, owners)
    if union == row.record.owners:
        return False
    index.add(replace(row, record=replace(row.record, owners=union)))
    return True


def remove_owner(index: Index, row: Row, owner: bytes) -> bool:
    """Take an owner from the row. Returns whether somebody still has it; if not, it no longer answers.

    Of copies that answer for nothing, and of those whose owners may not all be known, nobody has a claim that would
    outweigh the wish to be forgotten.
    """
    rest = tuple(tag for tag in row.record.owners if tag != owner)
    if row.live and row.certain and rest:
        index.add(replace(row, record=replace(row.record, owners=rest)))
        return True
    if row.live:
        index.kill(row)
    return False


def set_owners(index: Index, row: Row, owners: Sequence[bytes]) -> None:
    """Let exactly these have the entry, and nobody in particular if he had it; nobody else will turn out to."""
    known = _union([tag for tag in row.record.owners if is_crowd(tag)], owners)
    index.add(replace(row, certain=True, record=replace(row.record, owners=known)))


def _union(owners: Sequence[bytes], more: Sequence[bytes]) -> tuple[bytes, ...]:
    union = tuple(dict.fromkeys((*owners, *more)))
    if len(union) <= OWNERS_MAX:
        return union
    # What so many have is common knowledge. It stays when any of them is forgotten.
    crowd = next(filter(is_crowd, union), crowd_tag(union[0]))
    some = {crowd, *[tag for tag in union if tag != crowd][: OWNERS_MAX - 1]}
    return tuple(tag for tag in dict.fromkeys((*union, crowd)) if tag in some)


def _make_room(index: Index, row: Row, tails_max: int, placed: Placed) -> bool:
    """Remove the tails that the new one serves for. Returns False where an older one serves for it."""
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
    # A later segment has a higher number, unless the highest was removed; good enough for choosing among so many.
    for other in sorted(stay, key=lambda other: other.segment)[: max(0, len(stay) + 1 - tails_max)]:
        index.kill(other)
        placed.retracted.append(other.record.id)
    return True


def _serves(longer: EntryRecord, shorter: EntryRecord) -> bool:
    """Whether the longer tail is as good as the shorter one, up to whose end it holds the same tokens."""
    return (
        longer.tokens.startswith(shorter.tokens)
        and not shorter.snapshot
        and longer.window_from <= shorter.window_from
        and set(shorter.owners) <= set(longer.owners)
    )


class Changes:
    """Ids that answer now and did not, and the other way round. An id is never in both."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()
        self._gone: set[bytes] = set()

    def note(self, come: Sequence[bytes], gone: Sequence[bytes]) -> list[bytes]:
        """Returns what has gone."""
        self._come.update(come)
        self._gone.difference_update(come)
        self._gone.update(gone)
        self._come.difference_update(gone)
        return list(gone)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(come, gone), in order, and begin anew."""
        taken = sorted(self._come), sorted(self._gone)
        self._come, self._gone = set(), set()
        return taken
