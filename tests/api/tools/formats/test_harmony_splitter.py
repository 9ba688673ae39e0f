"""The Harmony format: reasoning, content and calls are separated wherever the text is cut, and answers are
constrained."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler
from satchel.api.pipeline.constrained_answers import ModelGrammars
from satchel.api.text.answers.grammars import AnswerForm, Thought
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import CallArguments, CallBegun, Piece, ReasoningDelta, ToolCall, text_of
from satchel.api.tools.formats.call_format import ConstrainedCalls, ConstrainedTool
from satchel.api.tools.formats.harmony_splitter import HarmonySplitter
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.harmony import write_harmony

THOUGHT = "<|channel|>analysis<|message|>They want it.<|end|>"
FINAL = "<|channel|>final<|message|>Hello, <b>you</b>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
TOLD = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}'
START = "<|start|>assistant"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def split(pieces: list[str], **how: Any) -> list[Piece]:
    splitter = HarmonySplitter([{"type": "function", "function": {"name": "weather"}}], **how)
    return [item for piece in pieces if piece for item in splitter.add(piece)] + splitter.flush()


def told(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Returns reasoning, content, calls, and the calls' arguments as they came in pieces."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
    calls = [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]
    came = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert sum(isinstance(piece, CallBegun) for piece in pieces) == len(calls)
    return thought, "".join(piece for piece in pieces if isinstance(piece, str)), calls, came


ANSWERS: list[tuple[str, tuple[str, str, list[tuple[str, str]], str]]] = [
    (THOUGHT + START + FINAL, ("They want it.", "Hello, <b>you</b>", [], "")),
    (THOUGHT + START + CALL, ("They want it.", "", [("weather", '{"city": "Köln"}')], '{"city": "Köln"}')),
    (TOLD, ("", "", [("weather", '{"city": "Köln"}')], '{"city": "Köln"}')),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}",
        ("", "I look.", [("weather", '{"city": "Köln"}')], '{"city": "Köln"}'),
    ),
    ("<|channel|>analysis<|message|>one<|end|>" + START + THOUGHT, ("oneThey want it.", "", [], "")),
    ("<|channel|>analysis<|message|>cut of", ("cut of", "", [], "")),
    (TOLD[:-3], ("", "", [("weather", '{"city": "Köl')], '{"city": "Köl')),
    ("<|channel|>commentary to=python<|message|>print(1)", ("", "print(1)", [], "")),
    ("to be or not", ("", "to be or not", [], "")),
    ("tall", ("", "tall", [], "")),
    ("<|channel|>analy", ("", "", [], "")),
    (CALL + "and more", ("", "", [("weather", '{"city": "Köln"}')], '{"city": "Köln"}')),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_what_is_what_does_not_depend_on_the_pieces(text: str, expected: Any, cuts: list[int]):
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = split([text[a:b] for a, b in pairwise(places)])
    assert told(pieces) == told(split(list(text))) == expected
    assert text.startswith("".join(map(text_of, pieces))), "tokens are found again by counting characters"


def test_an_answer_that_is_begun_needs_no_header():
    assert told(split(["and so", " on", f"<|end|>{START}{THOUGHT}"], answering=True))[:2] == (
        "They want it.",
        "and so on",
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_harmony(tmp_path_factory.mktemp("harmony")), name="harmony")


def takes(text: TextModel, grammar: str, answer: str) -> bool:
    matcher = GrammarCompiler(text.tokenizer.json(), text.tokenizer.end_tokens).matcher(grammar)
    tokens = text.tokenizer.encode(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_forced_call_has_either_form_and_may_be_thought_about(text: TextModel):
    calls = ConstrainedCalls([ConstrainedTool("weather", CITY, "tools[0]")], forced=True)
    grammar = ModelGrammars(text, 2**20).grammar(Thought.POSSIBLE, None, calls)
    call = CALL.removesuffix("<|call|>")
    for answer in (call, TOLD, THOUGHT + START + call, THOUGHT + START + TOLD):
        assert takes(text, grammar, answer), answer
    for answer in (FINAL, call.replace("city", "town"), TOLD.replace("weather", "whether"), THOUGHT):
        assert not takes(text, grammar, answer), answer


def test_a_bound_call_leaves_the_answer_free_and_a_form_is_what_is_said(text: TextModel):
    grammars = ModelGrammars(text, 2**20)
    calls = ConstrainedCalls([ConstrainedTool("weather", CITY, "tools[0]", strict=True)], forced=False)
    free = grammars.grammar(Thought.POSSIBLE, None, calls)
    assert takes(text, free, THOUGHT + START + FINAL) and takes(text, free, TOLD)
    assert not takes(text, free, TOLD.replace("city", "town"))
    form = grammars.grammar(Thought.POSSIBLE, AnswerForm("choice", ["yes", "no"], "form"), None)
    assert takes(text, form, THOUGHT + START + "<|channel|>final<|message|>yes")
    assert not takes(text, form, "yes") and not takes(text, form, FINAL)
    begun = grammars.grammar(Thought.NONE, AnswerForm("choice", ["yes", "no"], "form"), None)
    assert takes(text, begun, "no")


def call(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_history_has_one_call_a_message_with_its_result_behind_it(text: TextModel):
    rendered = text.template.render([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two.",
         "tool_calls": [call("a", "1", x=1), call("b", "2")]},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "assistant", "content": "Done", "reasoning_content": "gone"},
    ])  # fmt: skip
    assert rendered.partition("<|message|>Hi<|end|>")[2] == (
        "<|start|>assistant<|channel|>analysis<|message|>Two.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{"x": 1}<|call|>'
        '<|start|>functions.a to=assistant<|channel|>commentary<|message|>"first"<|end|>'
        "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"second"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done<|end|><|start|>assistant"
    )


@pytest.fixture
def served(backend: FakeBackend, text: TextModel, tmp_path: Path) -> FakeBackend:
    folder = str(write_harmony(tmp_path / "harmony"))
    backend.text = text
    backend.served[0] = served_model(folder=folder)
    return backend


async def test_a_chat_thinks_and_answers(api: Chat, served: FakeBackend):
    served.say(THOUGHT + START + FINAL)
    message = (await api.chat()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("They want it.", "Hello, <b>you</b>")
    usage = (await api.chat()).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 5
    chunks = await api.stream()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello, <b>you</b>"


@pytest.mark.parametrize("written", [CALL, TOLD])
async def test_a_chat_calls_a_tool_and_goes_on(api: Chat, served: FakeBackend, written: str):
    served.say(THOUGHT + START + written)
    choice = (await api.chat(tools=[TOOL], reasoning_effort="high")).json()["choices"][0]
    (asked,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (asked["function"]["name"], json.loads(asked["function"]["arguments"])) == ("weather", {"city": "Köln"})
    served.say(FINAL)
    result = {"role": "tool", "tool_call_id": asked["id"], "content": "rain"}
    messages = [{"role": "user", "content": "Hi"}, choice["message"], result]
    answer = (await api.post({"messages": messages, "tools": [TOOL]})).json()["choices"][0]
    assert answer["message"]["content"] == "Hello, <b>you</b>"
    prompt = served.text.tokenizer.decode(served.requests[-1]["prompt"])
    assert '"rain"<|end|><|start|>assistant' in prompt and "They want it.<|end|>" in prompt


async def test_other_protocols_and_forms_have_it_too(api: Chat, client: httpx.AsyncClient, served: FakeBackend):
    served.say(THOUGHT + START + CALL)
    tools = [{"name": "weather", "input_schema": CITY}]
    body = {"model": "x", "max_tokens": 90, "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    answer = (await client.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"], answer
    assert answer["stop_reason"] == "tool_use"
    await api.chat(tools=[TOOL], tool_choice="required")
    assert "to=functions." in served.requests[-1]["sampling"].grammar
    assert (await api.chat(response_format={"type": "json_object"})).status_code == 200


WRAPPED = '{"name": "weather", "arguments": {"city": "Köln"}}'


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    "written",
    [
        CALL.replace("weather ", "weatherjson "),
        CALL.replace(" <|constrain|>json", "json"),
        CALL.replace('"Köln"}', '"Köln",}'),
        CALL.replace('{"city": "Köln"}', WRAPPED),
        CALL.replace('{"city": "Köln"}', '{"arguments": {"city": "Köln"}}'),
        f"<|channel|>final<|message|>{WRAPPED}",
        f"<|channel|>final<|message|>```json\n{WRAPPED}\n```<|end|>",
    ],
)
async def test_calls_that_are_written_otherwise(api: Chat, served: FakeBackend, written: str, step: int):
    served.say(THOUGHT + START + written, step=step)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    choice = (await api.chat(tools=tools)).json()["choices"][0]
    (asked,) = choice["message"]["tool_calls"]
    assert (asked["function"]["name"], json.loads(asked["function"]["arguments"])) == ("weather", {"city": "Köln"})
    assert choice["message"]["content"] in ("", None) and choice["message"]["reasoning_content"] == "They want it."
    chunks = [each for chunk in await api.stream(tools=tools) if chunk != "[DONE]" for each in chunk["choices"]]
    deltas = [delta["function"] for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
    assert json.loads("".join(delta["arguments"] for delta in deltas)) == {"city": "Köln"}
    assert not "".join(chunk["delta"].get("content") or "" for chunk in chunks)


async def test_arguments_of_the_names_of_a_call_are_arguments(api: Chat, served: FakeBackend):
    """A tool may have an argument `name`."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    served.say(CALL.replace('{"city": "Köln"}', '{"name": "Köln", "arguments": {}}'))
    (asked,) = (await api.chat(tools=tools)).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(asked["function"]["arguments"]) == {"name": "Köln", "arguments": {}}


async def test_a_call_that_a_limit_cuts_has_what_there_is(api: Chat, served: FakeBackend):
    served.say(CALL[: CALL.index("ln")], finish="length")
    choice = (await api.chat(tools=[TOOL])).json()["choices"][0]
    (asked,) = choice["message"]["tool_calls"]
    assert asked["function"]["arguments"] == '{"city": "Kö' and choice["finish_reason"] == "length"
