"""The events of a background response, kept so that clients can read them again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice

from ....cluster.errors import InvalidRequest

_EVENT_END = b"\n\n"


class EventLog:
    """The server-sent events of one response, by their numbers. For one event loop.

    Args:
        bytes_max: the limit on all events together; beyond it the oldest are dropped.
        first: the number of the first event.
    """

    def __init__(self, bytes_max: int, first: int = 0) -> None:
        self.nbytes = 0
        self.ended = False
        self._bytes_max = bytes_max
        self._events: deque[bytes] = deque()
        self._first = first
        self._more = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Adds any number of complete events."""
        for event in events.split(_EVENT_END)[:-1]:
            self._events.append(event + _EVENT_END)
            self.nbytes += len(event) + len(_EVENT_END)
        while self.nbytes > self._bytes_max and len(self._events) > 1:
            self.nbytes -= len(self._events.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def check(self, after: int) -> None:
        """Raises:
        InvalidRequest: the events behind number `after` do not exist yet, or were dropped.
        """
        name, known = "starting_after", self._first + len(self._events)
        if after >= known and after >= 0:
            raise InvalidRequest(f"{name}: there are only {known} events so far, numbered from 0", param=name)
        if after + 1 < self._first:
            raise InvalidRequest(f"{name}: the events before number {self._first} are no longer kept", param=name)

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yields the events behind number `after` as they come, until the response ends, or the reader is so slow that
        the next event was dropped."""
        at = after + 1
        while at >= self._first:
            more = self._more
            if news := list(islice(self._events, at - self._first, None)):
                at += len(news)
                yield b"".join(news)
            elif self.ended:
                return
            else:
                await more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
