"""The consumers of a replica's tokens. A *consumer* is a process that submits sequences and gets frames with the
updates of all its sequences. If it stops asking, its lease runs out and its sequences are removed.

A consumer on this machine asks ahead for many frames (`rpc/local.py`). Then the thread that delivers updates, which is
the engine's, also sends them: a step costs it one message a consumer, and wakes no other thread of this process. If the
consumer is too slow to ask, what comes meanwhile is merged into one frame. Other consumers ask for each frame, on the
event loop.

Each frame is the answer of a call, not an item of a generator: before a generator ends Ray waits on the event loop
until every item is acknowledged, so one reader that is cut off would block all others for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ....cluster.config.timing import Timing
from ...protocol.replica_messages import SequenceUpdate
from ...protocol.updates import merged
from ...rpc.codec import encode
from ...rpc.local import AHEAD

logger = logging.getLogger(__name__)


class FrameAnswers(Protocol):
    """Where the frames go that a consumer has asked for ahead. Equal for one connection of it."""

    def send(self, answer: bytes) -> bool:
        """Sends the next frame, from any thread. Returns False if the connection has ended."""
        ...


@dataclass
class _Consumer:
    """One reader of frames. `updates` are those that it has not been given yet, bounded by its sequences' `max_tokens`;
    `frames` counts the frames that it was given; `seen` is the time of its last call.

    If it asks ahead, frames go to `answers`, and `ends` is the number of the first one that it has not asked for;
    `given` is the time of the last one. Then there are `updates` only if it has not asked for the next frame.

    If `broken`, some of its updates could not be sent. So its sequences cannot be trusted, and end with its lease."""

    seen: float
    updates: dict[str, SequenceUpdate] = field(default_factory=dict)
    sequences: set[str] = field(default_factory=set)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    frames: int = 0
    answers: FrameAnswers | None = None
    ends: int = 0
    given: float = 0.0
    woken: bool = False
    beats: bool = False
    broken: bool = False


class Consumers:
    """The consumers of one replica. Used on the event loop, but for `deliver`.

    Args:
        abort: aborts sequences, by request id.
        timing: after `report_s` without updates an empty frame is sent, because Ray takes 14 s to notice that a
            machine is gone.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]], timing: Timing) -> None:
        self._abort, self._timing = abort, timing
        self._consumers: dict[str, _Consumer] = {}
        self._lock = threading.Lock()
        """Held while consumers change, but for their sets of sequences."""
        self._loop = asyncio.get_running_loop()
        self._reaper = self._loop.create_task(self._reap())

    def sequences(self, consumer: str) -> set[str]:
        """Returns the ids of the consumer's sequences; callers add and remove ids in it."""
        return self._consumer(consumer).sequences

    def forget_sequences(self, request_ids: Iterable[str]) -> None:
        """Removes sequences that were aborted before the engine knew them."""
        ids = set(request_ids)
        for state in self._consumers.values():
            state.sequences -= ids

    async def next_frame(self, consumer: str, number: int) -> list[SequenceUpdate] | None:
        """Waits for updates of the consumer's sequences, and renews its lease. Nothing is sent ahead any more.

        Args:
            number: how many frames it has received. 0 registers it.

        Returns:
            None if the consumer is unknown here, or no longer known, or if a frame was lost on the way: then its
            sequences cannot be trusted. An empty list if nothing is new within `report_s`.
        """
        state = self._consumer(consumer) if number == 0 else self._consumers.get(consumer)
        if state is None:
            return None
        with self._lock:
            if state.broken:
                return None
            state.seen, state.answers = time.monotonic(), None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.report_s):
                await state.ready.wait()
        with self._lock:
            if self._consumers.get(consumer) is not state or state.broken or state.frames != number:
                return None
            state.frames += 1
            state.ready.clear()
            state.woken = False
            updates, state.updates = state.updates, {}
        return list(updates.values())

    def send_ahead(self, consumer: str, number: int, answers: FrameAnswers) -> None:
        """As `next_frame`, for the next `AHEAD` frames: each is sent when there are updates, or after `report_s`
        without any. The frames before may still be on their way, if they were sent to equal `answers`."""
        state = self._consumer(consumer) if number == 0 else self._consumers.get(consumer)
        with self._lock:
            if state is None or state.broken or not self._follows(state, number, answers):
                answers.send(encode(None))
                return
            now = time.monotonic()
            if answers != state.answers:
                state.answers, state.given = answers, now
            state.seen, state.ends = now, number + AHEAD
            if state.updates and self._give(state, [*state.updates.values()]):
                state.updates = {}
        if not state.beats:
            state.beats = True
            self._loop.call_later(self._timing.report_s, self._beat, consumer, state)

    def _follows(self, consumer: _Consumer, number: int, answers: FrameAnswers) -> bool:
        """Whether a consumer that has received so many frames has lost none."""
        return number <= consumer.frames if answers == consumer.answers else number == consumer.frames

    def _beat(self, consumer: str, state: _Consumer) -> None:
        """Sends an empty frame if no other was sent for a while."""
        with self._lock:
            if state.answers is None or self._consumers.get(consumer) is not state:
                state.beats = False
                return
            left_s = state.given + self._timing.report_s - time.monotonic()
            if left_s <= 0:
                self._give(state, [])
                left_s = self._timing.report_s
        self._loop.call_later(left_s, self._beat, consumer, state)

    def deliver(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        """Sends updates, by consumer, or adds them to the next frames. Called on any thread. If those of a consumer
        cannot be sent, only that consumer ends."""
        with self._lock:
            for name, news in updates.items():
                consumer = self._consumers.get(name)
                if consumer is None or consumer.broken:
                    continue
                try:
                    self._take(consumer, news)
                except Exception:
                    # The engine's thread must survive it, or the process ends.
                    logger.exception("updates could not be sent to consumer %s", name)
                    self._break(consumer)

    def _break(self, consumer: _Consumer) -> None:
        consumer.broken, consumer.seen = True, -math.inf
        if consumer.answers is not None:
            consumer.answers.send(encode(None))
            consumer.answers = None
        self._loop.call_soon_threadsafe(consumer.ready.set)

    def _take(self, consumer: _Consumer, news: list[SequenceUpdate]) -> None:
        for update in news:
            if update.finish is not None:
                consumer.sequences.discard(update.request_id)
        if not consumer.updates and self._give(consumer, news):
            return
        for update in news:
            before = consumer.updates.get(update.request_id)
            consumer.updates[update.request_id] = update if before is None else merged(before, update)
        if not consumer.woken:
            consumer.woken = True
            self._loop.call_soon_threadsafe(consumer.ready.set)

    def _give(self, consumer: _Consumer, frame: list[SequenceUpdate]) -> bool:
        """Sends a frame that was asked for ahead. Returns False if none was."""
        if consumer.answers is None or consumer.frames >= consumer.ends:
            return False
        if not consumer.answers.send(encode(frame)):
            consumer.answers = None
            return False
        consumer.frames += 1
        consumer.given = time.monotonic()
        return True

    def _consumer(self, name: str) -> _Consumer:
        with self._lock:
            state = self._consumers.get(name)
            if state is None:
                state = self._consumers[name] = _Consumer(time.monotonic())
            return state

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            lease_s = self._timing.consumer_lease_s
            for name in [name for name, state in self._consumers.items() if now - state.seen > lease_s]:
                with self._lock:
                    state = self._consumers.pop(name)
                    if state.answers is not None:
                        state.answers.send(encode(None))
                logger.warning("the lease of consumer %s ran out; its %d sequences end", name, len(state.sequences))
                sequences = list(state.sequences)
                state.sequences.clear()
                await self._abort(sequences)
                state.ready.set()
