"""Turns that are appended to the stored transcript run one after the other, and each continues the one before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from satchel.api.agents import memory as agents
from satchel.api.pipeline.generation import Generator
from satchel.api.requests.requests import ChatRequest
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import Unavailable
from tests.worlds.api.fake_backend import events_of
from tests.worlds.api.remembering import LocalStore, Remembering, spoken


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


async def test_what_is_drawn_beyond_a_stop_string_does_not_hide_what_is_before(endpoint, backend):
    drawn = endpoint.draw("the quick STOP brown fox")
    assert await endpoint.say("Hi", stop="STOP") == "the quick "
    first = endpoint.prompt
    await endpoint.say("Hi", "the quick ", "More")
    kept = len(first) + len([token for character in "the quick" for token in backend.text.tokenizer.encode(character)])
    assert endpoint.prompt[:kept] == [*first, *drawn][:kept]
    assert endpoint.memory.matches["extend"] == 0
    assert endpoint.memory.commits == {"opened": 1, "replaced": 1}, "it is the same conversation all the same"


async def test_agent_continue_appends_to_the_stored_transcript(endpoint, backend):
    drawn = endpoint.draw("the quick")
    assert await endpoint.go_on({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    first = endpoint.prompt
    endpoint.draw("brown fox")
    response = await endpoint.post({"messages": spoken("And?")}, **{"X-Agent-Continue": "1"})
    assert response.json()["choices"][0]["message"]["content"] == "brown fox"
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    said = [(message["role"], message["content"]) for message in await endpoint.transcript()]
    assert said == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "the quick"),
        ("user", "And?"),
        ("assistant", "brown fox"),
    ]
    assert backend.text.tokenizer.decode(endpoint.prompt) == backend.text.template.render(
        [{"role": role, "content": content} for role, content in said[:4]]
    )


async def test_agent_continue_goes_on_with_another_model(endpoint, backend):
    await endpoint.go_on("Hi")
    await endpoint.go_on("And?", model="other")
    said = [message["content"] for message in await endpoint.transcript()]
    assert said == ["Hi", "Hello there", "And?", "Hello there"]
    (branch,) = await endpoint.branches()
    assert branch["model"] == "other"


async def test_agent_continue_streams(endpoint, backend):
    await endpoint.go_on("Hi")
    response = await endpoint.post({"messages": spoken("And?"), "stream": True, "agent_continue": True})
    events = events_of(response.text)
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len(await endpoint.transcript()) == 4


async def test_turns_that_continue_run_one_after_the_other(endpoint, backend):
    answers = await asyncio.gather(*(endpoint.go_on(f"number {index}") for index in range(5)))
    assert answers == ["Hello there"] * 5
    transcript = await endpoint.transcript()
    # In any order.
    assert sorted(message["content"] for message in transcript[::2]) == [f"number {index}" for index in range(5)]
    lengths = [len(request["prompt"]) for request in backend.requests]
    assert lengths == sorted(lengths), "each has read the ones before"


async def test_a_stop_string_does_not_let_the_next_turn_in_before_this_one_is_kept(endpoint, backend):
    backend.say("done STOP more")
    await asyncio.gather(*(endpoint.go_on(f"number {index}", stop="STOP") for index in range(5)))
    assert len(await endpoint.transcript()) == 10
    assert len(await endpoint.branches()) == 1


async def test_a_turn_that_waits_too_long_is_refused_and_a_stateless_one_waits_for_nobody(backend, config):
    endpoint = Remembering(backend, config)
    endpoint.store.actor.services.turns._wait_s = 0.05
    hold = asyncio.Event()
    backend.play(hold, *backend.sequence("slow"))
    slow = asyncio.create_task(endpoint.go_on("first"))
    while not backend.generations:
        await asyncio.sleep(0.005)
    backend.say("Hello there")
    response = await endpoint.post({"messages": spoken("second"), "agent_continue": True})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "agent_busy")
    assert await endpoint.say("stateless") == "Hello there"
    hold.set()
    assert await slow == "slow"
    assert await endpoint.go_on("third") == "Hello there"


async def test_whoever_gives_up_waiting_leaves_the_line(endpoint, backend):
    hold = asyncio.Event()
    backend.play(hold, *backend.sequence("slow"))
    slow = asyncio.create_task(endpoint.go_on("first"))
    while not backend.generations:
        await asyncio.sleep(0.005)
    impatient = asyncio.create_task(endpoint.go_on("second"))
    await asyncio.sleep(0.05)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    backend.say("Hello there")
    hold.set()
    await slow
    assert await asyncio.wait_for(endpoint.go_on("third"), 20) == "Hello there"
    assert [message["content"] for message in (await endpoint.transcript())[::2]] == ["first", "third"]


async def test_a_continuing_turn_outlasts_a_store_that_starts_again(endpoint, backend):
    for method in ("begin", "commit"):
        endpoint.store.down.add(method)
        turn = asyncio.create_task(endpoint.go_on(method))
        await asyncio.sleep(0.3)
        assert not turn.done()
        endpoint.store.down.clear()
        assert await turn == "Hello there"
    assert [message["content"] for message in (await endpoint.transcript())[::2]] == ["begin", "commit"]


async def test_a_continuing_turn_that_cannot_be_kept_is_answered_and_gives_its_turn_back(endpoint, backend):
    endpoint.memory.timing = Timing(turn_answer_s=0.1)
    endpoint.store.down.add("commit")
    for streams in (False, True):
        response = await endpoint.post({"messages": spoken("Hi"), "agent_continue": True, "stream": streams})
        assert response.status_code == 200 and '"satchel":{"kept":false,"reason":"unanswered"}' in response.text
    endpoint.store.down.clear()
    assert await asyncio.wait_for(endpoint.go_on("Hi"), 20), "its turn was given back"
    endpoint.store.down.add("begin")
    response = await endpoint.post({"messages": spoken("Hi"), "agent_continue": True})
    assert response.status_code == 503


async def test_forgetting_in_mid_turn_keeps_that_turn_out(endpoint, backend):
    hold = asyncio.Event()
    backend.play(hold, *backend.sequence("secret"))
    turns = [
        asyncio.create_task(endpoint.post({"messages": spoken("Hi"), "agent_continue": continues}))
        for continues in (False, True)
    ]
    while len(backend.generations) < 2:
        await asyncio.sleep(0.005)
    assert (await endpoint.client.delete("/v1/agents/ann")).status_code == 200
    hold.set()
    statuses = [response.status_code for response in await asyncio.gather(*turns)]
    assert statuses == [200, 409]
    assert await endpoint.transcript() == []
    assert endpoint.memory.commits == {"forgotten": 2}


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"agent_continue": True}, {}, "agent_continue"),
        ({}, {"X-Agent-Continue": "1"}, "agent_continue"),
        ({"agent_id": "ann"}, {"X-Agent-Continue": "yes"}, "X-Agent-Continue"),
        ({"agent_id": "ann", "agent_continue": "yes"}, {}, "agent_continue"),
        ({"agent_id": "ann", "agent_continue": 1}, {}, "agent_continue"),
        ({"agent_id": "ann", "agent_continue": True, "messages": []}, {}, "messages"),
    ],
)
async def test_wrong_ways_to_continue_are_named(endpoint, backend, body, headers, param):
    response = await endpoint.client.post(
        "/v1/chat/completions", json={"messages": spoken("Hi"), **body}, headers=headers
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert backend.requests == []
    assert await endpoint.go_on("Hi"), "nobody holds the agent's turn"


async def test_completions_and_endpoints_without_memory_continue_nothing(endpoint, backend, config, api):
    body = {"prompt": "Hi", "agent_id": "ann", "agent_continue": True}
    response = await endpoint.client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "agent_continue")
    response = await api.chat(agent_id="ann", agent_continue=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "agent_continue")
    assert (await api.client.get("/v1/agents")).status_code == 503
    response = await api.chat(agent_id="ann", agent_continue=False)
    assert response.status_code == 200


async def test_a_handle_on_the_same_pipeline_gets_the_tree_of_errors(backend, config):
    memory = agents.AgentMemory(LocalStore(config).asked, timing=Timing(turn_answer_s=0.1))
    generator = Generator(backend, config, memory=memory)
    request = ChatRequest(spoken("Hi"), agent="ann", agent_continue=True, opening=[{"role": "system", "content": "S"}])
    for _ in range(2):
        stream = await generator.start_chat(request)
        await stream.collect()
    roles = [message["role"] for message in json.loads(await memory.store.transcript("default/ann"))]
    assert roles == ["system", "user", "assistant", "user", "assistant"], "the opening comes once"
    memory.store.down.add("begin")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Unavailable):
        await generator.start_chat(request)
