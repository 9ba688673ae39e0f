"""The engine of a model that does one job after the other, on one thread. Between two steps it takes commands, and ends
a job that is not wanted any more or whose deadline has passed.

A text model is another process on the same device. The device computes the work of both processes by turns: Metal and
CUDA command buffer by command buffer, of which a step of a job has many, and an operating system its threads. So no
text waits for a job, and jobs need not yield to them here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import mlx.core as mx

from ....cluster.errors import (
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    ReplicaLeaves,
    RequestAborted,
    SatchelError,
    Unavailable,
)
from ...model_files.identity.model_identity import ModelIdentity
from ..device.device_errors import DeviceFailed, on_device
from ..scheduling.fairness import takes_too_much
from .pace import JobPace
from .queue import SerialJob, SerialQueue

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often deadlines of waiting requests are looked at while no job is done."""

GIVEN_BYTES_MAX = 2**29
"""At most this many bytes of what requests bring (pixels, samples) are in a replica's memory."""

Refused = Callable[[SatchelError | None], None]

Paused = Callable[[int], None]
"""Called between two steps of a job, with how many are done. What it raises ends the job."""


class JobEnded(BaseException):
    """The current job has been ended. Not an `Exception`: libraries must not handle it."""


class JobRequest(Protocol):
    """What a request for a job says; as in `GenerateRequest`."""

    @property
    def request_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def tenant(self) -> str: ...
    @property
    def flow(self) -> str: ...


@dataclass
class JobCounters:
    """Totals since the engine started."""

    requests: int = 0
    device_failures: int = 0


Asked = TypeVar("Asked", bound=JobRequest)


class JobEngine(ABC, Generic[Asked]):
    """Does jobs.

    Args:
        waiting_max: how many requests may wait.
        memory_bytes: of temporary memory for one job.
        send: takes how far a job is, on the engine's thread: the request's id, and an update.
        claim: claims memory before a job needs more than any before it, given the bytes of temporary memory in all, on
            the engine's thread.
        given_bytes_max: the bytes of what requests bring, of all requests together. If there is no other, one request
            may have more.

    Attributes:
        counters: each kind of engine has its own.
        takes: the class of requests.
        jobs, whole, brought: what a job, the request's result and what requests bring are called in messages.
        does: what the model does, such as "makes images".
        weights_bytes, created: of the model's files: their weights as stored, and when the oldest was written, Unix
            time.
    """

    counters: JobCounters
    takes: ClassVar[type]
    jobs: ClassVar[str]
    whole: ClassVar[str]
    brought: ClassVar[str]
    does: str

    def __init__(
        self,
        identity: ModelIdentity,
        waiting_max: int,
        memory_bytes: int,
        send: Callable[[str, Any], None],
        claim: Callable[[int], None] = lambda nbytes: None,
        *,
        given_bytes_max: int = GIVEN_BYTES_MAX,
    ) -> None:
        self.identity = identity
        self.pace = JobPace()
        self.queue = SerialQueue(waiting_max)
        self.memory_bytes, self.given_bytes_max = memory_bytes, given_bytes_max
        self.temporary_bytes = 0
        """The most temporary memory of loading and of a job so far, in bytes."""
        self.weights_bytes = self.created = 0
        self._predicted = 0
        self._send, self._claim = send, claim
        self._asked: dict[str, Asked] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed: SatchelError | None = None
        self._stopped = threading.Event()
        self._idle_since = time.monotonic()
        self._began, self._steps = 0.0, 0
        self._uncharged = False
        """Whether a job is computed, and none of its steps has been charged yet."""

    # What a kind of job is.

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Fields of `ModelInfo` that say what the model does."""

    @property
    @abstractmethod
    def totals(self) -> dict[str, Any]:
        """Fields of `ReplicaStats` that only such models count."""

    @abstractmethod
    def refusal(self, request: Asked) -> SatchelError | None:
        """Returns why the model does not take a request; None if it does."""

    @abstractmethod
    def cost(self, request: Asked) -> tuple[int, int]:
        """Returns the tokens that a step of a job costs, and its steps."""

    @abstractmethod
    def size(self, request: Asked) -> int:
        """Returns what a job's memory grows with."""

    @abstractmethod
    def given_bytes(self, request: Asked) -> int:
        """Returns the bytes of what a request brings."""

    @abstractmethod
    def compute(self, request: Asked) -> Any:
        """Does the job, with `paused` called between its steps, and returns the last update. The job has begun, and is
        the current one."""

    @abstractmethod
    def failed(self, error: SatchelError) -> Any:
        """Returns the update that ends a job with an error."""

    @abstractmethod
    def too_large(self, needed: int) -> InvalidRequest:
        """Returns the refusal of a job that needs so many bytes."""

    def tell(self, request_id: str) -> None:
        """Sends how far the current job is, after each step."""

    # Called from any thread.

    def submit(self, request: Asked, reply: Refused) -> None:
        """Queues a request. `reply` gets None if it is accepted, else the refusal; it is called on the engine's
        thread."""
        self.call(lambda: reply(self._accept(request)))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Ends requests before the next step. Unknown ids are ignored."""

        def end() -> None:
            for request_id in request_ids:
                self._end(request_id, RequestAborted("the request was aborted"))

        self.call(end)

    def call(self, action: Callable[[], None]) -> None:
        """Runs `action` on the engine's thread between two steps."""
        self._inbox.put(action)

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones continue."""
        self._closed = Draining("the replica is shutting down")

    def end_all(self, *, leaves: bool = False) -> None:
        """Ends every request with an error that says the server is shutting down, or that the node `leaves`."""

        def end() -> None:
            why = ReplicaLeaves("the node is leaving") if leaves else Draining("the server is shutting down")
            for request_id in self.queue.request_ids:
                self._end(request_id, why)

        self.call(end)

    def stop(self) -> None:
        """Ends `run` before the next job."""
        self._stopped.set()
        self.call(lambda: None)

    @property
    def needed_bytes(self) -> int:
        """What the engine needs besides the weights now, in bytes: temporary memory, as predicted for the current job
        if that is more than any has taken, and what requests bring."""
        return max(self.temporary_bytes, self._predicted) + self.given_bytes_max

    @property
    def idle_s(self) -> float:
        """For how long there has been no request."""
        return 0.0 if self.queue.request_ids else time.monotonic() - self._idle_since

    # The engine's thread.

    def run(self) -> None:
        """Does jobs until `stop`."""
        while not self._stopped.is_set():
            self._take_commands(wait=not self.queue.waiting)
            self._end_expired()
            job = self.queue.begin()
            if job is not None:
                self._do(job)
                self._idle_since = time.monotonic()

    def _take_commands(self, *, wait: bool = False) -> None:
        try:
            command = self._inbox.get(block=wait, timeout=POLL_S if wait else None)
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _accept(self, request: Asked) -> SatchelError | None:
        """Queues a request, or returns its refusal."""
        if self._closed is not None:
            return self._closed
        if (refused := self.refusal(request) or self._over_memory(request)) is not None:
            return refused
        if request.request_id in self.queue:
            return Unavailable(f"request {request.request_id} has not left yet")
        reason = self.queue.refusal(request.tenant, request.flow)
        if reason == "full":
            return QueueFull(f"the queue is full ({self.queue.waiting_max} {self.jobs} wait)")
        if reason == "full_for_it":
            return QueueFull("the queue is full for this caller: the rest of it is reserved for others")
        if (refused := self._no_room_for(request)) is not None:
            return refused
        self._asked[request.request_id] = request
        deadline, (tokens, steps) = time.monotonic() + request.deadline_s, self.cost(request)
        job = SerialJob(request.request_id, tokens, steps, request.priority, deadline, request.tenant, request.flow)
        self.queue.add(job)
        self.counters.requests += 1
        return None

    def _no_room_for(self, request: Asked) -> QueueFull | None:
        """Returns the refusal of a request that brings more than there is room for, or than its tenant and flow may
        have here; None if there is room."""
        given, held = self.given_bytes(request), [(each, self.given_bytes(each)) for each in self._asked.values()]
        if not given or not (others := sum(nbytes for _, nbytes in held)):
            return None
        if others + given > self.given_bytes_max:
            return QueueFull(f"{self.brought} take {others >> 20} MiB already")
        own = [(each.flow, nbytes) for each, nbytes in held if each.tenant == request.tenant]
        # One file may be a large part of the room, so what it leaves is looked at. A tenant may have one in any case.
        of_flow = given + sum(nbytes for flow, nbytes in own if flow == request.flow)
        of_tenant = given + sum(nbytes for _, nbytes in own)
        if of_tenant > given and takes_too_much(of_flow, of_tenant, self.given_bytes_max - others - given):
            return QueueFull(f"{self.brought} take {others >> 20} MiB already: the rest is reserved for other callers")
        return None

    def _over_memory(self, request: Asked) -> InvalidRequest | None:
        """Returns the refusal of a job that would not fit into memory; None if it does, or if that is not known."""
        needed = self.pace.job_bytes(self.size(request))
        return None if needed <= self.memory_bytes else self.too_large(needed)

    def _do(self, job: SerialJob) -> None:
        request = self._asked[job.request_id]
        # Another model may have been loaded since it was accepted.
        if (refused := self._over_memory(request)) is not None:
            return self._end(job.request_id, refused)
        self._predicted = self.pace.job_bytes(self.size(request))
        try:
            self._claim(self.needed_bytes)
            self._compute(job, request)
        finally:
            self._predicted, self._uncharged = 0, False

    def _compute(self, job: SerialJob, request: Asked) -> None:
        self._steps, self._began, self._uncharged = 0, time.perf_counter(), True
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        try:
            self.tell(job.request_id)
            with on_device():
                last = self.compute(request)
        except JobEnded:
            return
        except DeviceFailed as error:
            logger.exception("the device failed at %s", job.request_id)
            self.counters.device_failures += 1
            mx.clear_cache()
            self._end(job.request_id, GenerationFailed(f"the device failed while the {self.whole} was made: {error}"))
        except SatchelError as error:
            self._end(job.request_id, error)
        except (Exception, SystemExit) as error:
            logger.exception("request %s failed", job.request_id)
            self._end(job.request_id, GenerationFailed(f"the {self.whole} was not made: {type(error).__name__}"))
        else:
            self.temporary_bytes = max(self.temporary_bytes, mx.get_peak_memory() - before)
            self.pace.note_job(self.size(request), max(0, mx.get_peak_memory() - before))
            self._send(job.request_id, last)
            self._forget(job.request_id)

    def paused(self, steps: int) -> None:
        """Between two steps of the current job, of which so many are done.

        Raises:
            JobEnded: the job has been ended.
        """
        job = self.queue.current
        now = time.perf_counter()
        if job is not None and steps > self._steps:
            self.note_steps(job, steps - self._steps, now - self._began)
            new, self._steps, self._began = steps - self._steps, steps, now
            self._charge(new)
            self.tell(job.request_id)
        self._take_commands()
        self._end_expired()
        if job is None or self.queue.current is not job:
            raise JobEnded

    def rest_done(self) -> None:
        """Notes that the current job is done, with the steps of which `paused` was not told."""
        job = self.queue.current
        if job is not None and job.steps:
            self.note_steps(job, job.steps, time.perf_counter() - self._began)
            self._charge(job.steps)

    def note_steps(self, job: SerialJob, new: int, seconds: float) -> None:
        """Notes new steps of the current job, which took so long together."""
        self.pace.note_step(job.tokens * new, seconds)

    def _charge(self, steps: int) -> None:
        """Charges steps of the current job."""
        self._uncharged = False
        for _ in range(steps):
            self.queue.step()

    def _end_expired(self) -> None:
        for request_id in self.queue.expired(time.monotonic()):
            self._end(request_id, DeadlineExceeded("the request's deadline has passed"))

    def _end(self, request_id: str, error: SatchelError) -> None:
        """Ends a request with an error; unknown ones are ignored."""
        if request_id in self.queue:
            current = self.queue.current
            if self._uncharged and current is not None and current.request_id == request_id:
                # It ends within its first step, which has been computed in part.
                self._charge(1)
            self._forget(request_id)
            self._send(request_id, self.failed(error))

    def _forget(self, request_id: str) -> None:
        self.queue.remove(request_id)
        del self._asked[request_id]
