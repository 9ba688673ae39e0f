"""What the queues of texts and of images have in common: which requests are there, whose turn it is, and who is
refused. Pure: no clock, no arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from .fairness import FairShares, queues_too_many


class Job(Protocol):
    """A request. `order` is its place in the order of arrival, `deadline` in seconds on the clock of `expired`."""

    request_id: str
    priority: int
    deadline: float
    tenant: str
    flow: str
    order: int


AnyJob = TypeVar("AnyJob", bound=Job)


class JobQueue(Generic[AnyJob]):
    """Requests that take turns by priority, and among equals by fairness (`fairness.py`).

    Args:
        waiting_max: how many may wait.
    """

    def __init__(self, waiting_max: int) -> None:
        self.waiting_max = waiting_max
        self._jobs: dict[str, AnyJob] = {}
        self._shares = FairShares()
        self._arrivals = 0

    @property
    def request_ids(self) -> list[str]:
        """All that are here. May be asked by any thread."""
        return list(self._jobs)

    def refusal(self, tenant: str, flow: str) -> str | None:
        """Returns why a request is refused: `full` if the queue is full, `full_for_it` if only this tenant or flow may
        not queue more, None if `add` may follow."""
        waiting = [*self._waiting()]
        room = self.waiting_max - len(waiting)
        if room <= 0:
            return "full"
        return "full_for_it" if queues_too_many(tenant, flow, waiting, room) else None

    def add(self, job: AnyJob) -> None:
        """Queues a request.

        Raises:
            ValueError: it is here already.
        """
        if job.request_id in self._jobs:
            raise ValueError(f"request {job.request_id} is already here")
        self._arrivals += 1
        job.order = self._arrivals
        self._jobs[job.request_id] = job
        self._shares.join(job)

    def expired(self, now: float) -> list[str]:
        """Returns the requests whose deadlines have passed at `now`."""
        return [job.request_id for job in self._jobs.values() if job.deadline <= now]

    def _waiting(self) -> Iterable[AnyJob]:
        return self._jobs.values()

    def _turn(self, job: AnyJob) -> tuple[Any, ...]:
        """What jobs are sorted by: the first is next."""
        return (-job.priority, *self._shares.turn(job, taking=False), job.order)
