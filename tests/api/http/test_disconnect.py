"""If the client disconnects, its sequence stops: streamed or not, before or after the first token, on a real server."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import ClientDisconnect

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.api.http import exchange as http
from satchel.api.http.exchange import CancelOnDisconnect
from satchel.api.pipeline.generation import Generator
from satchel.api.protocols.openai.messages import read_messages
from satchel.api.requests.requests import ChatRequest

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def connect(server: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(server)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps(body).encode()
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: satchel\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), len(data))
        + data
    )
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [None, "a", ["a", "b", "c"]])
async def test_a_sequence_that_has_produced_nothing_stops_with_its_client(server, backend, stream, prompt):
    backend.play(asyncio.Event())
    body = {**BODY, "stream": stream} if prompt is None else {"prompt": prompt, "stream": stream}
    sequences = len(prompt) if isinstance(prompt, list) else 1
    _, writer = await connect(server, body)
    await until(lambda: len(backend.generations) == sequences)
    writer.close()
    async with asyncio.timeout(20):
        for generation in backend.generations:
            await generation.aborted.wait()
    assert [generation.aborts for generation in backend.generations] == [1] * sequences


async def test_a_streaming_sequence_stops_with_its_client(server, backend):
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0), asyncio.Event())
    reader, writer = await connect(server, {**BODY, "stream": True})
    await reader.readuntil(b"Hello")
    assert backend.generations[0].aborts == 0
    writer.close()
    async with asyncio.timeout(20):
        await backend.generations[0].aborted.wait()
    assert backend.generations[0].aborts == 1


async def test_a_sequence_is_not_aborted_when_it_ends_by_itself(server, backend):
    async with httpx.AsyncClient(base_url=server) as client:
        for stream in (False, True):
            assert (await client.post("/v1/chat/completions", json={**BODY, "stream": stream})).status_code == 200
    assert [generation.aborts for generation in backend.generations] == [0, 0]


async def test_a_client_that_goes_while_the_request_is_queued_cancels_queueing(server, backend):
    cancelled = asyncio.Event()
    entered = asyncio.Event()

    async def generate(model, sequence, **how):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    backend.generate = generate
    for stream in (False, True):
        entered.clear()
        cancelled.clear()
        _, writer = await connect(server, {**BODY, "stream": stream})
        async with asyncio.timeout(20):
            await entered.wait()
            writer.close()
            await cancelled.wait()
        assert cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_stops_its_sequence(backend, config, stream):
    """As under Ray Serve: the coroutine is cancelled from outside, and no disconnect message is received."""
    app = create_app(backend, config)
    backend.play(asyncio.Event())
    data = json.dumps({**BODY, "stream": stream}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
        "http_version": "1.1",
        "scheme": "http",
    }
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message):
        raise AssertionError(message)

    task = asyncio.create_task(app(scope, receive, send))
    await until(lambda: bool(backend.generations))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        await backend.generations[0].aborted.wait()
    assert backend.generations[0].aborts == 1


async def test_the_pipeline_without_http_stops_its_sequence_when_left_early(backend, config):
    generator = Generator(backend, config)
    request = ChatRequest(messages=read_messages(BODY["messages"]), agent="ann")
    backend.say("one two three four")

    stream = await generator.start_chat(request)
    answer = await stream.collect()
    assert (answer.text, answer.reason) == ("one two three four", "stop")
    assert (stream.prompt_tokens, stream.replica) == (len(backend.requests[0]["prompt"]), "satchel/tiny#0")
    await stream.abort()
    assert backend.generations[0].aborts == 0

    stream = await generator.start_chat(request)
    async for _ in stream:
        break
    await stream.abort()
    await stream.abort()
    assert backend.generations[1].aborts == 1


async def test_a_tokenizer_is_loaded_once_for_requests_that_come_together(backend, config, text):
    loads = 0

    def load(folder, *, name, trusted):
        nonlocal loads
        loads += 1
        return text

    generator = Generator(backend, config, load_text=load)
    request = ChatRequest(messages=read_messages(BODY["messages"]))
    streams = await asyncio.gather(*(generator.start_chat(request) for _ in range(8)))
    for stream in streams:
        await stream.abort()
    assert loads == 1


async def test_loading_survives_the_request_that_began_it_and_is_tried_again_after_a_failure(backend, config, text):
    import threading

    release, failing = threading.Event(), True

    def load(folder, *, name, trusted):
        release.wait(20)
        if failing:
            raise OSError("disk")
        return text

    generator = Generator(backend, config, load_text=load)
    first = asyncio.create_task(generator.text_model(backend.served[0]))
    second = asyncio.create_task(generator.text_model(backend.served[0]))
    await asyncio.sleep(0.01)
    first.cancel()
    release.set()
    with pytest.raises(OSError, match="disk"):
        await second
    failing = False
    assert await generator.text_model(backend.served[0]) is text


async def test_headers_of_a_stream_do_not_wait_for_ever(server, backend, monkeypatch):
    """During a long prefill the client gets the headers soon; a later failure is an event."""
    monkeypatch.setattr("satchel.api.http.event_stream.HEADERS_WAIT_S", 0.05)
    computed = asyncio.Event()
    backend.play(computed, SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), finish="stop", cached_tokens=0))
    reader, writer = await connect(server, {**BODY, "stream": True})
    async with asyncio.timeout(20):
        assert b"x-satchel-replica" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b'"role":"assistant"')
        computed.set()
        await reader.readuntil(b"Hello")
        await reader.readuntil(b"[DONE]")
    writer.close()


@pytest.mark.parametrize("turns_until_gone", range(5))
@pytest.mark.parametrize("turns_of_work", range(5))
async def test_a_disconnection_in_any_moment_leaves_no_cancellation_behind(turns_until_gone, turns_of_work):
    async def receive():
        for _ in range(turns_until_gone):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    try:
        async with CancelOnDisconnect(receive):
            for _ in range(turns_of_work):
                await asyncio.sleep(0)
    except ClientDisconnect:
        pass
    for _ in range(5):
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_stays_one():
    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work():
        async with CancelOnDisconnect(receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_not_taken_for_a_disconnection():
    async def receive():
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        async with CancelOnDisconnect(receive):  # pyright: ignore[reportArgumentType]
            raise ZeroDivisionError


async def test_watching_ends_quietly_when_the_block_ends_first():
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async with CancelOnDisconnect(receive):
        await asyncio.sleep(0)
    gone.set()
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_client_that_takes_nothing_is_taken_for_gone(backend, config, monkeypatch):
    """The socket stays full: the request ends, and its sequence leaves the batch."""
    monkeypatch.setattr(http, "STALL_S", 0.05)
    backend.say("a long answer " * 50)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    taken = []

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message):
        taken.append(message)
        if len(taken) > 3:
            await asyncio.Event().wait()

    await asyncio.wait_for(create_app(backend, config)(scope, receive, send), 10)
    assert len(taken) == 4
    assert backend.generations[-1].aborted.is_set()
