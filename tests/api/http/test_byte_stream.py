"""A file that is sent while it is made: an error after its beginning is no end of the file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import uvicorn

from satchel.api.http.byte_stream import ByteStream
from satchel.cluster.errors import GenerationFailed


async def served(error: Exception | None) -> httpx.Response:
    """Returns the answer of a real server to one request, for two pieces of a file and an error."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"
        if error is not None:
            raise error

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["request_id"] = "a"
        await ByteStream(pieces(), "audio/wav")(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with httpx.AsyncClient() as client:
                return await client.get(f"http://127.0.0.1:{port}/")
    finally:
        server.should_exit = True
        await serving


async def test_a_whole_file():
    answer = await served(None)
    assert (answer.status_code, answer.content) == (200, b"onetwo")


@pytest.mark.parametrize("error", [GenerationFailed("it failed"), ValueError("it failed")])
async def test_an_error_after_the_first_piece_breaks_the_connection_off(error: Exception):
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        await served(error)
