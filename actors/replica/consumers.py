"""Who reads a replica's tokens. A *consumer* is a process that submits rows and reads one stream of frames for all of
them; when it stops renewing its lease, its rows are taken out. Everything here is on one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from ..messages import RowUpdate

logger = logging.getLogger(__name__)

LEASE_S = 10.0
BEAT_S = 0.5
"""A stream that has nothing to say says so this often: Ray takes 14 s to notice that a machine is gone."""


@dataclass
class _Consumer:
    """One reader of frames. `updates` hold what it has not taken yet, bounded by its rows' `max_tokens`."""

    seen: float
    updates: dict[str, RowUpdate] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stream: int = 0


class Consumers:
    """The consumers of one replica.

    Args:
        abort: takes rows out, by request id.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        self._abort = abort
        self._consumers: dict[str, _Consumer] = {}
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def rows(self, consumer: str) -> set[str]:
        """The consumer's rows, to be changed by whoever adds one or refuses it."""
        return self._consumer(consumer).rows

    def forget_rows(self, request_ids: Iterable[str]) -> None:
        """Rows that are not running yet will not."""
        ids = set(request_ids)
        for state in self._consumers.values():
            state.rows -= ids

    async def stream(self, consumer: str) -> AsyncIterator[list[RowUpdate]]:
        """All new tokens of the consumer's rows, an engine step at a time; now and then none. Ends with the consumer.

        A later call for the same consumer takes over, and this one ends.
        """
        state = self._consumer(consumer)
        state.stream += 1
        mine = state.stream
        state.ready.set()
        while state.stream == mine and self._consumers.get(consumer) is state:
            try:
                await asyncio.wait_for(state.ready.wait(), BEAT_S)
            except TimeoutError:
                yield []
                continue
            state.ready.clear()
            if state.updates and state.stream == mine:
                updates, state.updates = state.updates, {}
                yield list(updates.values())
        # The signal may have been meant for the stream that took over.
        state.ready.set()

    def renew(self, consumer: str) -> bool:
        """A sign of life. False when the consumer is not known (any more)."""
        state = self._consumers.get(consumer)
        if state is None:
            return False
        state.seen = time.monotonic()
        return True

    def deliver(self, updates: dict[str, list[RowUpdate]]) -> None:
        """Hand out new tokens, by consumer."""
        for name, rows in updates.items():
            consumer = self._consumers.get(name)
            if consumer is None:
                continue
            for update in rows:
                before = consumer.updates.get(update.request_id)
                consumer.updates[update.request_id] = update if before is None else _merge(before, update)
                if update.finish is not None:
                    consumer.rows.discard(update.request_id)
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
            for name in [name for name, state in self._consumers.items() if now - state.seen > LEASE_S]:
                state = self._consumers.pop(name)
                logger.warning("consumer %s is gone; its %d rows end", name, len(state.rows))
                rows = list(state.rows)
                state.rows.clear()
                await self._abort(rows)
                state.ready.set()


def _merge(before: RowUpdate, update: RowUpdate) -> RowUpdate:
    return replace(
        update,
        tokens=before.tokens + update.tokens,
        cached_tokens=before.cached_tokens if update.cached_tokens is None else update.cached_tokens,
        # An entry a token, or none at all; an update without tokens has none either way.
        logprobs=(before.logprobs or []) + (update.logprobs or []) if before.logprobs or update.logprobs else None,
    )
