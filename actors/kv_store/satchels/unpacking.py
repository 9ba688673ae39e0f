"""Writes a satchel's KV to a node's disk, under the ids that its new owner gives it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from ....cluster.errors import InvalidSatchel, SatchelError
from ...protocol.block_ids import block_id, block_ids
from ...protocol.entries import ENTRIES_MAX, EntryRecord, SegmentRecord, owner_tag, pack_tokens, tail_id, unpack_tokens
from ...protocol.media_ids import embeddings_parent, names_in
from ...protocol.store_messages import Content
from ..disk.changes import SegmentPlacement
from ..disk.segments import SegmentWriter
from ..disk.store import DiskStore
from .layout import CarriedEntry, Manifest, SatchelReader

_SEGMENT_BYTES = 32 * 2**20
_BLOCK_BYTES = 1024

NOT_SERVED = "no model that is served here has computed it"
NO_ROOM = "the tenant's limit or the disk leaves no room for all of it"


def check_words(manifest: Manifest, contents: list[Content]) -> None:
    """Checks that transcripts are lists of messages, as many as the manifest says. Raises `InvalidSatchel`."""
    for branch, content in zip(manifest.branches, contents, strict=True):
        try:
            messages = json.loads(content.messages)
        except (ValueError, RecursionError):
            messages = None
        if not isinstance(messages, list) or [isinstance(each, dict) for each in messages] != [True] * branch.messages:
            raise InvalidSatchel("the satchel is damaged: a transcript is no list of as many messages as it says")


class Renamed:
    """The ids of a satchel's entries for its new owner.

    Args:
        root_of: the root id of the new owner's blocks under a model; empty if they are not shared.
    """

    def __init__(self, manifest: Manifest, contents: list[Content], root_of: Callable[[bytes], bytes]) -> None:
        # By model and parent in the satchel: the parent here, and the agent's tokens after it.
        self._places: dict[tuple[bytes, bytes], tuple[bytes, list[tuple[bytes, int]]]] = {}
        for chain in manifest.chains:
            root, tokens = root_of(chain.model), contents[chain.branch].tokens
            numbers = array("I", tokens)
            there, here = block_ids(chain.root, numbers), block_ids(root, numbers) if root else []
            here = here or [b""] * len(there)
            for number, (old, new) in enumerate(zip([chain.root, *there], [root, *here], strict=True)):
                self._add(chain.model, old, new, tokens, number * _BLOCK_BYTES)
            for name in dict.fromkeys(names_in(numbers)):
                new = embeddings_parent(root, name) if root else b""
                self._add(chain.model, embeddings_parent(chain.root, name), new, pack_tokens(name), 0)

    def _add(self, model: bytes, old: bytes, new: bytes, tokens: bytes, start: int) -> None:
        place = self._places.setdefault((model, old), (new, []))
        place[1].append((tokens, start))

    def of(self, model: bytes, record: EntryRecord) -> tuple[bytes, bytes]:
        """Returns an entry's id and parent; empty if it may not be shared.

        Raises:
            InvalidSatchel: no branch of the agent claims it.
        """
        parent, said = self._places.get((model, record.parent), (b"", []))
        tokens = unpack_tokens(record.tokens)
        true_id = record.id if record.tail else block_id(record.parent, tokens)
        if record.id != true_id or not any(words.startswith(record.tokens, start) for words, start in said):
            raise InvalidSatchel("the satchel is damaged: it has KV of nothing that the agent said")
        if not parent:
            return b"", b""
        return tail_id(parent, tokens) if record.tail else block_id(parent, tokens), parent


@dataclass
class TakenKV:
    """How many entries and bytes were taken, out of how many, and why not all ("" if all were)."""

    entries: int = 0
    nbytes: int = 0
    of: int = 0
    why_not: str = ""


@dataclass
class KVTaker:
    """Writes a satchel's entries as segments of the node's disk and commits them.

    Args:
        commit, touch: as a `Keeper`'s.
        owner: the agent's key.
        models: whose KV is taken.
    """

    store: DiskStore
    owner: str
    models: Collection[bytes]
    commit: Callable[[SegmentRecord], SegmentPlacement]
    touch: Callable[[list[bytes], str], None]
    taken: TakenKV = field(default_factory=TakenKV)

    def take(self, reader: SatchelReader, renamed: Renamed) -> TakenKV:
        """Takes the entries of an already verified satchel, as far as there is room."""
        self._ids: dict[bytes, None] = {}
        self._segment: SegmentWriter | None = None
        try:
            for carried in reader.entries():
                self.taken.of += 1
                if self.taken.why_not and self.taken.why_not != NOT_SERVED:
                    continue
                entry_id, parent = renamed.of(carried.model, carried.record)
                if carried.model not in self.models or not parent:
                    self.taken.why_not = NOT_SERVED
                    continue
                self._try(partial(self._add, carried, entry_id, parent))
            self._try(self._commit)
        finally:
            if self._segment is not None:
                self._segment.abandon()
        # A chain's first blocks count as used later than its end, so that eviction takes the end first.
        self.touch([*self._ids], self.owner)
        return self.taken

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SatchelError as error:
            self.taken.why_not = error.message

    def _add(self, carried: CarriedEntry, entry_id: bytes, parent: bytes) -> None:
        segment, layout = self._segment, carried.layout
        if segment is not None and (
            (segment.model, segment.layout.packed) != (carried.model, layout.packed)
            or len(segment.records) == ENTRIES_MAX
            or len(segment.records) * layout.nbytes >= _SEGMENT_BYTES
        ):
            self._commit()
        if self._segment is None:
            self._segment = self.store.writer(carried.model, layout)
        self._segment.write(carried.data.data)
        owners = (owner_tag(self.store.key, self.owner),)
        self._segment.keep(replace(carried.record, id=entry_id, parent=parent, owners=owners))

    def _commit(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        with segment:
            placed = self.commit(segment.finish())
        self._ids.update(dict.fromkeys(record.id for record in segment.records))
        if placed.refused or not self._ids.keys().isdisjoint(placed.retracted):
            self.taken.why_not = NO_ROOM
            return
        self.taken.entries += len(segment.records)
        self.taken.nbytes += sum(record.nbytes for record in segment.records)
