"""The index of segment files: in memory, made of their footers at every start. Pure.

Each entry of a file has a row in the index. A row is *live* if lookups of its id return it. Other rows (second or
replaced copies) are kept so that their bytes can be found and erased. A footer lacks owners that were added later, so
after a start a row is not *certain* until those are found. A footer may not name a forgotten owner: such a file is
marked for erasing, and rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...protocol.entries import OWNERS_MAX, EntryRecord, Location, SegmentRecord, adds_to, crowd_tag, is_crowd
from .changes import SegmentPlacement


@dataclass(eq=False, slots=True)
class IndexRow:
    """An entry in a segment.

    Attributes:
        certain: whether `record` has all owners.
        named: the owners in the file.
    """

    segment: Segment
    slot: int
    live: bool
    certain: bool
    record: EntryRecord
    named: tuple[bytes, ...]

    @property
    def location(self) -> Location:
        return Location.of(self.record, self.segment.model, self.segment.name, self.slot)


@dataclass(eq=False, slots=True)
class Segment:
    """A file in the index.

    Attributes:
        number: segments that came later have higher ones.
        used: orders files by their last use.
        erase: whether its dead entries must be erased.
    """

    number: int
    name: str
    model: bytes
    nbytes: int
    tenant: bytes
    used: int
    erase: bool = False
    rows: list[IndexRow] = field(default_factory=list)

    @property
    def live(self) -> list[IndexRow]:
        return [row for row in self.rows if row.live]


class Index:
    """All committed segments and their entries. One thread at a time.

    Args:
        tails_max: tails of one parent; the oldest is dropped.

    Attributes:
        segments: by name.
        nbytes: of all segments.
        rows: how many entries there are, copies included.
        tenant_bytes: of each tenant's segments, without those that belong to no agent. A file has entries of one tenant
            only, because block ids depend on the tenant. KV that several of its agents share is one entry.
    """

    def __init__(self, tails_max: int) -> None:
        self.segments: dict[str, Segment] = {}
        self.nbytes = 0
        self.rows = 0
        self.tenant_bytes: Counter[bytes] = Counter()
        self._tails_max = tails_max
        self._number = 0
        self._live: dict[bytes, IndexRow] = {}
        # Live tails by parent, the oldest first.
        self._tails: dict[bytes, dict[bytes, IndexRow]] = {}
        # Segments in which an entry died since the last call of `lonely`.
        self._died: set[Segment] = set()

    def live(self, entry: bytes) -> IndexRow | None:
        """Returns the live row of an id."""
        return self._live.get(entry)

    def live_ids(self) -> list[bytes]:
        return list(self._live)

    def live_tails(self, parent: bytes) -> list[IndexRow]:
        return list(self._tails.get(parent, {}).values())

    def all_rows(self) -> Iterator[IndexRow]:
        return (row for segment in self.segments.values() for row in segment.rows)

    def owned(self, tag: bytes) -> list[IndexRow]:
        return [row for row in self.all_rows() if tag in row.record.owners]

    def before(self, segment: Segment) -> Segment | None:
        """Returns the segment with the parent of this segment's first entry."""
        row = self._live.get(segment.rows[0].record.parent)
        return row.segment if row is not None else None

    def lonely(self) -> list[Segment]:
        """Returns the segments that lost their last live entry since the last call."""
        died, self._died = self._died, set()
        return [segment for segment in died if segment.name in self.segments and not segment.live]

    def sparse(self) -> list[Segment]:
        """Returns the segments with fewer live than dead entries, or marked for erasing."""
        return [
            segment for segment in self.segments.values() if segment.erase or 2 * len(segment.live) < len(segment.rows)
        ]

    # Changes.

    def add_segment(self, record: SegmentRecord, used: int) -> Segment:
        """Adds a segment without entries."""
        self._number += 1
        segment = Segment(self._number, record.name, record.model, record.nbytes, record.tenant, used)
        self.segments[record.name] = segment
        self.nbytes += record.nbytes
        if segment.tenant:
            self.tenant_bytes[segment.tenant] += record.nbytes
        return segment

    def remove_segment(self, segment: Segment) -> list[bytes]:
        """Removes a segment and its entries. Returns the ids that were live."""
        gone = [row.record.id for row in segment.live]
        for row in segment.live:
            self.kill(row)
        del self.segments[segment.name]
        self.nbytes -= segment.nbytes
        self.rows -= len(segment.rows)
        if segment.tenant:
            self.tenant_bytes[segment.tenant] -= segment.nbytes
            if not self.tenant_bytes[segment.tenant]:
                del self.tenant_bytes[segment.tenant]
        return gone

    def add(self, row: IndexRow) -> None:
        """Adds a row to its segment."""
        row.segment.rows.append(row)
        row.segment.erase |= any(tag not in row.record.owners for tag in row.named)
        self.rows += 1
        if not row.live:
            self._died.add(row.segment)
            return
        entry = row.record
        self._live[entry.id] = row
        if entry.tail:
            self._tails.setdefault(entry.parent, {})[entry.id] = row

    def kill(self, row: IndexRow) -> None:
        """Makes a live row dead."""
        row.live = False
        self._died.add(row.segment)
        entry = row.record
        del self._live[entry.id]
        if entry.tail:
            siblings = self._tails[entry.parent]
            del siblings[entry.id]
            if not siblings:
                del self._tails[entry.parent]

    def check(self) -> None:
        """Raises AssertionError if the tables disagree."""
        segments = self.segments.values()
        tenants = Counter[bytes]()
        for segment in segments:
            assert segment.live, f"{segment.name} has no live entry"
            tenants[segment.tenant] += segment.nbytes
        del tenants[b""]
        assert tenants == self.tenant_bytes, "the bytes of tenants' files are counted wrong"
        assert self.nbytes == sum(segment.nbytes for segment in segments)
        assert self.rows == sum(len(segment.rows) for segment in segments)
        live = [row for row in self.all_rows() if row.live]
        assert len(live) == len(self._live), "two copies of one id are live"
        assert all(self._live.get(row.record.id) is row for row in live)
        tails = {row.record.id for row in live if row.record.tail}
        assert tails == {entry for siblings in self._tails.values() for entry in siblings}

    def place(
        self,
        record: SegmentRecord,
        used: int,
        *,
        certain: bool,
        without: Mapping[bytes, Collection[bytes]] | None = None,
        heirs: Mapping[bytes, Collection[bytes]] | None = None,
    ) -> SegmentPlacement:
        """Adds a segment. The first copy of an id stays live, unless a later one adds to it.

        A tail is dropped if a longer one begins with it, but only if all of its owners own the longer one too.
        Otherwise forgetting an owner would leave its tokens in an entry of another owner.

        Args:
            certain: whether the record names all owners.
            without: by entry id, tags of owners that may not have the entry. Without other owners it becomes a dead
                row, which is to be erased.
            heirs: by entry id, tags of further owners, which the record does not name.
        """
        placed, segment = SegmentPlacement(), self.add_segment(record, used)
        without, heirs = without or {}, heirs or {}
        for slot, entry in enumerate(record.entries):
            known = _union(entry.owners, heirs[entry.id]) if entry.id in heirs else entry.owners
            owners = tuple(tag for tag in known if tag not in without.get(entry.id, ()))
            if not owners:
                self.add(IndexRow(segment, slot, False, certain, entry, entry.owners))
                segment.erase = True
                placed.refused.append(entry.id)
                continue
            named, entry = entry.owners, replace(entry, owners=owners) if owners != entry.owners else entry
            row = IndexRow(segment, slot, True, certain, entry, named)
            old = self._live.get(entry.id)
            if old is None:
                row.live = not entry.tail or self._has_room(row, placed)
            elif old.segment.model == record.model and adds_to(entry, old.record):
                self.kill(old)
                row.certain = certain and old.certain
                row.record = replace(entry, owners=_union(entry.owners, old.record.owners))
            else:
                add_owners(old, entry.owners)
                row.live = False
            self.add(row)
            (placed.kept if row.live else placed.dropped).append(entry.id)
        return placed

    def _has_room(self, row: IndexRow, placed: SegmentPlacement) -> bool:
        """Drops the tails that the new one replaces. Returns False if an older one serves the new one's tokens."""
        entry = row.record
        siblings = [other for other in self.live_tails(entry.parent) if other.segment.model == row.segment.model]
        if any(_serves(other.record, entry) for other in siblings):
            return False
        replaced = [other for other in siblings if _serves(entry, other.record)]
        stay = [other for other in siblings if other not in replaced]
        for other in (*replaced, *stay[: max(0, len(stay) + 1 - self._tails_max)]):
            self.kill(other)
            placed.retracted.append(other.record.id)
        return True

    def remove_owner(self, row: IndexRow, owner: bytes) -> bool:
        """Removes an owner from a row. Returns whether it is still live: it has other owners. A dead row is to be
        erased."""
        rest = tuple(tag for tag in row.record.owners if tag != owner)
        if row.live and not rest:
            self.kill(row)
        if row.live:
            row.record = replace(row.record, owners=rest)
        if not row.live or owner in row.named:
            row.segment.erase = True
        return row.live


def add_owners(row: IndexRow, owners: Sequence[bytes]) -> None:
    union = _union(row.record.owners, owners)
    if union != row.record.owners:
        row.record = replace(row.record, owners=union)


def _union(owners: Iterable[bytes], more: Iterable[bytes]) -> tuple[bytes, ...]:
    union = tuple(dict.fromkeys((*owners, *more)))
    if len(union) <= OWNERS_MAX:
        return union
    # Too many owners are replaced by a crowd tag: the entry then stays if one of them is forgotten.
    crowd = next(filter(is_crowd, union), crowd_tag(union[0]))
    some = {crowd, *[tag for tag in union if tag != crowd][: OWNERS_MAX - 1]}
    return tuple(tag for tag in dict.fromkeys((*union, crowd)) if tag in some)


def _serves(longer: EntryRecord, shorter: EntryRecord) -> bool:
    """Returns whether the longer tail can be used in place of the shorter one."""
    return (
        longer.tokens.startswith(shorter.tokens)
        and not shorter.snapshot
        and longer.window_from <= shorter.window_from
        and set(shorter.owners) <= set(longer.owners)
    )
