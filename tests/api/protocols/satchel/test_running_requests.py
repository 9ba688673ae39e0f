"""Running requests: listed while they run, aborted by their ids, and seen by nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.cluster.audit import Audit
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.fake_backend import FakeBackend, events_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


async def running(client: httpx.AsyncClient, count: int, **how: Any) -> list[dict[str, Any]]:
    """The list, once it has so many."""
    async with asyncio.timeout(10):
        while True:
            found = (await client.get("/v1/requests", **how)).json()["data"]
            if len(found) == count:
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
def endless(backend: FakeBackend) -> FakeBackend:
    """Sequences with one token, that never end."""
    first = backend.sequence("Hello", cached=3)[0]
    backend.play(first, asyncio.Event())
    return backend


async def test_a_request_is_listed_while_it_runs(client: httpx.AsyncClient, backend: FakeBackend):
    end = asyncio.Event()
    first, *rest = backend.sequence("Hello there", cached=3)
    backend.play(first, end, *rest)
    backend.placed = {"satchel/tiny#0": "mac0"}
    assert await running(client, 0) == []
    task = asyncio.create_task(
        client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine", "X-Agent-ID": "ann"})
    )
    async with asyncio.timeout(10):
        while not (shown := (await running(client, 1))[0])["answers"]:
            await asyncio.sleep(0.01)
    assert shown["request_id"] == "mine" and shown["id"].startswith("mine/") and shown["agent"] == "ann"
    assert (shown["model"], shown["replica"], shown["node"]) == ("satchel/tiny", "satchel/tiny#0", "mac0")
    assert (shown["why"], shown["cached_tokens"], shown["completion_tokens"]) == ("test: scripted", 3, 1)
    assert shown["prompt_tokens"] == len(backend.requests[-1]["prompt"]) and "tenant" not in shown
    end.set()
    assert (await task).status_code == 200
    assert await running(client, 0) == []


@pytest.mark.parametrize("by", ["id", "request_id"])
async def test_an_aborted_request_ends_for_its_client_too(client: httpx.AsyncClient, endless: FakeBackend, by: str):
    task = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "n": 2}))
    shown = await running(client, 2)
    answer = (await client.delete(f"/v1/requests/{shown[0][by]}")).json()
    assert answer == {"id": shown[0][by], "object": "request.aborted", "aborted": 1 if by == "id" else 2}
    refused = await task
    assert (refused.status_code, refused.json()["error"]["code"]) == (499, "request_aborted")
    assert all(generation.aborts for generation in endless.generations)
    assert await running(client, 0) == []
    again = await client.delete(f"/v1/requests/{shown[0][by]}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


async def test_an_aborted_stream_ends_with_the_error(client: httpx.AsyncClient, endless: FakeBackend):
    task = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    (shown,) = await running(client, 1)
    await client.delete(f"/v1/requests/{shown['id']}")
    events = events_of((await task).text)
    assert next(each for each in events if "error" in each)["error"]["code"] == "request_aborted"
    assert endless.generations[0].aborts


async def test_a_request_is_aborted_before_its_first_token(client: httpx.AsyncClient, backend: FakeBackend):
    backend.play(asyncio.Event())
    task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
    (shown,) = await running(client, 1)
    assert not shown["answers"]
    await client.delete(f"/v1/requests/{shown['id']}")
    assert (await task).status_code == 499


async def test_a_client_that_leaves_is_listed_no_more(client: httpx.AsyncClient, endless: FakeBackend):
    task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
    await running(client, 1)
    task.cancel()
    assert await running(client, 0) == []


async def test_a_sequence_that_fails_is_listed_no_more(client: httpx.AsyncClient, backend: FakeBackend):
    backend.play(SequenceUpdate("row", [], finish="error", error={"kind": "GenerationFailed", "message": "no"}))
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 500
    assert await running(client, 0) == []


async def test_tenants_see_and_abort_only_their_own(endless: FakeBackend, config, tmp_path: Path):
    home = Home(tmp_path)
    prepare_home(home)
    how: dict[str, dict[str, Any]] = {"ann": {}, "bob": {}, "root": {"admin": True}}
    as_ = {name: {"Authorization": f"Bearer {create_key(home, name, **more)[1]}"} for name, more in how.items()}
    app = create_app(endless, config, keys=KeyRing(home, required=False), audit=Audit(home))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=as_["ann"]))
        (shown,) = await running(client, 1, headers=as_["ann"])
        assert await running(client, 0, headers=as_["bob"]) == await running(client, 0, headers=as_["root"]) == []
        for query in ("?tenant=*", "?tenant=ann"):
            assert (await client.get(f"/v1/requests{query}", headers=as_["bob"])).status_code == 403
            answer = await client.delete(f"/v1/requests/{shown['id']}{query}", headers=as_["bob"])
            assert answer.status_code == 403
        assert (await client.delete(f"/v1/requests/{shown['id']}", headers=as_["bob"])).status_code == 404
        (every,) = (await client.get("/v1/requests?tenant=*", headers=as_["root"])).json()["data"]
        assert every["tenant"] == "ann" and not task.done()
        assert (await client.delete(f"/v1/requests/{shown['id']}?tenant=*", headers=as_["root"])).status_code == 200
        assert (await task).status_code == 499
    assert "request aborted" in home.audit_file.read_text()
