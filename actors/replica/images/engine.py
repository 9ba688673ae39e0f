"""The engine of a model that makes images: one image after the other, on one thread. Between two steps it takes
commands, and ends an image that is not wanted any more or whose deadline has passed.

A text model is another process on the same device. The device computes the work of both processes by turns: Metal and
CUDA command buffer by command buffer, of which a step of an image has many, and an operating system its threads. So no
text waits for an image, and images need not yield to them here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
from ...protocol.replica_messages import ImageRequest, ImageUpdate, Pixels, image_refusal, image_tokens
from ..device.device_errors import DeviceFailed, on_device
from .pipeline import ImagePipeline
from .queue import ImageJob, ImageQueue

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often deadlines of waiting requests are looked at while no image is made."""

PACE_WEIGHT = 0.2
"""The weight of the newest step in the measured rate."""

GIVEN_BYTES_MAX = 2**29
"""At most this many bytes of pixels of images that are edited are in a replica's memory: about 40 of the largest."""

FARTHEST = 4
"""How many times as many patches as the largest image so far has the largest one whose memory is predicted from it."""

Refused = Callable[[SatchelError | None], None]
Send = Callable[[str, ImageUpdate], None]


class _Ended(BaseException):
    """The current image has been ended. Not an `Exception`: pipelines must not handle it."""


@dataclass
class ImageCounters:
    """Totals since the engine started."""

    requests: int = 0
    images: int = 0
    steps: int = 0
    device_failures: int = 0


class ImagePace:
    """How fast images are made.

    Attributes:
        tokens_per_s: patches of 16 x 16 pixels through one step, per second; 0 before the first step.
        step_s: of the latest step; None before the first one.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.step_s: float | None = None
        self._largest: tuple[int, int] | None = None
        """The patches and the temporary bytes of the largest image so far."""

    def note_step(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-9)
        known = self.tokens_per_s
        self.tokens_per_s = known + PACE_WEIGHT * (rate - known) if known else rate
        self.step_s = seconds

    def note_image(self, tokens: int, temporary_bytes: int) -> None:
        """Notes the memory of an image of so many patches, in bytes. Those that were given count too."""
        self._largest = min(self._largest or (0, 0), (tokens, temporary_bytes), key=lambda each: (-each[0], each[1]))

    def image_bytes(self, tokens: int) -> int:
        """Predicts the temporary memory of an image of so many patches, in bytes; 0 before the first image.

        A small image says little of a large one, for a part of its memory does not grow. So the prediction grows with
        the patches up to `FARTHEST` times those of the largest image so far, and no further.
        """
        if self._largest is None:
            return 0
        most, nbytes = self._largest
        return nbytes * min(tokens, FARTHEST * most) // most


class ImageEngine:
    """Makes images.

    Args:
        waiting_max: how many requests may wait.
        memory_bytes: of temporary memory for one image.
        claim: claims memory before an image needs more than any before it, given the bytes of temporary memory in all,
            on the engine's thread.
        given_bytes_max: the bytes of the pixels of the images that are edited, of all requests together. If there is no
            other, one request may have more.
        send: takes how far an image is, on the engine's thread.
    """

    def __init__(
        self,
        pipeline: ImagePipeline,
        identity: ModelIdentity,
        waiting_max: int,
        memory_bytes: int,
        send: Send,
        claim: Callable[[int], None] = lambda nbytes: None,
        *,
        given_bytes_max: int = GIVEN_BYTES_MAX,
    ) -> None:
        self.pipeline, self.identity = pipeline, identity
        self.counters, self.pace = ImageCounters(), ImagePace()
        self.queue = ImageQueue(waiting_max)
        self.memory_bytes, self.given_bytes_max = memory_bytes, given_bytes_max
        self.temporary_bytes = 0
        """The most temporary memory of loading and of an image so far, in bytes."""
        self._predicted = 0
        self._send, self._claim = send, claim
        self._asked: dict[str, ImageRequest] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed: SatchelError | None = None
        self._stopped = threading.Event()
        self._idle_since = time.monotonic()
        self._began, self._steps = 0.0, 0

    # Called from any thread.

    def submit(self, request: ImageRequest, reply: Refused) -> None:
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
        """Ends `run` before the next image."""
        self._stopped.set()
        self.call(lambda: None)

    @property
    def needed_bytes(self) -> int:
        """What the engine needs besides the weights now, in bytes: temporary memory, as predicted for the current image
        if that is more than any has taken, and the images that are edited."""
        return max(self.temporary_bytes, self._predicted) + self.given_bytes_max

    @property
    def idle_s(self) -> float:
        """For how long there has been no request."""
        return 0.0 if self.queue.request_ids else time.monotonic() - self._idle_since

    # The engine's thread.

    def run(self) -> None:
        """Makes images until `stop`."""
        while not self._stopped.is_set():
            self._take_commands(wait=not self.queue.waiting)
            self._end_expired()
            job = self.queue.begin()
            if job is not None:
                self._make(job)
                self._idle_since = time.monotonic()

    def _take_commands(self, *, wait: bool = False) -> None:
        try:
            command = self._inbox.get(block=wait, timeout=POLL_S if wait else None)
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _accept(self, request: ImageRequest) -> SatchelError | None:
        """Queues a request, or returns its refusal."""
        tokens, steps = image_tokens(request.width, request.height), self.pipeline.steps_of(request)
        if self._closed is not None:
            return self._closed
        if (refusal := image_refusal(self.pipeline.info, request, steps)) is not None:
            return InvalidRequest(refusal[1], param=refusal[0])
        if (refused := self._too_large(request)) is not None:
            return refused
        if request.request_id in self.queue:
            return Unavailable(f"request {request.request_id} has not left yet")
        reason = self.queue.refusal(request.tenant, request.flow)
        if reason == "full":
            return QueueFull(f"the queue is full ({self.queue.waiting_max} images wait)")
        if reason == "full_for_it":
            return QueueFull("the queue is full for this caller: the rest of it is reserved for others")
        others = sum(map(_given_bytes, self._asked.values()))
        if others and (given := _given_bytes(request)) and others + given > self.given_bytes_max:
            return QueueFull(f"the images of edits that wait take {others >> 20} MiB already")
        self._asked[request.request_id] = request
        deadline = time.monotonic() + request.deadline_s
        job = ImageJob(request.request_id, tokens, steps, request.priority, deadline, request.tenant, request.flow)
        self.queue.add(job)
        self.counters.requests += 1
        return None

    def _too_large(self, request: ImageRequest) -> InvalidRequest | None:
        """Returns the refusal of an image that would not fit into memory; None if it does, or if that is not known."""
        needed = self.pace.image_bytes(_patches(request))
        if needed <= self.memory_bytes:
            return None
        message = f"size: an image of this size takes about {needed >> 20} MiB of memory beside the model's weights"
        return InvalidRequest(f"{message}; {self.memory_bytes >> 20} MiB are left here", param="size")

    def _make(self, job: ImageJob) -> None:
        request = self._asked[job.request_id]
        # Another model may have been loaded since it was accepted.
        if (refused := self._too_large(request)) is not None:
            return self._end(job.request_id, refused)
        self._predicted = self.pace.image_bytes(_patches(request))
        try:
            self._claim(self.needed_bytes)
            self._compute(job, request)
        finally:
            self._predicted = 0

    def _compute(self, job: ImageJob, request: ImageRequest) -> None:
        self._steps, self._began = 0, time.perf_counter()
        mx.reset_peak_memory()
        before = mx.get_active_memory()

        def partial(pixels: Pixels) -> None:
            self._tell(job.request_id, partial=[pixels])

        try:
            self._tell(job.request_id)
            with on_device():
                made = self.pipeline.make(request, self._paused, partial if request.partial_images else None)
        except _Ended:
            return
        except DeviceFailed as error:
            logger.exception("the device failed at %s", job.request_id)
            self.counters.device_failures += 1
            mx.clear_cache()
            self._end(job.request_id, GenerationFailed(f"the device failed while the image was made: {error}"))
        except SatchelError as error:
            self._end(job.request_id, error)
        except (Exception, SystemExit) as error:
            logger.exception("request %s failed", job.request_id)
            self._end(job.request_id, GenerationFailed(f"the image was not made: {type(error).__name__}"))
        else:
            self.temporary_bytes = max(self.temporary_bytes, mx.get_peak_memory() - before)
            self.pace.note_image(_patches(request), max(0, mx.get_peak_memory() - before))
            self.counters.images += 1
            self._tell(job.request_id, image=made.pixels, prompt_tokens=made.prompt_tokens)
            self._forget(job.request_id)

    def _paused(self, steps: int) -> None:
        """Between two steps.

        Raises:
            _Ended: the image has been ended.
        """
        job = self.queue.current
        now = time.perf_counter()
        if job is not None and steps > self._steps:
            if self._steps:
                # The first step also waits for what came before it.
                self.pace.note_step(job.tokens, now - self._began)
            self.counters.steps += steps - self._steps
            self._steps, self._began = steps, now
            self.queue.step()
            self._tell(job.request_id)
        self._take_commands()
        self._end_expired()
        if job is None or self.queue.current is not job:
            raise _Ended

    def _tell(self, request_id: str, **new: object) -> None:
        """Sends how far the current image is."""
        request = self._asked[request_id]
        self._send(request_id, ImageUpdate(0, self._steps, self.pipeline.steps_of(request), **new))  # type: ignore[arg-type]

    def _end_expired(self) -> None:
        for request_id in self.queue.expired(time.monotonic()):
            self._end(request_id, DeadlineExceeded("the request's deadline has passed"))

    def _end(self, request_id: str, error: SatchelError) -> None:
        """Ends a request with an error; unknown ones are ignored."""
        if request_id in self.queue:
            self._forget(request_id)
            self._send(request_id, ImageUpdate(0, 0, 0, error=error.to_wire()))

    def _forget(self, request_id: str) -> None:
        self.queue.remove(request_id)
        del self._asked[request_id]


def _patches(request: ImageRequest) -> int:
    """Returns the patches of an image and of those that are given for it."""
    return sum(image_tokens(each.width, each.height) for each in [request, *request.images])


def _given_bytes(request: ImageRequest) -> int:
    return sum(len(each.data) for each in request.images)
