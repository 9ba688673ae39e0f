"""A server of one real model, and what clients ask of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import kill_everything, serving

READY_S = 1800.0
"""A model is tried at its first load."""

ANSWER_S = 600.0
SAID = 32
"""Tokens of an answer, unless it is said otherwise."""

Asked = str | list[dict[str, Any]]
"""A text to go on with, or a conversation."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def own_source(module: str) -> str:
    """The source of a module of the standard library."""
    return Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Logprobs:
    """Of a token as it is spelled, and of the likeliest ones, best first. Those that are spelled alike are one."""

    token: str
    said: float
    top: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """One choice of an answer."""

    text: str
    finish: str
    tokens: list[int]
    prompt: list[int]
    cached: int
    total: int
    calls: list[dict[str, Any]]
    logprobs: list[Logprobs]


class Server:
    """`satchel serve` with one model on a home of its own. It can be killed and started again there."""

    def __init__(self, folder: Path, home: Path, dtype: str) -> None:
        self.home = home
        model = {"name": "m", "source": str(folder), "dtype": dtype}
        (home / "config.yaml").write_text(json.dumps({"models": [model]}))

    def __enter__(self) -> Server:
        self._stack, self._process = self._started()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _started(self) -> tuple[ExitStack, subprocess.Popen[bytes]]:
        with ExitStack() as stack:
            port, config = free_port(), str(self.home / "config.yaml")
            command = ("--config", config, "--port", str(port))
            process = stack.enter_context(serving(self.home, *command, ready_s=READY_S))
            url = f"http://127.0.0.1:{port}"
            self.http = stack.enter_context(httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False))
            self._wait_until_proven()
            return stack.pop_all(), process

    def _wait_until_proven(self) -> None:
        """Until then it is served plainly, and nothing is kept."""
        ends = time.monotonic() + READY_S
        while self.http.get("/v1/models").json()["data"][0].get("proving"):
            assert time.monotonic() < ends, "a model is proven within minutes"
            time.sleep(1.0)

    def kill_and_restart(self) -> None:
        """As after a power cut."""
        kill_everything(self._process.pid)
        self._process.wait(timeout=30)
        self._stack.close()
        self._stack, self._process = self._started()

    def ask(self, said: Asked, agent: str = "", **more: Any) -> Answer:
        """The whole answer to a greedy request."""
        route, body = _request(said, more)
        got = self.http.post(route, json=body, headers={"X-Agent-ID": agent} if agent else {})
        assert got.status_code == 200, got.text
        data = got.json()
        (choice,) = data["choices"]
        message, usage = choice.get("message", {}), data["usage"]
        return Answer(
            text=choice["text"] if "text" in choice else message["content"],
            finish=choice["finish_reason"],
            tokens=choice["token_ids"],
            prompt=choice.get("prompt_token_ids") or data["prompt_token_ids"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            total=usage["total_tokens"],
            calls=message.get("tool_calls") or [],
            logprobs=_logprobs(choice["logprobs"] or {}),
        )

    def stream(self, said: Asked, **more: Any) -> Answer:
        """The same, put together from the pieces of a stream."""
        route, body = _request(said, {**more, "stream": True, "stream_options": {"include_usage": True}})
        text, finish, tokens, prompt, calls, usage = "", "", [], [], {}, {}
        with self.http.stream("POST", route, json=body) as got:
            assert got.status_code == 200, got.read()
            lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        for piece in map(json.loads, lines):
            assert "error" not in piece, piece
            usage = piece.get("usage") or usage
            prompt = piece.get("prompt_token_ids") or prompt
            for choice in piece["choices"]:
                delta = choice.get("delta", choice)
                text += delta.get("content") or delta.get("text") or ""
                tokens += choice.get("token_ids") or []
                prompt = choice.get("prompt_token_ids") or prompt
                assert not finish, "nothing comes after the end"
                finish = choice["finish_reason"] or finish
                for part in delta.get("tool_calls") or []:
                    _add_part(calls, part)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        ordered = [calls[index] for index in sorted(calls)]
        return Answer(text, finish, tokens, prompt, cached, usage["total_tokens"], ordered, [])

    def written(self) -> None:
        """What was said is on the disk: no more is written."""
        before, ends = -1.0, time.monotonic() + 60
        while (now := self._written_bytes()) != before or not now:
            assert time.monotonic() < ends, "KV is written within seconds"
            before = now
            time.sleep(2.0)

    def _written_bytes(self) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("satchel_written_bytes_total{"))


def _request(said: Asked, more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": SAID, "return_token_ids": True, **more}
    if isinstance(said, str):
        return "/v1/completions", {"prompt": said, **body}
    return "/v1/chat/completions", {"messages": said, **body}


def _logprobs(told: dict[str, Any]) -> list[Logprobs]:
    if "content" in told:
        tops = [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in told["content"]]
        return [Logprobs(one["token"], one["logprob"], top) for one, top in zip(told["content"], tops, strict=True)]
    if not told:
        return []
    columns = (told[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [Logprobs(*one) for one in zip(*columns, strict=True)]


def _add_part(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Adds a piece of a tool call as clients do."""
    call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] += part.get("id") or ""
    for name, value in part["function"].items():
        call["function"][name] += value or ""
