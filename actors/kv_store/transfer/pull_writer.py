"""Writes pulled entries to this node's disk as they come; a thread of its own syncs and commits what is complete."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ....cluster.errors import SatchelError
from ...protocol.entries import EntryRecord, SegmentRecord, owner_tag
from ..disk.folder import typed
from ..disk.io import DiskIO
from ..disk.placement import SegmentPlacement
from ..disk.segments import model_folder
from ..disk.store import DiskStore
from ..disk.streaming import SegmentWriter
from .messages import Described, Layout
from .priority import give_way
from .pull_loop import PullEnded, PullLimits, Stop, Wanted

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 32 * 2**20
"""A segment of so many bytes is complete: it is synced while the next one comes."""


class Keeper(Protocol):
    """Commits pulled segments and marks entries as their owner's. A `DiskStore` does so without any check."""

    def commit(self, record: SegmentRecord) -> SegmentPlacement: ...

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None: ...


class PullWriter:
    """Writes segments and commits them. The `Disk` of a `PullLoop`. An entry's bytes follow `begin`.

    Args:
        store: this node's.
        session: under which the store keeps uncommitted files.
        wanted: what is pulled.
        owner: of the pulled entries.
        limits: of the pull.
        left_s: returns the seconds that are left, or raises `PullEnded`.
        wall_clock: seconds since 1970, for the files.
        ended: called on the writer's thread when nothing more will be written.
        io: the disk.
        keeper: commits the segments.

    Attributes:
        installed: ids of the committed entries.
        retracted: ids that were replaced or evicted by the commits.
    """

    def __init__(
        self,
        store: DiskStore,
        session: str,
        wanted: Wanted,
        owner: str,
        limits: PullLimits,
        left_s: Callable[[], float],
        *,
        wall_clock: Callable[[], float],
        ended: Callable[[], None],
        io: DiskIO,
        keeper: Keeper,
    ) -> None:
        self.installed: set[bytes] = set()
        self.retracted: list[bytes] = []
        self._store, self._session, self._wanted, self._owner = store, session, wanted, owner
        self._limits, self._left_s, self._wall_clock, self._ended = limits, left_s, wall_clock, ended
        self._io, self._keeper = io, keeper
        self._parents = dict(zip(wanted.chain, (wanted.root, *wanted.chain), strict=False))
        self._changed = threading.Condition()
        self._layout: Layout | None = None
        self._segment: SegmentWriter | None = None
        self._complete: queue.SimpleQueue[SegmentWriter | None] = queue.SimpleQueue()
        self._open_bytes = 0  # of entries that are not committed
        self._abandoned = self._over = False
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="blocks-in", daemon=True)
        self._thread.start()

    # On the pull's thread. An error of the disk is a `PullEnded`.

    def begin(self, layout: Layout, tokens_bytes: int) -> None:
        """An entry comes. What came of one before that was not installed is forgotten."""
        segment, limits = self._segment, self._limits
        try:
            if segment is not None and layout is self._layout and segment.has_room(tokens_bytes):
                segment.drop()
                return
            self._hand_over()
            self._layout = layout
            self._segment = SegmentWriter(
                self._store.root,
                self._store.key,
                self._wanted.model,
                layout.parts,
                tokens_bytes=tokens_bytes * limits.install_entries_max,
                session=self._session,
                epoch=self._store.epoch,
                now_s=self._wall_clock(),
                meta=layout.meta,
                io=self._io,
            )
        except SatchelError as error:
            raise PullEnded(Stop.DISK, error.message) from None

    def write(self, piece: memoryview) -> None:
        """The next bytes of the entry."""
        assert self._segment is not None
        try:
            self._segment.write(piece)
        except SatchelError as error:
            raise PullEnded(Stop.DISK, error.message) from None

    def record(self, what: Described, tail: bool, tokens: bytes) -> EntryRecord:
        """Returns what the index will have of an entry. `tokens` is packed."""
        parent = self._parents.get(what.id, self._wanted.tail_parent)
        owners = (owner_tag(self._store.key, self._owner),)
        facts = what.digest, what.window_from, what.snapshot, what.nbytes
        return EntryRecord(what.id, parent, tail, tokens, *facts, owners)

    async def install(self, entry: EntryRecord, nbytes: int) -> None:
        """See `pull_loop.Disk`."""
        assert self._segment is not None
        try:
            self._segment.keep(entry)
        except SatchelError as error:
            raise PullEnded(Stop.DISK, error.message) from None
        with self._changed:
            self._open_bytes += nbytes
        count = len(self._segment.records)
        full = count >= self._limits.install_entries_max or count * nbytes >= _SEGMENT_BYTES
        if full or 2 * self._open_bytes >= self._limits.window_bytes:
            self._hand_over()
        self._wait(lambda: self._open_bytes <= self._limits.window_bytes)

    async def flush(self) -> None:
        """See `pull_loop.Disk`."""
        self._hand_over()

    async def finish(self) -> None:
        """See `pull_loop.Disk`."""
        self._hand_over()
        self._complete.put(None)
        self._wait(lambda: self._over)

    def _hand_over(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None and segment.records:
            self._complete.put(segment)
        elif segment is not None:
            segment.abandon()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not self._failed and not done():
                self._changed.wait(self._left_s())
        if self._failed:
            raise PullEnded(Stop.DISK, self._failed)

    def wake(self) -> None:
        """Has waits look at `left_s` again. Safe from any thread."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread. A file that is being synced then is only committed if its commit has begun."""
        self._abandoned = True
        if self._segment is not None:
            self._segment.abandon()
        self._complete.put(None)
        if self._failed or self._over:
            self._thread.join()
            # What it was given too late.
            self._clear()

    # On the writer's thread.

    def _run(self) -> None:
        give_way()
        try:
            while (segment := self._complete.get()) is not None:
                self._commit(segment)
        except SatchelError as error:
            self._fail(error.message)
        except Exception as error:
            logger.exception("pulled blocks could not be written")
            self._fail(str(error))
        finally:
            self._clear()
            self._ended()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (left := self._complete.get_nowait()) is not None:
                    left.abandon()

    def _commit(self, segment: SegmentWriter) -> None:
        if self._abandoned:
            segment.abandon()
            return
        record = segment.finish()
        if self._abandoned:
            with typed("removing an abandoned segment"):
                self._io.unlink(model_folder(self._store.root, self._wanted.model) / record.name)
            return
        placed = self._keeper.commit(record)
        self.retracted.extend(placed.retracted)
        if placed.refused:
            self._fail("its owner was forgotten, or is over its limit")
        elif not self._parents.keys().isdisjoint(placed.retracted):
            # Further blocks would evict more of the chain's own beginning.
            self._fail("the disk has no room for the whole chain")
        else:
            self.installed.update(entry.id for entry in record.entries)
        with self._changed:
            self._open_bytes -= sum(entry.nbytes for entry in record.entries)
            self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        self._failed, self._abandoned = reason, True
        self.wake()
