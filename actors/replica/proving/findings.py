"""What tests of models found at earlier loads, in a file of the home, so that later loads need not test again.

A finding belongs to a model id, which includes the files and the libraries' versions (`model_id.py`), to the device, to
Satchel's version, and to a version of the test.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ....cluster.errors import ClusterError
from ....cluster.home import write_private_json
from ...protocol.block_ids import digest
from ..device.device import device_name

version_of = cache(metadata.version)
"""Of an installed distribution. Cached, for each call reads its files."""


class Findings:
    """The findings about one model on this device.

    Args:
        path: the file, JSON by key; None for no file.
        model_id: 32 bytes that change whenever the model computes differently.
    """

    def __init__(self, path: Path | None, model_id: bytes) -> None:
        self._path, self._model_id = path, model_id

    def read(self, what: str, version: int) -> Any:
        """Returns what was noted; None if nothing was.

        Args:
            what: its name.
            version: increased whenever the test changes.
        """
        return _entries(self._path).get(self._key(what, version))

    def note(self, what: str, version: int, found: Any) -> None:
        """Stores a finding, a JSON value. If the file cannot be written, that is no error: the test runs again."""
        if self._path is None:
            return
        with suppress(ClusterError):
            write_private_json(self._path, _entries(self._path) | {self._key(what, version): found})

    def _key(self, what: str, version: int) -> str:
        ours, whose = f"satchel.{what}".encode(), [self._model_id, device_name().encode()]
        return digest(ours, *whose, bytes([version]), version_of("satchel").encode()).hex()


def _entries(path: Path | None) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if path is not None and isinstance(entries := json.loads(path.read_text(encoding="utf-8")), dict):
            return entries
    return {}


NOWHERE = Findings(None, b"")
"""Findings without a file: nothing is known, and nothing is stored."""
