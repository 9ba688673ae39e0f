"""Calls that models write in other forms than their template's, in every protocol, whole and streamed, and with forced
calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.api.text.model import load_text_model
from tests.worlds.api.anthropic_client import Messages, gathered
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.api.responses_client import Responses
from tests.worlds.api.served_models import served_model
from tests.worlds.models.call_templates import write_family
from tests.worlds.models.tiny_tokenizers import write_folder

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
KÖLN = {"city": "Köln"}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
FENCED = f"I look.\n\n```json\n{CALL}\n```"
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_a_call_in_a_fence_in_every_protocol(client: httpx.AsyncClient, backend: FakeBackend, step: int):
    backend.say(FENCED, step=step)
    chat, messages, responses = Chat(client), Messages(client), Responses(client)
    choice = (await chat.chat(tools=[TOOL])).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", KÖLN)

    chunks = [choice for chunk in await chat.stream(tools=[TOOL]) if chunk != "[DONE]" for choice in chunk["choices"]]
    deltas = [delta for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I look."

    tool = {"name": "weather", "input_schema": SCHEMA}
    for message in (await messages.say(tools=[tool]), gathered(await messages.stream(tools=[tool]))):
        text, used = message["content"]
        assert (text["text"], used["name"], used["input"]) == ("I look.", "weather", KÖLN)
        assert message["stop_reason"] == "tool_use"

    flat = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    streamed = (await responses.stream(tools=[flat]))[-1]["response"]
    for answer in (await responses.say(tools=[flat]), streamed):
        said, called = answer["output"]
        assert said["content"][0]["text"] == "I look." and called["type"] == "function_call"
        assert json.loads(called["arguments"]) == KÖLN

    body = {"model": "satchel/tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    told = await client.post("/api/chat", json=body)
    lines = [json.loads(line)["message"] for line in told.text.splitlines()]
    (called,) = [call for line in lines for call in line.get("tool_calls", ())]
    assert called["function"]["name"] == "weather" and called["function"]["arguments"] == KÖLN
    assert "".join(line["content"] for line in lines) == "I look."


FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat/completions": ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
    "responses": (
        "tool_choice",
        {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}], "tool_choice": "required"},
    ),
    "messages": (
        "tool_choice",
        {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    ),
}


async def test_a_forced_answer_has_one_call_unless_it_may_have_several(client: httpx.AsyncClient, backend: FakeBackend):
    other = TAGGED.replace("Köln", "Bonn")
    backend.say(f"{TAGGED}\n{other}\n{TAGGED}\n{other}\n<tool_call>\n{{", finish="length")
    several = {"parallel_tool_calls": True}
    for tools in ({**FORCED["chat/completions"][1]}, {**FORCED["chat/completions"][1], "tool_choice": NAMED}):
        for more, count in (({}, 1), ({"parallel_tool_calls": False}, 1), (several, 2)):
            choice = (await Chat(client).chat(**tools, **more)).json()["choices"][0]
            assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (count, "tool_calls")
            assert choice["message"]["content"] in ("", None)
    for more, count in (({}, 1), (several, 2)):
        answer = await Responses(client).say(**FORCED["responses"][1], **more)
        assert [item["type"] for item in answer["output"]] == ["function_call"] * count
        assert answer["parallel_tool_calls"] is (count == 2) and answer["status"] == "completed"
    for more, count in (({}, 1), ({"disable_parallel_tool_use": False}, 2)):
        tools = FORCED["messages"][1]
        message = await Messages(client).say(**{**tools, "tool_choice": {**tools["tool_choice"], **more}})
        assert [block["type"] for block in message["content"]] == ["tool_use"] * count
        assert message["stop_reason"] == "tool_use"


NAMED = {"type": "function", "function": {"name": "weather"}}


async def test_without_tools_or_with_none_chosen_it_is_text(api: Chat, backend: FakeBackend):
    backend.say(FENCED)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = (await api.chat(**fields)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (FENCED, "stop")


async def test_what_is_told_of_a_call_is_json(api: Chat, backend: FakeBackend):
    """Whole and in pieces, even if the model's own JSON is wrong."""
    for wrong in (
        '{"name": "weather", "arguments": {"city": "Köln",}}',
        '{"name": "weather", "arguments": {"city": "Kö\tln"}}',
        '{"name": "weather", "arguments": {\'city\': \'Köln\'}}',
        '{"name": "weather", "arguments": {"city": "Köln"}',
        '{"name": "weather", "arguments": {"city": "Köln", "days": few}}',
    ):
        backend.say(f"<tool_call>\n{wrong}\n</tool_call>", step=2)
        (call,) = (await api.chat(tools=[TOOL])).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Köln", "Kö\tln")
        chunks = [each for chunk in await api.stream(tools=[TOOL]) if chunk != "[DONE]" for each in chunk["choices"]]
        deltas = [delta["function"] for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
        assert json.loads("".join(delta["arguments"] for delta in deltas)) == json.loads(call["function"]["arguments"])


async def test_a_call_that_is_cut_is_none_where_arguments_must_be_whole(
    client: httpx.AsyncClient, backend: FakeBackend
):
    """Ollama's clients run every call that they get, so they get only complete calls."""
    backend.say(f"{TAGGED}\n<tool_call>\n{CALL[:45]}", finish="length")
    body = {"model": "satchel/tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    for stream in (False, True):
        lines = (await client.post("/api/chat", json={**body, "stream": stream})).text.splitlines()
        calls = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
        assert [call["function"]["arguments"] for call in calls] == [KÖLN]


PLAIN = (
    "{%- for message in messages %}{%- if message.role not in ('user', 'assistant') %}{{- raise_exception('no') }}"
    "{%- endif %}{%- if loop.index0 % 2 != (message.role == 'assistant') | int %}{{- raise_exception('turns') }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


async def test_a_template_without_a_place_for_tools_tells_of_them(api: Chat, backend: FakeBackend, tmp_path: Path):
    """It accepts only user and assistant messages, so tools, calls and results are described in these."""
    backbone = load_text_model(write_family(tmp_path / "family", "llama")).tokenizer.backend
    folder = write_folder(tmp_path / "plain", backbone, PLAIN)  # type: ignore[arg-type]
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder, context_tokens=4000)
    backend.say(CALL)
    for choice in ("auto", "required"):
        answer = (await api.chat(tools=[TOOL], tool_choice=choice)).json()["choices"][0]
        assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == KÖLN
        assert json.dumps(TOOL["function"]) in backend.prompt and '{"name": "name_of_the_tool"' in backend.prompt
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(KÖLN)}}
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "It rains."},
    ]
    await api.post({"messages": said, "tools": [TOOL]})
    _, _, rest = backend.prompt.partition("Hi<|im_end|>\n")
    assert rest == (
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\nThe result of weather:\nIt rains.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "family", ["odd", "pythonic, not shown", "llama", "listed", "fenced", "kimi", "mistral", "glm"]
)
async def test_every_family_takes_calls_in_json(api: Chat, backend: FakeBackend, tmp_path: Path, family: str):
    folder = write_family(tmp_path / "family", family)
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder, context_tokens=4000)
    for said in (CALL, FENCED, f"[{CALL}]"):
        backend.say(said, step=1)
        choice = (await api.chat(tools=[TOOL])).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == KÖLN and "{" not in (choice["message"]["content"] or "")
