"""Shared by the routes: request ids, error responses, reading bodies, and detecting disconnected clients.

Pure ASGI, so it works the same under uvicorn and under Ray Serve, and a cancelled request is a cancelled coroutine.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from types import TracebackType
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.config.config import Config
from ...cluster.errors import (
    InvalidRequest,
    RequestTooLarge,
    SatchelError,
    SlowBody,
    Unavailable,
    UnsupportedMediaType,
)
from ...cluster.telemetry.context import NO_SPAN, TRACING, Span, working_for
from ..requests.field_aliases import names_for_header
from ..requests.left_out import HEADER as LEFT_OUT
from ..requests.left_out import LeftOut
from ..requests.options import invalid_at
from ..requests.request_body import Body, RequestBody, parse_body
from .content_coding import codings_of, decoded
from .error_shapes import error_response, shape_of
from .metrics import Metrics

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_HEADER_CHARACTERS_MAX = 1024
_IGNORED = b"x-satchel-ignored"
"""The header that names ignored fields of a body."""
_LEFT_OUT = LEFT_OUT.encode("ascii")
STALL_S = 60.0
BODY_GRACE_S = 10.0
BODY_RATE = 16 * 2**10
"""The least bytes per second: less than a poor mobile connection has."""

T = TypeVar("T")

Refused = Callable[[str], None]
"""Called with the reason if a request is refused for lack of capacity."""

_LARGE_BYTES = 256 * 2**10
"""A larger body takes more than a few milliseconds to parse, so a thread parses it."""

_SAVED_BYTES = 2**20
"""How many bytes of a body that goes to disk are written at a time."""

_LENGTH_DIGITS_MAX = 18
_NO_NUMBER = "Content-Length is not a number"

_UNTRACED = frozenset({"/health", "/metrics", "/"})
"""Paths that are asked again and again: they are not traced, and only logged with `logs.level: debug`."""

_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
"""The headers of W3C Trace Context."""

_CLIENT_GONE = 499
"""nginx's status for a disconnected client, used only in metrics."""


def header_text(text: str) -> str:
    """Returns `text` as a header value: one line of printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:_HEADER_CHARACTERS_MAX]).strip()


class _Stalled(Exception):
    """The client does not read its response."""


class RequestContext:
    """Outermost middleware: gives every request an id, a span and a line of the log, and every response
    `x-request-id`, counts it, and turns an unexpected exception into a 500 that shows only the id. `x-satchel-ignored`
    names what was ignored in a body and `x-satchel-left-out` what was left out, even if the request fails. A client
    that reads nothing for `STALL_S` counts as disconnected.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = time.perf_counter()
        request_id = _given_request_id(scope) or uuid.uuid4().hex
        span = _begin_span(scope, request_id)
        with working_for(request_id, span):
            await self._answer(scope, receive, send, request_id, span, arrived)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, span: Span, arrived: float
    ) -> None:
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived, left_out=LeftOut())
        status = _CLIENT_GONE
        started = False
        own_header = shape_of(scope["path"]).request_id_header.encode("ascii")
        id_headers = [b"x-request-id", *([own_header] if own_header else [])]

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = [*message.get("headers", []), *((name, request_id.encode("ascii")) for name in id_headers)]
                if ignored := scope["state"].get("ignored"):
                    headers.append((_IGNORED, ignored.encode("ascii")))
                if left_out := scope["state"]["left_out"].header:
                    headers.append((_LEFT_OUT, left_out.encode("ascii")))
                message = {**message, "headers": headers}
            try:
                async with asyncio.timeout(STALL_S):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        try:
            await self._app(scope, receive, send_with_id)
        except _Stalled:
            # The server closes the connection of an unfinished answer.
            _log.warning("request %s: the client read nothing for %.0f s", request_id, STALL_S)
        except Exception:
            _log.exception("request %s failed", request_id)
            if started:
                raise
            hidden = SatchelError(f"internal error in request {request_id}")
            await error_response(scope, hidden)(scope, receive, send_with_id)
        finally:
            route, took_s = getattr(scope.get("route"), "path", "other"), time.perf_counter() - arrived
            self._metrics.request_ended(route, status, took_s)
            _log.log(_level(scope), "%s %s: %d in %.3f s", scope["method"], route, status, took_s)
            span.rename(f"{scope['method']} {route}")
            span.set({"http.route": route, "http.response.status_code": status})
            span.end(str(status) if status >= 500 else "")


def _level(scope: Scope) -> int:
    return logging.DEBUG if scope["path"] in _UNTRACED else logging.INFO


def _begin_span(scope: Scope, request_id: str) -> Span:
    """Begins the span of a request, within the caller's if the caller names one."""
    if scope["path"] in _UNTRACED:
        return NO_SPAN
    headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}
    about = {"http.request.method": scope["method"], "satchel.request.id": request_id}
    return TRACING.begin(scope["method"], headers, about)


def _given_request_id(scope: Scope) -> str | None:
    """Returns the caller's request id, None if there is no valid one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return given
    return None


async def _on_satchel_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SatchelError)
    log_failure(_log, f"request {request.state.request_id}", error)
    return error_response(request.scope, error)


def log_failure(log: logging.Logger, what: str, error: SatchelError, *, told: bool = True) -> None:
    """Logs a failure in one line, with a traceback only for status 500. Logs nothing if the client was `told` with a
    status below 500."""
    if error.status >= 500 or not told:
        log.warning("%s: %s", what, error.message, exc_info=error if error.status == 500 else None)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"there is no {request.url.path} here", "not_found"
    elif error.status_code == 405:
        allowed = _allowed(request)
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        error.headers = {**(error.headers or {}), "Allow": allowed}
        message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    shown = SatchelError(message)
    return error_response(request.scope, shown, status=error.status_code, code=code, headers=error.headers)


def _allowed(request: Request) -> str:
    """Returns every method that the request's path takes, as in the header `Allow`."""
    scope = {**request.scope, "type": "http"}
    routes = [route for route in request.app.routes if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({"OPTIONS", *(method for route in routes for method in route.methods or ())}))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first part of `loc` is "query".
    return error_response(request.scope, invalid_at(first["loc"][1:], first["msg"]))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error of `app` the shape of its route's protocol."""
    app.add_exception_handler(SatchelError, _on_satchel_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


class BodyReader:
    """Reads requests' bodies, within the limits of the config's `endpoint`.

    A body slower than `BODY_RATE` is refused. If all bodies together are too large, the largest of those older than
    `BODY_GRACE_S` is refused, so that endless bodies do not block others.
    """

    def __init__(self, config: Config, refused: Refused = lambda why: None) -> None:
        self._refused = refused
        self._limits = config.endpoint
        self._timeout_s = config.timeouts.request_s
        self._held = 0
        self._arriving: set[_Arriving] = set()
        self._large = asyncio.Lock()

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Returns the body, decoded, parsed and validated. Large and compressed ones are parsed one at a time.

        Raises:
            InvalidRequest: as `parse_body` and `content_coding.decoded`.
            UnsupportedMediaType: as `content_coding.codings_of`.
            RequestTooLarge, Unavailable, SlowBody, ClientDisconnect: as `_reading`.
        """
        codings = codings_of(request)

        def parse(data: bytearray) -> tuple[Body, str]:
            body = parse_body(kind, decoded(data, codings, self._limits.body_bytes_max), self._limits)
            if not isinstance(body, RequestBody):
                return body, ""
            request.state.left_out.add(*body.left_out)
            return body, names_for_header(body.ignored)

        async with (
            self._reading(request) as data,
            self._large if codings or len(data) > _LARGE_BYTES else nullcontext(),
        ):
            body, request.state.ignored = await asyncio.to_thread(parse, data)
            return body

    async def read_with(
        self, request: Request, parse: Callable[[bytearray], T], ignored: Callable[[T], Sequence[str]] = lambda made: ()
    ) -> T:
        """Returns what `parse` makes of the whole body, in a worker thread. Large ones are parsed one at a time.

        Args:
            ignored: returns the names of fields that are ignored.

        Raises:
            UnsupportedMediaType: it has a content encoding.
            RequestTooLarge, Unavailable, SlowBody, ClientDisconnect: as `_reading`.
            SatchelError: as `parse`.
        """
        if codings_of(request):
            raise UnsupportedMediaType("this route does not support content encodings")
        async with self._reading(request) as data, self._large if len(data) > _LARGE_BYTES else nullcontext():
            made = await asyncio.to_thread(parse, data)
            request.state.ignored = names_for_header(ignored(made))
            return made

    async def save(self, request: Request, take: Callable[[bytes], Awaitable[object]]) -> None:
        """Passes a body to `take` piece by piece, without holding it in memory. While `take` waits, nothing more is
        read.

        Raises:
            UnsupportedMediaType: it has a content encoding.
            SlowBody: it arrives too slowly.
            ClientDisconnect: the client disconnected first.
        """
        if codings_of(request):
            raise UnsupportedMediaType("this route does not support content encodings")
        loop, waited_s, count = asyncio.get_running_loop(), 0.0, 0
        stream, pieces = aiter(request.stream()), bytearray()
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(BODY_GRACE_S):
                    chunk = await anext(stream, None)
            except TimeoutError:
                raise SlowBody(f"nothing of the body came for {BODY_GRACE_S:g} s") from None
            waited_s += loop.time() - began
            if waited_s > BODY_GRACE_S + count / BODY_RATE:
                raise SlowBody(f"the body came slower than {BODY_RATE} bytes a second")
            pieces += chunk or b""
            if pieces and (chunk is None or len(pieces) >= _SAVED_BYTES):
                count += len(pieces)
                await take(bytes(pieces))
                pieces.clear()
            if chunk is None:
                return

    def announced(self, request: Request) -> int:
        """Returns the length of a request's body in bytes according to its headers, 0 if unknown.

        Raises:
            InvalidRequest: Content-Length is not a number.
        """
        announced = _announced(request)
        if len(announced) > _LENGTH_DIGITS_MAX:
            raise InvalidRequest(_NO_NUMBER)
        return int(announced)

    @asynccontextmanager
    async def _reading(self, request: Request) -> AsyncIterator[bytearray]:
        """Reads the whole body. Its bytes count as held until the block ends.

        Raises:
            InvalidRequest: Content-Length is not a number.
            RequestTooLarge: more than `endpoint.body_bytes_max`, announced or read.
            Unavailable: more than `endpoint.bodies_bytes_max` together with other bodies.
            SlowBody: it came too slowly, or took longer than `timeouts.request_s`.
            ClientDisconnect: the client disconnected first.
        """
        bytes_max = self._limits.body_bytes_max
        too_large = RequestTooLarge(f"the body is larger than {bytes_max} bytes (endpoint.body_bytes_max)")
        announced = _announced(request)
        if len(announced) > _LENGTH_DIGITS_MAX or int(announced) > bytes_max:
            raise too_large
        arriving = _Arriving(self._timeout_s)
        self._arriving.add(arriving)
        try:
            try:
                async with arriving.limit:
                    async for chunk in request.stream():
                        arriving.take(chunk)
                        self._held += len(chunk)
                        if len(arriving.body) > bytes_max:
                            raise too_large
                        self._make_room(arriving)
            except TimeoutError:
                raise self._too_large_together() if arriving.makes_room else arriving.too_slow() from None
            self._arriving.discard(arriving)
            yield arriving.body
        finally:
            self._arriving.discard(arriving)
            self._held -= len(arriving.body)

    def _make_room(self, newest: _Arriving) -> None:
        going = sum(len(it.body) for it in self._arriving if it.makes_room)
        if self._held - going <= self._limits.bodies_bytes_max:
            return
        late = [it for it in self._arriving if it.age_s > BODY_GRACE_S and not (it.makes_room or it.limit.expired())]
        largest = max(late, key=lambda it: len(it.body), default=newest)
        if largest is newest:
            raise self._too_large_together()
        # Its bytes are freed in the next iteration of the event loop.
        largest.makes_room = True
        largest.limit.reschedule(0.0)

    def _too_large_together(self) -> Unavailable:
        why = "the bodies of concurrent requests are too large together (endpoint.bodies_bytes_max)"
        self._refused(why)
        return Unavailable(why, retry_after_s=1.0)


def _announced(request: Request) -> str:
    """Returns the digits of Content-Length, "0" if there is none."""
    announced = request.headers.get("content-length", "0")
    if not (announced.isascii() and announced.isdigit()):
        raise InvalidRequest(_NO_NUMBER)
    return announced


class _Arriving:
    """A body being read. `limit` is its deadline, which moves as bytes arrive."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ends = self._began + timeout_s
        self.limit = asyncio.timeout(min(BODY_GRACE_S, timeout_s))
        self.body = bytearray()
        self.makes_room = False

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._began

    def take(self, chunk: bytes) -> None:
        """Adds a chunk and extends the deadline, at most to `BODY_GRACE_S` from now. So a pause of that length is
        allowed, but a constant trickle is not."""
        self.body += chunk
        until = self.limit.when()
        if until is not None and not self.makes_room:
            bought = until + len(chunk) / BODY_RATE
            self.limit.reschedule(min(bought, self._loop.time() + BODY_GRACE_S, self._ends))

    def too_slow(self) -> SlowBody:
        if self._loop.time() >= self._ends:
            return SlowBody("the body did not arrive within timeouts.request_s")
        return SlowBody(f"the body came slower than {BODY_RATE} bytes a second")


class CancelOnDisconnect:
    """``async with CancelOnDisconnect(receive):`` cancels the block when the client disconnects.

    Leaving it then raises `ClientDisconnect`. Enter it after the body has been read, when the next message can only be
    the disconnection. A cancellation from outside passes through.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        # The empty body of a GET request comes first if nothing has read it.
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._watcher.done():
            self._watcher.cancel()
        elif not self._watcher.cancelled() and (failure := self._watcher.exception()) is not None:
            # Under Ray Serve a cancelled request's channel ends in this way, so it is only logged.
            _log.debug("watching for the client's disconnection ended", exc_info=failure)
        if not self._gone:
            return
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            # The block ended just as the client disconnected: consume the pending cancellation.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                error = cancelled
        if self._task.uncancel() <= self._cancelling and (error is None or isinstance(error, asyncio.CancelledError)):
            raise ClientDisconnect from None
