"""The honest clients: greedy streams with fixed prompts, in a process of their own, as long as the server is attacked.

    python -m tests.attack.streams URL STREAMS TOKENS KEY

Prints a line of JSON for every answer, and every second the ages of what the streams wait for. Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks.programs import ROOT

_NAMES = ("ada", "bob", "eve", "ida", "leo", "mia", "ned", "zoe")
_PAUSE_S = 0.5


@dataclass
class StreamedAnswer:
    """One answer of one stream. Times are seconds by `time.time`; `gap_s` is the longest wait for a piece after the
    first, and `gap_at` when it ended. `error` where it was cut off, `refused` where it never began."""

    stream: int
    began: float
    ended: float = 0.0
    text: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0
    gap_at: float = 0.0
    error: str = ""
    refused: str = ""


@dataclass(frozen=True)
class LongestWait:
    """The longest that a running stream has waited for its next piece, at a time."""

    at: float
    longest_s: float


def prompt(stream: int) -> str:
    return f"Remember: the code of {_NAMES[stream % len(_NAMES)]} is {1000 + 7 * stream}. Tell me a long story."


class _Reader:
    def __init__(self, client: httpx.AsyncClient, stream: int, tokens: int) -> None:
        self._client, self._stream = client, stream
        self._body = {
            "messages": [{"role": "user", "content": prompt(stream)}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.waits_since: float | None = None

    async def run(self) -> None:
        while True:
            said = await self._answer()
            print(json.dumps({"said": asdict(said)}), flush=True)
            if said.error or said.refused:
                await asyncio.sleep(_PAUSE_S)

    async def _answer(self) -> StreamedAnswer:
        said = StreamedAnswer(self._stream, time.time())
        done = False
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=self._body) as response:
                if response.status_code != 200:
                    said.refused = f"{response.status_code} {(await response.aread())[:200].decode(errors='replace')}"
                    return said
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        self._piece(said, json.loads(line[6:]))
            if not done and not said.error:
                said.error = "it ended early"
        except httpx.HTTPError as error:
            what = f"{type(error).__name__} {error}"
            said.error, said.refused = (what, "") if self.waits_since is not None else ("", what)
        finally:
            self.waits_since = None
            said.ended = time.time()
        return said

    def _piece(self, said: StreamedAnswer, event: dict[str, Any]) -> None:
        if "error" in event:
            said.error = json.dumps(event["error"])
            return
        now = time.time()
        if self.waits_since is None:
            said.first_s = now - said.began
        elif now - self.waits_since > said.gap_s:
            said.gap_s, said.gap_at = now - self.waits_since, now
        self.waits_since = now
        for choice in event.get("choices", ()):
            said.text += choice["delta"].get("content") or ""


async def _main(url: str, streams: int, tokens: int, key: str) -> None:
    limits, headers = httpx.Limits(max_connections=None), {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=900.0, trust_env=False, limits=limits, headers=headers
    ) as client:
        readers = [_Reader(client, stream, tokens) for stream in range(streams)]
        running = [asyncio.create_task(reader.run()) for reader in readers]
        over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not over.done():
            await asyncio.wait({over}, timeout=1.0)
            now = time.time()
            since = [reader.waits_since for reader in readers if reader.waits_since is not None]
            print(json.dumps({"waiting": asdict(LongestWait(now, now - min(since, default=now)))}), flush=True)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Streams:
    """The process, and all that it has said so far."""

    def __init__(self, url: str, streams: int, tokens: int, key: str) -> None:
        self.said: list[StreamedAnswer] = []
        self.waiting: list[LongestWait] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.streams", url, str(streams), str(tokens), key],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "said" in told:
                self.said.append(StreamedAnswer(**told["said"]))
            else:
                self.waiting.append(LongestWait(**told["waiting"]))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reading.join(10)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
