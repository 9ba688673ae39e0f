"""The cluster as it changes: events, the latest decisions, the last hour."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from satchel.actors.protocol.replica_messages import ReplicaProgress
from satchel.actors.protocol.router_messages import Decisions, Explanation, MadeDecision
from satchel.api.app import create_app
from satchel.api.http.server import HttpServer
from satchel.api.protocols.satchel import cluster_routes, live_routes
from satchel.api.requests.backend import ReplicaStats
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.fake_backend import FakeBackend

Event = tuple[str, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_routes, "FRESH_S", -1.0)
    monkeypatch.setattr(live_routes, "EVENT_S", 0.02)
    monkeypatch.setattr(live_routes, "EVERY_S", 0.02)


def decision(number: int, **more: Any) -> MadeDecision:
    why = Explanation("m-0", "agent_home", 256, "mac0", costs_s={"m-0": {"prefill": 0.5, "total": 0.5}}, **more)
    return MadeDecision(number, f"r{number}/x", "default/ann", "m", 300, 1_700_000_000.0, why)


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    server = HttpServer(app, "127.0.0.1", port, closing=app.state.end_streams)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            yield client
    finally:
        await server.close(10)


async def events(response: httpx.Response) -> AsyncIterator[Event]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def until(stream: AsyncIterator[Event], name: str) -> Any:
    """The data of the next event of that name."""
    async with asyncio.timeout(10):
        async for found, data in stream:
            if found == name:
                return data
    raise AssertionError(f"the stream ended without {name}")


@pytest.fixture
def busy(backend: FakeBackend) -> FakeBackend:
    backend.replicas = [ReplicaStats("m-0", "m", True, node="local"), ReplicaStats("m-1", "m", False, node="local")]
    backend.made = Decisions("first", 2, [decision(1), decision(2)])
    return backend


async def test_a_reader_is_told_what_is_there_and_then_what_changes(busy: FakeBackend, config):
    busy.progress = {"m-1": ReplicaProgress("loading weights", 0.5, False)}
    async with serving(create_app(busy, config)) as client, client.stream("GET", "/v1/cluster/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        assert (await until(stream, "caller"))["admin"] is True
        view = await until(stream, "cluster")
        assert view == (await client.get("/v1/cluster?agents=0")).json()
        assert [each["loading"] for each in view["replicas"]] == [None, {"what": "loading weights", "fraction": 0.5}]
        made = await until(stream, "decisions")
        assert [each["number"] for each in made] == [1, 2] and made[0]["why"]["costs_s"]["m-0"]["total"] == 0.5
        busy.made = Decisions("first", 3, [decision(1), decision(2), decision(3)])
        assert [each["number"] for each in await until(stream, "decisions")] == [3]
        busy.replicas[0] = replace(busy.replicas[0], running=4)
        assert (await until(stream, "cluster"))["replicas"][0]["running"] == 4
        sample = await until(stream, "sample")
        async with asyncio.timeout(10):
            while sample["running"] != 4:
                sample = await until(stream, "sample")


async def test_decisions_of_a_restarted_router_are_told_again(busy: FakeBackend, config):
    async with serving(create_app(busy, config)) as client, client.stream("GET", "/v1/cluster/events") as response:
        stream = events(response)
        assert len(await until(stream, "decisions")) == 2
        busy.made = Decisions("second", 1, [decision(1)])
        assert [each["number"] for each in await until(stream, "decisions")] == [1]


async def test_a_router_that_does_not_answer_is_said_and_the_rest_goes_on(busy: FakeBackend, config):
    async with serving(create_app(busy, config)) as client, client.stream("GET", "/v1/cluster/events") as response:
        stream = events(response)
        await until(stream, "decisions")
        busy.made = None
        assert "router" in await until(stream, "trouble")
        busy.replicas[0] = replace(busy.replicas[0], waiting=1)
        assert (await until(stream, "cluster"))["replicas"][0]["waiting"] == 1
        busy.made = Decisions("third", 0)
        assert await until(stream, "trouble") is None


async def test_nothing_is_sent_twice(busy: FakeBackend, config):
    async with serving(create_app(busy, config)) as client, client.stream("GET", "/v1/cluster/events") as response:
        stream, names = events(response), []
        async with asyncio.timeout(10):
            async for name, _ in stream:
                names.append(name)
                if names.count("sample") == 5:
                    break
    assert [names.count(each) for each in ("caller", "requests", "cluster", "decisions")] == [1, 1, 1, 1]


async def test_streams_end_when_the_server_closes(busy: FakeBackend, config):
    app = create_app(busy, config)
    port = free_port()
    server = HttpServer(app, "127.0.0.1", port, closing=app.state.end_streams)
    await server.start()
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client,
        client.stream("GET", "/v1/cluster/events") as response,
    ):
        stream = events(response)
        await until(stream, "caller")
        closing = asyncio.create_task(server.close(60))
        async with asyncio.timeout(10):
            assert [name async for name, _ in stream][-1:] != ["caller"]
            await closing


async def test_there_are_not_endlessly_many_readers(busy: FakeBackend, config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_routes, "READERS_MAX", 1)
    async with serving(create_app(busy, config)) as client:
        async with client.stream("GET", "/v1/cluster/events") as response:
            await until(events(response), "caller")
            assert (await client.get("/v1/cluster/events")).status_code == 503
        async with asyncio.timeout(10):
            while True:
                async with client.stream("GET", "/v1/cluster/events") as again:
                    if again.status_code == 200:
                        break
                await asyncio.sleep(0.02)


async def test_a_tenant_is_told_of_its_own_requests_only(busy: FakeBackend, config, tmp_path: Path):
    home = Home(tmp_path)
    prepare_home(home)
    as_ = {name: {"Authorization": f"Bearer {create_key(home, name)[1]}"} for name in ("ann", "bob")}
    busy.play(asyncio.Event())
    async with serving(create_app(busy, config, keys=KeyRing(home, required=False))) as client:
        for path in ("/v1/cluster/history", "/v1/cluster/decisions", "/v1/cluster"):
            assert (await client.get(path, headers=as_["ann"])).status_code == 403
        asking = {"messages": [{"role": "user", "content": "x"}], "agent_id": "secret"}
        task = asyncio.create_task(client.post("/v1/chat/completions", json=asking, headers=as_["ann"]))
        while not busy.generations:
            await asyncio.sleep(0.01)
        seen: dict[str, list[Event]] = {}
        for name in ("ann", "bob"):
            async with client.stream("GET", "/v1/cluster/events", headers=as_[name]) as response:
                seen[name] = [await anext(stream) for stream in [events(response)] for _ in range(2)]
        task.cancel()
    assert [name for name, _ in seen["ann"]] == ["caller", "requests"]
    assert [each["agent"] for each in seen["ann"][1][1]] == ["secret"]
    assert seen["bob"][1] == ("requests", []) and seen["bob"][0][1] == {**seen["ann"][0][1], "tenant": "bob"}


async def test_the_last_hour_and_the_latest_decisions_are_shown(busy: FakeBackend, config):
    async with serving(create_app(busy, config)) as client:
        async with asyncio.timeout(10):
            while len((found := (await client.get("/v1/cluster/history")).json())["at"]) < 3:
                await asyncio.sleep(0.02)
        assert found["object"] == "history" and found["running"] == [0] * len(found["at"])
        made = (await client.get("/v1/cluster/decisions?after=1")).json()
        assert (made["last"], [each["sequence"] for each in made["decisions"]]) == (2, ["r2/x"])
        assert len((await client.get("/v1/cluster/decisions?limit=1")).json()["decisions"]) == 1
        for wrong in ("limit=0", "limit=201", "after=-1", "after=x"):
            assert (await client.get(f"/v1/cluster/decisions?{wrong}")).status_code == 400
