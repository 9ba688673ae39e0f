"""Reads a model's KV back from the files of the disk tier."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from math import inf
from pathlib import Path

from ...kv_store.disk.segment_reader import EntryReader, Run
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import TOKEN_BYTES, Failure, Location
from ..device.device import on_gpu
from ..kv.caches import ModelCacheSpec, PooledBlock, Records, Slab
from .slab_codec import DeviceBuffers, Layout

logger = logging.getLogger(__name__)

ADOPT_S = 10.0
"""How long a reader waits until the pool has taken its blocks, which happens between two steps."""

ADOPTS_AHEAD = 3
"""How many runs of blocks may wait for the pool at the same time: a step may take longer than reading a run."""

GPU_RUN_BYTES_MAX = 32 * 2**20
GPU_THREADS = 4
"""A GPU copies a run with one kernel per layer, so runs are larger. CUDA moves the pages of memory that host and GPU
share, which slows down the threads that write there, so more threads read."""

RATE_WEIGHT = 0.3
"""Weight of a new measurement in the smoothed read rate."""

RATE_LASTS_S = 60.0
"""After so long without a read nobody knows how fast the disk is: what made it slow may be over."""

RATE_GROWTH = 4
"""A read says nothing about one of more than so many times its bytes: opening files, and waiting for the pool, take a
short one's time."""

SLOW, SLOW_S = 1.5, 0.05
"""KV is computed again if reading it would take so many times as long, and so many seconds longer. Computing takes
longer than its rate says if there is much before it."""

Adopt = Callable[[Records], Future[list[PooledBlock]]]
"""Puts blocks into the pool, on the thread that may."""


class ReadRate:
    """How fast a disk gives KV back.

    Attributes:
        bytes_per_s: smoothed; 0 before the first read.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._noted_at = -inf
        self._nbytes_max = 0

    @property
    def lasts(self) -> bool:
        """Whether the last read was not long ago."""
        return time.monotonic() - self._noted_at < RATE_LASTS_S

    def note(self, nbytes: int, seconds: float) -> None:
        """Notes a read, unless it was empty."""
        if nbytes:
            rate = nbytes / max(seconds, 1e-6)
            self.bytes_per_s += (RATE_WEIGHT if self.bytes_per_s else 1.0) * (rate - self.bytes_per_s)
            self._nbytes_max = max(nbytes, self._nbytes_max)
            self._noted_at = time.monotonic()

    def seconds(self, nbytes: int) -> float:
        """Returns how long reading so many bytes takes; 0 if no read of late says that."""
        known = self.lasts and nbytes <= RATE_GROWTH * self._nbytes_max
        return nbytes / self.bytes_per_s if known else 0.0


def is_slow(read_s: float, blocks: int, tokens_per_s: float) -> bool:
    """Whether computing blocks again takes clearly less time than `read_s`, the time to read them.

    Args:
        tokens_per_s: how fast they are computed; 0 if they should not be.
    """
    return tokens_per_s > 0 and read_s > SLOW * blocks * BLOCK_TOKENS / tokens_per_s + SLOW_S


def read_slabs(
    spec: ModelCacheSpec, root: Path, key: bytes, where: Sequence[Location], failures: list[Failure]
) -> list[Slab | None]:
    """Reads entries back. Appends to `failures`.

    Args:
        root: the folder of KV.
        key: the home's key, from `read_key`.
        where: locations of the entries, pinned.

    Returns:
        For every location its slab, or None.

    Raises:
        InvalidRecord: a location is invalid.
        DiskError: nothing can be read now.
    """
    reader, layout_of = EntryReader(root, key, where), cache(partial(Layout, spec))
    slabs: list[Slab | None] = [None] * len(where)
    for run in reader.runs():
        for place, index in enumerate(run.indexes):
            location = where[index]
            try:
                layout = layout_of(run.layout.parts)
                slabs[index] = layout.slab(run.data[place], len(location.tokens) // TOKEN_BYTES, location.window_from)
            except ValueError as error:
                failures.append(Failure(location, str(error), False))
        reader.give_back(run)
    failures += reader.failures.values()
    return slabs


def read_blocks(
    spec: ModelCacheSpec, root: Path, key: bytes, where: Sequence[Location], failures: list[Failure], adopt: Adopt
) -> list[PooledBlock]:
    """Reads consecutive blocks back, up to the first that fails. Each run of them is put into the pool while the next
    ones are read. Appends to `failures`. Arguments and errors as for `read_slabs`.

    Args:
        adopt: puts blocks into the pool, on the thread that may.

    Raises:
        Unavailable: putting blocks into the pool takes longer than `ADOPT_S`.
    """
    buffers = DeviceBuffers() if on_gpu() else None
    if buffers is None:
        reader = EntryReader(root, key, where)
    else:
        reader = EntryReader(
            root, key, where, threads=GPU_THREADS, run_bytes_max=GPU_RUN_BYTES_MAX, make_buffer=buffers.make
        )
    layout_of = cache(partial(Layout, spec))
    blocks: list[PooledBlock] = []
    coming: deque[tuple[Run, Future[list[PooledBlock]]]] = deque()
    read = 0

    def take() -> None:
        run, adopted = coming.popleft()
        blocks.extend(adopted.result(ADOPT_S))
        if buffers is None:
            reader.give_back(run)

    try:
        for run in reader.runs():
            # How many blocks follow the earlier ones without a gap.
            count = sum(index == read + place for place, index in enumerate(run.indexes))
            windows = [where[index].window_from for index in run.indexes[:count]]
            if count:
                records = layout_of(run.layout.parts).records(run.data[:count], windows, len(where) - read, buffers)
                if buffers is not None:
                    reader.give_back(run)
                coming.append((run, adopt(records)))
                read += count
            if count < len(run.indexes):
                break
            if len(coming) > ADOPTS_AHEAD:
                take()
        while coming:
            take()
    except ValueError as error:
        failures.append(Failure(where[len(blocks)], str(error), False))
    except TimeoutError:
        logger.warning("blocks that were read back have waited %g s for the pool", ADOPT_S)
    failures += reader.failures.values()
    return blocks
