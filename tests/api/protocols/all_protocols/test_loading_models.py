"""Requests for models that come and go: they wait, their streams say how far the model is, and errors have the shape of
their protocol. And aliases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.pool_messages import LOADING, PooledModel
from satchel.api.requests.backend import ListedModel
from satchel.api.requests.loading import Loading
from satchel.cluster.errors import ModelLoadError
from tests.worlds.api.fake_backend import FakeBackend

MESSAGES = [{"role": "user", "content": "Hello"}]
PROGRESS = "loading satchel/tiny 43%: reading weights"
CHATS = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hello"},
}


class Pool:
    """Loads the default model when the test says so, or fails."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend, self.served = backend, list(backend.served)
        backend.served.clear()
        backend.entries["satchel/tiny"] = ListedModel("satchel/tiny", ("gpt-4o", "a/b"), True, False)
        backend.states["satchel/tiny"] = PooledModel("satchel/tiny", LOADING, "reading weights", 0.43)
        backend.loader = self.load
        self.asked, self.ready = asyncio.Event(), asyncio.Event()
        self.error: ModelLoadError | None = None

    async def load(self, name: str, loading: Loading) -> None:
        loading.progress = PROGRESS
        self.asked.set()
        try:
            await self.ready.wait()
        finally:
            loading.progress = ""
        if self.error is not None:
            raise self.error
        self.backend.served[:] = self.served


@pytest.fixture
def pool(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr("satchel.api.http.event_stream.HEADERS_WAIT_S", 0.02)
    monkeypatch.setattr("satchel.api.http.event_stream.PROGRESS_S", 0.02)
    return Pool(backend)


async def streamed(server: str, path: str, pool: Pool, then: Callable[[], Any]) -> tuple[int, bytes, bytes]:
    """Returns the status of a stream, what came while its model was loaded, and what came then."""
    before, after = b"", b""
    async with (
        asyncio.timeout(20),
        httpx.AsyncClient(base_url=server, timeout=20) as client,
        client.stream("POST", path, json={"model": "satchel/tiny", "stream": True, **CHATS[path]}) as answer,
    ):
        pieces = answer.aiter_bytes()
        for _ in range(3):
            before += await anext(pieces)
        then()
        async for piece in pieces:
            after += piece
    return answer.status_code, before, after


@pytest.mark.parametrize("path", CHATS)
async def test_a_stream_says_how_far_its_model_is_and_goes_on(server: str, pool: Pool, path: str):
    pool.backend.say("Hello", step=100)
    status, before, after = await streamed(server, path, pool, pool.ready.set)
    assert status == 200 and b'"Hello"' in after
    if path.startswith("/api/"):
        assert not before.strip(), "its clients parse every line"
        assert all(json.loads(line) for line in after.splitlines())
    else:
        assert before.count(f": {PROGRESS}\n\n".encode()) >= 3 and b"data:" not in before


@pytest.mark.parametrize("path", CHATS)
async def test_a_load_that_fails_is_told_in_the_stream(server: str, pool: Pool, path: str):
    pool.error = ModelLoadError("its weights are gone")
    status, _, after = await streamed(server, path, pool, pool.ready.set)
    assert status == 200
    if path.startswith("/api/"):
        assert json.loads(after.splitlines()[-1]) == {"error": "its weights are gone"}
        return
    events = [json.loads(line.removeprefix(b"data: ")) for line in after.splitlines() if line.startswith(b"data: ")]
    if path == "/v1/responses":
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["message"] == "its weights are gone"
    else:
        assert events[-1]["error"]["message"] == "its weights are gone"
    assert (b"event: error" in after) == (path == "/v1/messages")


@pytest.mark.parametrize("path", CHATS)
async def test_a_whole_answer_waits_for_its_model(client: httpx.AsyncClient, pool: Pool, path: str):
    asked = asyncio.create_task(client.post(path, json={"model": "gpt-4o", "stream": False, **CHATS[path]}))
    await asyncio.wait_for(pool.asked.wait(), 10)
    assert not asked.done()
    pool.ready.set()
    answer = await asked
    assert answer.status_code == 200 and "there" in answer.text
    assert pool.backend.loads == ["satchel/tiny"], "by its own name"


@pytest.mark.parametrize("path", CHATS)
async def test_a_load_that_fails_at_once_is_an_http_error(client: httpx.AsyncClient, pool: Pool, path: str):
    pool.error = ModelLoadError("its weights are gone")
    pool.ready.set()
    answer = await client.post(path, json={"model": "satchel/tiny", "stream": True, **CHATS[path]})
    assert answer.status_code == 500 and "its weights are gone" in answer.text


async def test_the_time_of_a_request_limits_its_wait(client: httpx.AsyncClient, pool: Pool):
    body = {"model": "satchel/tiny", "messages": MESSAGES, "timeout_s": 0.1}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 504


async def test_a_client_that_leaves_while_its_model_is_loaded_ends_only_its_own_wait(server: str, pool: Pool):
    async with httpx.AsyncClient(base_url=server, timeout=20) as client:
        body = {"model": "satchel/tiny", "messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
        pool.ready.set()
        assert (await client.post("/v1/chat/completions", json={**body, "stream": False})).status_code == 200
    assert len(pool.backend.requests) == 1


async def test_vectors_and_counts_wait_too(client: httpx.AsyncClient, pool: Pool):
    pool.ready.set()
    body = {"model": "a/b", "messages": MESSAGES}
    assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 200
    assert pool.backend.loads == ["satchel/tiny"]
    assert (await client.post("/v1/embeddings", json={"model": "a/b", "input": "Hello"})).status_code in (200, 400)
    assert pool.backend.loads == ["satchel/tiny"] * 2


async def test_the_list_of_models_says_their_state(client: httpx.AsyncClient, pool: Pool):
    first, *_ = (await client.get("/v1/models")).json()["data"]
    assert first["id"] == "satchel/tiny" and first["aliases"] == ["gpt-4o", "a/b"]
    assert (first["load"], first["state"], first["error"]) == ("request", "loading", None)
    assert first["progress"] == {"what": "reading weights", "fraction": 0.43}
    assert (await client.get("/v1/models/gpt-4o")).json() == first
    assert not pool.backend.loads, "looking loads nothing"
    pool.ready.set()
    await client.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": MESSAGES})
    pool.backend.states.clear()
    pool.backend.entries["satchel/tiny"] = ListedModel("satchel/tiny", ("gpt-4o",), True, True)
    first, second = (await client.get("/v1/models")).json()["data"]
    assert first["max_model_len"] > 0 and first["state"] == "loaded" and first["progress"] is None
    assert (second["load"], second["state"], second["aliases"]) == ("start", "loaded", [])


async def test_ollama_s_clients_load_and_list_them(client: httpx.AsyncClient, pool: Pool):
    assert (await client.get("/api/ps")).json() == {"models": []}
    pool.ready.set()
    assert (await client.post("/api/generate", json={"model": "gpt-4o:latest"})).json()["done_reason"] == "load"
    assert pool.backend.loads == ["satchel/tiny"]
    body = {"model": "gpt-4o", "keep_alive": 0}
    assert (await client.post("/api/generate", json=body)).json()["done_reason"] == "unload"
    assert (pool.backend.loads, pool.backend.unloads) == (["satchel/tiny"], ["satchel/tiny"])
    names = [model["name"] for model in (await client.get("/api/tags")).json()["models"]]
    assert "satchel/tiny" in names
    assert "satchel/tiny" not in [model["name"] for model in (await client.get("/api/ps")).json()["models"]]


async def test_a_background_response_is_there_at_once_and_waits_for_its_model(client: httpx.AsyncClient, pool: Pool):
    body = {"model": "satchel/tiny", "input": "Hello", "background": True}
    answer = (await client.post("/v1/responses", json=body)).json()
    assert answer["status"] in ("queued", "in_progress")
    pool.ready.set()
    async with asyncio.timeout(10):
        while (shown := (await client.get(f"/v1/responses/{answer['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.02)
    assert shown["model"] == "satchel/tiny"
