"""Digests of files: every byte is read once, and then known by what the file system says of the file.

A digest is SHA-256 over SHA-256 of pieces of a fixed size, so that several threads can read one file. It names whose KV
may be restored, so nobody may be able to make two files with one digest: a fast hash that is not cryptographic will not
do. A piece took a thread 1.7 to 1.9 GB/s on an x86 core with SHA instructions, BLAKE2b 1.1.

What is known lies in a file of the home. It is believed for a file of the same resolved path, inode, size and times of
change, so links into a store of blobs share what they point to; a blob's name is not believed, though it may be the
digest. The file is replaced as a whole. Where it is damaged or cannot be written, files are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ...cluster.errors import ModelLoadError
from ..protocol.block_ids import digest

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
READ_BYTES = 4 * 2**20
THREADS_MAX = 4
"""More than a disk is faster than."""

FILES_MAX = 4096
"""How many files are known at a time; those that were met longest ago go first."""

SETTLED_NS = 2 * 10**9
"""A file that was changed less than this before it was read may be changed again within one tick of its file system's
clock, which nobody would see: its digest is not kept."""

SHOWN_BYTES_MIN = 256 * 2**20
"""Reading less is over before anybody looks."""

LOCK_WAIT_S = 600.0
"""How long another process may be reading the same files; then they are read twice."""

_VERSION = 1
_KEPT_BYTES_MAX = 16 * 2**20


class Facts(NamedTuple):
    """What the file system says of a file, as long as nobody changes it."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Facts:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileDigest(NamedTuple):
    """A file (`path` with all links followed) as it was when it had this digest, 32 bytes."""

    path: Path
    facts: Facts
    digest: bytes


def digest_files(
    paths: Mapping[str, Path],
    kept: Path | None,
    progress: Callable[[float], None],
    now_ns: Callable[[], int] = time.time_ns,
) -> dict[str, FileDigest]:
    """The digests of regular files.

    Args:
        paths: by whatever name they are to be returned by.
        kept: the file in which digests are kept, None for none.
        progress: called with the fraction read, where there is much to read.

    Raises:
        ModelLoadError: one cannot be read, or is changed while it is read.
    """
    found = {name: _facts(path) for name, path in paths.items()}
    known = _known(found, _read(kept))
    if len(known) < len(found):
        with _alone(kept):
            # Whoever was reading may have read the same ones.
            entries = _read(kept)
            known = _known(found, entries)
            read = _hash_all({name: found[name] for name in found.keys() - known.keys()}, progress, now_ns)
            known |= {name: each for name, (each, _) in read.items()}
            settled = [each for each, is_settled in read.values() if is_settled]
            if settled:
                _write(kept, entries, [*known.values()], settled)
    return {name: known[name] for name in paths}


def check_unchanged(digests: Mapping[str, FileDigest], paths: Mapping[str, Path]) -> None:
    """Whether the files are still those that had these digests: what was loaded meanwhile is what they name.

    Raises:
        ModelLoadError: one is not.
    """
    for name, path in paths.items():
        known = digests[name]
        if _facts(path) != (known.path, known.facts):
            raise _changed(path)


def _facts(path: Path) -> tuple[Path, Facts]:
    try:
        real = path.resolve(strict=True)
        return real, Facts.of(real.stat())
    except (OSError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def _hash_all(
    files: Mapping[str, tuple[Path, Facts]], progress: Callable[[float], None], now_ns: Callable[[], int]
) -> dict[str, tuple[FileDigest, bool]]:
    """Digests by name, and whether each file had been left alone long enough for its digest to be kept."""
    total, done = sum(facts.size for _, facts in files.values()), 0
    shown = total >= SHOWN_BYTES_MIN
    results: dict[str, tuple[FileDigest, bool]] = {}
    # No more than there are cores to compute on.
    pool = ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1), "digest")
    try:
        for name, (path, facts) in sorted(files.items()):
            settled = now_ns() - max(facts.modified_ns, facts.changed_ns) >= SETTLED_NS
            pieces = []
            for nbytes, piece in _hash(path, facts, pool):
                pieces.append(piece)
                done += nbytes
                if shown:
                    progress(done / total)
            size = facts.size.to_bytes(8, "big")
            results[name] = FileDigest(path, facts, digest(b"satchel.file.1", size, *pieces)), settled
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _hash(path: Path, facts: Facts, pool: ThreadPoolExecutor) -> Iterator[tuple[int, bytes]]:
    """Size and digest of every piece, in order."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if Facts.of(os.fstat(descriptor)) != facts:
                raise _changed(path)
            spans = [(at, min(at + PIECE_BYTES, facts.size)) for at in range(0, facts.size, PIECE_BYTES)]
            futures = [pool.submit(_hash_piece, path, descriptor, start, end) for start, end in spans]
            try:
                for (start, end), future in zip(spans, futures, strict=True):
                    yield end - start, future.result()
            finally:
                # Before the descriptor's number is another file's.
                for future in futures:
                    if not future.cancel():
                        future.exception()
            if Facts.of(os.fstat(descriptor)) != facts or Facts.of(path.stat()) != facts:
                raise _changed(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from None


def _hash_piece(path: Path, descriptor: int, start: int, end: int) -> bytes:
    hasher = hashlib.sha256()
    while start < end:
        # Both of these let other threads run.
        data = os.pread(descriptor, min(READ_BYTES, end - start), start)
        if not data:
            raise _changed(path)
        hasher.update(data)
        start += len(data)
    return hasher.digest()


def _changed(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} is being changed while it is loaded; load it again when it is complete")


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


# What is kept: {"version", "files": {path: [inode, size, modified_ns, changed_ns, digest in hexadecimal]}}, the file
# that was met longest ago first.


def _known(found: Mapping[str, tuple[Path, Facts]], entries: Mapping[str, Any]) -> dict[str, FileDigest]:
    known = {}
    for name, (path, facts) in found.items():
        match entries.get(str(path)):
            case [*numbers, str(written)] if numbers == list(facts) and len(written) == 64:
                try:
                    known[name] = FileDigest(path, facts, bytes.fromhex(written))
                except ValueError:
                    logger.warning("a kept digest of %s makes no sense: it is read again", path)
    return known


def _read(kept: Path | None) -> dict[str, Any]:
    if kept is None:
        return {}
    try:
        with kept.open("rb") as file:
            raw = file.read(_KEPT_BYTES_MAX + 1)
        data = json.loads(raw) if len(raw) <= _KEPT_BYTES_MAX else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is of no use, files are read again: %s", kept, error)
        return {}
    files = data.get("files") if isinstance(data, dict) and data.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _write(kept: Path | None, entries: Mapping[str, Any], met: list[FileDigest], settled: list[FileDigest]) -> None:
    """Keep what is `settled`, and move what was `met` to the end."""
    if kept is None:
        return
    files = dict(entries)
    old = {str(each.path): files.pop(str(each.path), None) for each in met}
    files |= {path: entry for path, entry in old.items() if entry is not None}
    files |= {str(each.path): [*each.facts, each.digest.hex()] for each in settled}
    files = dict(list(files.items())[-FILES_MAX:])
    temporary = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": _VERSION, "files": files}, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o600)
        temporary.replace(kept)
    except OSError as error:
        logger.warning("%s cannot be written, so files are read again at the next start: %s", kept, error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _alone(kept: Path | None) -> Iterator[None]:
    """Read while no other process of this home does: replicas of one model that start together read it once."""
    with ExitStack() as held:
        if kept is not None:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(kept.with_name(f"{kept.name}.lock"), LOCK_WAIT_S, mode=0o600, fallback_to_soft=False)
                held.enter_context(lock)
            except Timeout:
                logger.warning("another process has read files for %.0f s: they are read beside it", LOCK_WAIT_S)
            except OSError as error:
                logger.warning("%s cannot be locked: %s", kept, error)
        yield
