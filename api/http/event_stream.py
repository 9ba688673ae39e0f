"""An answer as server-sent events in any protocol: the last generator that it passes, and pings while it is silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...cluster.errors import SatchelError
from ..pipeline.streams import Event, Finished, TextStream, Usage, abort_all, interleave
from ..requests.remembered import Remembered
from ..requests.requests import ChatRequest, CompletionRequest
from ..text.answers.sequence_text import TextDelta
from ..tools.answer_pieces import CallArguments, CallBegun, ReasoningDelta, ToolCall
from .answering import Answering
from .exchange import CancelOnDisconnect, header_text, log_failure

_log = logging.getLogger(__name__)

HEADERS_WAIT_S = 5.0
"""How long a stream's headers wait for its first event, so that an early failure becomes an HTTP error."""

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

PING_S = 10.0
"""Seconds without an event after which a ping is sent, because proxies and clients give up silent streams."""

PROGRESS_S = 2.0
"""How often a stream whose model is being loaded says how far it is."""


class Encoder(Protocol):
    """One protocol's form of a streamed answer: `start` once, then the events of every choice, each ended by its
    `finish`, then `end`; or `failed` at any time, as the last. Each returns whole server-sent events, b"" for none.
    """

    @property
    def idle(self) -> bytes:
        """The ping, which clients ignore."""
        ...

    def start(self, streams: Sequence[TextStream]) -> bytes: ...

    def text(self, index: int, delta: TextDelta) -> bytes: ...

    def reasoning(self, index: int, text: str) -> bytes: ...

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        """Encodes a complete call."""
        ...

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        """Begins a call whose arguments follow; no other event comes before its `call_ended`."""
        ...

    def call_arguments(self, index: int, more: CallArguments) -> bytes: ...

    def call_ended(self, index: int, call: ToolCall) -> bytes: ...

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes: ...

    def end(self, total: Usage) -> bytes:
        """Ends the stream; `total` is the usage of all choices."""
        ...

    def failed(self, error: SatchelError, request_id: str) -> bytes: ...


def comment(progress: str) -> bytes:
    """Returns a comment, which clients of server-sent events ignore."""
    return f": {header_text(progress)}\n\n".encode("ascii")


class EventStream(Response):
    """An answer as server-sent events.

    If the request waits for its model to be loaded, its headers are sent after `HEADERS_WAIT_S`, without those that
    name its replica; then the stream says how far the model is, and an error becomes its last event.

    Everything from queueing the sequence to stopping it happens in one coroutine, the call of this response, so that no
    cancellation can leave a running sequence behind.

    Args:
        encoder: makes the encoder, once the sequences have been accepted.
        failed: encodes the error of a request whose sequences were not accepted, with the request's id.
        headers: further headers, which may replace those of server-sent events.
        waits: encodes how far the model is loaded.
    """

    def __init__(
        self,
        answering: Answering,
        work: ChatRequest | CompletionRequest,
        encoder: Callable[[Sequence[TextStream]], Encoder],
        failed: Callable[[SatchelError, str], bytes],
        headers: Mapping[str, str] | None = None,
        waits: Callable[[str], bytes] = comment,
    ) -> None:
        # Response's own initializer is not called, because it sets a Content-Length.
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **(headers or {})})
        self._answering = answering
        self._work = work
        self._encoder, self._failed, self._waits = encoder, failed, waits
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with CancelOnDisconnect(receive):
                await self._answer(send, scope["state"]["request_id"])
        except ClientDisconnect:
            _log.debug("the client of request %s went away", scope["state"]["request_id"])

    async def _answer(self, send: Send, request_id: str) -> None:
        try:
            streams = await self._start(send)
        except SatchelError as error:
            if not self._begun:
                raise
            log_failure(_log, f"request {request_id} while its model was loaded", error, told=False)
            await send({"type": "http.response.body", "body": self._failed(error, request_id), "more_body": False})
            return
        try:
            await self._stream(streams, send, request_id)
        finally:
            await abort_all(streams)

    async def _start(self, send: Send) -> list[TextStream]:
        """Starts the sequences. While their model is being loaded, sends how far it is."""
        starting = asyncio.create_task(self._answering.start(self._work))
        loading, wait_s = self._work.loading, HEADERS_WAIT_S
        try:
            while not (await asyncio.wait({starting}, timeout=wait_s))[0]:
                wait_s = PROGRESS_S
                if loading.progress:
                    await self._begin(send)
                if self._begun:
                    told = self._waits(loading.progress or "starting")
                    await send({"type": "http.response.body", "body": told, "more_body": True})
            return starting.result()
        except BaseException:
            starting.cancel()
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None:
                await abort_all(starting.result())
            raise

    async def _begin(self, send: Send, headers: Mapping[str, str] | None = None) -> None:
        """Sends the headers, unless they were sent."""
        if not self._begun:
            self._begun = True
            self.headers.update({**(headers or {}), "X-Accel-Buffering": "no"})
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _stream(self, streams: list[TextStream], send: Send, request_id: str) -> None:
        async with aclosing(interleave(streams)) as events:
            first = asyncio.create_task(anext(events))
            try:
                if not self._begun:
                    await asyncio.wait({first}, timeout=HEADERS_WAIT_S)
                    if first.done():
                        first.result()
                await self._begin(send, self._answering.headers(self._work, streams))
                encoder = self._encoder(streams)
                async with (
                    _pinging(send, encoder.idle) as send_chunk,
                    aclosing(encoded(encoder, streams, first, events, request_id)) as chunks,
                ):
                    async for chunk in chunks:
                        await send_chunk(chunk)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                # The generator cannot be closed while a task is running in it.
                if not first.done():
                    first.cancel()
                    await asyncio.wait({first})


class FollowedStream(Response):
    """Server-sent events that are produced whether or not a client reads them.

    Args:
        chunks: whole events; closed if the client disconnects.
        ping: sent while there is no event.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], ping: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, "X-Accel-Buffering": "no"})
        self._chunks = chunks
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with CancelOnDisconnect(receive), aclosing(self._chunks) as chunks:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with _pinging(send, self._ping) as send_chunk:
                    async for chunk in chunks:
                        await send_chunk(chunk)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            _log.debug("the reader of request %s went away", scope["state"]["request_id"])


class ResultStream(Response):
    """Server-sent events of a request that begins when they are read. If it fails early, it becomes an HTTP error; a
    later error is the last event.

    Args:
        events: whole events and comments; closed if the client disconnects.
        failed: encodes an error, with the request's id.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], failed: Callable[[SatchelError, str], bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, "X-Accel-Buffering": "no"})
        self._events, self._failed = events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        try:
            async with CancelOnDisconnect(receive), aclosing(self._events) as events:
                first = asyncio.create_task(anext(events))
                try:
                    await asyncio.wait({first}, timeout=HEADERS_WAIT_S)
                    if first.done():
                        first.result()
                    await self._stream(first, events, send, request_id)
                finally:
                    # The generator cannot be closed while a task is running in it.
                    if not first.done():
                        first.cancel()
                        await asyncio.wait({first})
        except ClientDisconnect:
            _log.debug("the client of request %s went away", request_id)

    async def _stream(
        self, first: Awaitable[bytes], events: AsyncGenerator[bytes, None], send: Send, request_id: str
    ) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with _pinging(send, comment("")) as send_chunk:
            try:
                await send_chunk(await first)
                async for event in events:
                    await send_chunk(event)
            except SatchelError as error:
                log_failure(_log, f"request {request_id} in mid-stream", error, told=False)
                await send_chunk(self._failed(error, request_id))
            except Exception:
                _log.exception("request %s failed in mid-stream", request_id)
                hidden = SatchelError(f"internal error in request {request_id}")
                await send_chunk(self._failed(hidden, request_id))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def encoded(
    encoder: Encoder,
    streams: Sequence[TextStream],
    first: Awaitable[tuple[int, Event]],
    events: AsyncGenerator[tuple[int, Event], None],
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    """Yields the body of a streamed answer: the last of its four generators, which encodes events as bytes. `first` is
    the first of the `events`."""
    total = Usage(0, 0, 0)
    try:
        if start := encoder.start(streams):
            yield start
        item = await first
        while item is not None:
            index, event = item
            if isinstance(event, TextDelta):
                yield encoder.text(index, event)
            elif isinstance(event, Finished):
                total = total + event.usage
                yield encoder.finish(index, event, streams[index].remembered)
            elif isinstance(event, ReasoningDelta):
                yield encoder.reasoning(index, event.text)
            elif isinstance(event, CallBegun):
                yield encoder.call_begun(index, event)
            elif isinstance(event, CallArguments):
                yield encoder.call_arguments(index, event)
            elif event.begun:
                yield encoder.call_ended(index, event)
            else:
                yield encoder.tool_call(index, event)
            item = await anext(events, None)
    except SatchelError as error:
        log_failure(_log, f"request {request_id} in mid-stream", error, told=False)
        yield encoder.failed(error, request_id)
        return
    except Exception:
        _log.exception("request %s failed in mid-stream", request_id)
        yield encoder.failed(SatchelError(f"internal error in request {request_id}"), request_id)
        return
    yield encoder.end(total)


@asynccontextmanager
async def _pinging(send: Send, ping: bytes) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Yields a function that sends a chunk of the body. Sends `ping` after `PING_S` without a chunk."""
    loop = asyncio.get_running_loop()
    sent_at = loop.time()

    async def send_chunk(chunk: bytes) -> None:
        nonlocal sent_at
        if chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            sent_at = loop.time()

    async def ping_when_idle() -> None:
        while True:
            wait_s = sent_at + PING_S - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await send_chunk(ping)

    # A separate task costs nothing per token; a timeout on each wait for an event would.
    pings = asyncio.create_task(ping_when_idle())
    try:
        yield send_chunk
    finally:
        pings.cancel()
        # If a ping cannot be sent, the next chunk cannot be sent either, and raises the error.
        await asyncio.gather(pings, return_exceptions=True)
