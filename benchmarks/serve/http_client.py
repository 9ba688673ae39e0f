"""The HTTP client that makes load: many streamed chat completions at once, on bare sockets.

    python -m benchmarks.serve.http_client PORT MODEL

While answers arrive it does nothing but note the time of every piece of data; it reads what was in them afterwards. So
it takes little of the machine away from the server beside it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from .protocol import Agents, Burst, Command, Mix, StreamedTimes, Trace, answer_commands

NOT_SENT = "not sent, because an earlier turn failed"


def conversation(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class Exchange(asyncio.Protocol):
    """One request and the pieces of its response, on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.sent = time.perf_counter()
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.enough_pieces = 0
        self.dropped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if len(self.pieces) >= self.enough_pieces:
            self.enough.set()
        if b"data: [DONE]" in data:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.enough.set()
        if not self.ended.done():
            self.ended.set_result(time.perf_counter())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request_bytes(port: int, model: str, messages: list[dict[str, str]], max_tokens: int, agent: str = "") -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    named = f"X-Agent-ID: {agent}\r\n" if agent else ""
    return f"{head}{named}\r\n".encode() + body


class _ResponseBody:
    """Takes a response apart: status, headers, and the body's bytes out of the chunked coding, if it is in one."""

    def __init__(self) -> None:
        self.status = 0
        self.chunked = False
        self._buffer = b""
        self._in_body = False
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        if not self._in_body:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return b""
            self.status = int(head.split(b" ", 2)[1])
            self.chunked = b"transfer-encoding: chunked" in head.lower()
            self._in_body, self._buffer = True, rest
        if not self.chunked:
            body, self._buffer = self._buffer, b""
            return body
        return b"".join(self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        while self._buffer:
            if self._left > 2:
                piece = self._buffer[: self._left - 2]
                self._buffer, self._left = self._buffer[len(piece) :], self._left - len(piece)
                yield piece
            elif self._left:  # The line end after a chunk.
                skipped = min(self._left, len(self._buffer))
                self._buffer, self._left = self._buffer[skipped:], self._left - skipped
            else:
                size, separator, rest = self._buffer.partition(b"\r\n")
                if not separator:
                    return
                self._left, self._buffer = int(size.split(b";")[0], 16) + 2, rest


def read_exchange(exchange: Exchange) -> StreamedTimes:
    """What a finished exchange said: a time for every event with text in it, and the server's count of tokens."""
    stream = StreamedTimes(
        sent=exchange.sent, ended=exchange.ended.result() if exchange.ended.done() else time.perf_counter()
    )
    body, waiting, finished = _ResponseBody(), b"", False
    for moment, data in exchange.pieces:
        waiting = (waiting + body.feed(data)).replace(b"\r\n", b"\n")
        *events, waiting = waiting.split(b"\n\n")
        for event in events:
            line = event.strip()
            if line == b"data: [DONE]":
                finished, stream.ended = True, moment
            elif line.startswith(b"data: "):
                _note_event(stream, json.loads(line.removeprefix(b"data: ")), moment)
    if body.status != 200:
        stream.error = f"HTTP {body.status}: {waiting[:300].decode(errors='replace')}"
    elif not finished and not exchange.dropped and stream.error is None:
        stream.error = "the stream broke off"
    return stream


def _note_event(stream: StreamedTimes, event: dict[str, Any], moment: float) -> None:
    if event.get("error"):
        stream.error = json.dumps(event["error"])[:300]
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"):
            stream.times.append(moment)
            stream.text += delta.get("content") or ""
    usage = event.get("usage")
    if usage and usage.get("completion_tokens"):
        stream.tokens, stream.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens")


class LoadClient:
    """Runs commands against one server."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    def run(self, command: Command) -> Trace:
        return asyncio.run(self._agents(command) if isinstance(command, Agents) else self._run(command))

    async def _run(self, command: Burst | Mix) -> Trace:
        wall, cpu = time.perf_counter(), time.process_time()
        exchanges = await (self._burst(command) if isinstance(command, Burst) else self._mix(command))
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        for exchange in exchanges:
            exchange.close()
        await asyncio.wait([exchange.ended for exchange in exchanges])
        return Trace([read_exchange(exchange) for exchange in exchanges], share)

    async def _send(
        self, messages: list[dict[str, str]], max_tokens: int, enough_pieces: int = 0, agent: str = ""
    ) -> Exchange:
        exchange = Exchange(request_bytes(self._port, self._model, messages, max_tokens, agent))
        exchange.enough_pieces = enough_pieces
        await asyncio.get_running_loop().create_connection(lambda: exchange, "127.0.0.1", self._port)
        return exchange

    async def _burst(self, command: Burst) -> list[Exchange]:
        exchanges = await asyncio.gather(
            *(self._send(conversation(prompt), command.max_tokens) for prompt in command.prompts)
        )
        await asyncio.wait([exchange.ended for exchange in exchanges], timeout=command.timeout_s)
        return exchanges

    async def _mix(self, command: Mix) -> list[Exchange]:
        # The first piece is the response's head.
        sends = (self._send(conversation(prompt), command.max_tokens, command.after + 1) for prompt in command.running)
        running = await asyncio.gather(*sends)
        async with asyncio.timeout(command.timeout_s):
            for exchange in running:
                await exchange.enough.wait()
        long = await self._send(conversation(command.long), command.long_tokens)
        await asyncio.wait([long.ended], timeout=command.timeout_s)
        for exchange in running:
            exchange.dropped = True
        return [*running, long]

    async def _agents(self, command: Agents) -> Trace:
        wall, cpu = time.perf_counter(), time.process_time()
        ends = asyncio.get_running_loop().time() + command.timeout_s
        agents = (self._agent(command, index, ends) for index in range(len(command.turns)))
        streams = [stream for turns in await asyncio.gather(*agents) for stream in turns]
        return Trace(streams, (time.process_time() - cpu) / (time.perf_counter() - wall))

    async def _agent(self, command: Agents, index: int, ends: float) -> list[StreamedTimes]:
        """Returns a stream for every turn of one agent."""
        first = [{"role": "system", "content": command.system}] if command.system else []
        messages, turns, streams = first, command.turns[index], []
        for text, max_tokens in turns:
            messages = [*(messages if command.grows else first), {"role": "user", "content": text}]
            stream = await self._turn(messages, max_tokens, command.names[index], ends)
            streams.append(stream)
            if stream.error is not None:
                break
            messages = [*messages, {"role": "assistant", "content": stream.text}]
        return streams + [StreamedTimes(error=NOT_SENT)] * (len(turns) - len(streams))

    async def _turn(self, messages: list[dict[str, str]], max_tokens: int, agent: str, ends: float) -> StreamedTimes:
        sent = time.perf_counter()
        try:
            exchange = await self._send(messages, max_tokens, agent=agent)
        except OSError as error:
            return StreamedTimes(sent=sent, ended=time.perf_counter(), error=str(error))
        left_s = max(0.0, ends - asyncio.get_running_loop().time())
        late = not (await asyncio.wait([exchange.ended], timeout=left_s))[0]
        exchange.close()
        await asyncio.wait([exchange.ended])
        stream = read_exchange(exchange)
        if late:
            stream.error = "no whole answer in time"
        return stream


if __name__ == "__main__":
    answer_commands(LoadClient(int(sys.argv[1]), sys.argv[2]).run)
