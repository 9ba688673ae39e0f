"""One request as the scheduler sees it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...protocol.replica_messages import IDLE_PRIORITY


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(eq=False)
class ScheduledSequence:
    """One request in the scheduler. Lengths are tokens.

    Attributes:
        prompt: how many tokens must have KV before decoding starts. The prompt's very last token is not counted: it is
            the first decode step's input.
        done: how many of these have KV.
        generated: tokens decoded since the sequence was last queued.
        keys: ids of the prompt's whole blocks; empty if blocks cannot be reused.
        twin: equal for sequences with equal whole prompts; empty if whole prompts cannot be reused.
        known: how many prompt tokens could be reused when the sequence arrived.
        pause: a number of tokens after which a chunk must end; 0 for none.
        unbroken: [start, stop) of tokens that must be computed in one chunk.
        restoring: whether it has a place and waits for KV that is read back.
        suspect: whether it was in a batch that failed.
        passed: whether a shorter sequence took the last prefill turn from this one.
    """

    request_id: str
    prompt: int
    max_tokens: int
    priority: int = 0
    deadline: float = float("inf")
    tenant: str = ""
    flow: str = ""
    order: int = 0
    state: SequenceState = SequenceState.WAITING
    done: int = 0
    generated: int = 0
    suspect: bool = False
    keys: tuple[bytes, ...] = ()
    twin: bytes = b""
    known: int = 0
    pause: int = 0
    unbroken: Sequence[tuple[int, int]] = ()
    restoring: bool = False
    passed: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def idle(self) -> bool:
        """Whether it is computed only while there is nothing else."""
        return self.priority <= IDLE_PRIORITY

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.order)

    @property
    def reaches(self) -> int:
        """How many tokens of a sequence in prefill have KV, or will have it once its KV is read back."""
        return min(self.known, self.prompt) if self.restoring else self.done
