"""Caches the KV of sequences in memory, and writes the KV of agents' sequences to disk.

A sequence's whole blocks go to disk while it is still being prefilled: as soon as they fill a few files, or at once if
another node waits for them. The rest goes when the sequence ends, for any reason. The copies for the disk are computed
with the next step and handed to the writer after it, if the disk keeps up: KV that waits longer is not copied before
its turn. The KV is pinned in memory until it is on disk, so that the next turn finds it in one place or the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from ..device.device_errors import on_device
from ..execution.executor import BatchExecutor
from .disk_tier import DiskTier, WriteJob
from .sequence_memory import Restored, Sequence, SequenceMemory, Unsaved, copies_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 2**20
"""A running sequence's blocks are written once this many bytes of it are unsaved."""


@dataclass(frozen=True)
class _SavedOrComing:
    """The ids of entries that are on disk or on their way there."""

    saved: dict[bytes, None]
    coming: set[bytes]

    def __contains__(self, block: object) -> bool:
        return block in self.saved or block in self.coming


class Keeping:
    """Caches sequences' KV. Used on the engine's thread. Cached KV only saves work, so no failure here fails a request.

    Args:
        disk: stores the KV of agents' sequences; None if nothing is written.
        later: runs an action on the engine's thread; may be called from any thread.
        pinned_bytes_max: returns how many bytes may be pinned in memory because the disk does not keep up.

    Attributes:
        added: whether KV of a sequence may have been cached since this was last set to False, in memory or on its way
            to the disk, where its bytes count before they are copied.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        executor: BatchExecutor,
        disk: DiskTier | None,
        later: Callable[[Callable[[], None]], None],
        pinned_bytes_max: Callable[[], float] = lambda: inf,
    ) -> None:
        self._memory = memory
        self._executor = executor
        self._disk = disk
        self._later = later
        self._pinned_bytes_max = pinned_bytes_max
        self.added = False
        self._noted: deque[WriteJob] = deque()
        self._noted_bytes = 0
        # The first one, if its KV is copied already.
        self._copied: WriteJob | None = None
        self._coming: set[bytes] = set()
        self._writers = 0

    @property
    def behind(self) -> bool:
        """Whether too many bytes wait for the disk: no sequence may begin until there are fewer."""
        return bool(self._noted) and self._noted_bytes > self._pinned_bytes_max()

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that are not on disk yet. For any thread."""
        return self._noted_bytes + (0 if self._disk is None else self._disk.waiting_bytes)

    # In the life of a sequence.

    def put_back(self, sequence: Sequence, restored: Restored) -> None:
        """Does `SequenceMemory.put_back`."""
        self._try(self._memory.put_back, sequence, restored)

    def after_chunk(self, sequence: Sequence, computed: int) -> None:
        """Caches and writes the whole blocks of a sequence in prefill, which has KV of `computed` tokens now."""
        if sequence.request.reusable:
            self._try(self._memory.keep_blocks, sequence, computed)
            self._try(self._write_blocks, sequence)

    def at_pause(self, sequence: Sequence, computed: int) -> None:
        """Caches the state at the token where later prompts diverge from this one, as `SequenceMemory.pause` says."""
        self._try(self._memory.keep_prompt_end, sequence, computed)

    def after_prompt(self, sequence: Sequence, computed: int) -> None:
        """Caches the prompt's end once its last chunk is computed: for other choices, or for the agent's next turn."""
        if sequence.request.choices > 1:
            self._try(self._memory.keep_tail, sequence, computed)
        elif sequence.request.agent and sequence.request.reusable and sequence.prompt_end is None:
            self._try(self._memory.keep_prompt_end, sequence, computed)

    def before_step(self, decoding: Iterable[Sequence]) -> None:
        """Caches the prompt's tail of each sequence whose next decode step fills, and so seals, the block in which the
        prompt ends."""
        for sequence in decoding:
            if self._memory.fills_prompt(sequence):
                self._try(self._memory.keep_prompt_tail, sequence)

    def keep(self, sequence: Sequence, *, ended: bool = False, returns: bool = False) -> None:
        """Caches all KV of a sequence that is about to leave, if it has any and it can be reused.

        Args:
            ended: whether its answer is complete, not aborted.
            returns: whether it goes back to the queue.
        """
        if (sequence.request.reusable or returns) and self._executor.holds(sequence.id):
            self._try(self._memory.keep_all, sequence)
            self._try(self._write_all, sequence, ended)

    def _try(self, store: Callable[..., None], sequence: Sequence, *arguments: object) -> None:
        self.added = True
        try:
            store(sequence, *arguments)
        except Exception:
            logger.exception("the KV of request %s could not be kept", sequence.id)

    # On the way to the disk.

    def _write_blocks(self, sequence: Sequence) -> None:
        """Writes the blocks of a running sequence if there are enough of them. If the disk cannot keep up, they stay in
        the sequence."""
        disk = self._disk_of(sequence)
        if disk is None:
            return
        known = _SavedOrComing(disk.saved, self._coming)
        self._memory.drop_snapshots(sequence, known)
        nbytes = self._memory.unsaved_bytes(sequence, known)
        least = 1 if sequence.request.hands_on else PIECE_BYTES
        if nbytes >= least and not self._noted and disk.has_room(nbytes):
            self._offer(disk, sequence, [], self._memory.unsaved_blocks(sequence, known))

    def _write_all(self, sequence: Sequence, ended: bool) -> None:
        """Writes the KV of a sequence that is about to leave and whose KV is cached already; `ended` as for
        `SequenceMemory.unsaved`."""
        disk = self._disk_of(sequence)
        if disk is not None:
            unsaved = self._memory.unsaved(sequence, _SavedOrComing(disk.saved, self._coming), ended=ended)
            self._offer(disk, sequence, self._memory.used(sequence), unsaved)

    def hand_over(self, *, computing: bool) -> None:
        """Copies the KV of write jobs of the steps before for the disk, as long as it has room for them, and hands it
        over. If the disk makes no progress, nobody waits for it: the others are given up.

        Args:
            computing: whether a step is in flight. Then copies are handed over at the next call, when they have been
                computed with it: waiting for them would be waiting for the step.
        """
        disk = self._disk
        while disk is not None and self._noted:
            job = self._noted[0]
            if job is not self._copied:
                if not disk.has_room(job.nbytes):
                    break
                self._copy(job)
                if computing:
                    return
            with on_device():
                disk.write(job)
            # Only now: if the device fails before, the job is withdrawn.
            self._take_first()
        if disk is not None and self._noted and disk.stalled:
            logger.warning("the disk makes no progress: %d bytes of KV are not written", self._noted_bytes)
            while self._noted:
                disk.withdraw()
                self._take_first().done()

    def _copy(self, job: WriteJob) -> None:
        with on_device():
            if self._executor.followers is not None:
                items = [(item.id, item.parent, item.tokens, item.kept.value) for item in job.unsaved]
                self._executor.save(job.owner, job.root, job.scope, job.chain, items, dict(job.limits))
            job.unsaved = copies_of(job.unsaved, self._executor)
        self._copied = job

    def reset(self) -> None:
        """Forgets the write jobs that were not handed over: their KV is gone."""
        self._coming.clear()
        while self._noted:
            assert self._disk is not None
            self._disk.withdraw()
            self._take_first()

    def _take_first(self) -> WriteJob:
        job, self._copied = self._noted.popleft(), None
        self._noted_bytes -= job.nbytes
        return job

    def _disk_of(self, sequence: Sequence) -> DiskTier | None:
        return self._disk if self._memory.is_written(sequence) else None

    def _offer(self, disk: DiskTier, sequence: Sequence, chain: list[bytes], unsaved: list[Unsaved]) -> None:
        self._writers += 1
        writer, blocks = f"written {self._writers}", {item.id for item in unsaved if item.id is not None}

        def done() -> None:
            self._coming -= blocks
            self._memory.release(writer)

        request = sequence.request
        job = WriteJob(
            request.agent,
            chain,
            unsaved,
            root=request.root_id,
            scope=request.scope,
            limits=request.disk_limits,
            adapter=request.adapter,
            done=lambda: self._later(done),
        )
        if disk.accepts(job):
            self._coming |= blocks
            self._memory.hold(writer, sequence, unsaved)
            self._noted.append(job)
            self._noted_bytes += job.nbytes
