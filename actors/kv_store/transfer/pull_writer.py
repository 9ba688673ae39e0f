"""Writes pulled entries to this node's disk, on a thread of its own, while the pull receives more."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

from ....cluster.errors import SatchelError
from ...protocol.entries import Entry, SegmentRecord, unpack_tokens
from ..disk.folder import typed
from ..disk.io import DiskIO
from ..disk.placement import SegmentPlacement
from ..disk.segments import grouped, model_folder, write_segment
from ..disk.store import DiskStore
from .machine.pull_terms import Event, Installed, InstallFailed
from .machine.pull_wire import Received, Wanted

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Commits pulled segments and marks entries as their owner's. A `DiskStore` does so without any check."""

    def commit(self, record: SegmentRecord) -> SegmentPlacement: ...

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None: ...


class PullWriter:
    """Writes segments and commits them, one `install` at a time.

    Args:
        store: this node's.
        session: under which the store keeps uncommitted files.
        wanted: what is pulled.
        owner: of the pulled entries.
        wall_clock: seconds since 1970, for the files.
        tell: receives events for the state machine; called on the writer's thread.
        ended: called on the writer's thread when nothing more will be written.
        io: the disk.
        keeper: commits the segments; None for the store itself.

    Attributes:
        retracted: ids that were replaced or evicted by the commits.
    """

    def __init__(
        self,
        store: DiskStore,
        session: str,
        wanted: Wanted,
        owner: str,
        *,
        wall_clock: Callable[[], float],
        tell: Callable[[Event], None],
        ended: Callable[[], None],
        io: DiskIO | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.retracted: list[bytes] = []
        self._store, self._session, self._wanted, self._owner = store, session, wanted, owner
        self._wall_clock, self._tell, self._ended = wall_clock, tell, ended
        self._io = io or DiskIO()
        self._keeper: Keeper = keeper or store
        self._chain = dict(zip(wanted.chain, (wanted.root, *wanted.chain), strict=False))
        self._queue: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blocks-in", daemon=True)
        self._thread.start()

    def install(self, entries: list[Received]) -> None:
        """Queues entries for writing. `Installed` follows for each committed file, or `InstallFailed` for the rest."""
        self._queue.put(entries)

    def abandon(self) -> None:
        """Stops writing. A file that is being written is only committed if its commit has begun."""
        self._abandoned.set()

    def close(self) -> None:
        """Ends the thread after the queued entries."""
        self._queue.put(None)

    def join(self, wait_s: float) -> bool:
        """Returns whether the thread has ended; waits up to `wait_s` seconds for that."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (entries := self._queue.get()) is not None:
                try:
                    self._install(entries)
                except SatchelError as error:
                    self._tell(InstallFailed(error.message))
                except Exception as error:
                    logger.exception("pulled blocks could not be written")
                    self._tell(InstallFailed(str(error)))
                # Frees the arrays while the thread waits.
                del entries
        finally:
            self._ended()

    def _install(self, received: Sequence[Received]) -> None:
        for _, run in groupby(received, key=lambda entry: sorted(entry.meta.items())):
            same = list(run)
            for entries in grouped(self._entry(entry) for entry in same):
                if self._abandoned.is_set():
                    return
                record = write_segment(
                    self._store.root,
                    self._store.key,
                    self._wanted.model,
                    entries,
                    session=self._session,
                    epoch=self._store.epoch,
                    now_s=self._wall_clock(),
                    meta=same[0].meta,
                    io=self._io,
                )
                if self._abandoned.is_set():
                    self._remove(record)
                    return
                self._commit(record)

    def _commit(self, record: SegmentRecord) -> None:
        ids = tuple(entry.id for entry in record.entries)
        placed = self._keeper.commit(record)
        gone = placed.retracted
        self.retracted.extend(gone)
        if placed.refused:
            self._tell(InstallFailed("its owner was forgotten, or is over its limit"))
        elif not self._chain.keys().isdisjoint(gone):
            # Further blocks would evict more of the chain's own beginning.
            self._tell(InstallFailed("the disk has no room for the whole chain"))
        else:
            self._tell(Installed(ids))

    def _remove(self, record: SegmentRecord) -> None:
        with typed("removing an abandoned segment"):
            self._io.unlink(model_folder(self._store.root, self._wanted.model) / record.name)

    def _entry(self, received: Received) -> Entry:
        described = received.what
        return Entry(
            id=described.id,
            parent=self._chain.get(described.id, self._wanted.tail_parent),
            tokens=unpack_tokens(received.tokens),
            parts=received.parts,
            tail=received.tail,
            owners=(self._owner,),
            window_from=described.window_from,
            snapshot=described.snapshot,
            digests=received.digests,
        )
