"""A server of one checkpoint, started anew, and what clients ask of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ..serve.processes import ProcessGroup
from ..serve.targets import SERVERS, CannotStart, RunFolder, free_port

ANSWER_S = 600.0
POLL_S = 0.2

Message = Mapping[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass
class Streamed:
    """An answer as it came.

    Attributes:
        first_s: until the first piece of text, seconds; the whole time if none came.
        tokens: their ids.
        gaps: by how much each of them was likelier than the next likeliest one, in log probability; empty if that was
            not asked for.
    """

    first_s: float = 0.0
    total_s: float = 0.0
    text: str = ""
    finish: str = ""
    prompt: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        ready_s: from its start to its first answer, of one token, seconds.
        group: its processes.
    """

    url: str
    model: str
    ready_s: float
    group: ProcessGroup

    def proven_s(self, timeout_s: float) -> float:
        """Waits until the model's self-test has ended. Returns when, in seconds from the start.

        Raises:
            CannotStart: it takes longer than `timeout_s`.
        """
        while (waited := time.perf_counter() - self.group.started) < timeout_s:
            (model, *_) = httpx.get(f"{self.url}/v1/models", timeout=ANSWER_S).json()["data"]
            if not model.get("proving"):
                return waited
            time.sleep(1.0)
        raise CannotStart(f"its self-test does not end within {timeout_s:.0f} s: {self.group.tail()}")

    def ask(self, **body: Any) -> dict[str, Any]:
        """Returns a chat completion; what the server said if it refused, under `error`."""
        answer = httpx.post(f"{self.url}/v1/chat/completions", json={"model": self.model, **body}, timeout=ANSWER_S)
        return answer.json()

    async def stream(
        self,
        client: httpx.AsyncClient,
        messages: Sequence[Message],
        tokens: int,
        agent: str = "",
        *,
        gaps: bool = False,
    ) -> Streamed:
        """Streams a greedy chat completion.

        Args:
            agent: whose memory is used; empty for none.
            gaps: whether to ask for the two likeliest tokens at each place too, which takes time.

        Raises:
            httpx.HTTPStatusError: the server refused.
        """
        body: dict[str, Any] = {"model": self.model, "messages": [*messages], "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True}
        if gaps:
            body |= {"logprobs": True, "top_logprobs": 2}
        if agent:
            body["agent_id"] = agent
        streamed, began = Streamed(), time.perf_counter()
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=ANSWER_S) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line.removeprefix("data: ")), streamed, time.perf_counter() - began)
        streamed.total_s = time.perf_counter() - began
        streamed.first_s = streamed.first_s or streamed.total_s
        return streamed


def _take(chunk: dict[str, Any], streamed: Streamed, now_s: float) -> None:
    if usage := chunk.get("usage"):
        streamed.prompt = usage["prompt_tokens"]
        streamed.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices", ()):
        if text := choice["delta"].get("content"):
            streamed.first_s = streamed.first_s or now_s
            streamed.text += text
        streamed.finish = choice.get("finish_reason") or streamed.finish
        streamed.tokens += choice.get("token_ids") or ()
        for told in (choice.get("logprobs") or {}).get("content") or ():
            best = sorted((other["logprob"] for other in told["top_logprobs"]), reverse=True)
            streamed.gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))


@contextmanager
def satchel(folder: Path, home: Path, place: RunFolder, timeout_s: float, **model: Any) -> Iterator[Server]:
    """Starts Satchel with one replica of a checkpoint, as its defaults are but for the keys in `model`. What one agent
    has read is reused for that agent alone, so a request of none is computed whole.

    Args:
        home: kept from start to start, with the results of the first start's self-test.

    Raises:
        CannotStart: it does not answer in time.
    """
    home.mkdir(mode=0o700, exist_ok=True)
    port, config = free_port(), home / "config.yaml"
    # JSON is YAML.
    models = [{"name": "bench", "source": str(folder), **model}]
    config.write_text(json.dumps({"models": models, "endpoint": {"port": port}, "share": "agent"}))
    command = [sys.executable, "-m", "satchel.api.cli", "serve", "--config", str(config), "--home", str(home)]
    with _running(command, port, "bench", place, timeout_s) as server:
        yield server


@contextmanager
def mlx_lm_server(folder: Path, place: RunFolder, timeout_s: float) -> Iterator[Server]:
    """Starts mlx-lm's server of a checkpoint.

    Raises:
        CannotStart: it does not answer in time.
    """
    port = free_port()
    launch = SERVERS["mlx_lm.server"](folder, port, place)
    with _running(launch.command, port, launch.model, place, timeout_s) as server:
        yield server


@contextmanager
def _running(command: list[str], port: int, model: str, place: RunFolder, timeout_s: float) -> Iterator[Server]:
    group = ProcessGroup(command, place.environment, place.work / f"server-{port}.log")
    try:
        url = f"http://127.0.0.1:{port}"
        yield Server(url, model, _first_answer_s(group, url, model, timeout_s), group)
    finally:
        group.stop()


def _first_answer_s(group: ProcessGroup, url: str, model: str, timeout_s: float) -> float:
    # A checkpoint may have no chat template.
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    while (waited := time.perf_counter() - group.started) < timeout_s:
        if group.process.poll() is not None:
            raise CannotStart(f"it ended with code {group.process.returncode}: {group.tail()}")
        try:
            if httpx.post(f"{url}/v1/completions", json=body, timeout=timeout_s - waited).status_code == 200:
                return time.perf_counter() - group.started
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise CannotStart(f"no answer within {timeout_s:.0f} s: {group.tail()}")
