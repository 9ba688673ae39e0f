"""A home: the folder with one cluster's state. Folders are 0700 and files 0600; one server uses it at a time."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .config import Home
from .errors import ClusterError, HomeInUse

_LOCK_WAIT_S = 1.0
"""The kernel frees a killed server's lock once the process is gone, which takes a moment."""


def prepare_home(home: Home) -> None:
    """Makes the folders of the home, for this user alone.

    Raises:
        ClusterError: they cannot be made, or belong to somebody else.
    """
    for folder in (home.root, home.run, home.tls):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise ClusterError(f"cannot use {folder}: {error.strerror or error}") from None


def write_private(path: Path, text: str) -> None:
    """Replaces the file in one step; only this user may read it.

    Raises:
        ClusterError: it cannot be written.
    """
    try:
        replace_private(path, text)
    except OSError as error:
        raise ClusterError(f"cannot write {path}: {error.strerror or error}") from None


def replace_private(path: Path, text: str) -> None:
    """As `write_private`.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_private_json(path: Path, data: dict[str, Any]) -> None:
    """Replaces the file with JSON in one step; only this user may read it.

    Raises:
        ClusterError: it cannot be written.
    """
    write_private(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in the file; None if it is absent or holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def ensure_token(home: Home) -> Path:
    """Returns the file with the cluster's secret; makes it at the first call.

    Raises:
        ClusterError: it cannot be written.
    """
    if not home.token_file.exists() or home.token_file.stat().st_size < 32:
        write_private(home.token_file, secrets.token_hex(32))
    home.token_file.chmod(0o600)
    return home.token_file


class HomeLock:
    """The lock of a home, held by its server. The kernel frees it when the process ends, however it ends.

    Args:
        path: of the lock; None is the home's own.
    """

    def __init__(self, home: Home, path: Path | None = None) -> None:
        self._path = path or home.lock_file
        self._root = home.root
        self._lock = FileLock(self._path, _LOCK_WAIT_S, mode=0o600, thread_local=False, fallback_to_soft=False)

    @property
    def is_held(self) -> bool:
        return self._lock.is_locked

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            HomeInUse: another server has it; the message names its process id.
        """
        try:
            self._lock.acquire()
        except Timeout:
            holder = self._path.read_text("ascii", "replace").strip() or "unknown"
            raise HomeInUse(
                f"{self._root} is in use by the server with process id {holder}; stop it, or choose another "
                "folder with --home"
            ) from None
        self._path.write_text(f"{os.getpid()}\n", "ascii")

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self.is_held:
            self._path.write_text("", "ascii")
            self._lock.release()
