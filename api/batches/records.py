"""A batch as it is kept on disk: which requests it has, and how far it is."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...cluster.errors import BatchNotFound
from .files import remove_if_left, write_json

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
ENDED_MAX = 1000
"""How many batches of a tenant that have ended are kept."""

WINDOW_S = 24 * 3600
"""How long a batch may take."""

_ID = re.compile(r"batch_[0-9a-f]{24}")


@dataclass(frozen=True)
class BatchRecord:
    """One batch. Times are Unix time, None for what has not happened.

    Attributes:
        tenant, key: whose it is, and the id of the key that made it, "" if none was needed.
        endpoint: the path that every request of it asks.
        errors: what is wrong with its lines: code, message, param and line.
        total, completed, failed: how many requests it has, and how many were answered, rightly or with an error.
        usage: prompt tokens, completion tokens and cached tokens of the answers so far.
    """

    id: str
    tenant: str
    key: str
    endpoint: str
    input_file_id: str
    status: Status
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def now(self, status: Status, **changed: Any) -> BatchRecord:
        """Returns the batch with another status from now on."""
        return replace(self, status=status, **{f"{status}_at": int(time.time())}, **changed)

    def shown(self) -> dict[str, Any]:
        """Returns the batch in OpenAI's form."""
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
        spent = {name: self.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{name: getattr(self, name) for name in times},
            "expires_at": self.expires_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": spent["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": spent["cached_tokens"]},
                "output_tokens": spent["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.usage.get("reasoning_tokens", 0)},
                "total_tokens": spent["prompt_tokens"] + spent["completion_tokens"],
            },
            "metadata": self.metadata or None,
        }


def new_batch(tenant: str, key: str, endpoint: str, input_file_id: str, metadata: dict[str, str]) -> BatchRecord:
    batch_id = f"batch_{secrets.token_hex(12)}"
    return BatchRecord(batch_id, tenant, key, endpoint, input_file_id, "validating", int(time.time()), metadata)


class BatchRecords:
    """The batches of the tenant whose folder this is. Every method does I/O."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, record: BatchRecord) -> None:
        """Writes a batch, new or changed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self._path(record.id), asdict(record))

    def get(self, batch_id: str) -> BatchRecord:
        """
        Raises:
            BatchNotFound: there is none.
        """
        record = _read(self._path(batch_id)) if _ID.fullmatch(batch_id) else None
        if record is None:
            raise BatchNotFound(f"there is no batch {batch_id[:100]!r}", param="batch_id")
        return record

    def list(self) -> list[BatchRecord]:
        """Returns all batches, the newest first."""
        found = [record for path in self.folder.glob("batch_*.json") if (record := _read(path)) is not None]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def end(self, record: BatchRecord) -> None:
        """Writes a batch that has ended, and removes what only a batch that runs needs. Forgets the oldest ones beyond
        `ENDED_MAX`."""
        self.save(record)
        self.results(record.id).unlink(missing_ok=True)
        self.cancel_mark(record.id).unlink(missing_ok=True)
        for other in [other for other in self.list() if other.ended][ENDED_MAX:]:
            self._path(other.id).unlink(missing_ok=True)

    def remove_left(self, now: float) -> None:
        """Removes what is left of batches that are not running, if a process was killed as one ended.

        Args:
            now: Unix time.
        """
        for path in self.folder.glob("batch_*"):
            batch_id, _, kind = path.name.partition(".")
            if kind != "json" and ((record := _read(self._path(batch_id))) is None or record.ended):
                remove_if_left(path, now)

    def results(self, batch_id: str) -> Path:
        """Where the answers of a batch that has not ended are, a line each."""
        return self.folder / f"{batch_id}.jsonl.part"

    def _path(self, batch_id: str) -> Path:
        return self.folder / f"{batch_id}.json"

    def cancel_mark(self, batch_id: str) -> Path:
        """A file that asks whoever runs the batch to end it."""
        return self.folder / f"{batch_id}.cancel"


def all_records(root: Path) -> Iterator[tuple[BatchRecords, BatchRecord]]:
    """Yields the batches of all tenants that have not ended, the oldest first."""
    found = [
        (records, record)
        for folder in root.glob("*/")
        for records in [BatchRecords(folder)]
        for record in records.list()
    ]
    for records, record in sorted(found, key=lambda pair: (pair[1].created_at, pair[1].id)):
        if not record.ended:
            yield records, record


def _read(path: Path) -> BatchRecord | None:
    try:
        return BatchRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
