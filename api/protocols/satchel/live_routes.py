"""The cluster as it changes: server-sent events, the latest decisions, and the last hour's samples."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from ....actors.protocol.router_messages import Decisions
from ....cluster.detached import background
from ....cluster.errors import SatchelError, Unavailable
from ...http.adding import EVENTS, add_route
from ...http.answering import probe
from ...http.event_stream import FollowedStream
from ...http.guard import require_admin
from ...pipeline.running import RunningSequences
from ...requests.backend import Backend
from ...requests.callers import Caller
from ...views.history import EVERY_S, History
from ...views.requests import running_views

EVENT_S = 1.0
"""How often a reader of the events gets what has changed."""

ANSWER_S = 10.0
READERS_MAX = 64
DECISIONS_MAX = 200

_log = logging.getLogger(__name__)

_PING = b": waiting\n\n"


class LiveRoutes:
    """Handlers for what changes in the cluster.

    A reader is sent what differs from the last that it was sent, once a second. Nothing waits for a slow reader but the
    number of the last decision and sample that it has seen: what it has missed beyond the latest ones is left out.

    Args:
        look: returns the view of the cluster without agents, at most a second old.
    """

    def __init__(
        self, backend: Backend, running: RunningSequences, look: Callable[[], Awaitable[dict[str, Any]]], version: str
    ) -> None:
        self._backend = backend
        self._running = running
        self._look = look
        self._version = version
        self._history = History()
        self._readers = 0
        self._closing = asyncio.Event()

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/cluster/events", self.follow, answers=(EVENTS,))
        add_route(app, "GET", "/v1/cluster/history", self.history)
        add_route(app, "GET", "/v1/cluster/decisions", self.decisions)

    async def history(self, request: Request) -> Response:
        """Shows the last hour in samples, a list for each field. For administrators."""
        require_admin(request.state.caller)
        made = await asyncio.to_thread(lambda: _encoded(self._history.columns()))
        return Response(made, media_type="application/json")

    async def decisions(
        self,
        request: Request,
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=DECISIONS_MAX)] = 50,
    ) -> Response:
        """Lists the router's latest decisions with their reasons and costs, the oldest first. For administrators."""
        require_admin(request.state.caller)
        return JSONResponse(asdict(await probe(self._backend.decisions(after, limit))))

    async def follow(self, request: Request) -> Response:
        """Streams what changes: `caller` first, then `requests` (for administrators those of all tenants). For
        administrators also `cluster`, `decisions` and `sample`, as their routes show them, and `trouble` if the cluster
        does not answer."""
        if self._readers >= READERS_MAX:
            raise Unavailable(f"{READERS_MAX} clients follow the events already", retry_after_s=10.0)
        return FollowedStream(self._events(request.state.caller), _PING)

    def close(self) -> None:
        """Ends the streams of all readers, which have no other end."""
        self._closing.set()

    def sampling(self) -> AbstractAsyncContextManager[None]:
        """Takes samples in the context."""
        return background(self._sample())

    async def _sample(self) -> None:
        while True:
            try:
                self._history.add(await self._look(), time.time())
            except SatchelError:
                # The plots have a gap.
                _log.debug("the cluster did not answer for a sample")
            except Exception:
                _log.exception("a sample could not be taken")
            await asyncio.sleep(EVERY_S)

    async def _events(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        self._readers += 1
        closing = asyncio.create_task(self._closing.wait())
        try:
            who = {"tenant": caller.tenant, "admin": caller.admin, "version": self._version}
            yield _event("caller", who)
            reader = _Reader(self._history.count)
            while not self._closing.is_set():
                tenant = "" if caller.admin else caller.tenant
                running = running_views(self._running.of(tenant), tenants=caller.admin)
                if news := reader.changed("requests", running):
                    yield news
                if caller.admin:
                    for news in await self._seen_by_administrators(reader):
                        yield news
                # Not `wait_for`, which may swallow the cancellation when the reader leaves.
                await asyncio.wait({closing}, timeout=EVENT_S)
        finally:
            closing.cancel()
            self._readers -= 1

    async def _seen_by_administrators(self, reader: _Reader) -> list[bytes]:
        news = []
        try:
            news.append(reader.changed("cluster", await self._look()))
            found = await self._latest(reader.decision)
            if found.router != reader.router:
                # A new router counts from 1 again.
                found = found if reader.decision == 0 else await self._latest(0)
                reader.router = found.router
            if found.decisions:
                news.append(_event("decisions", [asdict(each) for each in found.decisions]))
            reader.decision = found.last
            news.append(reader.changed("trouble", None))
        except SatchelError as error:
            news.append(reader.changed("trouble", error.message))
        news += [_event("sample", sample) for sample in self._history.after(reader.sample)]
        reader.sample = self._history.count
        return news

    async def _latest(self, after: int) -> Decisions:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._backend.decisions(after, DECISIONS_MAX)
        except TimeoutError:
            raise Unavailable(f"the router did not answer within {ANSWER_S:.0f} s") from None


class _Reader:
    """What one reader of the events was sent.

    Attributes:
        sample: the number of the last sample.
        decision: the number of the last decision of the `router`.
    """

    def __init__(self, sample: int) -> None:
        self.sample = sample
        self.decision = 0
        self.router = ""
        self._sent: dict[str, bytes] = {"trouble": _event("trouble", None)}

    def changed(self, name: str, data: Any) -> bytes:
        """Returns the event; b"" if it was sent like this before."""
        made = _event(name, data)
        if self._sent.get(name) == made:
            return b""
        self._sent[name] = made
        return made


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), _encoded(data))


def _encoded(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
