"""Reports how a turn was stored in its agent's memory: a header, and a field of the body or the last chunk.

Only the unexpected is reported. A computed answer is never withheld because of the agent's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEADER = "x-satchel-memory"

FULL, NO_ROOM, UNANSWERED, FORGOTTEN = "disk_full", "no_room", "unanswered", "forgotten"
OVER_QUOTA = "insufficient_quota"
"""Why a turn is not kept, in this order: no room on the disk even after evicting KV; no room in
`transcripts_bytes_max`; the store does not answer; the agent was deleted meanwhile; the tenant's disk quota is used
up."""


@dataclass(frozen=True)
class Remembered:
    """How a turn was stored in its agent's memory.

    Attributes:
        unkept: why the turn's tokens are not kept, "" if they are.
        copied: whether as many nodes have them as configured (`replication`).
        let_go: whether the agent's earlier turns had been evicted to make room for others.
    """

    unkept: str = ""
    copied: bool = True
    let_go: bool = False

    @property
    def kept(self) -> bool:
        return not self.unkept

    @property
    def header(self) -> str:
        """The header's value, "" if there is nothing to report."""
        notes = [f"not-kept; reason={self.unkept}"] if self.unkept else [] if self.copied else ["not-copied"]
        return ", ".join([*notes, *(["earlier-let-go"] if self.let_go else [])])

    @property
    def body(self) -> dict[str, Any] | None:
        """The field `satchel` of an answer's body or last chunk, None if there is nothing to report."""
        if not self.header:
            return None
        body: dict[str, Any] = {"kept": self.kept}
        if self.unkept:
            body["reason"] = self.unkept
        elif not self.copied:
            body["copied"] = False
        if self.let_go:
            body["earlier_let_go"] = True
        return body
