"""The seam between what speaks HTTP or Python and what runs on Ray.

`app.py` and `generation.py` know only these protocols; `dispatch.py` implements them over Ray actors, and tests over
plain objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from ..actors.messages import RowUpdate, Sampling


@dataclass(frozen=True)
class ServedModel:
    """A configured model as its replicas loaded it. `folder` holds tokenizer and template; `created` is Unix time;
    `memory` says in words which layers keep what, and how."""

    name: str
    model_id: bytes
    folder: str
    context_tokens: int
    vocabulary_size: int
    created: int
    memory: str = ""


@dataclass(frozen=True)
class ReplicaStats:
    """One replica, read now. `answers` is False where it did not reply in time; its numbers are 0 then."""

    replica: str
    model: str
    answers: bool
    running: int = 0
    waiting: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    requests_total: int = 0
    prefix_blocks: int = 0
    prefix_bytes: int = 0
    prefix_hits_total: int = 0
    prefix_misses_total: int = 0
    unwritten_bytes: int = 0
    written_blocks_total: int = 0
    written_bytes_total: int = 0
    unwritten_turns_total: int = 0
    restored_tokens_total: int = 0
    blocks_corrupt_total: int = 0


class Generation(Protocol):
    """One running row. Iterating yields its updates; the last one has `finish` set and no more follow.

    Closing early (`abort`, or leaving the iteration) takes the row out of the batch within one step. A failure ends
    the iteration with a `SatchelError`.
    """

    replica: str
    why: str

    def __aiter__(self) -> AsyncIterator[RowUpdate]: ...

    async def abort(self) -> None: ...


class Backend(Protocol):
    async def names(self) -> list[str]:
        """Every served model's name, loaded yet or not, the default first."""
        ...

    async def models(self) -> list[ServedModel]:
        """Those of them that have been loaded at least once, in the same order."""
        ...

    async def generate(
        self,
        model: ServedModel,
        *,
        agent: str,
        prompt: list[int],
        sampling: Sampling,
        request_id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        choices: int = 1,
        beside: str = "",
    ) -> Generation:
        """Route and queue one row. Returns once a replica has accepted it.

        Args:
            agent: the agent's key, or "" for none.
            prompt: token ids, at least one.
            request_id: unique among all rows.
            priority: as the caller gave it; a higher number goes first.
            deadline_s: from now to the last token; None is the configured limit, which also bounds it.
            choices: how many rows with this very prompt come together.
            beside: the replica that took the first of them, "" for none.

        Raises:
            Unavailable: the queue is full, no replica lives, or the cluster is draining.
        """
        ...

    async def health(self) -> dict[str, bool]:
        """For every served model, whether a replica of it answers now."""
        ...

    async def stats(self) -> list[ReplicaStats]: ...
