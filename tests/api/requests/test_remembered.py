"""A computed answer is always delivered, and says what its agent's memory lacks: in a header and a field, or in the
last chunk. A metric counts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from satchel.api.app import create_app
from satchel.api.client.agent import Agent
from satchel.api.client.background import BackgroundLoop
from satchel.api.http.server import HttpServer
from satchel.api.requests.remembered import Remembered
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import MemoryFull
from tests.worlds.api.fake_backend import events_of
from tests.worlds.api.remembering import LocalStore, Remembering, spoken


@pytest.fixture(name="endpoint")
async def endpoints(backend, config) -> AsyncIterator[Remembering]:
    made = Remembering(backend, config)
    yield made
    await made.client.aclose()


def fill(endpoint: Remembering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the disk be full for transcripts."""

    def transaction() -> Any:
        raise MemoryFull("database or disk is full")

    monkeypatch.setattr(endpoint.store.actor.services.memory.database, "transaction", transaction)


async def metric(endpoint: Remembering, name: str) -> float:
    text = (await endpoint.client.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.split()[-1])


@pytest.mark.parametrize("continues", [False, True])
async def test_words_that_find_no_room_cost_no_answer_and_it_says_so(endpoint, continues, monkeypatch):
    body: dict[str, Any] = {"messages": spoken("Hi"), "agent_continue": continues}
    usual = await endpoint.post(body)
    assert "x-satchel-memory" not in usual.headers and "satchel" not in usual.json()
    with monkeypatch.context() as full:
        fill(endpoint, full)
        whole = await endpoint.post(body)
        assert (whole.status_code, whole.headers["x-satchel-memory"]) == (200, "not-kept; reason=disk_full")
        assert whole.json()["choices"][0]["message"]["content"] == "Hello there"
        assert whole.json()["satchel"] == {"kept": False, "reason": "disk_full"}
        for more in ({}, {"stream_options": {"include_usage": True}}):
            streamed = events_of((await endpoint.post({**body, "stream": True, **more})).text)
            said = [event for event in streamed if event != "[DONE]" and "satchel" in event]
            assert [event["choices"][0]["finish_reason"] for event in said] == ["stop"]
            assert said[0]["satchel"] == whole.json()["satchel"]
    assert await metric(endpoint, 'satchel_turns_not_kept_total{reason="disk_full"}') == 3
    again = await asyncio.wait_for(endpoint.post({**body, "stream": True}), 20)
    assert '"satchel":' not in again.text, "its turn was given back, and there is room again"
    assert len(await endpoint.transcript()) == (4 if continues else 2)


async def test_memory_that_has_no_room_for_an_agent_and_one_that_was_forgotten_meanwhile(backend, config):
    endpoint = Remembering(backend, config, LocalStore(replace(config, transcripts_bytes_max=600)))
    for continues in (False, True):
        answer = await endpoint.post({"messages": spoken("Hi" * 300), "agent_continue": continues})
        assert answer.headers["x-satchel-memory"] == "not-kept; reason=no_room"
    hold = asyncio.Event()
    backend.play(hold, *backend.sequence("secret"))
    turn = asyncio.create_task(endpoint.post({"messages": spoken("Hi")}))
    while len(backend.generations) < 3:
        await asyncio.sleep(0.005)
    await endpoint.client.delete("/v1/agents/ann")
    hold.set()
    assert (await turn).headers["x-satchel-memory"] == "not-kept; reason=forgotten"


async def test_a_store_that_does_not_answer(endpoint):
    endpoint.memory.timing = Timing(brief_answer_s=0.05, answer_s=0.05, turn_answer_s=0.05)
    for broken in (endpoint.store.down, endpoint.store.stuck):
        broken.add("commit")
        for continues in (False, True):
            answer = await endpoint.post({"messages": spoken("Hi"), "agent_continue": continues})
            assert answer.headers["x-satchel-memory"] == "not-kept; reason=unanswered"
        broken.clear()


async def test_an_injection_that_is_not_kept_is_an_error_as_there_is_nothing_else_to_it(endpoint, monkeypatch):
    await endpoint.say("Hi")
    with monkeypatch.context() as full:
        fill(endpoint, full)
        refused = await endpoint.client.post("/v1/agents/ann/inject", json={"messages": spoken("x")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "memory_full")
    assert await asyncio.wait_for(endpoint.go_on("and?"), 20)


async def test_a_turn_whose_copies_were_not_made_in_time_says_so(endpoint, monkeypatch):
    async def kept(agent: str) -> bool:
        return False

    monkeypatch.setattr(endpoint.store.actor.services.turns, "_kept", kept)
    answer = await endpoint.post({"messages": spoken("Hi")})
    assert answer.headers["x-satchel-memory"] == "not-copied"
    assert answer.json()["satchel"] == {"kept": True, "copied": False}
    assert await metric(endpoint, "satchel_turns_not_copied_total") == 1


async def test_the_store_may_wait_for_copies_as_long_as_the_policy_says(endpoint, monkeypatch):
    async def kept(agent: str) -> bool:
        await asyncio.sleep(0.2)
        return True

    endpoint.memory.timing = Timing(brief_answer_s=0.1, answer_s=0.1)
    monkeypatch.setattr(endpoint.store.actor.services.turns, "_kept", kept)
    answer = await endpoint.post({"messages": spoken("Hi")})
    assert answer.headers["x-satchel-memory"] == "not-kept; reason=unanswered"
    endpoint.memory.copy_wait_s = 2.0
    assert "x-satchel-memory" not in (await endpoint.post({"messages": spoken("Hi")})).headers


@pytest.mark.parametrize("continues", [False, True])
async def test_the_next_turn_of_an_agent_that_was_let_go_says_so_and_the_one_after_it_does_not(
    backend, config, continues, caplog
):
    endpoint = Remembering(backend, config, LocalStore(replace(config, transcripts_bytes_max=3000)))
    assert "x-satchel-memory" not in (await endpoint.post({"messages": spoken("Hi")})).headers
    for index in range(9):
        await endpoint.say("x" * 100, agent=f"other{index}")
    assert await endpoint.branches() == []
    assert "agent default/ann is evicted" in caplog.text
    body = {"messages": spoken("Hi"), "agent_continue": continues}
    streamed = await endpoint.post({**body, "stream": True})
    assert streamed.headers["x-satchel-memory"] == "earlier-let-go"
    assert events_of(streamed.text)[-2]["satchel"] == {"kept": True, "earlier_let_go": True}
    assert "x-satchel-memory" not in (await endpoint.post(body)).headers
    assert "x-satchel-memory" not in (await endpoint.post(body, agent="new")).headers


async def test_an_injection_into_an_agent_that_was_let_go_says_so_too(backend, config):
    endpoint = Remembering(backend, config, LocalStore(replace(config, transcripts_bytes_max=3000)))
    await endpoint.say("Hi")
    for index in range(9):
        await endpoint.say("x" * 100, agent=f"other{index}")
    done = await endpoint.client.post("/v1/agents/ann/inject", json={"messages": spoken("x")})
    assert done.headers["x-satchel-memory"] == "earlier-let-go"
    assert done.json()["satchel"] == {"kept": True, "earlier_let_go": True}
    done = await endpoint.client.post("/v1/agents/ann/inject", json={"messages": spoken("x")})
    assert "x-satchel-memory" not in done.headers and "satchel" not in done.json()


async def test_the_list_of_agents_tells_how_many_were_let_go(endpoint, backend):
    assert (await endpoint.client.get("/v1/agents")).json()["let_go"] == 0
    backend.machines = [replace(backend.machines[0], name=name, agents_let_go=3) for name in "ab"]
    assert (await endpoint.client.get("/v1/agents")).json()["let_go"] == 6
    assert await metric(endpoint, 'satchel_agents_let_go_total{node="b"}') == 3


async def test_health_and_metrics_say_where_no_kv_is_kept_on_disk_and_why(endpoint, backend):
    assert "disk_errors" not in (await endpoint.client.get("/health")).json()
    backend.machines = [replace(backend.machines[0], disk_error="the disk is full", agents_let_go=0)]
    answer = await endpoint.client.get("/health")
    assert answer.status_code == 200, "answers need no disk"
    assert answer.json()["disk_errors"] == {"local": "the disk is full"}
    assert await metric(endpoint, 'satchel_disk_open{node="local"}') == 0
    backend.machines = [replace(backend.machines[0], disk_error="", disk_full=True, agents_let_go=0)]
    answer = await endpoint.client.get("/health")
    assert (answer.status_code, answer.json()["disk_errors"]) == (200, {"local": "its disk is full"})
    assert await metric(endpoint, 'satchel_disk_open{node="local"}') == 0


async def test_a_handle_knows_of_its_last_turn(endpoint, monkeypatch):
    loop = BackgroundLoop()
    ann = Agent(endpoint.generator, loop, "ann", "", None)
    assert ann.remembered is None
    answered = "".join([piece async for piece in ann._turn("Hi", {})])
    assert answered == "Hello there" and ann.remembered == Remembered()
    fill(endpoint, monkeypatch)
    assert "".join([piece async for piece in ann._turn("Hi", {})]) == "Hello there"
    assert ann.remembered == Remembered(unkept="disk_full")
    loop.close()


async def test_the_official_client_takes_what_is_said(endpoint, backend, config, monkeypatch):
    port = free_port()
    server = HttpServer(create_app(backend, config, generator=endpoint.generator), "127.0.0.1", port)
    await server.start()
    fill(endpoint, monkeypatch)
    ask: dict[str, Any] = {"model": "satchel/tiny", "messages": spoken("Hi"), "extra_headers": {"X-Agent-ID": "ann"}}
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(**ask)
        assert answer.choices[0].message.content == "Hello there"
        assert answer.model_extra == {"satchel": {"kept": False, "reason": "disk_full"}}
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **ask)]
        assert chunks[-1].model_extra == answer.model_extra
    await server.close(10)
