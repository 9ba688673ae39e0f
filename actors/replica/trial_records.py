"""What trials of models found, kept in a file, and which of them ended their process."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import getpid
from pathlib import Path
from typing import Any

from ...cluster.errors import ClusterError
from ...cluster.home import write_private_json
from ...cluster.processes import ProcessMark

DEATHS_MAX = 2
"""How many processes may have ended in the middle of a model's trial before it is not tried any more: one may have been
ended from outside."""


@dataclass
class TrialRecords:
    """The records in a file, by the key of a model on a device. A file that cannot be read has none, and where none can
    be written models are tried again at the next start.

    Args:
        path: None for records that are not kept.
    """

    path: Path | None

    def found(self, key: str) -> dict[str, Any] | None:
        """Returns what the trial found; None if none has ended."""
        return self._read().get("found", {}).get(key)

    def deaths(self, key: str) -> int:
        """Returns how many processes began a trial and are gone without its end."""
        return sum(not ProcessMark(**begun).is_alive() for begun in self._begun(self._read(), key))

    def begin(self, key: str) -> None:
        """Notes that this process tries the model."""
        record = self._read()
        mark = ProcessMark.of(getpid())
        if mark is not None:
            record.setdefault("begun", {})[key] = [*self._begun(record, key), asdict(mark)]
            self._write(record)

    def end(self, key: str, found: dict[str, Any]) -> None:
        """Keeps what a trial found."""
        record = self._read()
        record.setdefault("found", {})[key] = found
        record.get("begun", {}).pop(key, None)
        self._write(record)

    @staticmethod
    def _begun(record: dict[str, Any], key: str) -> list[dict[str, Any]]:
        return record.get("begun", {}).get(key, [])

    def _read(self) -> dict[str, Any]:
        if self.path is not None:
            with suppress(OSError, ValueError):
                record = json.loads(self.path.read_text(encoding="utf-8"))
                if isinstance(record, dict):
                    return record
        return {}

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with suppress(ClusterError):
                write_private_json(self.path, record)
