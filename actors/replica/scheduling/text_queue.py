"""Decides which texts are embedded in each engine step. Pure: no clock, no arrays.

A job is a request with several texts. Jobs take turns by priority, and among equals by fairness, as sequences do: the
tenant and then the flow that have been given least come first (`fairness.py`). A step's batch has the next texts of the
first job, and as many texts of later jobs as there is room for. A job's shortest texts come first, so that a batch has
little padding.

A text longer than the budget is computed alone, one chunk a step. Only one such text is computed at a time, because it
holds memory: if another job comes to its own long text, the first one continues instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .job_queue import JobQueue

PADDING_MAX = 2.0
"""A padded batch may have at most this many times its real tokens."""


@dataclass(eq=False)
class TextJob:
    """A request's texts, by their lengths in tokens.

    Attributes:
        left: indexes of the texts that have no vector yet, the shortest first.
        order: its place in the order of arrival.
    """

    request_id: str
    lengths: Sequence[int]
    priority: int = 0
    deadline: float = float("inf")
    tenant: str = ""
    flow: str = ""
    order: int = 0
    left: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = sorted(range(len(self.lengths)), key=lambda index: self.lengths[index])


@dataclass(frozen=True)
class Pick:
    """The tokens `[start:stop]` of a job's text; all of them, unless it is long."""

    job: TextJob
    index: int
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        return self.stop == self.job.lengths[self.index]


class TextQueue(JobQueue[TextJob]):
    """The texts that wait for their vectors.

    Args:
        waiting_max: how many requests may be here.
    """

    def __init__(self, waiting_max: int) -> None:
        super().__init__(waiting_max)
        self._long: Pick | None = None
        """The latest chunk of the long text that is being computed."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def pending_tokens(self) -> int:
        """Tokens of all texts that have no vector yet, less those of the long one that are done."""
        # Copies, because other threads than the engine's ask.
        done = 0 if (long := self._long) is None else long.stop
        left = sum(job.lengths[index] for job in list(self._jobs.values()) for index in list(job.left))
        return max(0, left - done)

    @property
    def long_text(self) -> tuple[str, int] | None:
        """The request and the length of the long text that is being computed."""
        return None if self._long is None else (self._long.job.request_id, self._long.job.lengths[self._long.index])

    def remove(self, request_id: str) -> None:
        """Removes a request in any state."""
        job = self._jobs.pop(request_id)
        self._shares.leave(job)
        if self._long is not None and self._long.job is job:
            self._long = None

    def begin_anew(self) -> None:
        """Forgets the computed chunks of a long text."""
        self._long = None

    def next_batch(self, budget: int) -> list[Pick]:
        """Returns what to compute in a step of `budget` tokens, padding included: whole texts of several jobs, or one
        chunk; `computed` must follow. Empty only if there are no jobs."""
        picks: list[Pick] = []
        longest = tokens = 0
        for job in self._by_turn():
            for index in job.left:
                length = job.lengths[index]
                if length > budget or self._is_long(job, index):
                    if not picks:
                        return [self._chunk(job, index, budget)]
                    break
                width = max(longest, length)
                places = (len(picks) + 1) * width
                if picks and (places > budget or places > PADDING_MAX * (tokens + length)):
                    break
                picks.append(Pick(job, index, 0, length))
                longest, tokens = width, tokens + length
            if (len(picks) + 1) * longest > budget:
                break
        return picks

    def computed(self, picks: Sequence[Pick]) -> list[str]:
        """Notes that these are computed. Removes and returns the requests whose texts all have vectors."""
        done = []
        for pick in picks:
            job = pick.job
            self._shares.charge(job, pick.stop - pick.start)
            if not pick.ends:
                self._long = pick
                continue
            if self._is_long(job, pick.index):
                self._long = None
            job.left.remove(pick.index)
            if not job.left:
                done.append(job.request_id)
                self.remove(job.request_id)
        return done

    def _by_turn(self) -> list[TextJob]:
        return sorted(self._jobs.values(), key=self._turn)

    def _is_long(self, job: TextJob, index: int) -> bool:
        return self._long is not None and (self._long.job, self._long.index) == (job, index)

    def _chunk(self, job: TextJob, index: int, budget: int) -> Pick:
        start = 0
        if self._long is not None:
            job, index, start = self._long.job, self._long.index, self._long.stop
        return Pick(job, index, start, min(job.lengths[index], start + budget))

    def check(self) -> None:
        """Checks that every job has texts left, and that the long text is one of them.

        Raises:
            AssertionError: a job has no text left, or the long text is not among them.
        """
        for request_id, job in self._jobs.items():
            assert job.request_id == request_id and job.left
            assert [job.lengths[index] for index in job.left] == sorted(job.lengths[index] for index in job.left)
        if self._long is not None:
            job = self._jobs[self._long.job.request_id]
            assert job is self._long.job and self._long.index in job.left
            assert 0 < self._long.stop < job.lengths[self._long.index]
