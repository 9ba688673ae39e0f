"""The store actor's methods for the disk tier, called by replicas of its node. Their bytes go past it, by files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...cluster.errors import SatchelError
from ...cluster.timing import Timing
from ..protocol.block_ids import BLOCK_TOKENS
from ..protocol.entries import TOKEN_BYTES, Location, SegmentRecord, unpack_tokens
from .agents.claims import Branch, Claims
from .disk.quotas import Limits
from .disk.segment_reader import Failure
from .disk.store import DiskStore
from .ownership import Ownership

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPACT_S = 20.0
SPACE_S = 2.0
"""How often it is looked what is free of the device, which others fill too."""


class DiskCalls:
    """A part of `KVStoreActor`; every answer is `{"result": ...}` or `{"error": ...}`."""

    _timing: Timing
    _store: DiskStore | None = None
    _disk_threads: ThreadPoolExecutor | None = None

    def open_disk(self, store: DiskStore | None, session: str, owners: Ownership | None = None) -> None:
        """Answer for `store`, which was opened for `session`; None for a node that keeps no KV on disk.

        Args:
            owners: who may have KV in it; None where nobody is ever forgotten.
        """
        self._store = store
        self._owners = owners
        self._session = session
        if self._disk_threads is None:
            self._disk_threads = ThreadPoolExecutor(2, "disk")

    async def disk_session(self) -> dict[str, Any]:
        """What a writer or reader must know: `root`, `session` and `epoch`; None where there is no disk tier."""
        store = self._store
        if store is None:
            return {"result": None}
        return {"result": {"root": str(store.root), "session": self._session, "epoch": store.epoch}}

    async def disk_commit(self, record: dict[str, Any], limits: Limits | None = None) -> dict[str, Any]:
        """Make a written segment count; its chain is to be touched afterwards. Returns its ids that are there now.

        What belongs to nobody but to agents that were forgotten since it was computed is not among them.

        Args:
            limits: of the tenant whose KV it is.
        """
        await self._limit_kv(limits)

        async def work(store: DiskStore, owners: Ownership | None) -> list[bytes]:
            segment = await self._in_thread(SegmentRecord.from_wire, record)
            without = await owners.unclaimed(segment.entries) if owners is not None else {}
            heirs = await owners.inherited(segment.entries) if owners is not None else {}
            placed = await self._in_thread(store.commit, segment, without, heirs)
            gone = set(placed.retracted)
            return [entry for entry in (*placed.kept, *placed.dropped) if entry not in gone]

        return await self._fenced(work)

    async def disk_touch(self, model: bytes, chain: list[bytes], owner: str) -> dict[str, Any]:
        """Note that a chain was used. Returns the ids of it that are not there."""

        async def work(store: DiskStore, owners: Ownership | None) -> list[bytes]:
            await self._touch(store, owners, chain, owner, wait=True)
            return await self._in_thread(_missing, store, model, chain)

        return await self._fenced(work)

    async def disk_find(
        self, model: bytes, chain: list[bytes], parent: bytes, tokens: bytes, tails_max: int
    ) -> dict[str, Any]:
        """What is there of a prompt, pinned for a reader.

        Args:
            chain: the ids of blocks that are wanted, in order; only those up to the first that is missing count. After
                these, tails are looked for.
            parent: what comes before `chain`.
            tokens: all that follow `parent` (`pack_tokens`).

        Returns:
            `{"blocks": [...], "tails": [[location, tokens], ...], "lease": id}`, locations on the wire.
        """

        def work(store: DiskStore) -> dict[str, Any]:
            blocks: list[Location] = []
            for location in store.locate(model, chain):
                if location is None:
                    break
                blocks.append(location)
            start = len(blocks) * BLOCK_TOKENS * TOKEN_BYTES
            rest = unpack_tokens(tokens[start : start + BLOCK_TOKENS * TOKEN_BYTES])
            tails = store.tails(model, blocks[-1].id if blocks else parent, rest, tails_max)
            pin = store.pin([*blocks, *(tail.location for tail in tails)], self._timing.block_lease_s)
            return {
                "blocks": [location.to_wire() for location in blocks],
                "tails": [[tail.location.to_wire(), tail.tokens] for tail in tails],
                "lease": pin.lease,
            }

        return await self._on_disk(work)

    async def disk_read(self, lease: str, chain: list[bytes], owner: str, failures: list[list[Any]]) -> dict[str, Any]:
        """A reader has done: it gives its lease back, and tells which entries it could not read."""

        def give_back(store: DiskStore) -> None:
            store.unpin(lease)
            if failures:
                store.report(
                    [Failure(Location.from_wire(where), reason, missing) for where, reason, missing in failures]
                )

        async def work(store: DiskStore, owners: Ownership | None) -> None:
            await self._in_thread(give_back, store)
            # The turn that reads has only begun, so nothing is about to say more of its owner.
            await self._touch(store, owners, chain, owner, wait=False)

        return await self._fenced(work)

    async def _limit_kv(self, limits: Limits | None) -> None:
        """These limits count before more KV comes."""

    async def _touch(
        self, store: DiskStore, owners: Ownership | None, chain: list[bytes], owner: str, *, wait: bool
    ) -> None:
        """Note the use of a chain, of which its user owns what he may."""
        theirs = chain if owners is None else await owners.ownable(chain, owner, wait=wait)
        if len(theirs) < len(chain):
            await self._in_thread(store.touch, chain, "")
        await self._in_thread(store.touch, theirs, owner)

    async def _fenced(self, work: Callable[[DiskStore, Ownership | None], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Do what may let an owner have something; None where there is no disk tier."""
        store, owners = self._store, self._owners
        if store is None:
            return {"result": None}
        try:
            done = work(store, owners)
            return {"result": await (done if owners is None else owners.fenced(done))}
        except SatchelError as error:
            return {"error": error.to_wire()}

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk_threads, work, *arguments)

    async def _on_disk(self, work: Callable[[DiskStore], T]) -> dict[str, Any]:
        store = self._store
        if store is None:
            return {"result": None}
        try:
            return {"result": await self._in_thread(work, store)}
        except SatchelError as error:
            return {"error": error.to_wire()}

    async def tend_disk(self, store: DiskStore) -> None:
        """Keep `store` tidy and within what the device has left, as long as this task lives."""
        loop = asyncio.get_running_loop()
        compacted_at = loop.time()
        while True:
            await asyncio.sleep(SPACE_S)
            try:
                await self._in_thread(store.keep_reserve)
                if loop.time() - compacted_at >= COMPACT_S:
                    compacted_at = loop.time()
                    await self._in_thread(store.compact)
                    if self._owners is not None:
                        self._owners.again()
            except SatchelError as error:
                # A full disk, for one; the next round tries again.
                logger.warning("tidying the disk up: %s", error.message)


def kept_on(store: DiskStore, branches: Iterable[Branch]) -> int:
    """How many entries, blocks and tails, `store` has of these branches."""
    found: set[bytes] = set()
    for branch in branches:
        claims = Claims([branch])
        found.update(where.id for where in store.locate(branch.model, [*claims.blocks]) if where is not None)
        for parent, packed in claims.rests():
            rest = unpack_tokens(packed)
            for tail in store.tails(branch.model, parent, rest):
                # Of another's tail that only begins alike, nothing here is this agent's.
                if tail.tokens == min(len(tail.location.tokens) // 4, len(rest)):
                    found.add(tail.location.id)
    return len(found)


def _missing(store: DiskStore, model: bytes, chain: list[bytes]) -> list[bytes]:
    return [block for block, location in zip(chain, store.locate(model, chain), strict=True) if location is None]
