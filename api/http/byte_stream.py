"""A file that is sent while it is made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...cluster.errors import SatchelError
from .exchange import CancelOnDisconnect, log_failure

_log = logging.getLogger(__name__)


class ByteStream(Response):
    """A file of a request that begins when it is read. If the request fails before the first piece, it becomes an HTTP
    error. After that the connection ends without the body's end, so that no client takes what it has for the whole.

    Args:
        pieces: of the file; closed if the client disconnects.
        kind: the file's media type.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], kind: str) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Type": kind, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        try:
            async with CancelOnDisconnect(receive), aclosing(self._pieces) as pieces:
                first = await anext(pieces, b"")
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    await _send_piece(send, first)
                    async for piece in pieces:
                        await _send_piece(send, piece)
                except (SatchelError, asyncio.CancelledError) as error:
                    if isinstance(error, SatchelError):
                        log_failure(_log, f"request {request_id} in mid-stream", error, told=False)
                        return
                    raise
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            _log.debug("the client of request %s went away", request_id)


async def _send_piece(send: Send, piece: bytes) -> None:
    if piece:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
