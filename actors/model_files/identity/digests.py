"""Digests of model files: each file is read once; later its digest is found by the file's metadata.

A digest is SHA-256 over the SHA-256 of pieces of a fixed size, so that several threads can read one file. It decides
which KV may be restored. So it must be infeasible to make two files with one digest, which needs a cryptographic hash.
A thread hashes 1.7 to 1.9 GB/s on an x86 core with SHA instructions; BLAKE2b reaches 1.1.

Known digests are cached in a file of the home. One is used if resolved path, inode, size and times of change are the
same, so links to one blob share its digest; a blob's name is not trusted, though it may be the digest. The cache is
replaced as a whole. If it is damaged or cannot be written, files are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ....cluster.errors import ModelLoadError
from ...protocol.block_ids import digest

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
READ_BYTES = 4 * 2**20
THREADS_MAX = 4
"""With this many threads hashing is faster than reading from a disk."""

FILES_MAX = 4096
"""Files in the cache; those used longest ago are removed first."""

SETTLED_NS = 2 * 10**9
"""A file that was changed less than this before it was read may be changed again within the same tick of its file
system's clock, unnoticed: its digest is not cached."""

SHOWN_BYTES_MIN = 256 * 2**20
"""Reading fewer bytes is too short to show progress."""

SHOWN_EVERY_S = 0.2

LOCK_WAIT_S = 600.0
"""How long to wait for another process that reads the same files; then they are read twice."""

_VERSION = 1
_KEPT_BYTES_MAX = 16 * 2**20


class Facts(NamedTuple):
    """The metadata that changes if a file is changed."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Facts:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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
    """Returns the digests of regular files, by the names of `paths`.

    Args:
        kept: the cache file, None for none.
        progress: called with the fraction read, if there is much to read.

    Raises:
        ModelLoadError: a file cannot be read, or is changed while it is read.
    """
    found = _facts_of(paths)
    known = _known(found, _read(kept))
    if len(known) < len(found):
        with _alone(kept):
            # The process that had the lock may have read the same files.
            entries = _read(kept)
            known = _known(found, entries)
            read = _hash_all({name: found[name] for name in found.keys() - known.keys()}, progress, now_ns)
            known |= {name: each for name, (each, _) in read.items()}
            settled = [each for each, is_settled in read.values() if is_settled]
            if settled:
                _write(kept, entries, [*known.values()], settled)
    return {name: known[name] for name in paths}


@contextmanager
def digests_meanwhile(
    paths: Mapping[str, Path], kept: Path | None, progress: Callable[[float], None]
) -> Iterator[Callable[[], dict[str, FileDigest]]]:
    """A context in which files are hashed while they are loaded: both read a file at the same time, the second from
    the system's cache. It gives a function that waits for the digests, with `progress`, and returns or raises what
    `digest_files` does; it also raises if a file has changed since the context began. If the context ends with an
    error, hashing ends too."""
    # Before anything is loaded: a file that changes meanwhile has other facts afterwards.
    before = _facts_of(paths)
    reached, unwanted = [0.0], threading.Event()

    def note(fraction: float) -> None:
        reached[0] = fraction
        if unwanted.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1, "digests") as pool:
        future = pool.submit(digest_files, paths, kept, note)

        def digests() -> dict[str, FileDigest]:
            while wait([future], SHOWN_EVERY_S).not_done:
                progress(reached[0])
            found = future.result()
            for name, each in found.items():
                if (each.path, each.facts) != before[name]:
                    raise _changed(each.path)
            check_unchanged(found, paths)
            return found

        try:
            yield digests
        except BaseException:
            unwanted.set()
            raise


def check_unchanged(digests: Mapping[str, FileDigest], paths: Mapping[str, Path]) -> None:
    """Checks that the files have not changed since they were hashed: so what was loaded since then has these digests.

    Raises:
        ModelLoadError: one has changed.
    """
    for name, path in paths.items():
        known = digests[name]
        if _facts(path) != (known.path, known.facts):
            raise _changed(path)


def _facts_of(paths: Mapping[str, Path]) -> dict[str, tuple[Path, Facts]]:
    return {name: _facts(path) for name, path in paths.items()}


def _facts(path: Path) -> tuple[Path, Facts]:
    try:
        real = path.resolve(strict=True)
        return real, Facts.of(real.stat())
    except (OSError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def _hash_all(
    files: Mapping[str, tuple[Path, Facts]], progress: Callable[[float], None], now_ns: Callable[[], int]
) -> dict[str, tuple[FileDigest, bool]]:
    """Returns (digest, whether it may be cached: the file was not changed just before) by name."""
    total, done = sum(facts.size for _, facts in files.values()), 0
    shown = total >= SHOWN_BYTES_MIN
    results: dict[str, tuple[FileDigest, bool]] = {}
    # Not more threads than cores.
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
    """Yields size and digest of every piece, in order."""
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
                # All reads must end before the descriptor is closed: its number may then be another file's. The last is
                # cancelled first: otherwise each would begin while the one before it is waited for.
                for future in reversed(futures):
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
        # Both calls release the interpreter's lock.
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


# The cache: {"version", "files": {path: [inode, size, modified_ns, changed_ns, digest in hexadecimal]}}, the file used
# longest ago first.


def _known(found: Mapping[str, tuple[Path, Facts]], entries: Mapping[str, Any]) -> dict[str, FileDigest]:
    known = {}
    for name, (path, facts) in found.items():
        match entries.get(str(path)):
            case [*numbers, str(written)] if numbers == list(facts) and len(written) == 64:
                try:
                    known[name] = FileDigest(path, facts, bytes.fromhex(written))
                except ValueError:
                    logger.warning("the cached digest of %s is invalid; the file is read again", path)
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
        logger.warning("%s cannot be used, so files are read again: %s", kept, error)
        return {}
    files = data.get("files") if isinstance(data, dict) and data.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _write(kept: Path | None, entries: Mapping[str, Any], met: list[FileDigest], settled: list[FileDigest]) -> None:
    """Adds the digests that are `settled` to the cache, and moves those that were `met` to its end."""
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
    """Holds the home's lock for reading, so that replicas of one model that start together read it once."""
    with ExitStack() as held:
        if kept is not None:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(kept.with_name(f"{kept.name}.lock"), LOCK_WAIT_S, mode=0o600, fallback_to_soft=False)
                held.enter_context(lock)
            except Timeout:
                logger.warning("another process has read files for %.0f s; this one now reads them, too", LOCK_WAIT_S)
            except OSError as error:
                logger.warning("%s cannot be locked: %s", kept, error)
        yield
