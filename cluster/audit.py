"""The audit log: administrators' actions and refused keys, as JSON lines in the home.

It takes at most twice `BYTES_MAX`: the file and its predecessor. On a full disk lines are lost, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .home import Home

_log = logging.getLogger(__name__)

BYTES_MAX = 8 * 2**20
REFUSALS_A_SECOND = 10
"""How many refusals are logged; further ones are only counted."""


class Audit:
    """The writer of the audit log. Thread-safe."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        self._path = home.audit_file
        self._clock = clock
        self._guard = threading.Lock()
        self._second = 0
        self._refused = self._left_out = 0

    def note(self, what: str, **details: Any) -> None:
        """Writes one line: the time in Unix seconds, `what` happened, and `details`."""
        with self._guard:
            self._write({"time": round(self._clock(), 3), "what": what, **details})

    def note_refusal(self, what: str, **details: Any) -> None:
        """Writes as `note` does, at a limited rate: anybody can cause refusals."""
        with self._guard:
            now = self._clock()
            if int(now) != self._second:
                self._second, self._refused = int(now), 0
            self._refused += 1
            if self._refused > REFUSALS_A_SECOND:
                self._left_out += 1
                return
            more = {"left_out": self._left_out} if self._left_out else {}
            self._left_out = 0
            self._write({"time": round(now, 3), "what": what, **details, **more})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=True) + "\n"
        try:
            with suppress(FileNotFoundError):
                if self._path.stat().st_size > BYTES_MAX:
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("the audit log cannot be written (%s): %s", error.strerror or error, text.rstrip())
