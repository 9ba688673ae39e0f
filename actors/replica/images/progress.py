"""Requests for images on their way to the engine, and how far each is, for those who wait for it.

Used on the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from ....cluster.config.timing import Timing
from ....cluster.errors import ReplicaLost, SatchelError, Unavailable
from ...protocol.replica_messages import ImageRequest, ImageUpdate, Pixels

logger = logging.getLogger(__name__)


class Submits(Protocol):
    """What makes images: `ImageEngine`, which is not imported where the event loop runs."""

    def submit(self, request: ImageRequest, reply: Callable[[SatchelError | None], None]) -> None: ...

    def abort(self, request_ids: tuple[str, ...]) -> None: ...


async def queue_image(engine: Submits, progress: ImageProgress, request: ImageRequest) -> None:
    """Queues an image. If this is cancelled, it is ended.

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
class _Image:
    """One image. `seen`: when it was last asked for; never before it is accepted. `partial` has the partial images that
    were not fetched yet, with the numbers of their updates."""

    seen: float = float("inf")
    latest: ImageUpdate = field(default_factory=lambda: ImageUpdate(0, -1, 0))
    partial: list[tuple[int, Pixels]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ImageProgress:
    """The images that are made or wait.

    Args:
        abort: ends requests.
        timing: an image is ended if nobody has asked for it for `consumer_lease_s` since it was accepted. The engine
            may accept it late, for it takes commands between steps alone.
    """

    def __init__(self, abort: Callable[[tuple[str, ...]], None], timing: Timing) -> None:
        self._abort, self._timing = abort, timing
        self._images: dict[str, _Image] = {}
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def begin(self, request_id: str) -> bool:
        """Notes that somebody asks for an image. Returns False if it is here already."""
        if request_id in self._images:
            return False
        self._images[request_id] = _Image()
        return True

    def accept(self, request_id: str) -> None:
        """Notes that the engine has accepted an image: its lease begins."""
        if (image := self._images.get(request_id)) is not None:
            image.seen = time.monotonic()

    def forget(self, request_id: str) -> None:
        """Forgets an image; unknown ones are ignored."""
        if (image := self._images.pop(request_id, None)) is not None:
            image.changed.set()

    def deliver(self, request_id: str, update: ImageUpdate) -> None:
        """Takes what is new of an image; its number is ignored."""
        image = self._images.get(request_id)
        if image is None:
            return
        number = image.latest.number + 1
        image.partial += [(number, pixels) for pixels in update.partial]
        image.latest = replace(update, number=number, partial=[])
        image.changed.set()

    async def next_update(self, request_id: str, number: int) -> ImageUpdate | None:
        """Waits for more than update `number` of an image, and renews the lease.

        Returns:
            All that is new; None if that is nothing within `timing.report_s`.

        Raises:
            ReplicaLost: the image is unknown.
        """
        image = self._images.get(request_id)
        if image is None:
            raise ReplicaLost("the replica does not know the image any more")
        image.seen = time.monotonic()
        image.partial = [each for each in image.partial if each[0] > number]
        if image.latest.number <= number:
            image.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.report_s):
                    await image.changed.wait()
        if image.latest.number <= number:
            return None
        if image.latest.is_last and self._images.get(request_id) is image:
            del self._images[request_id]
        return replace(image.latest, partial=[pixels for _, pixels in image.partial])

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            oldest = time.monotonic() - self._timing.consumer_lease_s
            late = [request_id for request_id, image in self._images.items() if image.seen < oldest]
            for request_id in late:
                self.forget(request_id)
            if late:
                logger.warning("nobody asked for %d images: they end", len(late))
                self._abort(tuple(late))
