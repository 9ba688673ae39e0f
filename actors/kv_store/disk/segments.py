"""Segment files: written once, by replicas or the store, and never changed.

The KV folder::

    kv/key                                the secret of all MACs, for agents' memory too
    kv/segments/<model>/<session>.<random>.kv     finished
    kv/segments/<model>/<session>.<random>.tmp    being written

A file gets its final name only after all of it is durable.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ....cluster.errors import DiskError, InvalidRecord
from ...protocol.entries import (
    DIGEST_BYTES,
    ENTRIES_MAX,
    ID_BYTES,
    KEY_BYTES,
    Entry,
    EntryDigest,
    EntryRecord,
    Part,
    SegmentRecord,
    checked_meta,
    flat_bytes,
    owner_tag,
    pack_tokens,
    signature,
)
from .folder import typed
from .io import DiskIO
from .segment_header import build

FINISHED = ".kv"
UNFINISHED = ".tmp"
EARLIER = ".safetensors"
"""Segments of the layout before, which nobody reads any more."""

STORE_SESSION = "store"
"""The session of files that the store itself writes. Replicas use other names."""

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.[0-9a-f]{32}(\.kv|\.tmp|\.safetensors)")


def checked_session(session: str) -> str:
    """Returns `session`. Raises `InvalidRecord` if it cannot begin a file's name."""
    if not _SESSION.fullmatch(session):
        raise InvalidRecord(f"a session is up to 64 letters, digits, - and _, not {session!r:.80}")
    return session


def session_of(name: str) -> str | None:
    """Returns the session in a segment's file name, None if `name` is none of a segment."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def model_folder(root: Path, model: bytes) -> Path:
    """Returns the folder of a model's segments. Raises `InvalidRecord` if `model` is no model id."""
    if not isinstance(model, bytes) or len(model) != ID_BYTES:
        raise InvalidRecord("a model id has 32 bytes")
    return root / "segments" / model.hex()


class SegmentFile(NamedTuple):
    """A file with the name of a segment. `used` orders files by their last use."""

    path: Path
    model: bytes
    nbytes: int
    used: int


def segment_files(root: Path) -> Iterator[SegmentFile]:
    """Yields every finished or unfinished segment file; other files are left alone."""
    with os.scandir(root / "segments") as folders:
        names = sorted(folder.name for folder in folders if folder.is_dir(follow_symlinks=False))
    for name in names:
        try:
            model = bytes.fromhex(name)
        except ValueError:
            continue
        if len(model) != ID_BYTES or model.hex() != name:
            continue
        with os.scandir(root / "segments" / name) as files:
            for file in sorted(files, key=lambda file: file.name):
                if session_of(file.name) is not None and not file.is_dir(follow_symlinks=False):
                    # Writers may rename the file, and other threads unlink it.
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield SegmentFile(Path(file.path), model, status.st_size, status.st_mtime_ns)


def read_key(root: Path, io: DiskIO | None = None) -> bytes:
    """Returns the home folder's secret (32 bytes) in `root/key`, which the first caller creates. KV and agents' memory
    share it.

    Raises:
        DiskError: it cannot be read or created, or has not 32 bytes. Nothing verifies then, and an operator must remove
            the file.
    """
    io = io or DiskIO()
    path = root / "key"
    with typed(f"the key {path}"):
        if not path.exists():
            _make_key(path, io)
        secret = path.read_bytes()
        path.chmod(0o600)
    if len(secret) != KEY_BYTES:
        raise DiskError(f"{path} has {len(secret)} bytes instead of {KEY_BYTES}; without it no memory can be verified")
    return secret


def _make_key(path: Path, io: DiskIO) -> None:
    unfinished = path.with_name(f".key.{secrets.token_hex(8)}{UNFINISHED}")
    descriptor = io.create(unfinished)
    try:
        try:
            io.write(descriptor, unfinished, [secrets.token_bytes(KEY_BYTES)])
            io.sync(descriptor, unfinished)
        finally:
            os.close(descriptor)
        # The link fails if another process was first, so all agree on one key. It may also have removed our file.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            io.link(unfinished, path)
        io.sync_folder(path.parent)
    finally:
        io.unlink(unfinished)


def grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yields runs of entries that fit one segment each: at most 16 neighbours with equal signatures. Takes only one
    entry of the next run before it yields a run."""
    group: list[Entry] = []
    last: tuple[Part, ...] | None = None
    for entry in entries:
        parts = signature(entry.parts)
        if group and (parts != last or len(group) == ENTRIES_MAX):
            yield group
            group = []
        group.append(entry)
        last = parts
    if group:
        yield group


def write_segment(
    root: Path,
    key: bytes,
    model: bytes,
    entries: Sequence[Entry],
    *,
    session: str,
    epoch: int,
    now_s: float,
    meta: Mapping[str, str] | None = None,
    io: DiskIO | None = None,
) -> SegmentRecord:
    """Writes `entries` as one durable file. It does not count until the store commits the record.

    Args:
        root: the KV folder, which exists.
        key: `read_key`.
        model: the model id, 32 bytes.
        entries: 1 to 16 with equal signatures.
        session: of the writer; the store keeps uncommitted files of its current session.
        epoch: `DiskStore.epoch`.
        now_s: seconds since 1970.
        meta: what readers need to interpret the parts.

    Returns:
        The record for the store's `commit`.

    Raises:
        InvalidRecord: the entries cannot be stored together.
        DiskFull, DiskError: nothing is left behind.
    """
    tags = [tuple(dict.fromkeys(owner_tag(key, owner) for owner in entry.owners)) for entry in entries]
    return write_tagged(
        root, key, model, entries, tags, session=session, epoch=epoch, now_s=now_s, meta=meta or {}, io=io or DiskIO()
    )


def write_tagged(
    root: Path,
    key: bytes,
    model: bytes,
    entries: Sequence[Entry],
    tags: Sequence[tuple[bytes, ...]],
    *,
    session: str,
    epoch: int,
    now_s: float,
    meta: Mapping[str, str],
    io: DiskIO,
) -> SegmentRecord:
    """Writes a segment like `write_segment`, with owner tags instead of owners: `tags[slot]`. Raises as that does."""
    if not 1 <= len(entries) <= ENTRIES_MAX or len({entry.id for entry in entries}) != len(entries):
        raise InvalidRecord(f"a segment has 1 to {ENTRIES_MAX} different entries")
    parts = signature(entries[0].parts)
    if any(signature(entry.parts) != parts for entry in entries):
        raise InvalidRecord("the entries of a segment have equal names, dtypes and shapes")
    folder = model_folder(root, model)
    flat = [[flat_bytes(entry.parts[part.name]) for part in parts] for entry in entries]
    size, digest_of = sum(part.nbytes for part in parts), EntryDigest(parts)
    rows = tuple(_record(entry, digest_of(*flat[slot]), size, tags[slot]) for slot, entry in enumerate(entries))
    name = f"{checked_session(session)}.{secrets.token_hex(16)}"
    record = SegmentRecord(name + FINISHED, 0, model, epoch, now_s, checked_meta(meta), rows)
    header = build(record, parts, key)
    with typed(f"writing a segment under {folder}"):
        _write(folder, name, [header, *(data for own in flat for data in own)], io)
    nbytes = len(header) + size * len(entries)
    return SegmentRecord(record.name, nbytes, model, epoch, now_s, record.meta, rows)


def _record(entry: Entry, digest: bytes, nbytes: int, tags: tuple[bytes, ...]) -> EntryRecord:
    assert len(digest) == DIGEST_BYTES
    return EntryRecord(
        id=entry.id,
        parent=entry.parent,
        tail=entry.tail,
        tokens=pack_tokens(entry.tokens),
        digest=digest,
        window_from=entry.window_from,
        snapshot=entry.snapshot,
        nbytes=nbytes,
        owners=tags,
    ).checked()


def _write(folder: Path, name: str, buffers: Sequence[memoryview | bytes], io: DiskIO) -> None:
    io.folder(folder.parent)
    io.folder(folder)
    unfinished = folder / (name + UNFINISHED)
    descriptor = io.create(unfinished)
    try:
        try:
            io.write(descriptor, unfinished, buffers)
            io.sync(descriptor, unfinished)
        finally:
            os.close(descriptor)
        io.rename(unfinished, folder / (name + FINISHED))
        io.sync_folder(folder)
    except BaseException:
        # Only the first error matters, and the store sweeps leftovers.
        with contextlib.suppress(OSError):
            io.unlink(unfinished)
            io.unlink(folder / (name + FINISHED))
        raise
