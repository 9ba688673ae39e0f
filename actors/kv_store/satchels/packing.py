"""Packs an agent's branches, and what the node's disk has of their KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...protocol.entries import Location, unpack_tokens
from ...protocol.store_messages import Content, Head
from ..agents.claims import Branch, Claims
from ..disk.segment_reader import EntryReader
from ..disk.store import DiskStore
from .layout import CarriedBranch, Chain, Manifest, SatchelWriter

_TAILS_MAX = 4
"""Tails packed for one branch, the longest ones: earlier turns leave shorter ones."""


def kv_of(store: DiskStore, branches: Iterable[Branch]) -> list[Location]:
    """Returns the blocks, tails and image embeddings of these branches that are on the disk, each once."""
    found: dict[bytes, Location] = {}
    for branch in branches:
        claims = Claims([branch])
        located = [*store.locate(branch.model, [*claims.blocks])]
        for parent, packed in claims.rests():
            tails = store.tails(branch.model, parent, unpack_tokens(packed))
            # The last tokens of a longer one may be another agent's.
            whole = [each.location for each in tails if 4 * each.tokens == len(each.location.tokens)]
            located += whole[:_TAILS_MAX]
        found |= {location.id: location for location in located if location is not None}
    return [*found.values()]


def manifest_of(
    agent: str,
    branches: Sequence[tuple[Head, Content]],
    chains: Iterable[tuple[int, Branch]],
    locations: Sequence[Location],
    now_s: float,
) -> Manifest:
    """Returns the manifest of a satchel.

    Args:
        agent: its id, without the tenant.
        branches: the oldest first.
        chains: (number of a branch, where its KV is).
        now_s: seconds since 1970.
    """
    carried = [
        CarriedBranch(
            model=head.model,
            files=head.files,
            turns=head.turns,
            injected=head.injected,
            messages=head.messages,
            use=head.epoch,
            created=head.created,
            used=head.used,
            program=head.program,
            parent=head.parent,
        )
        for head, _ in branches
    ]
    kept = [Chain(number, branch.model, branch.root) for number, branch in chains if branch.root]
    nbytes = sum(location.nbytes for location in locations)
    return Manifest(agent, now_s, carried, kept, len(locations), nbytes)


def write_satchel(
    write: Callable[[Any], object],
    key: bytes,
    manifest: Manifest,
    contents: Sequence[Content],
    store: DiskStore | None,
    locations: Sequence[Location],
    lease_s: float,
) -> None:
    """Writes a satchel. Entries that turn out to be damaged are left out, and reported to the store.

    Args:
        write: takes all bytes, in order.
        key: of the cluster.
        locations: what of the store's disk goes into it.
        lease_s: for how long the store keeps its files.

    Raises:
        DiskError: nothing can be read now.
        OSError: as `write`.
    """
    writer = SatchelWriter(write, key)
    writer.begin(manifest, contents)
    if store is not None and locations:
        _write_entries(writer, store, locations, lease_s)
    writer.end()


def _write_entries(writer: SatchelWriter, store: DiskStore, locations: Sequence[Location], lease_s: float) -> None:
    reader = EntryReader(store.root, store.key, locations)
    lease, taken_at = store.pin(locations, lease_s), time.monotonic()
    try:
        for run in reader.runs():
            for row, index in enumerate(run.indexes):
                writer.entry(locations[index], run.layout, run.data[row].data)
            reader.give_back(run)
            if time.monotonic() - taken_at > lease_s / 3:
                lease, taken_at = store.pin(locations, lease_s, lease), time.monotonic()
    finally:
        store.unpin(lease)
    store.report(reader.failures.values())
