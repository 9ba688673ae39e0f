"""Recent problems on this machine: JSON lines in the home, which `satchel doctor` shows.

Any process of the server may write. A failed write is only logged: on a full disk a line is lost.
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

from .home import Home

_log = logging.getLogger(__name__)

FILE_BYTES_MAX = 128 * 2**10
"""A larger file replaces its predecessor, so at most twice this is kept."""

TEXT_CHARACTERS_MAX = 500

Kind = Literal[
    "stuck", "died", "silent", "node", "disk", "given_up", "refused", "certificate", "slower", "device", "unfit"
]
"""A process was ended because it was stuck (`stuck`), ended by itself and was restarted (`died`), or sent no heartbeat
(`silent`); a node stopped or resumed reporting; a disk is full or has room again; a request was given up; many requests
were refused; the endpoint's certificate was replaced by one that cannot be used; a model computes slower than this
device could; the device failed at something; a model that was served in plain mode failed its self-test."""


@dataclass(frozen=True)
class Incident:
    """One line of the file. `at_s` is Unix time."""

    at_s: float
    kind: str
    text: str


def note_incident(home: Home, kind: Kind, text: str) -> None:
    """Appends an incident to the home's file, which only this user may read. Blocks on the disk."""
    line = json.dumps({"at_s": round(time.time(), 3), "kind": kind, "text": text[:TEXT_CHARACTERS_MAX]}) + "\n"
    try:
        _append(home.incidents_file, line.encode())
    except OSError as error:
        _log.warning("an incident cannot be written (%s): %s", error.strerror, text)


def note_incident_aside(home: Home, kind: Kind, text: str) -> threading.Thread:
    """Does as `note_incident`, in a thread of its own, for callers that must not wait for a disk."""
    thread = threading.Thread(target=note_incident, args=(home, kind, text), name="incident", daemon=True)
    thread.start()
    return thread


def _append(path: Path, line: bytes) -> None:
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_still(path, descriptor):
                # Another process has just rotated it.
                continue
            size = os.fstat(descriptor).st_size
            if size + len(line) > FILE_BYTES_MAX:
                path.replace(former(path))
                continue
            # The leading newline separates this line from one that a full disk has cut short.
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
    """Returns the path of the file's predecessor."""
    return path.with_suffix(".old" + path.suffix)


def incidents(home: Home, since_s: float) -> list[Incident]:
    """Returns the incidents since `since_s` (Unix time), the oldest first."""
    recorded = [one for path in (former(home.incidents_file), home.incidents_file) for one in _read(path)]
    return sorted((one for one in recorded if one.at_s >= since_s), key=lambda one: one.at_s)


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
