"""What the HTTP server refuses before it has a request, and how it closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api import patches
from satchel.api.app import create_app
from satchel.api.http import exchange as http
from satchel.api.http.server import HttpServer
from satchel.cluster.bring_up.ports import free_port
from tests.worlds.api.fake_backend import events_of

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


ENDLESS = [(b"X: y\r\n", "100 headers"), (b"y" * 1000, "65536")]
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: satchel\r\nContent-Type: application/json\r\n"
ASKS = POST + b"Content-Length: %d\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def test_an_answer_in_http_1_0_has_no_chunks_and_ends_with_the_connection(server: str):
    for more in ({}, {"stream": True}):
        body = json.dumps({**BODY, **more}).encode()
        reader, writer = await send(server, (ASKS % len(body)).replace(b"HTTP/1.1", b"HTTP/1.0"), body)
        async with asyncio.timeout(10):
            head, _, said = (await reader.read()).partition(b"\r\n\r\n")
        assert b" 200 " in head and b"transfer-encoding" not in head.lower()
        if more:
            assert said.startswith(b"data: ") and said.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(said)["choices"] and f"content-length: {len(said)}".encode() in head.lower()
        writer.close()


@pytest.mark.parametrize(("endless", "said"), ENDLESS, ids=["headers", "one header"])
async def test_a_head_without_end_is_refused(server: str, endless: bytes, said: str):
    start = b"GET /health HTTP/1.1\r\nHost: satchel\r\nX: "
    reader, writer = await send(server, start, endless * ((patches.HEAD_BYTES_MAX - 10) // len(endless)))
    await asyncio.sleep(0.1)
    writer.write(endless * 12)
    status, error = await refusal(reader)
    assert status == 431 and error["type"] == "invalid_request_error" and said in error["message"]
    writer.close()


@pytest.mark.parametrize(("endless", "said"), ENDLESS, ids=["trailers", "one trailer"])
async def test_trailers_without_end_are_refused(server: str, endless: bytes, said: str):
    """The bytes after the last chunk of a body are limited like headers."""
    reader, writer = await send(server, CHUNKED + b"2\r\n{}\r\n0\r\nX: ")
    status = 0
    async with asyncio.timeout(10):
        while not status:
            writer.write(endless * (100_000 // len(endless)))
            await asyncio.sleep(0.01)
            if reader._buffer:  # type: ignore[attr-defined]
                status, error = await refusal(reader)
                assert said in error["message"]
    assert status == 431
    writer.close()


async def test_a_chunk_extension_without_end_is_refused(server: str):
    reader, writer = await send(server, CHUNKED + b"2;x=")
    for _ in range(3):
        writer.write(b"y" * 40_000)
        await asyncio.sleep(0.05)
    assert (await refusal(reader))[0] == 431
    writer.close()


async def test_trailers_are_no_headers(server: str, backend):
    body = json.dumps(BODY).encode()
    chunks = b"%x\r\n%s\r\n0\r\nX-Agent-ID: somebody\r\n\r\n" % (len(body), body)
    reader, writer = await send(server, CHUNKED, chunks)
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert backend.requests[-1]["agent"] == ""
    writer.close()


async def test_a_few_requests_may_wait_on_one_connection(server: str, backend):
    """They are answered in order; a client that sends more without reading is disconnected."""
    go = asyncio.Event()
    backend.play(go, SequenceUpdate("r", [5], "stop", 0))
    first = json.dumps(BODY).encode()
    more = b"GET /v1/models HTTP/1.1\r\nHost: satchel\r\n\r\n"
    reader, writer = await send(server, ASKS % len(first) + first, more * patches.PIPELINED_MAX)
    go.set()
    async with asyncio.timeout(10):
        answers = b""
        while answers.count(b"HTTP/1.1 200") <= patches.PIPELINED_MAX:
            answers += await reader.read(65536)
    assert answers.index(b"chat.completion") < answers.index(b'"list"')
    writer.close()
    go.clear()
    reader, writer = await send(server, ASKS % len(first) + first, more * 2000)
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    go.set()


async def test_connections_that_ask_nothing_make_room(backend, config):
    """The connection that was idle longest is closed; if all are busy, the new one is refused and may retry."""
    go = asyncio.Event()
    backend.play(go, SequenceUpdate("r", [5], "stop", 0))
    port = free_port()
    server = HttpServer(create_app(backend, config), "127.0.0.1", port, connections_max=3)
    await server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        idle = [await send(url) for _ in range(3)]
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    assert await idle[0][0].read() == b"", "the first is closed"
        body = json.dumps(BODY).encode()
        working = [await send(url, ASKS % len(body) + body) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(backend.requests) < 3:
                await asyncio.sleep(0.01)
        reader, refused = await send(url)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (503, "unavailable") and "connections_max" in error["message"]
        go.set()
        for reader, _ in working:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for writer in (refused, *(writer for _, writer in [*idle, *working])):
            writer.close()
    finally:
        await server.close(5)


async def test_a_body_that_trickles_is_not_waited_for(server: str, monkeypatch: pytest.MonkeyPatch):
    """A pause is allowed, but single bytes now and then do not extend the deadline."""
    monkeypatch.setattr(http, "BODY_GRACE_S", 0.6)
    body = json.dumps(BODY).encode()
    reader, writer = await send(server, ASKS % len(body), body[:10])
    await asyncio.sleep(0.2)
    writer.write(body[10:])
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await send(server, ASKS % 1000)
    async with asyncio.timeout(10):
        while not reader._buffer:  # type: ignore[attr-defined]
            writer.write(b" ")
            await asyncio.sleep(0.05)
        line = await reader.readline()
    assert line.startswith(b"HTTP/1.1 408")
    writer.close()


async def test_unfinished_bodies_keep_nobody_out(server: str, monkeypatch: pytest.MonkeyPatch):
    """The largest of the slow bodies is refused to make room for a complete one."""
    monkeypatch.setattr(http, "BODY_GRACE_S", 1.0)
    part = b'{"user": "' + b"x" * (2**20 - 60_000)
    senders = [await send(server, ASKS % 2**20, part) for _ in range(2)]

    async def trickle() -> None:
        while True:
            for _, writer in senders:
                writer.write(b"x" * 600)
            await asyncio.sleep(0.02)

    going = asyncio.create_task(trickle())
    await asyncio.sleep(1.2)
    async with httpx.AsyncClient(base_url=server) as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "user": "x" * 500_000})
    going.cancel()
    assert answer.status_code == 200
    for _, writer in senders:
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


async def test_empty_lines_before_a_request_are_passed_over(server: str, caplog: pytest.LogCaptureFixture):
    """As RFC 9112 asks for (2.2)."""
    reader, writer = await send(server, b"\r\n", b"\r\n", b"GET /health HTTP/1.1\r\nHost: satchel\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await send(server, b"\r\n" * (patches.HEAD_BYTES_MAX // 2 + 1))
    assert (await refusal(reader))[0] == 431
    writer.close()
    assert not caplog.records


async def test_there_are_no_web_sockets(server: str):
    """An upgraded connection would escape this protocol's limits."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    reader, writer = await send(server, b"GET /health HTTP/1.1\r\nHost: satchel\r\n" + upgrade + b"\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "as if it had not asked for one"
    writer.close()


@pytest.mark.parametrize("before", [False, True])
async def test_a_head_that_does_not_end_is_hung_up_on(server: str, monkeypatch: pytest.MonkeyPatch, before: bool):
    """Also as the second request of a connection."""
    monkeypatch.setattr(patches, "HEAD_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: satchel\r\n\r\n"
    reader, writer = await send(server, *([whole] if before else []), b"GET /health HT")
    async with asyncio.timeout(10):
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    assert answer.startswith(b"HTTP/1.1 200") == before or not answer
    writer.close()


async def test_bodies_are_bounded_together_and_room_comes_back(server: str):
    """Of three bodies of almost a mebibyte two fit; the third is refused and may retry."""
    part = b'{"user": "' + b"x" * (2**20 - 4096)
    senders = [await send(server, ASKS % 2**20, part) for _ in range(2)]
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
    """New connections are refused, and running answers are finished."""
    last = asyncio.Event()
    encode = backend.text.tokenizer.encode
    backend.play(
        SequenceUpdate("r", encode("Hello"), cached_tokens=0), last, SequenceUpdate("r", encode(" you"), "stop")
    )
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
        async with asyncio.timeout(20):
            await closing
