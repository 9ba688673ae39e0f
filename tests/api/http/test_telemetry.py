"""What a request leaves behind: a span with its model and its tokens, and a line of the log. Neither has its words."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from satchel.cluster.errors import NoReplica
from satchel.cluster.telemetry.context import TRACING
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.collector import Collector, SeenSpan, traced

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
WORDS = "elephant"


async def ended(collector: Collector) -> SeenSpan:
    """The only span of a request."""
    await asyncio.to_thread(TRACING.close)
    (found,) = collector.spans
    return found


async def test_the_span_of_an_answer(api: Chat, backend: FakeBackend):
    backend.say("Hello there", cached=2)
    with traced() as collector:
        answer = await api.client.post(
            "/v1/chat/completions",
            json={
                "model": "satchel/tiny",
                "messages": [{"role": "user", "content": WORDS}],
                "n": 2,
                "max_tokens": 9,
                "temperature": 0.5,
                "agent_id": "scribe",
            },
            headers={"x-request-id": "req-1", "traceparent": f"{CALLER}-01"},
        )
        found = await ended(collector)
    usage = answer.json()["usage"]
    assert (found.name, found.process, found.failed) == ("POST /v1/chat/completions", "endpoint", False)
    assert f"00-{found.trace}-{found.parent}" == CALLER
    assert found.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "satchel.request.id": answer.headers["x-request-id"],
        "satchel.tenant": "default",
        "gen_ai.agent.id": "scribe",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "satchel",
        "gen_ai.request.model": "satchel/tiny",
        "gen_ai.response.model": "satchel/tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": ["stop", "stop"],
    }
    assert usage["completion_tokens"] > 2 and answer.headers["x-request-id"] == "req-1"


async def test_the_span_of_a_streamed_answer(api: Chat, backend: FakeBackend):
    backend.say("Hello there")
    with traced() as collector:
        body = {"messages": [{"role": "user", "content": WORDS}], "stream": True}
        await api.client.post("/v1/chat/completions", json=body)
        found = await ended(collector)
    assert found.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert found.attributes["gen_ai.usage.output_tokens"] > 0


async def test_the_span_of_texts_that_are_embedded(client: httpx.AsyncClient):
    with traced() as collector:
        answer = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
        found = await ended(collector)
    assert found.attributes["gen_ai.operation.name"] == "embeddings", answer.text
    assert found.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"] > 0


async def test_the_span_of_a_refused_request(api: Chat, backend: FakeBackend):
    backend.refusal = NoReplica("none")
    with traced() as collector:
        await api.chat()
        found = await ended(collector)
    assert found.failed and found.attributes["http.response.status_code"] == 503


async def test_what_watches_the_endpoint_is_not_traced(client: httpx.AsyncClient):
    with traced() as collector:
        await client.get("/health")
        await client.get("/metrics")
        await asyncio.to_thread(TRACING.close)
    assert collector.spans == []


async def test_a_request_is_one_line(api: Chat, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "satchel")
    body = {"messages": [{"role": "user", "content": WORDS}]}
    await api.client.post("/v1/chat/completions", json=body)
    await api.client.get(f"/v1/agents/{WORDS}")
    await api.client.get("/health")
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
    assert [line.partition(" in ")[0] for line in lines] == [
        "POST /v1/chat/completions: 200",
        "GET /v1/agents/{agent_id}: 503",
    ]
    assert WORDS not in caplog.text
