"""Operations on an agent's memory (inject, fork, release, forget, list) and on the replicas' cache."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import openai
import pytest

from satchel.actors.protocol.block_ids import block_ids, root_id, scope_of
from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.api.http.server import HttpServer
from satchel.api.requests.backend import ReplicaStats
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.timing import Timing
from tests.worlds.api.remembering import LocalStore, Remembering, spoken


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


async def inject(endpoint: Remembering, *messages: str, agent: str = "ann", **fields):
    return await endpoint.client.post(f"/v1/agents/{agent}/inject", json={"messages": spoken(*messages), **fields})


async def test_what_is_injected_is_computed_and_found_by_the_next_turn(endpoint, backend):
    backend.play(SequenceUpdate("row", [3], finish="length", cached_tokens=4))
    response = await inject(endpoint, "The code is 5.")
    body = response.json()
    assert response.status_code == 200, body
    injected = endpoint.prompt
    assert backend.text.tokenizer.decode(injected) == "<|im_start|>user\nThe code is 5.<|im_end|>\n"
    assert body["object"] == "agent.injection"
    assert (body["tokens"], body["cached_tokens"], body["computed_tokens"]) == (len(injected), 4, len(injected) - 4)
    assert (backend.sampling.max_tokens, backend.sampling.temperature) == (0, 0.0)
    assert await endpoint.transcript() == spoken("The code is 5."), "the token drawn for nothing is not remembered"
    backend.say("5")
    assert await endpoint.go_on("What is it?") == "5"
    assert endpoint.prompt[: len(injected)] == injected
    assert endpoint.memory.matches == {"new": 1, "extend": 1}


async def test_an_injection_goes_to_the_end_of_the_conversation_it_makes_main(endpoint, backend):
    drawn = endpoint.draw("the quick")
    await endpoint.say("Hi")
    first = endpoint.prompt
    await endpoint.say("A title?")
    await inject(endpoint, "By the way")
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    await endpoint.go_on("And?")
    contents = [message["content"] for message in await endpoint.transcript()]
    assert contents[:4] == ["Hi", "the quick", "By the way", "And?"]
    assert len(await endpoint.branches()) == 2


async def test_a_failed_injection_changes_nothing_and_frees_the_agent(endpoint, backend):
    endpoint.memory.timing = Timing(turn_answer_s=0.1)
    endpoint.store.down.add("commit")
    assert (await inject(endpoint, "x")).status_code == 503
    endpoint.store.down.clear()
    assert (await inject(endpoint, "refuse me")).status_code == 400
    assert (await inject(endpoint, "x " * 2000)).json()["error"]["code"] == "context_length_exceeded"
    assert await endpoint.transcript() == []
    assert await asyncio.wait_for(endpoint.go_on("Hi"), 20)


async def test_a_fork_has_the_same_memory_and_goes_its_own_way(endpoint, backend):
    drawn = endpoint.draw("the quick")
    await endpoint.go_on("Hi")
    first = endpoint.prompt
    response = await endpoint.client.post("/v1/agents/ann/fork", json={"as": "bob"})
    assert response.json() == {"id": "bob", "object": "agent.fork", "forked_from": "ann", "branches": 1}
    await endpoint.go_on("And?", agent="bob")
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert [len(await endpoint.transcript(agent)) for agent in ("ann", "bob")] == [2, 4]
    again = await endpoint.client.post("/v1/agents/ann/fork", json={"as": "bob"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "agent_exists")
    none = await endpoint.client.post("/v1/agents/nobody/fork", json={"as": "carl"})
    assert (none.status_code, none.json()["error"]["code"]) == (404, "agent_not_found")


@pytest.mark.parametrize("body", [{}, {"as": ""}, {"as": 5}, {"as": "no spaces"}, {"as": None}, []])
async def test_a_wrong_target_is_named(endpoint, body):
    response = await endpoint.client.post("/v1/agents/ann/fork", json=body)
    assert response.status_code == 400
    assert isinstance(body, list) or response.json()["error"]["param"] == "as"


async def test_erasing_leaves_nothing_and_a_second_time_finds_nothing(endpoint, backend):
    endpoint.draw("the quick")
    await endpoint.say("Hi " * 200)
    response = await endpoint.client.delete("/v1/agents/ann")
    assert response.json() == {"id": "ann", "object": "agent.deleted", "deleted": True}
    root = root_id(b"1" * 32, scope_of("tenant", "default", "ann", ""))
    ((_, parent, released, first, _),) = endpoint.store.released
    assert parent == root and len(released) > 1 and len(first) == 4 * 256, "its blocks, and what it began with"
    assert endpoint.memory.lines._agents.currsize == 0
    for method in ("GET", "DELETE"):
        response = await endpoint.client.request(method, "/v1/agents/ann")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "agent_not_found")
    await endpoint.say("Hi", "the quick", "And?")
    assert endpoint.memory.matches == {"new": 2}


async def test_releasing_names_the_blocks_that_the_agent_stands_on(endpoint, backend):
    await endpoint.say("Hi " * 200)
    line = endpoint.prompt + backend.text.tokenizer.encode("Hello there")
    root = root_id(b"1" * 32, scope_of("tenant", "default", "ann", ""))
    response = await endpoint.client.post("/v1/agents/ann/release")
    expected = block_ids(root, line)
    assert len(expected) >= 2
    assert endpoint.store.released == [(b"1" * 32, root, expected, array("I", line[:256]).tobytes(), [])]
    assert response.json() == {"id": "ann", "object": "agent.release", "bytes": 1000 * len(expected)}
    assert await endpoint.transcript(), "the memory on disk stays"
    assert (await endpoint.client.post("/v1/agents/nobody/release")).status_code == 404


@pytest.mark.parametrize(("share", "blocks"), [("tenant", True), ("agent", True), ("none", False)])
async def test_scopes_decide_which_blocks_are_an_agents(backend, share, blocks):
    config = parse_config({"models": [{"name": "satchel/tiny", "source": "x"}], "share": share})
    endpoint = Remembering(backend, config)
    await endpoint.say("Hi " * 200)
    await endpoint.client.post("/v1/agents/ann/release")
    await endpoint.client.post("/v1/agents/ann/fork", json={"as": "bob"})
    await endpoint.client.post("/v1/agents/bob/release")
    assert bool(endpoint.store.released) == blocks
    if blocks:
        (_, _, ann, *_), (_, _, bob, *_) = endpoint.store.released
        assert (ann == bob) == (share == "tenant")


async def test_an_agent_tells_what_is_remembered_of_it(endpoint, backend):
    await endpoint.say("Hi " * 200)
    await endpoint.say("A title?")
    body = (await endpoint.client.get("/v1/agents/ann")).json()
    assert (body["id"], body["object"], body["model"], body["messages"]) == ("ann", "agent", "satchel/tiny", 2)
    line = backend.requests[0]["prompt"] + backend.text.tokenizer.encode("Hello there")
    assert (body["tokens"], body["blocks"], body["tier"]) == (len(line), len(line) // 256, "cold")
    assert body["bytes"] > 4 * body["tokens"] and body["last_used"] >= body["created"] > 1e9
    assert len(body["branches"]) == 2
    endpoint.store.in_memory = 1
    assert (await endpoint.client.get("/v1/agents/ann")).json()["tier"] == "hot"


async def test_the_conversation_is_shown(endpoint):
    await endpoint.say("Hi", agent="ann")
    shown = (await endpoint.client.get("/v1/agents/ann/transcript")).json()
    assert (shown["id"], shown["object"]) == ("ann", "agent.transcript")
    assert [(each["role"], each["content"]) for each in shown["messages"]] == [
        ("user", "Hi"),
        ("assistant", "Hello there"),
    ]
    unknown = await endpoint.client.get("/v1/agents/nobody/transcript")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "agent_not_found")


async def test_agents_are_listed_page_by_page(endpoint):
    for agent in ("c", "a", "b"):
        await endpoint.say("Hi", agent=agent)
    first = (await endpoint.client.get("/v1/agents", params={"limit": 2})).json()
    assert ([agent["id"] for agent in first["data"]], first["has_more"], first["last_id"]) == (["a", "b"], True, "b")
    rest = (await endpoint.client.get("/v1/agents", params={"limit": 2, "after": "b"})).json()
    assert ([agent["id"] for agent in rest["data"]], rest["has_more"]) == (["c"], False)
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"limit": "-1"}, {"after": "no spaces"}):
        response = await endpoint.client.get("/v1/agents", params=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert (await Remembering(endpoint.backend, endpoint.generator.config).client.get("/v1/agents")).json()[
        "data"
    ] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/inject"), ("POST", "/fork"), ("POST", "/release")],
)
async def test_every_route_refuses_what_is_no_agent_id_and_a_store_that_is_down(endpoint, method, path):
    endpoint.memory.timing = Timing(turn_answer_s=0.1)
    body = {"messages": spoken("Hi"), "as": "bob"}
    response = await endpoint.client.request(method, f"/v1/agents/no%20spaces{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "agent_id")
    endpoint.store.down |= {"info", "forget", "fork", "begin", "blocks"}
    response = await endpoint.client.request(method, f"/v1/agents/ann{path}", json=body)
    assert response.status_code == 503


async def test_the_replicas_cache_is_cleared_and_counted(endpoint, backend):
    backend.replicas = [
        ReplicaStats("r0", "m", True, cached_tokens_total=40, prefix_blocks=2, prefix_bytes=1024, prefix_hits_total=3),
        ReplicaStats("r1", "m", True, cached_tokens_total=2, prefix_misses_total=1, slots_running=3, slots_kept=4),
        ReplicaStats("r2", "m", False),
    ]
    body = (await endpoint.client.get("/v1/cache/stats")).json()
    assert body == {
        "object": "cache.stats",
        "hits": 3,
        "misses": 1,
        "tokens_saved": 42,
        "entry_count": 2,
        "current_memory_bytes": 1024,
        "slots": {"running": 3, "kept": 4, "free": 0},
        "memory_bytes": 0,
        "memory_bytes_max": 0,
    }
    assert (await endpoint.client.delete("/v1/cache")).json()["bytes"] == 7
    assert endpoint.store.cleared == 1


async def test_the_official_client_continues_an_agent(backend, config, tmp_path):
    endpoint = Remembering(backend, config, LocalStore(config, tmp_path))
    port = free_port()
    server = HttpServer(create_app(backend, config, generator=endpoint.generator), "127.0.0.1", port)
    await server.start()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        for text in ("Hi", "And?"):
            answer = await client.chat.completions.create(
                model="satchel/tiny",
                messages=[{"role": "user", "content": text}],
                extra_headers={"X-Agent-ID": "ann"},
                extra_body={"agent_continue": True},
            )
            assert answer.choices[0].message.content == "Hello there"
        assert len(await endpoint.transcript()) == 4
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(
                model="satchel/tiny",
                messages=[{"role": "user", "content": "Hi"}],
                extra_body={"agent_continue": True},
            )
        assert error.value.param == "agent_continue"
    finally:
        await client.close()
        await server.close(5)
