"""Who waits for an image gets all that is new, and an image for which nobody asks is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from satchel.actors.protocol.replica_messages import ImageRequest, ImageUpdate, Pixels
from satchel.actors.replica.jobs.progress import JobProgress, queue_job
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import QueueFull, ReplicaLost, SatchelError, Unavailable

SOON = replace(USUAL, report_s=0.02, consumer_lease_s=0.05)
FIRST, SECOND = Pixels(1, 1, b"abc"), Pixels(1, 1, b"def")
REQUEST = ImageRequest("a", "m", "p", 16, 16, 0)


class Engine:
    """Takes or refuses; with no answer until `reply` is called if `silent`."""

    def __init__(self, refusal: SatchelError | None = None, *, silent: bool = False) -> None:
        self.refusal, self.silent, self.aborted = refusal, silent, list[str]()
        self.reply: Callable[[SatchelError | None], None] = lambda refusal: None

    def submit(self, request: ImageRequest, reply: Callable[[SatchelError | None], None]) -> None:
        self.reply = reply
        if not self.silent:
            reply(self.refusal)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        self.aborted += request_ids


async def test_updates_are_joined_until_they_are_fetched():
    progress = JobProgress(lambda ids: None, USUAL)
    await queue_job(Engine(), progress, REQUEST)
    progress.deliver("a", ImageUpdate(0, 1, 4, partial=[FIRST]))
    progress.deliver("a", ImageUpdate(0, 2, 4))
    progress.deliver("a", ImageUpdate(0, 2, 4, partial=[SECOND]))
    update = await progress.next_update("a", 0)
    assert update is not None
    assert (update.step, update.partial) == (2, [FIRST, SECOND])
    # An answer that was lost on its way is asked for again.
    assert await progress.next_update("a", 0) == update
    progress.deliver("a", ImageUpdate(0, 4, 4, image=FIRST, prompt_tokens=5))
    last = await progress.next_update("a", update.number)
    assert last is not None and (last.partial, last.image, last.prompt_tokens) == ([], FIRST, 5)
    with pytest.raises(ReplicaLost):
        await progress.next_update("a", last.number)


async def test_nothing_new_is_none_after_a_moment_and_news_come_at_once():
    progress = JobProgress(lambda ids: None, replace(USUAL, report_s=0.02))
    progress.begin("a")
    assert await progress.next_update("a", 0) is None
    slow = JobProgress(lambda ids: None, replace(USUAL, report_s=20.0))
    slow.begin("a")
    waits = asyncio.create_task(slow.next_update("a", 0))
    await asyncio.sleep(0)
    slow.deliver("a", ImageUpdate(0, 1, 4))
    update = await asyncio.wait_for(waits, 10)
    assert update is not None and update.step == 1


async def test_an_image_for_which_nobody_asks_is_given_up():
    aborted: list[str] = []
    progress = JobProgress(aborted.extend, SOON)
    await queue_job(Engine(), progress, REQUEST)
    async with asyncio.timeout(10):
        while aborted != ["a"]:
            await asyncio.sleep(0.05)
    with pytest.raises(ReplicaLost):
        await progress.next_update("a", 0)
    progress.deliver("a", ImageUpdate(0, 1, 4))


async def test_an_image_that_is_accepted_late_is_not_given_up_before():
    aborted: list[str] = []
    progress, engine = JobProgress(aborted.extend, SOON), Engine(silent=True)
    asks = asyncio.create_task(queue_job(engine, progress, REQUEST))
    # The reaper, which comes once a second, comes once.
    await asyncio.sleep(1.5)
    assert not aborted and not asks.done()
    engine.reply(None)
    await asks
    assert await progress.next_update("a", 0) is None


async def test_a_refusal_is_raised_and_leaves_nothing():
    progress = JobProgress(lambda ids: None, USUAL)
    with pytest.raises(QueueFull):
        await queue_job(Engine(QueueFull("full")), progress, REQUEST)
    await queue_job(Engine(), progress, REQUEST)
    with pytest.raises(Unavailable, match="has not left"):
        await queue_job(Engine(), progress, REQUEST)


async def test_a_caller_who_hangs_up_while_it_is_queued_ends_it():
    progress, engine = JobProgress(lambda ids: None, USUAL), Engine(silent=True)
    asks = asyncio.create_task(queue_job(engine, progress, REQUEST))
    await asyncio.sleep(0)
    asks.cancel()
    await asyncio.wait({asks})
    assert asks.cancelled() and engine.aborted == ["a"]
    assert progress.begin("a")
