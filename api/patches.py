"""What Satchel changes in uvicorn, and which internals of uvicorn it uses; no other file under `api/` does either.

docs/patches.md lists the patches of all libraries. Each fits the version of uvicorn that pyproject.toml pins, 0.54.0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_S = 60.0
READ_S = 1.0
"""Seconds after which an answer's last bytes have reached the client, whether it has read them or not."""

HEAD_BYTES_MAX = 64 * 2**10
HEADERS_MAX = 100
"""The most headers of a request, including its trailers, which are ignored."""
PIPELINED_MAX = 8
"""The most requests of one connection that wait for an earlier answer."""

NOT_HTTP = 400, "this is not a valid HTTP request"


def status_line(status: int) -> bytes:
    """Returns the first line of an answer.

    Changes: nothing. The table of these lines is internal to uvicorn.
    Why: answers that the server sends before there is a request begin as uvicorn's do.
    Fits: uvicorn 0.54.0.
    Noticed by: tests/api/http/test_tls.py::test_plain_http_is_told_what_is_spoken
    """
    return STATUS_LINE[status]


class HttpProtocol(HttpToolsProtocol):
    """One connection, with limits that uvicorn lacks.

    Changes: uvicorn's protocol, in a subclass, and the state of an answer in HTTP 1.0, which has no chunks. A request's
        line and headers are limited to `HEAD_BYTES_MAX` and `HEAD_S`, and bytes outside head and body to
        `HEAD_BYTES_MAX` too; headers, requests that wait on a connection, and connections are limited in number. Input
        that is not HTTP gets an error in the server's own shape.
    Why: uvicorn waits for ever for the headers, reads headers of any size, and has settings for none of these limits.
    Fits: uvicorn 0.54.0.
    Noticed by: tests/api/http/test_server.py::test_a_head_without_end_is_refused

    Args:
        connections_max: of the server. If there are more, the longest idle one is closed; if none is idle, the new one
            is refused.
        refused: called with the reason if a connection is refused for lack of capacity.
        error: makes the JSON of an error from its status and message.
    """

    def __init__(
        self,
        *args: Any,
        connections_max: int,
        refused: Callable[[str], None],
        error: Callable[[int, str], str],
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._refused = refused
        self._connections_max = connections_max
        self._error = error
        self._refusal = NOT_HTTP

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # The default for TLS is eight times as much.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._head_bytes = self._headers = self._between_bytes = 0
        self._head_ends = self.loop.call_later(HEAD_S, transport.abort)
        self._waits_since = self.loop.time()
        if len(self.connections) > self._connections_max:
            self._make_room()

    def _make_room(self) -> None:
        others = [it for it in self.connections - {self} if isinstance(it, HttpProtocol)]
        spare = [it for it in others if it.is_idle] or [it for it in others if it._is_answered]
        if spare:
            min(spare, key=lambda it: it._waits_since).transport.abort()
        else:
            why = f"all {self._connections_max} connections are in use (endpoint.connections_max)"
            self._refused(why)
            self._refuse(503, why)

    @property
    def is_idle(self) -> bool:
        """Whether every request of this connection has been answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    @property
    def _is_answered(self) -> bool:
        """Whether everything is sent and only the client's TLS close is missing."""
        return self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def data_received(self, data: bytes) -> None:
        in_head = self._head_bytes >= 0
        self._in_body = False
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if in_head and self._head_bytes >= 0:
            self._head_bytes += len(data)
        elif self._head_bytes < 0:
            self._between_bytes = 0 if self._in_body else self._between_bytes + len(data)
        if max(self._head_bytes, self._between_bytes) > HEAD_BYTES_MAX:
            self._refuse(431, f"the request's line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Also after an answer on the same connection; uvicorn limits the wait for the next request.
        self._head_ends.cancel()
        self._head_bytes, self._head_ends = 0, self.loop.call_later(HEAD_S, self.transport.abort)
        self._headers, self._between_bytes = 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADERS_MAX:
            raise self._stop(431, f"the request has more than {HEADERS_MAX} headers")
        if self._head_bytes >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            # Earlier requests are being answered, so no response can be sent for this one.
            self.transport.abort()
            raise self._stop(*NOT_HTTP)
        self._head_bytes = -1
        self._head_ends.cancel()
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            # HTTP 1.0 has no chunks: the end of the connection ends the answer.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilTheEnd()

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_answered and self.loop.time() - self._waits_since > READ_S:
            # The client has long read the answer: do not wait for its TLS close.
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends.cancel()
        super().connection_lost(exc)

    def _stop(self, status: int, message: str) -> Exception:
        """Sets the refusal, and returns the exception that ends parsing if a parser callback raises it."""
        self._refusal = status, message
        return ValueError(message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            # The client would read this error as part of another answer.
            self.transport.abort()
            return
        body = self._error(status, message)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        again = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(status_line(status) + f"{head}{again}\r\n{body}".encode())
        self.transport.close()


class _UntilTheEnd(int):
    """The number of expected bytes of an answer that ends with the connection: no count is too high or too low."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilTheEnd:
        return self

    __hash__ = int.__hash__


def without_signals(server: uvicorn.Server) -> None:
    """Lets only the owner of a server stop it, not signals.

    Changes: `capture_signals` of one `uvicorn.Server`, which then captures none.
    Why: Ray handles this process's signals. uvicorn has no setting for that.
    Fits: uvicorn 0.54.0.
    Noticed by: tests/api/test_patches.py::test_a_server_leaves_this_process_its_signals
    """
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]


def protocol_maker(server: uvicorn.Server, protocol: Callable[..., asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
    """Returns a factory of connections' protocols, as a started server makes them for its own listeners.

    Changes: nothing. The state of a server and of its application are internal to uvicorn.
    Why: `http/tls_listener.py` accepts connections itself, and they must count as the server's.
    Fits: uvicorn 0.54.0.
    Noticed by: tests/api/http/test_tls.py::test_answers_and_streams_come_through
    """
    return partial(protocol, config=server.config, server_state=server.server_state, app_state=server.lifespan.state)
