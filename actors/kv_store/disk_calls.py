"""The store actor's methods for the disk tier, called by replicas of its node. Their bytes go past it, by files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...cluster.errors import SatchelError
from .codec import Location, SegmentRecord
from .disk import DiskStore
from .segment_reader import Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPACT_S = 20.0
LEASE_S = 30.0
"""How long a reader has for its files."""


class DiskCalls:
    """A part of `KVStoreActor`; every answer is `{"result": ...}` or `{"error": ...}`."""

    def open_disk(self, store: DiskStore | None, session: str) -> None:
        """Answer for `store`, which was opened for `session`; None for a node that keeps no KV on disk."""
        self._store = store
        self._session = session
        self._disk_threads = ThreadPoolExecutor(2, "disk")
        self._compacting: asyncio.Task[None] | None = None

    async def disk_session(self) -> dict[str, Any]:
        """What a writer or reader must know: `root`, `session` and `epoch`; None where there is no disk tier."""
        store = self._store
        if store is None:
            return {"result": None}
        if self._compacting is None:
            self._compacting = asyncio.create_task(self._compact_now_and_then(store))
        return {"result": {"root": str(store.root), "session": self._session, "epoch": store.epoch}}

    async def disk_commit(self, record: dict[str, Any]) -> dict[str, Any]:
        """Make a written segment count; its chain is to be touched afterwards. Returns its ids that are there now."""

        def work(store: DiskStore) -> list[bytes]:
            placed = store.commit(SegmentRecord.from_wire(record))
            return [*placed.kept, *placed.dropped]

        return await self._on_disk(work)

    async def disk_touch(self, model: bytes, chain: list[bytes], owner: str) -> dict[str, Any]:
        """Note that a chain was used. Returns the ids of it that are not there."""

        def work(store: DiskStore) -> list[bytes]:
            store.touch(chain, owner)
            return _missing(store, model, chain)

        return await self._on_disk(work)

    async def disk_find(
        self, model: bytes, chain: list[bytes], tail_parent: bytes, rest: list[int], tails_max: int
    ) -> dict[str, Any]:
        """What is there of a prompt, pinned for a reader.

        Args:
            chain: the ids of blocks that are wanted, in order; only those up to the first that is missing count.
            tail_parent: what a tail follows where `chain` is empty.
            rest: the tokens after the last block, of which a tail may have the beginning.

        Returns:
            `{"blocks": [...], "tails": [[location, tokens], ...], "lease": id}`, locations on the wire.
        """

        def work(store: DiskStore) -> dict[str, Any]:
            blocks: list[Location] = []
            for location in store.locate(model, chain):
                if location is None:
                    break
                blocks.append(location)
            tails = []
            if len(blocks) == len(chain):
                tails = store.tails(model, blocks[-1].id if blocks else tail_parent, rest, tails_max)
            pin = store.pin([*blocks, *(tail.location for tail in tails)], LEASE_S)
            return {
                "blocks": [location.to_wire() for location in blocks],
                "tails": [[tail.location.to_wire(), tail.tokens] for tail in tails],
                "lease": pin.lease,
            }

        return await self._on_disk(work)

    async def disk_read(self, lease: str, chain: list[bytes], owner: str, failures: list[list[Any]]) -> dict[str, Any]:
        """A reader has done: it gives its lease back, and tells which entries it could not read."""

        def work(store: DiskStore) -> None:
            store.unpin(lease)
            if failures:
                store.report(
                    [Failure(Location.from_wire(where), reason, missing) for where, reason, missing in failures]
                )
            store.touch(chain, owner)

        return await self._on_disk(work)

    async def disk_held(self, model: bytes, ids: list[bytes]) -> dict[str, Any]:
        """How many of these blocks are there."""
        return await self._on_disk(lambda store: len(ids) - len(_missing(store, model, ids)))

    async def _on_disk(self, work: Callable[[DiskStore], T]) -> dict[str, Any]:
        store = self._store
        if store is None:
            return {"result": None}
        try:
            return {"result": await asyncio.get_running_loop().run_in_executor(self._disk_threads, work, store)}
        except SatchelError as error:
            return {"error": error.to_wire()}

    async def _compact_now_and_then(self, store: DiskStore) -> None:
        while True:
            await asyncio.sleep(COMPACT_S)
            try:
                await asyncio.get_running_loop().run_in_executor(self._disk_threads, store.compact)
            except SatchelError as error:
                # A full disk, for one; the next round tries again.
                logger.warning("tidying the disk up: %s", error.message)


def _missing(store: DiskStore, model: bytes, chain: list[bytes]) -> list[bytes]:
    return [block for block, location in zip(chain, store.locate(model, chain), strict=True) if location is None]
