"""Constrained answers (a response format or tools), through the application and a real engine.

The shipped model does not write JSON by itself, so correct answers here come from the grammar.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest
import pytest_asyncio

from satchel.api.agents.memory import AgentMemory
from satchel.api.app import create_app
from satchel.api.pipeline.generation import Generator
from satchel.cluster.config.config import Config, parse_config
from tests.worlds.api.engine_backend import EngineBackend
from tests.worlds.api.remembering import LocalStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["short", "long"]},
    },
    "required": ["city", "days", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


def tool(name: str, schema: dict[str, Any] | None = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


AT = {"type": "object", "properties": {"at": {"type": "boolean"}}, "additionalProperties": False}
TOOLS = [tool("weather"), tool("forecast", AT)]
NAMED = {"type": "function", "function": {"name": "forecast"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


class World:
    def __init__(self, folder: Path) -> None:
        self.config: Config = parse_config(
            {
                "models": [{"name": "satchel/recall", "source": "embedded:recall"}],
                "endpoint": {"grammar_bytes_max": "16 KiB"},
            }
        )
        self.store = LocalStore(self.config, folder / "kv")
        self.backend = EngineBackend(self.config, self.store)
        generator = Generator(self.backend, self.config, memory=AgentMemory(self.store.asked))
        app = create_app(self.backend, self.config, generator=generator)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120)

    async def post(self, path: str = "chat/completions", /, **fields: Any) -> httpx.Response:
        said = {"prompt": "Ada said: "} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
        return await self.client.post(f"/v1/{path}", json={**said, "max_tokens": 150, **fields})

    async def choices(self, path: str = "chat/completions", /, **fields: Any) -> list[dict[str, Any]]:
        answer = await self.post(path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    async def content(self, **fields: Any) -> str:
        (choice,) = await self.choices(**fields)
        assert choice["finish_reason"] == "stop", choice
        return choice["message"]["content"]

    async def calls(self, **fields: Any) -> list[tuple[str, Any]]:
        (choice,) = await self.choices(**{"tools": TOOLS, **fields})
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] == ""
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(each["name"], json.loads(each["arguments"])) for each in called]

    async def refused(self, **fields: Any) -> dict[str, Any]:
        answer = await self.post(**fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and "Traceback" not in error["message"]
        return error


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    await made.backend.begin()
    yield made
    await made.backend.at_rest()
    await made.client.aclose()
    await made.backend.end()


# Forms.


@pytest.mark.parametrize("how", [{}, {"temperature": 1.2, "seed": 5}, {"temperature": 2, "seed": 6, "top_p": 0.8}])
async def test_a_schema_is_kept_to(world: World, how: dict[str, Any]):
    text = await world.content(response_format=FORM, **how)
    jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert await world.content(response_format=FORM, **how) == text


async def test_every_choice_keeps_to_it(world: World):
    choices = await world.choices(response_format=FORM, n=3, temperature=1.5, seed=1)
    texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert len(set(texts)) == 3


async def test_a_stream_says_what_the_whole_answer_says(world: World):
    fields = {"response_format": FORM, "temperature": 1, "seed": 3, "logprobs": True}
    (whole,) = await world.choices(**fields)
    chunks = [choice for chunk in await events(world, **fields) for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in chunks) == whole["message"]["content"]
    said = [each for choice in chunks for each in (choice["logprobs"] or {"content": []})["content"]]
    assert said == whole["logprobs"]["content"]


async def events(world: World, **fields: Any) -> list[dict[str, Any]]:
    answer = await world.post(stream=True, **fields)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


LABELS = string.ascii_letters[:45]
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r"\{(.|\n)*\}"),
    ({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*"),
    ({"structured_outputs": {"regex": r"^\d{3}-[ab]{1,9}\.$"}}, r"\d{3}-[ab]{1,9}\."),
    ({"structured_outputs": {"choice": ["maybe", "never/ever", 'a "b"\n']}}, 'maybe|never/ever|a "b"\n'),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] ("," [0-9])? "."'}}, r"x\d(,\d)?\."),
    ({"guided_json": SCHEMA}, r"\{(.|\n)*\}"),
    ({"json_schema": {"const": "42"}}, '"42"'),
    ({"response_format": {"type": "json_object", "schema": {"const": 42}}}, "42"),
    ({"guided_regex": "[xyz]{4}"}, "[xyz]{4}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_choice": [f"x{one}{other}" for one in LABELS for other in LABELS]}, "x[A-Za-z]{2}"),
    ({"guided_grammar": 'start: "a" B\nB: /b{2}/'}, "abb"),
    ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS)
async def test_every_way_to_ask_for_a_form(world: World, fields: dict[str, Any], pattern: str):
    for path in ("chat/completions", "completions"):
        (choice,) = await world.choices(path, **fields, temperature=0.8, seed=2)
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop" or '"json' in json.dumps(fields)


async def test_an_answer_that_is_too_long_is_cut(world: World):
    whole = await world.content(response_format=FORM)
    (choice,) = await world.choices(response_format=FORM, max_tokens=4)
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "length" and whole.startswith(text) and text != whole


async def test_a_stop_string_cuts_a_form_too(world: World):
    whole = await world.content(response_format=FORM)
    assert await world.content(response_format=FORM, stop='"days"') == whole[: whole.index('"days"')]


async def test_an_agent_remembers_a_bound_answer(world: World):
    first = await world.content(response_format=FORM, agent_id="ann")
    again = await world.post(agent_id="ann", agent_continue=True, response_format=FORM, max_tokens=100)
    usage = again.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > len(first) // 4


# Calls.


@pytest.mark.parametrize("choice", ["required", "any"])
async def test_a_required_call_is_made(world: World, choice: str):
    for name, arguments in await world.calls(tool_choice=choice):
        schema = next(each["function"]["parameters"] for each in TOOLS if each["function"]["name"] == name)
        jsonschema_rs.validate(schema, arguments)


async def test_required_calls_may_be_several_or_one(world: World):
    """`ignore_eos` generates calls as long as more are allowed; without `parallel_tool_calls` there is one."""
    how = {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True, "max_tokens": 200}
    (many,) = await world.choices(**how, parallel_tool_calls=True)
    assert len(many["message"]["tool_calls"]) > 1
    for single in ({"parallel_tool_calls": False}, {}):
        (one,) = await world.choices(**how, **single)
        assert one["finish_reason"] == "tool_calls"
        (call,) = one["message"]["tool_calls"]
        assert call["function"] == many["message"]["tool_calls"][0]["function"]


@pytest.mark.parametrize("choice", [NAMED, allowed("required", "forecast"), {**allowed("required", "forecast")}])
async def test_a_named_tool_is_called(world: World, choice: dict[str, Any]):
    for seed in range(3):
        calls = await world.calls(tool_choice=choice, temperature=1, seed=seed)
        assert {name for name, _ in calls} == {"forecast"}


async def test_a_form_does_not_hinder_forced_calls(world: World):
    assert [name for name, _ in await world.calls(tool_choice=NAMED, response_format=FORM)] == ["forecast"]


async def test_free_text_stays_free_where_tools_are_strict(world: World):
    """The answer is the same as without tools, because the model calls none."""
    fields = {"messages": [{"role": "user", "content": "Remember: the code of ada is 1815."}]}
    plain = await world.content(**fields, tools=TOOLS)
    assert await world.content(**fields, tools=[tool("weather", strict=True)]) == await world.content(
        **fields, tools=[tool("weather")]
    )
    assert await world.content(**fields, tools=TOOLS, tool_choice=allowed("auto", "weather")) == plain


async def test_a_form_or_a_call(world: World):
    for seed in range(4):
        (choice,) = await world.choices(
            tools=TOOLS,
            response_format=FORM,
            temperature=2,
            seed=seed,
            logit_bias={"3068": 100.0 if seed % 2 else -100.0},
        )
        if seed % 2:
            assert choice["finish_reason"] == "tool_calls"
        else:
            jsonschema_rs.validate(SCHEMA, json.loads(choice["message"]["content"]))


async def test_streamed_calls_are_those_of_the_whole_answer(world: World):
    fields = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 3}
    whole = await world.calls(**fields)
    called: dict[int, dict[str, Any]] = {}
    for chunk in await events(world, **fields):
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                call = called.setdefault(delta["index"], {"id": delta.get("id"), "name": "", "arguments": ""})
                call["name"] += delta["function"].get("name", "")
                call["arguments"] += delta["function"]["arguments"]
    assert [(call["name"], json.loads(call["arguments"])) for call in called.values()] == whole
    assert all(call["id"] for call in called.values())


async def test_a_call_that_is_cut_is_a_call_that_is_cut(world: World):
    """As at OpenAI: the arguments so far, and `length`."""
    fields = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 1, "seed": 3, "max_tokens": 14}
    (whole,) = await world.choices(**fields)
    assert whole["finish_reason"] == "length" and whole["message"]["content"] == ""
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "forecast" and call["function"]["arguments"].startswith("{")
    chunks = [choice for chunk in await events(world, **fields) for choice in chunk["choices"]]
    deltas = [delta for choice in chunks for delta in choice["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "length"


class Trip(pydantic.BaseModel):
    days: Literal[1, 2, 3]
    kind: Literal["short", "long"] | None


async def test_the_official_client_parses_what_it_asked_for(world: World):
    """A class for the answer, and one for a tool's arguments, also streamed."""
    same: Any = world.client
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=same)
    ask = {"model": "satchel/recall", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150}
    whole = await client.chat.completions.parse(**ask, response_format=Trip)
    assert isinstance(whole.choices[0].message.parsed, Trip)
    tools = [openai.pydantic_function_tool(Trip, name="travel")]
    called = await client.chat.completions.parse(**ask, tools=tools, tool_choice="required")
    assert called.choices[0].message.tool_calls is not None
    arguments = called.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(arguments, Trip)
    async with client.chat.completions.stream(**ask, tools=tools, tool_choice="required") as stream:
        deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None and len(deltas) > 3
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == arguments


# Refusals.

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json", ": no text can follow this"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "already"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"jsno": "x"}}, "structured_outputs.jsno", "not known"),
    ({"structured_outputs": {"choice": False}}, "structured_outputs.choice", "list of strings"),
    ({"structured_outputs": {"json_object": 0}}, "structured_outputs.json_object", "boolean"),
    ({"response_format": FORM, "guided_regex": "a"}, "guided_regex", "response_format.json_schema.schema"),
    ({"guided_choice": []}, "guided_choice", "list of strings"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "?!"}, "guided_grammar", "GBNF"),
    ({"guided_grammar": "\n" * 10000}, "guided_grammar", "No 'root' rule"),
    ({"guided_grammar": "root ::= " + "(" * 10000}, "guided_grammar", "recursion"),
    ({"guided_grammar": "a::=b\n" * 2000}, "guided_grammar", "1000 rules"),
    ({"guided_json": {"properties": {"a": {"type": "strin"}}}}, "guided_json.properties.a", "Invalid type: strin"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "JSON schema"),
    ({"guided_json": '{"a":' * 5000 + "1" + "}" * 5000}, "guided_json", "too large"),
    ({"guided_json": {"$ref": "#/$defs/x"}}, "guided_json", "does not exist"),
    (
        {
            "guided_json": {
                "$ref": "#/$defs/x",
                "$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "nul"}}]}},
            }
        },
        "guided_json.$defs.x.anyOf[1].items",
        "Invalid type: nul",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": NAMED, "tools": [tool("weather")]}, "tool_choice", "'forecast'"),
    ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice", "required"),
    ({"tool_choice": allowed("never", "weather"), "tools": TOOLS}, "tool_choice", "mode"),
    (
        {"tools": [TOOLS[0], tool("f", {"type": "object", "properties": {"a": {"type": "x"}}}, strict=True)]},
        "tools[1].function.parameters.properties.a",
        "Invalid type: x",
    ),
    ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", ""),
    ({"guided_choice": ["word " * 40 + str(index) for index in range(100)]}, "guided_choice", "grammar_bytes_max"),
]


async def test_what_cannot_be_kept_to_is_refused_with_its_place(world: World):
    for fields, param, message in REFUSED:
        error = await world.refused(**fields)
        assert error["param"] == param and message in error["message"], (fields, error)


WRONG = {"type": "object", "properties": {"a": {"type": "x"}}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "messages",
            {
                **ASKED,
                "tools": [
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"name": "f", "input_schema": WRONG, "strict": True},
                ],
            },
            "tools[1].input_schema.properties.a",
        ),
        (
            "responses",
            {
                "input": "Hi",
                "tools": [
                    {"type": "web_search"},
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [{"type": "function", "name": "f", "parameters": WRONG, "strict": True}],
                    },
                ],
            },
            "tools[1].tools[0].parameters.properties.a",
        ),
        (
            "chat/completions",
            {**ASKED, "functions": [{"name": "f", "parameters": WRONG}], "function_call": {"name": "f"}},
            "functions[0].parameters.properties.a",
        ),
    ],
)
async def test_a_tools_schema_is_blamed_where_the_client_wrote_it(
    world: World, path: str, body: dict[str, Any], place: str
) -> None:
    answer = await world.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{place}: "), answer.text


async def test_unknown_keywords_are_errors_only_where_strict_asks_for_it(world: World):
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "not": {"const": False}}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    assert "a" in json.loads(await world.content(response_format=form))
    form["json_schema"]["strict"] = True  # type: ignore[index]
    error = await world.refused(response_format=form)
    assert error["param"] == "response_format.json_schema.schema.properties.a" and "not" in error["message"]


# Pydantic's schema of a Decimal, and a program that writes every keyword.
AMOUNT = {"type": "string", "maxLength": 6, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
KIND = {"type": "string", "enum": ["short", "long"], "pattern": None, "minLength": None, "format": None, "$ref": None}
ODD = {**SCHEMA, "properties": {"kind": KIND, "amount": {"anyOf": [{"type": "boolean"}, AMOUNT]}}}
ODD["required"] = ["amount", "kind"]
PLAIN = {**ODD, "properties": {"kind": {"enum": ["short", "long"]}, "amount": {"maxLength": 6}}}


async def test_what_cannot_be_followed_of_a_schema_is_ignored_and_all_else_obeyed(world: World):
    """In every protocol with a response format, and in calls; with `strict` it is an error."""
    how = {"temperature": 1, "seed": 5}
    form = {"type": "json_schema", "json_schema": {"name": "pay", "schema": ODD}}
    said = [await world.content(**how, response_format=form), await world.content(**how, guided_json=ODD)]
    (choice,) = await world.choices("completions", **how, structured_outputs={"json": ODD})
    said.append(choice["text"])
    ask, chat = {"input": "Hi", **how}, {"model": "satchel/recall", "messages": ASKED["messages"], "stream": False}
    answer = await world.client.post(
        "/v1/responses", json={**ask, "text": {"format": {"type": "json_schema", "name": "pay", "schema": ODD}}}
    )
    said.append(answer.json()["output"][0]["content"][0]["text"])
    said.append((await world.client.post("/api/chat", json={**chat, "format": ODD})).json()["message"]["content"])
    called = await world.calls(**how, tools=[tool("pay", ODD)], tool_choice="required")
    assert [name for name, _ in called] == ["pay"]
    (block,) = (await message(world, tools=[{"name": "pay", "input_schema": ODD}], tool_choice={"type": "any"}))[
        "content"
    ]
    for value in [*map(json.loads, said), called[0][1], block["input"]]:
        jsonschema_rs.validate(PLAIN, value)
    strict = {"type": "json_schema", "json_schema": {"name": "pay", "schema": ODD, "strict": True}}
    assert (await world.refused(response_format=strict))["param"].startswith("response_format.json_schema.schema.")
    tools = [tool("pay", ODD, strict=True)]
    assert (await world.refused(tools=tools, tool_choice="required"))["param"].startswith(
        "tools[0].function.parameters."
    )


async def test_forms_are_compiled_once(world: World, monkeypatch: pytest.MonkeyPatch):
    await world.content(response_format=FORM)
    monkeypatch.setattr("llguidance.LLMatcher", None)
    jsonschema_rs.validate(SCHEMA, json.loads(await world.content(response_format=FORM)))


# The same with Anthropic's messages.

MESSAGE_TOOLS = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]


async def message(world: World, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, **fields}
    answer = await world.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_messages_keep_to_a_format(world: World) -> None:
    answer = await message(world, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    (block,) = answer["content"]
    assert answer["stop_reason"] == "end_turn" and jsonschema_rs.is_valid(SCHEMA, json.loads(block["text"]))
    wrong = {"type": "json_schema", "schema": {"type": "nothing"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "output_config": {"format": wrong}}
    refusal = await world.client.post("/v1/messages", json=body)
    assert refusal.status_code == 400 and "output_config.format.schema" in refusal.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"weather", "forecast"}),
        ({"type": "tool", "name": "forecast"}, {"forecast"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "forecast"}),
    ],
)
async def test_messages_call_the_tools_that_they_must(world: World, choice: dict[str, Any], names: set[str]) -> None:
    answer = await message(world, tools=MESSAGE_TOOLS, tool_choice=choice)
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert answer["stop_reason"] == "tool_use" and calls and {call["name"] for call in calls} <= names
    schemas = {each["name"]: each["input_schema"] for each in MESSAGE_TOOLS}
    assert all(jsonschema_rs.is_valid(schemas[call["name"]], call["input"]) for call in calls)
    if choice.get("disable_parallel_tool_use"):
        assert len(calls) == 1


async def test_the_input_of_a_call_is_streamed_as_it_is_written(world: World) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, "stream": True, "tools": MESSAGE_TOOLS}
    answer = await world.client.post("/v1/messages", json={**body, "tool_choice": {"type": "tool", "name": "weather"}})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    begun = kinds.index("content_block_start")
    assert events[begun]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 3 and jsonschema_rs.is_valid(SCHEMA, json.loads("".join(pieces)))
    assert kinds[begun + 1 :] == ["content_block_delta"] * len(pieces) + [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_a_limit_cuts_has_what_is_json_of_it(world: World) -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = await message(world, tools=MESSAGE_TOOLS, tool_choice=choice, max_tokens=14)
    assert answer["stop_reason"] == "max_tokens"
    assert all(isinstance(block["input"], dict) for block in answer["content"] if block["type"] == "tool_use")
