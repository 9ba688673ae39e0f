"""What the HTTP server refuses before there is a request, and how it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from satchel.actors.messages import RowUpdate
from satchel.api import server as http_server
from satchel.api.app import create_app
from satchel.api.server import HttpServer
from satchel.cluster.ports import free_port
from tests.api.conftest import events_of

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def send(server: str, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(server)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.01)
    return reader, writer


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """The status and the error's body of an answer that ends the connection."""
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("endless", [b"X: y\r\n", b"y" * 1000], ids=["headers", "one header"])
async def test_a_head_without_end_is_refused(server: str, endless: bytes):
    start = b"GET /health HTTP/1.1\r\nHost: x\r\nX: "
    reader, writer = await send(server, start, endless * ((http_server.HEAD_BYTES_MAX - 10) // len(endless)))
    await asyncio.sleep(0.1)
    writer.write(endless * 12)
    status, error = await refusal(reader)
    assert status == 431 and error["type"] == "invalid_request_error" and "65536" in error["message"]
    writer.close()


async def test_a_large_body_is_no_large_head(server: str):
    async with httpx.AsyncClient(base_url=server) as client:
        for _ in range(2):
            data = {**BODY, "user": "x" * 500_000}
            assert (await client.post("/v1/chat/completions", json=data)).status_code == 200


async def test_what_is_not_http_is_told_so_in_the_protocols_shape(server: str):
    reader, writer = await send(server, b"hello there\r\n\r\n")
    status, error = await refusal(reader)
    assert status == 400 and error["message"] == "this is not a valid HTTP request"
    writer.close()


@pytest.mark.parametrize("before", [False, True])
async def test_a_head_that_does_not_end_is_hung_up_on(server: str, monkeypatch: pytest.MonkeyPatch, before: bool):
    """Also as the second request of a connection."""
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await send(server, *([whole] if before else []), b"GET /health HT")
    async with asyncio.timeout(10):
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    assert answer.startswith(b"HTTP/1.1 200") == before or not answer
    writer.close()


async def test_bodies_are_bounded_together_and_room_comes_back(server: str):
    """Three bodies of a mebibyte less a little, of which two fit; the third is asked to come again."""
    part = b'{"user": "' + b"x" * (2**20 - 4096)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    senders = [await send(server, head % 2**20, part) for _ in range(2)]
    await asyncio.sleep(0.2)
    async with httpx.AsyncClient(base_url=server) as client:
        data = {**BODY, "user": "x" * 500_000}
        refused = await client.post("/v1/chat/completions", json=data)
        assert refused.status_code == 503 and "bodies_bytes_max" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        for _, writer in senders:
            writer.close()
        await asyncio.sleep(0.2)
        assert (await client.post("/v1/chat/completions", json=data)).status_code == 200


async def test_a_closing_server_lets_a_client_read_the_rest(backend, config):
    """Nothing new is taken, and what was being answered is answered to the end."""
    last = asyncio.Event()
    encode = backend.text.encode
    backend.play(RowUpdate("r", encode("Hello"), cached_tokens=0), last, RowUpdate("r", encode(" you"), "stop"))
    port = free_port()
    server = HttpServer(create_app(backend, config), "127.0.0.1", port)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            closing = asyncio.create_task(server.close(10))
            await asyncio.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as other:
                    await other.get(f"http://127.0.0.1:{port}/health")
            assert not closing.done() and server.failure is None
            last.set()
            text += "".join([piece async for piece in pieces])
        assert events_of(text)[-1] == "[DONE]"
        async with asyncio.timeout(5):
            await closing
