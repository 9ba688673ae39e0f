"""Requests for jobs on their way to the engine, and how far each is, for those who wait for it.

Used on the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from ....cluster.config.timing import Timing
from ....cluster.errors import ReplicaLost, SatchelError, Unavailable

logger = logging.getLogger(__name__)


class Submits(Protocol):
    """What does jobs: `JobEngine`, which is not imported where the event loop runs."""

    def submit(self, request: Any, reply: Callable[[SatchelError | None], None]) -> None: ...

    def abort(self, request_ids: tuple[str, ...]) -> None: ...


class Update(Protocol):
    """How far a job is: a dataclass. `number` is the update's, from 1, `partial` the parts of the result that are new,
    and `is_last` says whether the job has ended."""

    number: int
    partial: list[Any]

    @property
    def is_last(self) -> bool: ...


News = TypeVar("News", bound=Any)
"""A class of updates."""


async def queue_job(engine: Submits, progress: JobProgress[Any], request: Any) -> None:
    """Queues a job. If this is cancelled, it is ended.

    Raises:
        SatchelError: the refusal.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[SatchelError | None] = loop.create_future()

    def reply(refusal: SatchelError | None) -> None:
        loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(refusal))

    if not progress.begin(request.request_id):
        raise Unavailable(f"request {request.request_id} has not left yet")
    engine.submit(request, reply)
    try:
        refusal = await answer
    except asyncio.CancelledError:
        progress.forget(request.request_id)
        engine.abort((request.request_id,))
        raise
    if refusal is not None:
        progress.forget(request.request_id)
        raise refusal
    progress.accept(request.request_id)


@dataclass
class _Job(Generic[News]):
    """One job. `seen`: when it was last asked for; never before it is accepted. `partial` has the parts of its result
    that were not fetched yet, with the numbers of their updates."""

    seen: float = float("inf")
    number: int = 0
    latest: News | None = None
    partial: list[tuple[int, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class JobProgress(Generic[News]):
    """The jobs that are done or wait.

    Args:
        abort: ends requests.
        timing: a job is ended if nobody has asked for it for `consumer_lease_s` since it was accepted. The engine may
            accept it late, for it takes commands between steps alone.
    """

    def __init__(self, abort: Callable[[tuple[str, ...]], None], timing: Timing) -> None:
        self._abort, self._timing = abort, timing
        self._jobs: dict[str, _Job[News]] = {}
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def begin(self, request_id: str) -> bool:
        """Notes that somebody asks for a job. Returns False if it is here already."""
        if request_id in self._jobs:
            return False
        self._jobs[request_id] = _Job()
        return True

    def accept(self, request_id: str) -> None:
        """Notes that the engine has accepted a job: its lease begins."""
        if (job := self._jobs.get(request_id)) is not None:
            job.seen = time.monotonic()

    def forget(self, request_id: str) -> None:
        """Forgets a job; unknown ones are ignored."""
        if (job := self._jobs.pop(request_id, None)) is not None:
            job.changed.set()

    def deliver(self, request_id: str, update: News) -> None:
        """Takes what is new of a job; its number is ignored."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.number += 1
        job.partial += [(job.number, part) for part in update.partial]
        job.latest = replace(update, number=job.number, partial=[])
        job.changed.set()

    async def next_update(self, request_id: str, number: int) -> News | None:
        """Waits for more than update `number` of a job, and renews the lease.

        Returns:
            All that is new; None if that is nothing within `timing.report_s`.

        Raises:
            ReplicaLost: the job is unknown.
        """
        job = self._jobs.get(request_id)
        if job is None:
            raise ReplicaLost("the replica does not know the request any more")
        job.seen = time.monotonic()
        job.partial = [each for each in job.partial if each[0] > number]
        if job.number <= number:
            job.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.report_s):
                    await job.changed.wait()
        latest: Any = job.latest
        if job.number <= number or latest is None:
            return None
        if latest.is_last and self._jobs.get(request_id) is job:
            del self._jobs[request_id]
        return replace(latest, partial=[part for _, part in job.partial])

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            oldest = time.monotonic() - self._timing.consumer_lease_s
            late = [request_id for request_id, job in self._jobs.items() if job.seen < oldest]
            for request_id in late:
                self.forget(request_id)
            if late:
                logger.warning("nobody asked for %d jobs: they end", len(late))
                self._abort(tuple(late))
