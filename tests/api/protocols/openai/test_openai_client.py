"""The official client against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from satchel.cluster.errors import QueueFull

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_async_client(client, backend):
    backend.say("Hello wörld 😀", cached=2)
    answer = await client.chat.completions.create(model="satchel/tiny", messages=MESSAGES, seed=1)
    assert answer.choices[0].message.content == "Hello wörld 😀"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2

    stream = await client.chat.completions.create(
        model="satchel/tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello wörld 😀"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens

    text = await client.completions.create(model="satchel/tiny", prompt=["a", "b"])
    assert [choice.text for choice in text.choices] == ["Hello wörld 😀"] * 2


async def test_the_sync_client(server, backend):
    backend.say("Hello")

    def talk() -> tuple[str | None, str, list[str], str]:
        with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
            whole = client.chat.completions.create(model="satchel/tiny", messages=MESSAGES)
            stream = client.chat.completions.create(model="satchel/tiny", messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            models = [model.id for model in client.models.list()]
            return whole.choices[0].message.content, streamed, models, client.models.retrieve("satchel/tiny").id

    assert await asyncio.to_thread(talk) == ("Hello", "Hello", ["satchel/tiny", "other"], "satchel/tiny")


async def test_tool_calls(client, backend):
    backend.say(CALL)
    answer = await client.chat.completions.create(model="satchel/tiny", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content == ""
    assert message.tool_calls[0].function.name == "weather"
    # The client's own form of the answer goes back in as history.
    history = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    await client.chat.completions.create(model="satchel/tiny", messages=history, tools=TOOLS)
    assert '"arguments": {"city": "K' in backend.prompt
    async with client.chat.completions.stream(model="satchel/tiny", messages=MESSAGES, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Köln"}'
    assert final.choices[0].finish_reason == "tool_calls"


async def test_choices_and_logprobs(client, backend):
    backend.say("Hello wörld 😀", "other")
    asked: Any = {"model": "satchel/tiny", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**asked, logit_bias={"5": -100}, presence_penalty=0.5)
    assert [choice.message.content for choice in answer.choices] == ["Hello wörld 😀", "other"]
    for choice in answer.choices:
        given = choice.logprobs.content
        assert bytes(byte for token in given for byte in token.bytes).decode() == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in given)
    assert (backend.sampling.logit_bias, backend.sampling.presence_penalty) == ([(5, -100.0)], 0.5)

    backend.say("Hello wörld 😀", "other")
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello wörld 😀", "other"]
    assert [choice.logprobs.content for choice in final.choices] == [c.logprobs.content for c in answer.choices]

    text = await client.completions.create(model="satchel/tiny", prompt="a", logprobs=3)
    assert "".join(text.choices[0].logprobs.tokens) == text.choices[0].text
    assert text.choices[0].logprobs.text_offset[0] == 0


async def test_reasoning_goes_back_in_as_history(client, thinker):
    thinker.say("<think>\nHe greets.\n</think>\n\nHello")
    asked: Any = {"model": "satchel/tiny", "reasoning_effort": "high"}
    answer = await client.chat.completions.create(**asked, messages=MESSAGES)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("He greets.", "Hello")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    await client.chat.completions.create(**asked, messages=[*MESSAGES, message.model_dump(), *MESSAGES])
    assert "<think>\nHe greets.\n</think>\n\nHello<|im_end|>" in thinker.prompt
    stream = await client.chat.completions.create(**asked, messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "He greets."


async def test_errors_arrive_as_the_clients_exceptions(client, backend):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="satchel/tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    backend.refusal = QueueFull("full")
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model="satchel/tiny", messages=MESSAGES)
    assert (full.value.status_code, full.value.code) == (503, "queue_full")
    backend.refusal = None
    backend.play(*backend.sequence("Hello")[:-1], QueueFull("lost"))
    stream = await client.chat.completions.create(model="satchel/tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        async for _ in stream:
            pass


async def test_the_older_form_of_tools(client, backend):
    backend.say(CALL)
    asked: Any = {"model": "satchel/tiny", "messages": MESSAGES, "functions": [TOOLS[0]["function"]]}
    answer = await client.chat.completions.create(**asked, function_call="auto")
    message = answer.choices[0].message
    assert (message.function_call.name, answer.choices[0].finish_reason) == ("weather", "function_call")
    result = {"role": "function", "name": "weather", "content": "rain"}
    again = await client.chat.completions.create(**{**asked, "messages": [*MESSAGES, message.model_dump(), result]})
    assert again.system_fingerprint == answer.system_fingerprint
    assert answer.system_fingerprint is not None
    assert "rain" in backend.prompt


async def test_completions_with_their_own_fields(client, backend):
    backend.say(" more", " most")
    answer = await client.completions.create(model="satchel/tiny", prompt="once", echo=True, best_of=2, seed=1)
    assert len(answer.choices) == 1 and answer.choices[0].text in ("once more", "once most")


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1000 tokens") as caught:
        await client.chat.completions.create(model="satchel/tiny", messages=[{"role": "user", "content": "a " * 3000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
