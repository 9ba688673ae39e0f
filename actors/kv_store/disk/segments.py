"""Segment files: written by replicas, once, and never changed.

The folder of a home's KV::

    kv/key                                the secret under which everything is sealed, agents' memory too
    kv/segments/<model>/<session>.<random>.safetensors     finished
    kv/segments/<model>/<session>.<random>.tmp             being written

A file appears under its final name only when all of it is durable.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

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
    part_digest,
    signature,
)
from .folder import typed
from .io import DiskIO
from .segment_header import build

FINISHED = ".safetensors"
UNFINISHED = ".tmp"
STORE_SESSION = "store"
"""The session of files that the store itself writes. Replicas' sessions have other names."""

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.[0-9a-f]{32}(\.safetensors|\.tmp)")


def checked_session(session: str) -> str:
    """Itself. Raises `InvalidRecord` where it cannot begin a file's name."""
    if not _SESSION.fullmatch(session):
        raise InvalidRecord(f"a session is up to 64 letters, digits, - and _, not {session!r:.80}")
    return session


def session_of(name: str) -> str | None:
    """Whose file it is by its name, or None for a name that no writer gives."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def model_folder(root: Path, model: bytes) -> Path:
    if not isinstance(model, bytes) or len(model) != ID_BYTES:
        raise InvalidRecord("a model id has 32 bytes")
    return root / "segments" / model.hex()


def read_key(root: Path, io: DiskIO | None = None) -> bytes:
    """The home's secret (32 bytes) in `root/key`, made by whoever needs it first. KV and agents' memory share it.

    Raises:
        DiskError: it cannot be read or made, or is not 32 bytes; what it sealed is then lost, and it is for a person
            to remove.
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
        # A link fails where another process was first, so all agree on one key. That process may also have swept ours.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            io.link(unfinished, path)
        io.sync_folder(path.parent)
    finally:
        io.unlink(unfinished)


def grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries in runs that fit one segment each: neighbours with equal signatures, at most 16. A run is given before
    the entries after its successor are taken."""
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
    """Write `entries` as one durable file. It is nobody's until the store commits the record.

    Args:
        root: the folder of KV, which exists.
        key: `read_key`.
        model: the model id, 32 bytes.
        entries: 1 to 16 with equal signatures.
        session: of the writer; the store keeps the uncommitted files of its own session.
        epoch: `DiskStore.epoch`, as the store told it.
        now_s: the writer's wall clock.
        meta: what readers must know of the parts.

    Returns:
        What the store's `commit` takes.

    Raises:
        InvalidRecord: entries that cannot be stored together.
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
    """`write_segment`, with the owners as tags already."""
    if not 1 <= len(entries) <= ENTRIES_MAX or len({entry.id for entry in entries}) != len(entries):
        raise InvalidRecord(f"a segment has 1 to {ENTRIES_MAX} different entries")
    parts = signature(entries[0].parts)
    if any(signature(entry.parts) != parts for entry in entries):
        raise InvalidRecord("the entries of a segment have equal names, dtypes and shapes")
    folder = model_folder(root, model)
    flat = [[flat_bytes(entry.parts[part.name]) for part in parts] for entry in entries]
    digests = [entry.digests or [part_digest(data) for data in own] for entry, own in zip(entries, flat, strict=True)]
    size, digest_of = sum(part.nbytes for part in parts), EntryDigest(parts)
    rows = tuple(_record(entry, digest_of(digests[slot]), size, tags[slot]) for slot, entry in enumerate(entries))
    name = f"{checked_session(session)}.{secrets.token_hex(16)}"
    record = SegmentRecord(name + FINISHED, 0, model, epoch, now_s, checked_meta(meta), rows)
    header = build(record, parts, list(zip(*digests, strict=True)), key)
    with typed(f"writing a segment under {folder}"):
        _write(folder, name, [header, *(data for run in zip(*flat, strict=True) for data in run)], io)
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
        # Not reported: the first error is the one that matters, and the store sweeps what stays.
        with contextlib.suppress(OSError):
            io.unlink(unfinished)
            io.unlink(folder / (name + FINISHED))
        raise
