"""What became of a turn in its agent's memory, as answers say it: a header, and a field of the body or the last chunk.

Only what a caller would not expect is said. An answer that was computed is never withheld because of its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEADER = "x-satchel-memory"

FULL, NO_ROOM, UNANSWERED, FORGOTTEN = "disk_full", "no_room", "unanswered", "forgotten"
OVER_QUOTA = "insufficient_quota"
"""Why a turn is not kept: no room on the disk though KV was evicted, none in `transcripts_bytes_max`; the store does
not answer; the agent was forgotten meanwhile; other turns of the tenant took all that its key allows of the disk."""


@dataclass(frozen=True)
class Remembered:
    """
    Attributes:
        unkept: why the turn's words are not kept, "" where they are.
        copied: whether as many nodes have them as should (`replication`).
        let_go: whether what the agent had said before had been let go, because others needed the room.
    """

    unkept: str = ""
    copied: bool = True
    let_go: bool = False

    @property
    def kept(self) -> bool:
        return not self.unkept

    @property
    def header(self) -> str:
        """The header's value, "" where there is nothing to say."""
        said = [f"not-kept; reason={self.unkept}"] if self.unkept else [] if self.copied else ["not-copied"]
        return ", ".join([*said, *(["earlier-let-go"] if self.let_go else [])])

    @property
    def body(self) -> dict[str, Any] | None:
        """The field `satchel` of an answer's body or last chunk, None where there is nothing to say."""
        if not self.header:
            return None
        found: dict[str, Any] = {"kept": self.kept}
        if self.unkept:
            found["reason"] = self.unkept
        elif not self.copied:
            found["copied"] = False
        if self.let_go:
            found["earlier_let_go"] = True
        return found
