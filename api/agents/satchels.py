"""Satchels at the endpoint: files that lie on its machine while they are uploaded or downloaded."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...actors.protocol.store_messages import Limits
from ...cluster.errors import AgentExists, AgentNotFound, DiskError, DiskFull, Unavailable
from .memory import AgentMemory
from .satchel_files import PIECE_BYTES
from .store import Store

_ROOM_BYTES = 64 * 2**20
"""While a satchel of unknown length arrives, disk space is reserved in steps of this size."""


class PackedFile(NamedTuple):
    """An open file that has no name any more, so the system deletes it when it is closed. `nbytes` is its length."""

    file: BinaryIO
    nbytes: int

    def read(self) -> Iterator[bytes]:
        """Yields the file's content and closes it. Blocks."""
        with self.file:
            yield from iter(lambda: self.file.read(PIECE_BYTES), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the file's content and closes it."""
        try:
            while piece := await asyncio.to_thread(self.file.read, PIECE_BYTES):
                yield piece
        finally:
            self.file.close()


async def packed(memory: AgentMemory, key: str) -> PackedFile:
    """Packs an agent. A caller that is cancelled meanwhile leaves no file behind.

    Raises:
        AgentNotFound: the agent is unknown.
        DiskFull, RequestTooLarge, Unavailable: it cannot be packed now, or not on this machine.
    """

    async def pack() -> PackedFile:
        done = await memory.store.pack(key)
        return await asyncio.to_thread(_opened, Path(done.path), done.nbytes)

    task = memory.background(pack())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close)
        raise


def _opened(path: Path, nbytes: int) -> PackedFile:
    _check_here(path)
    file = path.open("rb", buffering=0)
    path.unlink()
    return PackedFile(file, nbytes)


def _check_here(path: Path) -> None:
    """Checks that this process runs on the endpoint's machine, where satchels lie: a Python handle may run on
    another."""
    if not path.parent.is_dir():
        raise Unavailable("agents are packed and unpacked on the machine of the endpoint", retry_after_s=None)


def _close(task: asyncio.Task[PackedFile]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().file.close()


Save = Callable[[Callable[[bytes], Awaitable[object]]], Awaitable[object]]
"""Passes the uploaded bytes, piece by piece, to its argument."""


async def unpacked(
    memory: AgentMemory,
    key: str,
    save: Save,
    nbytes: int,
    *,
    replace: bool,
    trusted: bool,
    limits: Limits,
) -> dict[str, Any]:
    """Unpacks an agent from a satchel that is being uploaded.

    Args:
        save: reads the upload.
        nbytes: the announced length, 0 if unknown.
        replace: whether an existing agent of that name is replaced.
        trusted: whether KV from another cluster's satchel is accepted.
        limits: the tenant's.

    Raises:
        InvalidSatchel: it is not a satchel, or it is incomplete.
        AgentExists: there is such an agent.
        DiskFull, RequestTooLarge, QuotaExceeded, MemoryFull, Unavailable: it cannot be unpacked now, or not on this
            machine.
    """
    if not replace:
        await _check_new(memory.store, key)
    path = Path(await memory.store.room(key, nbytes, limits))
    try:
        await _received(memory.store, key, path, save, nbytes, limits)
        came = await memory.store.unpack(key, str(path), replace=replace, trusted=trusted, limits=limits)
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    memory.lines.forget(key)
    kv = {"entries": came.entries, "of": came.entries_of, "bytes": came.nbytes, "why_not": came.why_not or None}
    identity = {"id": key.partition("/")[2], "object": "agent.satchel", "branches": came.branches}
    return {**identity, "replaced": came.replaced, "kv": kv}


async def _check_new(store: Store, key: str) -> None:
    """Raises `AgentExists` before a large file is uploaded for nothing."""
    with suppress(AgentNotFound):
        await store.info(key)
        raise AgentExists(f"there is an agent {key.partition('/')[2]!r} already", param="replace")


async def _received(store: Store, key: str, path: Path, save: Save, nbytes: int, limits: Limits) -> None:
    _check_here(path)
    room, count = nbytes, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=PIECE_BYTES) as file:

        async def take(piece: bytes) -> None:
            nonlocal room, count
            count += len(piece)
            if count > room:
                room = count + _ROOM_BYTES
                await store.room(key, count, limits)
            await asyncio.to_thread(file.write, piece)

        try:
            await save(take)
            await asyncio.to_thread(file.flush)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (DiskFull if full else DiskError)(f"the satchel cannot be kept: {error.strerror or error}") from None
