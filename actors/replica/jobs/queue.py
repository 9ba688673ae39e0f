"""Decides which job is done next. Pure: no clock, no arrays.

Jobs are done one after the other, by priority, and among equals by fairness, as sequences are: the tenant and then the
flow that have been given least come first (`scheduling/fairness.py`). A step of a job costs a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..scheduling.job_queue import JobQueue


@dataclass(eq=False)
class SerialJob:
    """A request for one job.

    Attributes:
        tokens: what one step costs.
        steps: how many steps are left, about.
        deadline: in seconds on the clock of `SerialQueue.expired`.
        order: its place in the order of arrival.
    """

    request_id: str
    tokens: int
    steps: int
    priority: int = 0
    deadline: float = float("inf")
    tenant: str = ""
    flow: str = ""
    order: int = 0


class SerialQueue(JobQueue[SerialJob]):
    """The jobs that are done or wait.

    Args:
        waiting_max: how many may wait.
    """

    def __init__(self, waiting_max: int) -> None:
        super().__init__(waiting_max)
        self.current: SerialJob | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    @property
    def running(self) -> int:
        return int(self.current is not None)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self.running

    @property
    def pending_tokens(self) -> int:
        """What all jobs will cost, about. May be asked by any thread."""
        return sum(job.tokens * job.steps for job in list(self._jobs.values()))

    def begin(self) -> SerialJob | None:
        """Returns the next job, which becomes the current one; None if none waits. The former one must have been
        removed."""
        assert self.current is None
        self.current = min(self._jobs.values(), key=self._turn, default=None)
        if self.current is not None:
            self._shares.admit(self.current)
        return self.current

    def step(self) -> None:
        """Notes that a step of the current one is computed. Steps beyond those that it was to have cost nothing."""
        assert self.current is not None
        if self.current.steps > 0:
            self._shares.charge(self.current, self.current.tokens)
            self.current.steps -= 1

    def remove(self, request_id: str) -> SerialJob | None:
        """Removes a request in any state, and returns it; None for an unknown one."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._shares.leave(job)
            if job is self.current:
                self.current = None
        return job

    def _waiting(self) -> Iterable[SerialJob]:
        return (job for job in self._jobs.values() if job is not self.current)
