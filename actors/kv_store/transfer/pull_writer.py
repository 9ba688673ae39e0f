"""Writes pulled entries to this node's disk, on a thread of its own, while the pull receives more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np

from ....cluster.errors import SatchelError
from ...protocol.entries import Entry, SegmentRecord, unpack_tokens
from ..disk.folder import typed
from ..disk.io import DiskIO
from ..disk.placement import SegmentPlacement
from ..disk.segment_reader import parts_of
from ..disk.segments import model_folder, write_segment
from ..disk.store import DiskStore
from .messages import Described, Layout
from .pull_loop import PullEnded, PullLimits, Stop, Wanted

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Commits pulled segments and marks entries as their owner's. A `DiskStore` does so without any check."""

    def commit(self, record: SegmentRecord) -> SegmentPlacement: ...

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None: ...


@dataclass(frozen=True)
class Received:
    """A received entry with a verified digest. `tokens` is packed; `data` are its bytes, `(nbytes,) uint8`."""

    what: Described
    tail: bool
    tokens: bytes
    layout: Layout
    digests: list[bytes]
    data: np.ndarray


class PullWriter:
    """Writes segments and commits them. The `Disk` of a `PullLoop`.

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
        self._chain = dict(zip(wanted.chain, (wanted.root, *wanted.chain), strict=False))
        self._changed = threading.Condition()
        self._waiting: list[Received] = []
        self._held_bytes = 0  # waiting, or being written
        self._taken = self._written = 0
        self._free: list[np.ndarray] = []
        self._finishing = self._abandoned = False
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="blocks-in", daemon=True)
        self._thread.start()

    # On the pull's thread.

    def buffer(self, nbytes: int) -> np.ndarray:
        """Returns room for an entry, `(nbytes,) uint8`. That of written entries is used again."""
        with self._changed:
            while self._free:
                if len(free := self._free.pop()) == nbytes:
                    return free
        return np.empty(nbytes, np.uint8)

    async def install(self, entry: Received, nbytes: int) -> None:
        """See `pull_loop.Disk`."""
        self._wait(lambda: self._held_bytes + nbytes <= self._limits.window_bytes)
        with self._changed:
            self._waiting.append(entry)
            self._taken += 1
            self._held_bytes += nbytes
            self._changed.notify_all()

    async def finish(self) -> None:
        """See `pull_loop.Disk`."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._wait(lambda: self._written == self._taken)

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
        """Ends the thread. A file that is being written then is only committed if its commit has begun."""
        with self._changed:
            self._abandoned = True
            idle = self._failed or self._written == self._taken
            self._changed.notify_all()
        if idle:
            self._thread.join()

    # On the writer's thread.

    def _run(self) -> None:
        try:
            while entries := self._next():
                self._write(entries)
                # Frees the arrays while the thread waits.
                del entries
        except SatchelError as error:
            self._fail(error.message)
        except Exception as error:
            logger.exception("pulled blocks could not be written")
            self._fail(str(error))
        finally:
            self._ended()

    def _next(self) -> list[Received]:
        """Waits for entries that are worth a file, because small groups make many small files. Returns none at the
        end."""
        limits = self._limits

        def ready() -> bool:
            full = len(self._waiting) >= limits.install_entries_max or 2 * self._held_bytes >= limits.window_bytes
            return self._abandoned or self._finishing or (full and bool(self._waiting))

        with self._changed:
            self._changed.wait_for(ready)
            if self._abandoned:
                return []
            entries = self._waiting[: limits.install_entries_max]
            del self._waiting[: len(entries)]
            return entries

    def _write(self, received: Sequence[Received]) -> None:
        for _, run in groupby(received, key=lambda entry: (entry.layout.parts, sorted(entry.layout.meta.items()))):
            if self._abandoned:
                return
            same = list(run)
            record = write_segment(
                self._store.root,
                self._store.key,
                self._wanted.model,
                [self._entry(entry) for entry in same],
                session=self._session,
                epoch=self._store.epoch,
                now_s=self._wall_clock(),
                meta=same[0].layout.meta,
                io=self._io,
            )
            if self._abandoned:
                with typed("removing an abandoned segment"):
                    self._io.unlink(model_folder(self._store.root, self._wanted.model) / record.name)
                return
            self._commit(record)
            with self._changed:
                self._written += len(same)
                self._free += [entry.data for entry in same]
                self._held_bytes -= sum(len(entry.data) for entry in same)
                self._changed.notify_all()

    def _commit(self, record: SegmentRecord) -> None:
        placed = self._keeper.commit(record)
        self.retracted.extend(placed.retracted)
        if placed.refused:
            self._fail("its owner was forgotten, or is over its limit")
        elif not self._chain.keys().isdisjoint(placed.retracted):
            # Further blocks would evict more of the chain's own beginning.
            self._fail("the disk has no room for the whole chain")
        else:
            self.installed.update(entry.id for entry in record.entries)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failed, self._abandoned = reason, True
            self._changed.notify_all()

    def _entry(self, received: Received) -> Entry:
        described = received.what
        return Entry(
            id=described.id,
            parent=self._chain.get(described.id, self._wanted.tail_parent),
            tokens=unpack_tokens(received.tokens),
            parts=parts_of(received.data, received.layout.parts),
            tail=received.tail,
            owners=(self._owner,),
            window_from=described.window_from,
            snapshot=described.snapshot,
            digests=received.digests,
        )
