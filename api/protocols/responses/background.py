"""Background responses: they go on if no client reads them, and can be read again from any of their events.

They run in the endpoint's process, and end with it. Their ids say that they are background responses
(`chains.background_id`). So a later process can look for the answer in the agent's transcript, and otherwise report
that the response failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ....cluster.errors import QueueFull, RateLimited
from ...requests.history import Message
from .chains import KeptResponse
from .event_log import EventLog
from .events import ResponseEvents

_CANCEL_WAIT_S = 10.0


class BackgroundResponse:
    """One background response that is running.

    Args:
        events: encodes its events.
        items: its input, as in `KeptResponse`.
        messages: all messages before it; None if it is appended to a transcript.
        agent: as in `KeptResponse`.
        tools: as in `KeptResponse`.

    Attributes:
        answer: the answer as one message, once it is complete.
    """

    def __init__(
        self,
        events: ResponseEvents,
        items: list[dict[str, Any]],
        messages: list[Message] | None,
        agent: str,
        log: EventLog,
        tools: Sequence[tuple[Any, str]] = (),
    ) -> None:
        self.events = events
        self._tools = tools
        self.log = log
        self.answer: Message | None = None
        self._items = items
        self._messages = messages
        self._agent = agent
        self._task: asyncio.Task[None] | None = None
        log.add(events.queued())

    def begin(self, make: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Starts it; `ended` is called after its end."""

        def done(task: asyncio.Task[None]) -> None:
            self.log.end()
            ended()

        self._task = asyncio.create_task(make)
        self._task.add_done_callback(done)

    @property
    def kept(self) -> KeptResponse:
        """The response so far."""
        whole = None if self._messages is None or self.answer is None else [*self._messages, self.answer]
        return KeptResponse(self.events.now, self._items, whole, self._agent, self.log, self._tools)

    async def cancel(self) -> None:
        """Ends it, and waits at most 10 s for that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CANCEL_WAIT_S)


class BackgroundResponses:
    """The running background responses of all tenants. For one event loop.

    Args:
        most: the most that may run at a time.
        bytes_max: the limit on each one's events.
    """

    def __init__(self, most: int, bytes_max: int) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._running: dict[tuple[str, str], BackgroundResponse] = {}

    def get(self, tenant: str, id: str) -> BackgroundResponse | None:
        return self._running.get((tenant, id))

    def log(self, tenant: str, *, shares: bool) -> EventLog:
        """Returns the event log for a response that is about to begin.

        Args:
            shares: whether there are other tenants. Then a tenant may have at most as many places as are free: if it is
                alone, half of them. So there is always room for others (Choudhury and Hahne 1998).

        Raises:
            RateLimited: the tenant has as many as the others leave it.
            QueueFull: there are as many as the limit allows.
        """
        if (free := self._most - len(self._running)) <= 0:
            raise QueueFull(
                f"{self._most} responses are being made in the background (endpoint.background_responses_max); try "
                "again later, or without background"
            )
        own = sum(whose == tenant for whose, _ in self._running)
        if shares and own >= free:
            raise RateLimited(
                f"{own} responses are being made in the background for this key; the {free} places that are free "
                "(endpoint.background_responses_max) are for others. Try again later, or without background",
                retry_after_s=1.0,
            )
        return EventLog(self._bytes_max)

    def begin(
        self,
        tenant: str,
        id: str,
        response: BackgroundResponse,
        make: Coroutine[Any, Any, None],
        ended: Callable[[KeptResponse], None],
    ) -> None:
        """Starts a response, and counts it until it has ended.

        Args:
            make: adds all its events to the log, including the last one, however it ends; if cancelled, it must end
                soon.
            ended: called with the response to store.
        """

        def gone() -> None:
            del self._running[tenant, id]
            ended(response.kept)

        self._running[tenant, id] = response
        response.begin(make, gone)
