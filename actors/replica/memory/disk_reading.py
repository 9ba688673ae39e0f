"""Reads a model's KV back from the files of the disk tier."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path

from ...kv_store.disk.segment_reader import EntryReader, Run
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

Adopt = Callable[[Records], Future[list[PooledBlock]]]
"""Puts blocks into the pool, on the thread that may."""


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
