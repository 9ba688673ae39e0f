"""The agents' side of HTTP: turns through httpx or the openai client, and Satchel's own routes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

from .server import MODEL

TIMEOUT_S = 660.0
_SAMPLE = re.compile(r"^(?:satchel_|vllm:)(\w+?)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(match|reason|outcome|status|route)="([^"]*)"')
MEMORY_HEADER, MEMORY_FIELD = "x-satchel-memory", "satchel"
"""Where an answer says what its agent's memory lacks; it says nothing where it lacks nothing."""


@dataclass(frozen=True)
class Ask:
    """A turn: `messages` are the whole conversation, or where it `continues`, what is new. After `pieces` of the answer
    the client hangs up; 0 reads to its end."""

    agent: str
    messages: list[dict[str, str]]
    continues: bool
    tokens_max: int
    stop: str = ""
    streamed: bool = False
    official: bool = False
    pieces: int = 0
    timeout_s: float | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": MODEL, "messages": self.messages, "temperature": 0}
        found["max_tokens"] = self.tokens_max
        if self.stop:
            found["stop"] = [self.stop]
        if self.streamed:
            found |= {"stream": True, "stream_options": {"include_usage": True}}
        return found

    def extra(self) -> dict[str, Any]:
        found: dict[str, Any] = {"agent_continue": True} if self.continues else {}
        if self.timeout_s is not None:
            found["timeout_s"] = self.timeout_s
        return found


@dataclass
class TurnResult:
    """What came of a turn: `whole` where it came to its end. Lengths are tokens."""

    text: str = ""
    whole: bool = False
    finish: str = ""
    prompt: int = 0
    cached: int = 0
    drawn: int = 0
    unkept: bool = False
    why: str = ""
    error: str = ""
    pieces: int = 0

    def headers(self, headers: httpx.Headers) -> None:
        self.why = headers.get("x-satchel-why", "")
        self.unkept |= headers.get(MEMORY_HEADER, "").startswith("not-kept")

    def body(self, body: dict[str, Any]) -> None:
        """An answer, or a piece of one."""
        if (error := body.get("error")) is not None:
            self.error = json.dumps(error)
            return
        self.unkept |= not (body.get(MEMORY_FIELD) or {}).get("kept", True)
        if (usage := body.get("usage")) is not None:
            self.prompt, self.drawn = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in body.get("choices") or ():
            said = choice.get("message") or choice.get("delta") or {}
            if text := said.get("content"):
                self.text += text
                self.pieces += 1
            if choice.get("finish_reason"):
                self.finish = choice["finish_reason"]


class Http:
    """One endpoint's users. Errors of the connection become `TurnResult.error`, or are raised by the other methods."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        # Proxies of the environment are meant for other places.
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)
        self._official = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=TIMEOUT_S,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(timeout=TIMEOUT_S, trust_env=False),
        )

    async def close(self) -> None:
        await self._http.aclose()
        await self._official.close()

    async def say(self, ask: Ask) -> TurnResult:
        """A turn."""
        told = TurnResult()
        try:
            await (self._official_say(ask, told) if ask.official else self._say(ask, told))
        except (httpx.HTTPError, APIConnectionError) as error:
            told.error = told.error or f"connection: {type(error).__name__} {error}"
        except APIStatusError as error:
            told.error = f"{error.status_code} {error.response.text}"
        except APIError as error:
            told.error = f"stream: {error} {error.body}"
        told.whole = bool(told.finish) and not told.error and (told.prompt > 0 or not ask.streamed)
        return told

    async def _say(self, ask: Ask, told: TurnResult) -> None:
        body, headers = {**ask.fields(), **ask.extra()}, {"X-Agent-ID": ask.agent}
        if not ask.streamed:
            answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
            told.headers(answer.headers)
            told.error = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
            if not told.error:
                told.body(answer.json())
            return
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            told.headers(answer.headers)
            if answer.status_code != 200:
                told.error = f"{answer.status_code} {(await answer.aread()).decode()}"
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    told.body(json.loads(line.removeprefix("data: ")))
                    if ask.pieces and told.pieces >= ask.pieces:
                        return

    async def _official_say(self, ask: Ask, told: TurnResult) -> None:
        create = self._official.chat.completions.with_raw_response.create
        raw = await create(**ask.fields(), extra_headers={"X-Agent-ID": ask.agent}, extra_body=ask.extra())
        told.headers(raw.headers)
        answer = raw.parse()
        if not ask.streamed:
            told.body(answer.to_dict())
            return
        async with answer as stream:  # type: ignore[attr-defined]
            async for chunk in stream:
                told.body(chunk.to_dict())
                if ask.pieces and told.pieces >= ask.pieces:
                    return

    async def json(self, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> tuple[int, Any]:
        """Status and body of one of Satchel's own routes.

        Raises:
            httpx.HTTPError: the connection broke.
        """
        answer = await self._http.request(method, path, json=body, timeout=timeout_s)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, {"error": answer.text}

    async def metrics(self) -> dict[str, float]:
        """The counters of `/metrics`, by name and what they count.

        Raises:
            httpx.HTTPError: the connection broke, or the server has none now.
        """
        answer = await self._http.get("/metrics", timeout=20.0)
        answer.raise_for_status()
        found: dict[str, float] = {}
        for line in answer.text.splitlines():
            match = _SAMPLE.match(line)
            if match is None or not match[1].endswith("_total"):
                continue
            labels = " ".join(value for _, value in _LABEL.findall(match[2] or ""))
            name = f"{match[1].removesuffix('_total')} {labels}".strip()
            found[name] = found.get(name, 0.0) + float(match[3])
        return found
