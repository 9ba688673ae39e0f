"""An agent's turns: the stored token ids are sent again, and no turn overwrites another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.agents import memory as agents
from satchel.api.pipeline.streams import Finished
from satchel.api.requests.requests import ChatRequest
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import Unavailable
from tests.worlds.api.remembering import LocalStore, Remembering, spoken


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


async def test_the_next_turn_sends_the_ids_that_were_drawn(endpoint, backend):
    """If the same text was tokenized again, it would give other ids, and everything behind them would be computed
    again."""
    drawn = endpoint.draw("the quick brown fox")
    await endpoint.say("Hi")
    first = endpoint.prompt
    endpoint.draw("ok")
    await endpoint.say("Hi", "the quick brown fox", "And now?")
    anew = backend.text.tokenizer.encode(endpoint.rendered("Hi", "the quick brown fox", "And now?"))
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert endpoint.prompt != anew, "else this test shows nothing"
    assert backend.text.tokenizer.decode(endpoint.prompt) == backend.text.tokenizer.decode(anew)
    assert endpoint.memory.matches == {"new": 1, "extend": 1}
    assert endpoint.memory.commits == {"opened": 1, "replaced": 1}
    (branch,) = await endpoint.branches()
    assert (branch["turns"], branch["messages"]) == (2, 4)


@pytest.mark.parametrize(("end", "finish"), [("", "length"), ("<|im_end|>", "stop")])
async def test_an_answer_that_was_cut_off_is_continued_as_well(endpoint, backend, end, finish):
    drawn = endpoint.draw("the quick brown f", end=end, finish=finish)
    await endpoint.say("Hi")
    first = endpoint.prompt
    await endpoint.say("Hi", "the quick brown f", "More")
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]


async def test_without_an_agent_nothing_is_remembered(endpoint):
    await endpoint.say("Hi", agent="")
    assert endpoint.store.calls == []
    response = await endpoint.client.post("/v1/completions", json={"prompt": "Hi", "agent_id": "ann"})
    assert response.status_code == 200
    assert endpoint.store.calls == [], "continuations of text are not remembered"


async def test_side_requests_and_edited_histories_leave_the_conversation_alone(endpoint, backend):
    drawn = endpoint.draw("the quick brown fox")
    await endpoint.say("Hi")
    first = endpoint.prompt
    endpoint.draw("A title")
    await endpoint.say("Make a title of: Hi, the quick brown fox")
    await endpoint.say("Hi", "something else", "And now?")
    conversation, *others = await endpoint.branches()
    assert len(others) == 2 and conversation["messages"] == 2
    await endpoint.say("Hi", "the quick brown fox", "And now?")
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert [branch["messages"] for branch in await endpoint.branches()] == [4, 2, 4]


async def test_concurrent_turns_of_one_branch_both_stay(endpoint, backend):
    endpoint.draw("ok")
    await endpoint.say("Hi")
    await asyncio.gather(endpoint.say("Hi", "ok", "left"), endpoint.say("Hi", "ok", "right"))
    branches = await endpoint.branches()
    assert [branch["turns"] for branch in branches] == [2, 2]
    for side in ("left", "right"):
        await endpoint.say("Hi", "ok", side, "ok", "next")
    assert endpoint.memory.matches["extend"] == 4
    assert [branch["turns"] for branch in await endpoint.branches()] == [3, 3]


async def test_only_the_first_choice_is_remembered(endpoint, backend):
    backend.say("one", "two", "three")
    response = await endpoint.post({"messages": spoken("Hi"), "n": 3})
    said = response.json()["choices"][0]["message"]["content"]
    assert [message["content"] for message in await endpoint.transcript()] == ["Hi", said]
    assert endpoint.memory.commits == {"opened": 1}


async def test_the_turn_is_kept_when_its_last_event_comes(endpoint, backend):
    stream = await endpoint.generator.start_chat(ChatRequest(spoken("Hi"), agent="ann"))
    async for event in stream:
        kept = bool(await endpoint.transcript())
        assert kept == isinstance(event, Finished)
    assert kept


@pytest.mark.parametrize("method", ["recall", "commit"])
async def test_a_store_that_fails_or_hangs_costs_the_memory_and_not_the_answer(endpoint, method):
    endpoint.memory.timing = Timing(brief_answer_s=0.05, answer_s=0.05)
    for broken in (endpoint.store.down, endpoint.store.stuck):
        broken.add(method)
        assert await endpoint.say("Hi") == "Hello there"
        broken.clear()
    assert sum(endpoint.memory.commits[name] for name in ("failed", "not recalled")) == 2
    assert await endpoint.say("Hi") == "Hello there"


async def test_a_failed_sequence_and_one_whose_client_left_are_not_remembered(endpoint, backend):
    backend.play(SequenceUpdate("row", backend.text.tokenizer.encode("Hel"), cached_tokens=0), Unavailable("lost"))
    for fields in ({}, {"stream": True}, {"agent_continue": True}, {"agent_continue": True, "stream": True}):
        await endpoint.post({"messages": spoken("Hi"), **fields})
    for continues in (False, True):
        backend.say("one two three", step=1)
        stream = await endpoint.generator.start_chat(ChatRequest(spoken("Hi"), agent="ann", agent_continue=continues))
        events = aiter(stream)
        await anext(events)
        await events.aclose()
        never_read = await endpoint.generator.start_chat(
            ChatRequest(spoken("Hi"), agent="ann", agent_continue=continues)
        )
        await never_read.abort()
    assert await endpoint.transcript() == []
    backend.say("Hello there")
    assert await endpoint.go_on("Hi") == "Hello there", "and the agent's turn is free"


async def test_tool_calls_are_remembered_and_continued(endpoint, backend):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    encode = backend.text.tokenizer.encode
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    drawn = encode(call) + encode("<|im_end|>")
    backend.play(SequenceUpdate("row", drawn, finish="stop", cached_tokens=0))
    response = await endpoint.post({"messages": spoken("Hi"), "tools": tools, "agent_continue": True})
    (said,) = response.json()["choices"][0]["message"]["tool_calls"]
    first = endpoint.prompt
    assert (await endpoint.transcript())[1]["tool_calls"] == [said]
    backend.say("done")
    result = {"role": "tool", "tool_call_id": said["id"], "content": "5"}
    await endpoint.go_on(result, tools=tools)
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    roles = [message["role"] for message in await endpoint.transcript()]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_a_template_that_leaves_reasoning_out_still_continues_the_conversation(thinker, config):
    """The text of the history differs from the sampled tokens, but it is the same conversation."""
    endpoint = Remembering(thinker, config)
    encode = thinker.text.tokenizer.encode
    drawn = encode("<think>\nhm\n</think>\n\nyes") + encode("<|im_end|>")
    thinker.play(SequenceUpdate("row", drawn, finish="stop", cached_tokens=0))
    kwargs = {"enable_thinking": True}
    assert await endpoint.say("Hi", chat_template_kwargs=kwargs) == "yes"
    first = endpoint.prompt
    await endpoint.say("Hi", "yes", "And now?", chat_template_kwargs=kwargs)
    assert endpoint.prompt[: len(first)] == first
    (branch,) = await endpoint.branches()
    assert branch["turns"] == 2
    assert endpoint.memory.commits == {"opened": 1, "replaced": 1}


async def test_an_evicted_line_is_fetched_again_and_never_a_stale_one(backend, config):
    """Two endpoints over one store: each sees what the other has committed."""
    store = LocalStore(config)
    one, two = Remembering(backend, config, store), Remembering(backend, config, store)
    drawn = one.draw("the quick")
    await one.say("Hi")
    first = one.prompt
    assert await two.say("Hi", "the quick", "And?")
    assert two.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert await one.say("Hi", "the quick", "And?", "the quick", "More")
    assert one.memory.matches == {"new": 1, "extend": 1} and two.memory.matches == {"extend": 1}
    two.memory.lines.set(("default/ann", b"1" * 32), {})
    await two.say("Hi", "the quick", "And?", "the quick", "More", "the quick", "!")
    assert two.memory.matches == {"extend": 2}
    (branch,) = await one.branches()
    assert branch["turns"] == 4


async def test_lines_are_kept_within_their_limit(backend, config):
    endpoint = Remembering(backend, config)
    endpoint.memory.lines = agents._Lines(4000)
    for index in range(20):
        await endpoint.say("Hi", agent=f"a{index}")
        assert endpoint.memory.lines._agents.currsize <= 4000
    assert 0 < len(endpoint.memory.lines._agents) < 20
    await endpoint.say("Hi", "Hello there", "And?", agent="a0")
    assert endpoint.memory.matches["extend"] == 1


async def test_memory_survives_the_store_and_the_endpoint(backend, config, tmp_path):
    one = Remembering(backend, config, LocalStore(config, tmp_path))
    drawn = one.draw("the quick")
    await one.go_on("Hi")
    first = one.prompt
    one.store.actor.close()
    two = Remembering(backend, config, LocalStore(config, tmp_path))
    await two.go_on("And?")
    assert two.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert len(await two.transcript()) == 4


async def test_metrics_tell_how_prompts_continued(endpoint):
    await endpoint.say("Hi")
    await endpoint.say("Hi", "Hello there", "And?")
    await endpoint.say("Hi", "Hello", "And?")
    text = (await endpoint.client.get("/metrics")).text
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["satchel_prefix_match_total", "new"] == 1
    assert found["satchel_prefix_match_total", "extend"] == 1
    assert found["satchel_prefix_recomputed_tokens_total", "text changed"] > 0
    assert found["satchel_agent_turns_total", "replaced"] == 1
