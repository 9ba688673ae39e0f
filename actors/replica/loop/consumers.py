"""The consumers of a replica's tokens. A *consumer* is a process that submits sequences and polls frames with the
updates of all its sequences. If it stops polling, its lease runs out and its sequences are removed. Everything here
runs on one event loop.

Each frame is the answer of a call, not an item of a generator: before a generator ends Ray waits on the event loop
until every item is acknowledged, so one reader that is cut off would block all others for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ....cluster.config.timing import Timing
from ...protocol.replica_messages import SequenceUpdate

logger = logging.getLogger(__name__)


@dataclass
class _Consumer:
    """One reader of frames. `updates` are those that it has not fetched yet, bounded by its sequences' `max_tokens`;
    `frames` counts the frames that it was given; `seen` is the time of its last call."""

    seen: float
    updates: dict[str, SequenceUpdate] = field(default_factory=dict)
    sequences: set[str] = field(default_factory=set)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    frames: int = 0


class Consumers:
    """The consumers of one replica.

    Args:
        abort: aborts sequences, by request id.
        timing: after `report_s` without updates an empty frame is sent, because Ray takes 14 s to notice that a
            machine is gone.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]], timing: Timing) -> None:
        self._abort, self._timing = abort, timing
        self._consumers: dict[str, _Consumer] = {}
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def sequences(self, consumer: str) -> set[str]:
        """Returns the ids of the consumer's sequences; callers add and remove ids in it."""
        return self._consumer(consumer).sequences

    def forget_sequences(self, request_ids: Iterable[str]) -> None:
        """Removes sequences that were aborted before the engine knew them."""
        ids = set(request_ids)
        for state in self._consumers.values():
            state.sequences -= ids

    async def next_frame(self, consumer: str, number: int) -> list[SequenceUpdate] | None:
        """Waits for updates of the consumer's sequences, and renews its lease.

        Args:
            number: how many frames it has received. 0 registers it.

        Returns:
            None if the consumer is unknown here, or no longer known, or if a frame was lost on the way: then its
            sequences cannot be trusted. An empty list if nothing is new within `report_s`.
        """
        state = self._consumer(consumer) if number == 0 else self._consumers.get(consumer)
        if state is None:
            return None
        state.seen = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.report_s):
                await state.ready.wait()
        if self._consumers.get(consumer) is not state or state.frames != number:
            return None
        state.frames += 1
        state.ready.clear()
        updates, state.updates = state.updates, {}
        return list(updates.values())

    def deliver(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        """Adds updates, by consumer, to the next frames."""
        for name, sequences in updates.items():
            consumer = self._consumers.get(name)
            if consumer is None:
                continue
            for update in sequences:
                before = consumer.updates.get(update.request_id)
                consumer.updates[update.request_id] = update if before is None else _merge(before, update)
                if update.finish is not None:
                    consumer.sequences.discard(update.request_id)
            consumer.ready.set()

    def _consumer(self, name: str) -> _Consumer:
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
                state = self._consumers.pop(name)
                logger.warning("the lease of consumer %s ran out; its %d sequences end", name, len(state.sequences))
                sequences = list(state.sequences)
                state.sequences.clear()
                await self._abort(sequences)
                state.ready.set()


def _merge(before: SequenceUpdate, update: SequenceUpdate) -> SequenceUpdate:
    return replace(
        update,
        tokens=before.tokens + update.tokens,
        cached_tokens=before.cached_tokens if update.cached_tokens is None else update.cached_tokens,
        disk_tokens=before.disk_tokens if update.cached_tokens is None else update.disk_tokens,
        queued_s=before.queued_s if update.queued_s is None else update.queued_s,
        prefill_s=before.prefill_s if update.prefill_s is None else update.prefill_s,
        # Logprobs have one entry per token, or are missing; an update without tokens has no entry either way.
        logprobs=(before.logprobs or []) + (update.logprobs or []) if before.logprobs or update.logprobs else None,
    )
