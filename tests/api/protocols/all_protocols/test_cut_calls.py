"""If an answer ends within a call, no protocol reports a complete call, streamed or not: neither by the finish reason
nor by arguments that the model did not write."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.worlds.api.anthropic_client import Messages
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.api.responses_client import Responses

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "read_file", "parameters": SCHEMA, "strict": False}
CUSTOM = {"type": "custom", "name": "patch"}
READ = {"name": "read_file", "input_schema": SCHEMA}
PATH = {"path": "/tmp/abc-def"}
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/tmp/abc-def"}}\n</tool_call>'
FIRST = CALL.replace("abc-def", "first")
PART = CALL[: CALL.index("abc")]


async def streamed_chat(client: httpx.AsyncClient, **fields: Any) -> tuple[list[str], str]:
    """Returns the arguments of the calls, and why the answer ended."""
    chunks = [each for chunk in await Chat(client).stream(**fields) if chunk != "[DONE]" for each in chunk["choices"]]
    written: dict[int, str] = {}
    for chunk in chunks:
        for delta in chunk["delta"].get("tool_calls", ()):
            written[delta["index"]] = written.get(delta["index"], "") + delta["function"]["arguments"]
    return list(written.values()), chunks[-1]["finish_reason"]


async def chats(client: httpx.AsyncClient, **fields: Any) -> list[tuple[list[str], str]]:
    choice = (await Chat(client).chat(tools=[TOOL], **fields)).json()["choices"][0]
    whole = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
    return [(whole, choice["finish_reason"]), await streamed_chat(client, tools=[TOOL], **fields)]


async def messages(client: httpx.AsyncClient, **fields: Any) -> list[tuple[list[Any], str, str | None]]:
    """Returns the inputs of the calls whose blocks were closed, why the answer ended, and the stop string."""
    whole = await Messages(client).say(tools=[READ], **fields)
    inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    events = await Messages(client).stream(tools=[READ], **fields)
    opened, closed, written = "", [], ""
    for event in events:
        if event["type"] == "content_block_start":
            opened, written = event["content_block"]["type"], ""
        elif event["type"] == "content_block_delta":
            written += event["delta"].get("partial_json", "")
        elif event["type"] == "content_block_stop" and opened == "tool_use":
            closed.append(json.loads(written))
    ends = [whole, events[-2]["delta"]]
    return [
        (calls, end["stop_reason"], end["stop_sequence"]) for calls, end in zip((inputs, closed), ends, strict=True)
    ]


async def responses(client: httpx.AsyncClient, **fields: Any) -> list[tuple[list[tuple[str, str]], str]]:
    """Returns the calls' arguments and status, and the response's status."""
    streamed = await Responses(client).stream(tools=[FLAT], **fields)
    shown = [await Responses(client).say(tools=[FLAT], **fields), streamed[-1]["response"]]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == shown[1]["output"]
    return [
        ([(item["arguments"], item["status"]) for item in each["output"] if item["type"] == "function_call"],
         each["status"])
        for each in shown
    ]  # fmt: skip


async def ollama(client: httpx.AsyncClient, **fields: Any) -> list[tuple[list[Any], str]]:
    told = []
    for stream in (False, True):
        body = {"model": "satchel/tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], **fields}
        answer = await client.post("/api/chat", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        calls = [call["function"]["arguments"] for line in lines for call in line["message"].get("tool_calls", ())]
        told.append((calls, lines[-1]["done_reason"]))
    return told


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_a_stop_string_within_a_call_leaves_it_out(client: httpx.AsyncClient, backend: FakeBackend, step: int):
    backend.say(f"Well. {CALL}", step=step)
    assert await chats(client, stop=["abc"]) == [([], "stop")] * 2
    assert await messages(client, stop_sequences=["abc"]) == [([], "stop_sequence", "abc")] * 2
    assert await responses(client, stop=["abc"]) == [([], "completed")] * 2
    assert await ollama(client, options={"stop": ["abc"]}) == [([], "stop")] * 2


@pytest.mark.parametrize("stop", ["</tool_call>", "}\n</tool_call>", "Then"])
async def test_a_stop_string_behind_a_call_leaves_it_whole(client: httpx.AsyncClient, backend: FakeBackend, stop: str):
    """The call is complete if its arguments are. If the request has stop strings, it comes in one piece."""
    backend.say(f"{CALL}\nThen")
    for arguments, reason in await chats(client, stop=[stop, "never"]):
        assert ([json.loads(each) for each in arguments], reason) == ([PATH], "tool_calls")
    assert await messages(client, stop_sequences=[stop]) == [([PATH], "tool_use", None)] * 2
    for ((arguments, item_status),), status in await responses(client, stop=[stop]):
        assert (json.loads(arguments), item_status, status) == (PATH, "completed", "completed")
    assert await ollama(client, options={"stop": [stop]}) == [([PATH], "stop")] * 2


async def test_the_calls_before_the_one_that_is_cut_are_whole(client: httpx.AsyncClient, backend: FakeBackend):
    backend.say(f"{FIRST}\n{CALL}")
    for arguments, reason in await chats(client, stop=["abc"]):
        assert ([json.loads(each) for each in arguments], reason) == ([{"path": "/tmp/first"}], "stop")
    assert await messages(client, stop_sequences=["abc"]) == [([{"path": "/tmp/first"}], "stop_sequence", "abc")] * 2
    assert await ollama(client, options={"stop": ["abc"]}) == [([{"path": "/tmp/first"}], "stop")] * 2


async def test_a_stop_token_within_a_call_leaves_it_out(client: httpx.AsyncClient, backend: FakeBackend):
    (token,) = backend.text.tokenizer.encode("#")
    backend.say(f"{PART}#")
    assert await chats(client, stop_token_ids=[token]) == [([], "stop")] * 2
    assert await messages(client, stop_token_ids=[token]) == [([], "end_turn", None)] * 2
    assert await responses(client, stop_token_ids=[token]) == [([], "completed")] * 2
    assert await ollama(client, stop_token_ids=[token]) == [([], "stop")] * 2


@pytest.mark.parametrize("end", [CALL.index("abc"), CALL.index("{", 20) + 1, CALL.index("}"), CALL.index('"/tmp') - 2])
async def test_a_limit_within_a_call(client: httpx.AsyncClient, backend: FakeBackend, end: int):
    """As at OpenAI, there are the arguments so far. Anthropic's block is not closed."""
    backend.say(CALL[:end], finish="length")
    said = CALL[CALL.index("{", 20) : end]
    assert await chats(client) == [([said], "length")] * 2
    assert await messages(client) == [([], "model_context_window_exceeded", None)] * 2
    assert await responses(client) == [([(said, "incomplete")], "incomplete")] * 2
    assert await ollama(client) == [([], "length")] * 2


@pytest.mark.parametrize("end", [CALL.index("abc"), CALL.index("{", 20) + 1, CALL.index('"/tmp') - 2])
async def test_a_call_that_the_model_itself_does_not_end(client: httpx.AsyncClient, backend: FakeBackend, end: int):
    """A value's missing end is not made up, because then half a file might be written."""
    backend.say(CALL[:end])
    said = CALL[CALL.index("{", 20) : end]
    assert await chats(client) == [([said], "stop")] * 2
    assert await messages(client) == [([], "end_turn", None)] * 2
    assert await responses(client) == [([(said, "incomplete")], "completed")] * 2
    assert await ollama(client) == [([], "stop")] * 2


async def test_free_text_that_is_cut_is_incomplete(client: httpx.AsyncClient, backend: FakeBackend):
    backend.say('<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin', finish="length")
    streamed = await Responses(client).stream(tools=[CUSTOM])
    for shown in (await Responses(client).say(tools=[CUSTOM]), streamed[-1]["response"]):
        (item,) = shown["output"]
        assert (item["type"], item["status"], shown["status"]) == ("custom_tool_call", "incomplete", "incomplete")


async def test_the_older_form_of_calls(client: httpx.AsyncClient, backend: FakeBackend):
    functions = {"functions": [TOOL["function"]]}
    backend.say(CALL)
    choice = (await Chat(client).chat(**functions, stop=["abc"])).json()["choices"][0]
    assert choice["message"].get("function_call") is None and choice["finish_reason"] == "stop"
    backend.say(PART, finish="length")
    choice = (await Chat(client).chat(**functions)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
