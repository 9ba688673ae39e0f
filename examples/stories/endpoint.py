"""A running Satchel endpoint as its clients see it: the official OpenAI client for what is said, and Satchel's own
routes for what else can be done with an agent."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import BadRequestError, DefaultHttpxClient, OpenAI

TIMEOUT_S = 600.0
CONTEXT_EXCEEDED = "context_length_exceeded"
_SAMPLE = re.compile(r'^(\w+)(?:\{(?:[^}]*,)?(?:match|reason|replica)="([^"]*)"[^}]*\})? (\S+)$')

Message = dict[str, str]


class PromptTooLong(Exception):
    """The prompt does not fit in the model's context."""


@dataclass(frozen=True)
class RequestUsage:
    """What one request took. Lengths are tokens.

    Args:
        prompt_tokens: of the whole prompt; of an injection, of the agent's whole conversation.
        cached_tokens: of the prompt, that were not computed again.
        completion_tokens: of the answer; 0 of an injection.
        first_token_s: from sending to the first text; None where there was none.
        text: the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0
    first_token_s: float | None = None
    text: str = ""

    @property
    def computed_tokens(self) -> int:
        """What of the prompt was prefilled."""
        return self.prompt_tokens - self.cached_tokens


class ScenarioEndpoint:
    """One endpoint and one of its models. Any number of threads may use it.

    Args:
        url: as `http://127.0.0.1:8000`.
        model: "" for the endpoint's default.

    Raises:
        httpx.HTTPError: nothing answers there.
    """

    def __init__(self, url: str, model: str = "") -> None:
        url = url.rstrip("/").removesuffix("/v1")
        # Proxies of the environment are meant for other places than a server on one's own machine.
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self._client = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=TIMEOUT_S,
            # A turn that is sent twice may be kept twice.
            max_retries=0,
            http_client=DefaultHttpxClient(timeout=TIMEOUT_S, trust_env=False),
        )
        self.model = model or self._json("GET", "/v1/models")["data"][0]["id"]

    def close(self) -> None:
        self._client.close()
        self._http.close()

    def chat(
        self, messages: Sequence[Any], *, agent: str = "", continues: bool = False, tokens_max: int = 64
    ) -> RequestUsage:
        """A greedy answer.

        Args:
            messages: the whole conversation, or what is new of it.
            agent: who asks; "" for nobody, of whom nothing is kept.
            continues: whether `messages` are appended to what the agent remembers.

        Raises:
            PromptTooLong: the conversation does not fit.
            openai.OpenAIError: the endpoint refused, or did not answer.
        """
        started = time.perf_counter()
        first_s, pieces, usage = None, list[str](), None
        try:
            stream = self._client.chat.completions.create(
                model=self.model,
                messages=list(messages),
                temperature=0,
                max_tokens=tokens_max,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"X-Agent-ID": agent} if agent else {},
                extra_body={"agent_continue": True} if continues else {},
            )
        except BadRequestError as error:
            if error.code == CONTEXT_EXCEEDED:
                raise PromptTooLong(str(error)) from error
            raise
        with stream:
            for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].delta.content:
                    if first_s is None:
                        first_s = time.perf_counter() - started
                    pieces.append(chunk.choices[0].delta.content)
        if usage is None:
            raise RuntimeError("the endpoint sent no usage")
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        return RequestUsage(usage.prompt_tokens, cached, usage.completion_tokens, first_s, "".join(pieces))

    def inject(self, agent: str, messages: Sequence[Message]) -> RequestUsage:
        """Put messages into an agent's memory, without an answer."""
        answer = self._json("POST", f"/v1/agents/{agent}/inject", {"model": self.model, "messages": list(messages)})
        return RequestUsage(answer["tokens"], answer["cached_tokens"])

    def release(self, agent: str) -> int:
        """Leave an agent's KV only on the disk. Returns the bytes that this freed."""
        return self._json("POST", f"/v1/agents/{agent}/release")["bytes"]

    def clear_cache(self) -> None:
        """Let all replicas drop the KV that they keep in memory for reuse: everybody's."""
        self._json("DELETE", "/v1/cache")

    def forget(self, agent: str) -> None:
        """Erase an agent, if there is one."""
        response = self._http.delete(f"/v1/agents/{agent}")
        if response.status_code != 404:
            response.raise_for_status()

    def counters(self, name: str) -> dict[str, float]:
        """A counter of `/metrics` by its label's value, over all replicas; "" where it has no label."""
        response = self._http.get("/metrics")
        response.raise_for_status()
        found = (_SAMPLE.match(line) for line in response.text.splitlines())
        return {match[2] or "": float(match[3]) for match in found if match and match[1] == name}

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        response = self._http.request(method, path, json=body)
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"{method} {path}: {response.status_code} {response.text[:300]}",
                request=response.request,
                response=response,
            )
        return response.json()


@contextmanager
def endpoint_at(url: str, model: str = "") -> Iterator[ScenarioEndpoint]:
    """An `ScenarioEndpoint` that is closed afterwards.

    Raises:
        SystemExit: nothing answers there.
    """
    try:
        endpoint = ScenarioEndpoint(url, model)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SystemExit(f"{url} does not answer ({error}); start one with: make serve") from error
    try:
        yield endpoint
    finally:
        endpoint.close()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
