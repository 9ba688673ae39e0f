"""The node's KV on disk: opens it as soon as possible, keeps it tidy, and answers replicas. Replicas read and write the
files themselves."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ....cluster.config.timing import Timing
from ....cluster.errors import SatchelError
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import TOKEN_BYTES, Failure, Location, SegmentRecord, unpack_tokens
from ...protocol.store_messages import DiskSession, FoundKV, FoundTail, Limits
from ..agents.claims import Branch, Claims
from ..disk.quotas import Quotas, tenant_of
from ..disk.store import DiskLimits, DiskStore
from .ownership import Ask, Elsewhere, Ownership

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_WAIT_S = 10.0
"""How long to wait for a dying predecessor to release the KV folder."""

OPEN_RETRY_S, OPEN_RETRY_S_MAX = 0.5, 15.0
"""How soon a disk tier that could not be opened is tried again: the pause grows each time, up to the second value."""

COMPACT_S = 20.0
SPACE_S = 2.0
"""How often the device's free space is checked, which other programs fill too."""

COPIED_MAX = 10_000
"""How many forks of agents may wait for a disk tier."""


class NodeDisk:
    """For one event loop.

    Args:
        folder: of the KV; None for a node that keeps none.
        limits: of that folder.
        ask: calls its argument in the thread that owns `Agents`.
        quotas: the tenants' limits.

    Attributes:
        session: of this process, for writers.
        store: None as long as it cannot be opened; transcripts are kept nevertheless.
        owned: the owners of its entries; None without a store.
        error: why there is no store, "" if there is one.
        on_opened: called if the store was opened later.
        elsewhere: as of `Ownership`.
        on_touched: called with an agent's key when its KV has changed.
    """

    def __init__(self, folder: Path | None, limits: DiskLimits, ask: Ask, quotas: Quotas, timing: Timing) -> None:
        self._timing = timing
        self.session = f"s{uuid.uuid4().hex}"
        self.store: DiskStore | None = None
        self.owned: Ownership | None = None
        self.error = ""
        self.on_opened: Callable[[], object] = lambda: None
        self.on_touched: Callable[[str], object] = lambda agent: None
        self.elsewhere: Elsewhere | None = None
        self.threads = ThreadPoolExecutor(2, "disk")
        self._folder, self._limits, self._ask, self._quotas = folder, limits, ask, quotas
        self._tending: asyncio.Task[None] | None = None
        # Agents that were forked while no KV was kept on disk.
        self._copied: dict[tuple[str, str], None] = {}
        if (found := self._open(LOCK_WAIT_S)) is not None:
            self.take(found)

    def ask_elsewhere(self, elsewhere: Elsewhere) -> None:
        """Lets other nodes say what forgotten agents that live again may own here."""
        self.elsewhere = elsewhere
        if self.owned is not None:
            self.owned.elsewhere = elsewhere

    def take(self, store: DiskStore) -> None:
        """Uses the store from now on."""
        self.store, self.owned = store, Ownership(store, self._ask, self._timing.claim_wait_s)
        self.owned.elsewhere = self.elsewhere

    def _open(self, lock_wait_s: float) -> DiskStore | None:
        folder = self._folder
        if folder is None:
            return None
        try:
            store = DiskStore(folder, session=self.session, limits=self._limits, lock_wait_s=lock_wait_s)
        except SatchelError as error:
            if error.message != self.error:
                logger.error("no KV is kept on disk: %s", error.message)
            self.error = error.message
            return None
        self.error = ""
        try:
            # Before the database of transcripts is opened, which may need the room.
            store.keep_reserve()
        except SatchelError as error:
            logger.warning("KV gives nothing of the disk back: %s", error.message)
        # KV from before it shared its key with agents' memory; it is unreadable now.
        shutil.rmtree(folder / "blocks", ignore_errors=True)
        return store

    # Maintenance.

    async def ready(self) -> None:
        """Reads which agents were forgotten. Cheap after the first call."""
        self.tend()
        if self.owned is not None:
            await self.owned.ready()

    def tend(self) -> None:
        """Starts the store's maintenance, which also opens it if it is not open. Cheap after the first call."""
        if self._tending is None and (self._folder is not None or self.store is not None):
            self._tending = asyncio.create_task(self._open_and_tend())

    async def _open_and_tend(self) -> None:
        wait_s = OPEN_RETRY_S
        while self.store is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, OPEN_RETRY_S_MAX)
            found = await asyncio.to_thread(self._open, 0.0)
            if found is not None:
                logger.warning("KV is kept on disk from now on")
                self.take(found)
                self.on_opened()
        assert self.owned is not None
        copied, self._copied = self._copied, {}
        with suppress(SatchelError):
            # At once: KV of agents that were forgotten meanwhile is erased, except what forks own.
            await asyncio.gather(self.owned.ready(), *(self.owned.copied(*pair) for pair in copied))
        await self._keep_tidy(self.store, self.owned)

    async def _keep_tidy(self, store: DiskStore, owned: Ownership) -> None:
        """Keeps the store tidy and within the device's free space, as long as this task lives."""
        loop = asyncio.get_running_loop()
        compacted_at = loop.time()
        while True:
            await asyncio.sleep(SPACE_S)
            try:
                await self.in_thread(store.keep_reserve)
                if loop.time() - compacted_at >= COMPACT_S:
                    compacted_at = loop.time()
                    await self.in_thread(store.compact)
                    owned.again()
            except SatchelError as error:
                # For example a full disk; the next round tries again.
                logger.warning("tidying the disk up: %s", error.message)

    def make_room(self) -> None:
        """Evicts KV to make room for transcripts on a full disk. Not for the event loop."""
        if self.store is not None:
            try:
                self.store.make_room()
            except SatchelError as error:
                logger.warning("KV makes no room: %s", error.message)

    async def make_room_for(self, agent: str) -> None:
        """Limits the KV of the agent's tenant to the room that its transcripts leave. Does nothing for a tenant that
        never had a limit."""
        tenant = tenant_of(agent)
        if self.store is None or not self._quotas.knows(tenant):
            return
        try:
            await self.in_thread(self.store.limit, tenant, self._quotas.kv_bytes_max(tenant))
        except SatchelError as error:
            logger.warning("KV of %s stays beyond its limit for now: %s", tenant, error.message)

    async def limit(self, limits: Limits | None) -> None:
        """Applies these limits before more KV comes."""
        self._quotas.note(limits)
        for tenant in limits or ():
            await self.make_room_for(f"{tenant}/")

    # Changes of agents.

    def committed(self, agent: str) -> None:
        """Wakes KV that waits for the agent's branch: a turn has been committed."""
        if self.owned is not None:
            self.owned.committed(agent)

    def forgotten(self, agent: str) -> None:
        """Begins to erase the agent's KV: its tombstone has been written."""
        if self.owned is not None:
            self.owned.forgotten(agent)

    async def copied(self, source: str, target: str) -> None:
        """Makes `target`, a fork of `source`, an owner of the KV of `source`."""
        if self.owned is None:
            if len(self._copied) < COPIED_MAX:
                self._copied[source, target] = None
            return
        try:
            await self.owned.copied(source, target)
        except SatchelError as error:
            logger.warning("agent %s computes anew what %s has on disk: %s", target, source, error.message)

    # For replicas of the node; None if there is no store.

    def describe(self) -> DiskSession | None:
        """Returns what a writer or reader must know."""
        self.tend()
        store = self.store
        return None if store is None else DiskSession(str(store.root), self.session, store.epoch)

    async def commit(self, segment: SegmentRecord, limits: Limits | None = None) -> list[bytes] | None:
        """Commits a written segment; as `StoreClient.disk_commit`."""
        await self.limit(limits)

        async def work(store: DiskStore, owned: Ownership) -> list[bytes]:
            without = await owned.unclaimed(segment.entries, segment.model)
            heirs = await owned.inherited(segment.entries, segment.model)
            placed = await self.in_thread(store.commit, segment, without, heirs)
            gone = set(placed.retracted)
            return [entry for entry in (*placed.kept, *placed.dropped) if entry not in gone]

        return await self._fenced(work)

    async def touch(self, model: bytes, chain: Sequence[bytes], owner: str) -> list[bytes] | None:
        """Records the use of a chain. Returns those of its ids that are absent."""

        async def work(store: DiskStore, owned: Ownership) -> list[bytes]:
            await self._touch(store, owned, chain, owner, wait=True)
            return await self.in_thread(_missing, store, model, chain)

        missing = await self._fenced(work)
        if owner:
            heirs = self.owned.heirs_of(owner) if self.owned is not None else []
            for agent in (owner, *heirs):
                self.on_touched(agent)
        return missing

    async def find(
        self, model: bytes, chain: Sequence[bytes], parent: bytes, tokens: bytes, tails_max: int
    ) -> FoundKV | None:
        """Returns the KV of a prompt that is there, pinned for a reader; as `StoreClient.disk_find`."""

        def work(store: DiskStore) -> FoundKV:
            blocks: list[Location] = []
            for location in store.locate(model, chain):
                if location is None:
                    break
                blocks.append(location)
            start = len(blocks) * BLOCK_TOKENS * TOKEN_BYTES
            rest = unpack_tokens(tokens[start : start + BLOCK_TOKENS * TOKEN_BYTES])
            tails = store.tails(model, blocks[-1].id if blocks else parent, rest, tails_max)
            lease = store.pin([*blocks, *(tail.location for tail in tails)], self._timing.block_lease_s)
            return FoundKV(blocks, [FoundTail(tail.location, tail.tokens) for tail in tails], lease)

        return None if self.store is None else await self.in_thread(work, self.store)

    async def models(self, agent: str) -> list[bytes]:
        """As `StoreClient.kv_models`."""
        return [] if self.store is None else await self.in_thread(self.store.models, agent)

    async def read(self, lease: str, chain: Sequence[bytes], owner: str, failures: Sequence[Failure] = ()) -> None:
        """Ends a reader's lease; as `StoreClient.disk_read`."""

        def give_back(store: DiskStore) -> None:
            store.unpin(lease)
            if failures:
                store.report(failures)

        async def work(store: DiskStore, owned: Ownership) -> None:
            await self.in_thread(give_back, store)
            # The reading turn has only begun, so no branch that claims more is about to come.
            await self._touch(store, owned, chain, owner, wait=False)

        await self._fenced(work)

    async def _touch(
        self, store: DiskStore, owned: Ownership, chain: Sequence[bytes], owner: str, *, wait: bool
    ) -> None:
        """Records the use of a chain. The user becomes an owner of the entries that it may own."""
        theirs = await owned.ownable(chain, owner, wait=wait)
        if len(theirs) < len(chain):
            await self.in_thread(store.touch, chain, "")
        await self.in_thread(store.touch, theirs, owner)

    async def _fenced(self, work: Callable[[DiskStore, Ownership], Coroutine[Any, Any, T]]) -> T | None:
        """Runs work that may give an owner something. Returns None if there is no store."""
        if self.store is None or self.owned is None:
            return None
        return await self.owned.fenced(work(self.store, self.owned))

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work` in a thread for work that waits for the disk, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)


def kept_on(store: DiskStore, branches: Iterable[Branch]) -> int:
    """Returns how many entries of these branches, blocks and tails, `store` has."""
    found: set[bytes] = set()
    for branch in branches:
        claims = Claims([branch])
        found.update(where.id for where in store.locate(branch.model, [*claims.blocks]) if where is not None)
        for parent, packed in claims.rests():
            rest = unpack_tokens(packed)
            for tail in store.tails(branch.model, parent, rest):
                # Another agent's tail that only begins with the same tokens is not this agent's.
                if tail.tokens == min(len(tail.location.tokens) // 4, len(rest)):
                    found.add(tail.location.id)
    return len(found)


def _missing(store: DiskStore, model: bytes, chain: Sequence[bytes]) -> list[bytes]:
    return [block for block, location in zip(chain, store.locate(model, chain), strict=True) if location is None]
