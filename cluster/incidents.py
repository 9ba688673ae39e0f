"""What went wrong on this machine lately: a line of JSON each in the home, which `satchel doctor` shows.

Any process of the server may write. Nobody waits for it and nothing fails by it: on a full disk a line is lost.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .config import Home

_log = logging.getLogger(__name__)

FILE_BYTES_MAX = 128 * 2**10
"""When the file is larger it becomes the former one, of which there is one: so twice that is kept at most."""

TEXT_CHARACTERS_MAX = 500

Kind = Literal["stuck", "died", "silent", "node", "disk", "given_up", "refused", "certificate"]
"""A process was ended because it stood still, has ended and was started again, or gave no sign of life; a node does not
report, or does again; a disk is full, or has room again; a request was given up; many were refused; the
endpoint's certificate was replaced by one that cannot be used."""


@dataclass(frozen=True)
class Incident:
    """`at_s` is Unix time."""

    at_s: float
    kind: str
    text: str


def note_incident(home: Home, kind: Kind, text: str) -> None:
    """Write it down, for this user alone. Takes a moment on the disk."""
    line = json.dumps({"at_s": round(time.time(), 3), "kind": kind, "text": text[:TEXT_CHARACTERS_MAX]}) + "\n"
    try:
        _append(home.incidents_file, line.encode())
    except OSError as error:
        _log.warning("an incident is not written down (%s): %s", error.strerror, text)


def note_incident_aside(home: Home, kind: Kind, text: str) -> threading.Thread:
    """As `note_incident`, by a thread of its own: for those that must not wait for a disk."""
    thread = threading.Thread(target=note_incident, args=(home, kind, text), name="incident", daemon=True)
    thread.start()
    return thread


def _append(path: Path, line: bytes) -> None:
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_still(path, descriptor):
                # Another process has just set it aside.
                continue
            size = os.fstat(descriptor).st_size
            if size + len(line) > FILE_BYTES_MAX:
                path.replace(former(path))
                continue
            # Behind a line that a full disk has cut short this one begins anew.
            os.write(descriptor, line if size == 0 else b"\n" + line)
            return
        finally:
            os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def former(path: Path) -> Path:
    return path.with_suffix(".old" + path.suffix)


def incidents(home: Home, since_s: float) -> list[Incident]:
    """Those written down since then (Unix time), the oldest first."""
    found = [one for path in (former(home.incidents_file), home.incidents_file) for one in _read(path)]
    return sorted((one for one in found if one.at_s >= since_s), key=lambda one: one.at_s)


def _read(path: Path) -> Iterator[Incident]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            data = json.loads(line)
            yield Incident(float(data["at_s"]), str(data["kind"]), str(data["text"]))
        except (ValueError, TypeError, KeyError):
            # Blank, or cut short.
            continue
