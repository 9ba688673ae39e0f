"""Writes pulled entries to this node's disk as they come; a thread of its own syncs and commits what is complete."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Protocol

from ....cluster.errors import DiskError, SatchelError
from ...protocol.entries import EntryLayout, EntryRecord, SegmentRecord
from ..disk.changes import SegmentPlacement
from ..disk.segments import SegmentWriter
from ..disk.store import DiskStore
from .priority import give_way
from .pull_loop import Wanted

_SEGMENT_BYTES = 32 * 2**20
"""A segment with this many bytes is complete: it is synced while the next one is received."""

SEGMENTS_AHEAD = 3
"""Complete segments that may wait for being synced and committed."""


class Keeper(Protocol):
    """Commits pulled segments and marks entries as their owner's. A `DiskStore` does so without any check."""

    def commit(self, record: SegmentRecord) -> SegmentPlacement: ...

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None: ...


class PullWriter:
    """Writes segments and commits them. The `Disk` of a `PullLoop`. An entry's bytes follow `begin`.

    Args:
        store: this node's.
        keeper: commits the segments.
        wanted: what is pulled.
        entries_max: of one segment.
        left_s: returns the seconds that are left, or raises `PullEnded`.

    Attributes:
        installed: ids of the committed entries.
        retracted: ids that were replaced or evicted by the commits.

    Raises:
        DiskError: an entry cannot be written, or one before it could not be committed. So does every method.
    """

    def __init__(
        self,
        store: DiskStore,
        keeper: Keeper,
        wanted: Wanted,
        entries_max: int,
        left_s: Callable[[], float],
    ) -> None:
        self.installed: set[bytes] = set()
        self.retracted: list[bytes] = []
        self._store, self._keeper, self._entries_max, self._left_s = store, keeper, entries_max, left_s
        self._model, self._chain = wanted.model, {wanted.root, *wanted.chain}
        self._segment: SegmentWriter | None = None
        self._thread = ThreadPoolExecutor(1, "blocks-in", initializer=give_way)
        self._commits: deque[Future[None]] = deque()
        self._woken: Future[None] = Future()
        self._abandoned = False

    # On the pull's thread.

    def begin(self, layout: EntryLayout) -> None:
        """Begins an entry. Drops the bytes of an earlier entry that was not installed."""
        if self._segment is not None and self._segment.layout.packed == layout.packed:
            self._segment.drop()
            return
        self._hand_over()
        self._segment = self._store.writer(self._model, layout)

    def write(self, piece: memoryview) -> None:
        """Writes the next bytes of the entry."""
        assert self._segment is not None
        self._segment.write(piece)

    async def install(self, entry: EntryRecord) -> None:
        """See `pull_loop.Disk`."""
        assert self._segment is not None
        self._segment.keep(entry)
        count = len(self._segment.records)
        if count >= self._entries_max or count * entry.nbytes >= _SEGMENT_BYTES:
            self._hand_over()
        self._wait(SEGMENTS_AHEAD)

    async def flush(self) -> None:
        """See `pull_loop.Disk`."""
        self._hand_over()

    async def finish(self) -> None:
        """See `pull_loop.Disk`."""
        self._hand_over()
        self._wait(0)

    def _hand_over(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None and segment.records:
            self._commits.append(self._thread.submit(self._commit, segment))
        elif segment is not None:
            segment.abandon()

    def _wait(self, most: int) -> None:
        """Waits until at most `most` segments are uncommitted."""
        while len(self._commits) > most:
            done, _ = wait((self._commits[0], self._woken), self._left_s(), FIRST_COMPLETED)
            if self._commits[0] in done:
                self._commits.popleft().result()

    def wake(self) -> None:
        """Ends all waits: `left_s` raises from now on. Idempotent; safe from any thread."""
        with contextlib.suppress(InvalidStateError):
            self._woken.set_result(None)

    def close(self, ended: Callable[[], None]) -> None:
        """Ends the thread, which calls `ended`. A file that is being synced then is only committed if its commit has
        begun."""
        at_once = self._abandoned or all(commit.done() for commit in self._commits)
        self._abandoned = True
        if self._segment is not None:
            self._segment.abandon()
        told = self._thread.submit(ended)
        self._thread.shutdown(wait=False)
        if at_once:
            told.result()

    # On the thread that commits.

    def _commit(self, segment: SegmentWriter) -> None:
        try:
            with segment:
                if self._abandoned:
                    return
                record = segment.finish()
            if self._abandoned:
                segment.abandon()
                return
            placed = self._keeper.commit(record)
            self.retracted.extend(placed.retracted)
            if placed.refused:
                raise DiskError("its owner was forgotten, or is over its limit")
            if not self._chain.isdisjoint(placed.retracted):
                # Further blocks would evict more of the chain's own beginning.
                raise DiskError("the disk has no room for the whole chain")
            self.installed.update(entry.id for entry in record.entries)
        except BaseException as error:
            # Later blocks without this one would be no prefix of the chain.
            self._abandoned = True
            if isinstance(error, SatchelError):
                raise DiskError(error.message) from None
            raise
