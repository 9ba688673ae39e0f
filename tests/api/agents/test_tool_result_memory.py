"""An agent's memory has tool results in the order of their calls, so that it is reused whatever order they come in. An
answer that the caller began is one message in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.worlds.api.remembering import Remembering

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "Fetch both."}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ("k1", "k2")],
}
FIRST, SECOND = ({"role": "tool", "tool_call_id": id, "content": said} for id, said in (("k1", "one"), ("k2", "two")))


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


def told(transcript: list[Any]) -> list[str]:
    return [message["content"] for message in transcript if message["role"] == "tool"]


async def test_a_conversation_is_the_same_in_whatever_order_results_come(endpoint, backend):
    drawn = endpoint.draw("the quick")
    assert await endpoint.say(ASK, CALLS, SECOND, FIRST, tools=[TOOL]) == "the quick"
    before = endpoint.prompt
    assert told(await endpoint.transcript()) == ["one", "two"]
    answered: Any = {"role": "assistant", "content": "the quick"}
    await endpoint.say(ASK, CALLS, FIRST, SECOND, answered, {"role": "user", "content": "And?"}, tools=[TOOL])
    assert endpoint.prompt[: len(before) + len(drawn)] == [*before, *drawn]
    assert len(await endpoint.branches()) == 1


async def test_appended_results_stand_behind_the_calls_in_the_transcript(endpoint, backend):
    stored: Any = [ASK, CALLS]
    await endpoint.client.post(
        "/v1/agents/ann/inject", json={"model": "satchel/tiny", "messages": stored}, headers={"X-Agent-ID": "ann"}
    )
    assert await endpoint.go_on(SECOND, FIRST, {"role": "user", "content": "Now?"}, tools=[TOOL])
    said = [message["content"] for message in await endpoint.transcript()]
    assert said == ["Fetch both.", "", "one", "two", "Now?", "Hello there"]
    text = backend.text.tokenizer.decode(endpoint.prompt)
    assert 0 < text.index("one") < text.index("two") < text.index("Now?")


async def test_an_answer_that_was_begun_is_one_message_of_the_memory(endpoint, backend):
    drawn = endpoint.draw(" quick fox")
    begun: Any = {"role": "assistant", "content": "The", "partial": True}
    assert await endpoint.say("Hi", begun) == " quick fox"
    before = endpoint.prompt
    assert [message["content"] for message in await endpoint.transcript()] == ["Hi", "The quick fox"]
    await endpoint.say("Hi", "The quick fox", "And?")
    assert endpoint.prompt[: len(before) + len(drawn)] == [*before, *drawn]
