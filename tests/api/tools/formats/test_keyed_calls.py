"""Calls in Python's and Gemma's form: read while they are written, and constrained by tools' schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler
from satchel.api.pipeline.constrained_answers import ModelGrammars
from satchel.api.text.answers.grammars import Thought
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import CallArguments, Piece, ToolCall, text_of
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.formats.call_format import ConstrainedCalls, ConstrainedTool
from satchel.api.tools.formats.keyed_calls import KeyedCalls
from satchel.cluster.errors import InvalidRequest
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.call_templates import write_family

KEYED = ("gemma4", "function_gemma", "pythonic", "pythonic, not shown", "llama, pythonic", "llama, bare")
GEMMA = KEYED[:2]
DEEP: dict[str, Any] = {"list": [1, -2.5, {"x": "}]", "y": [[], {}]}], "none": None, "text": 'a "b"\n\\ {', "yes": True}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two", "on")
]


@pytest.fixture(scope="module", params=KEYED)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_family(tmp_path_factory.mktemp("family"), request.param), name=request.param)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_family(tmp_path_factory.mktemp("gemma"), "gemma4"), name="gemma4")


def format_of(text: TextModel) -> KeyedCalls:
    known = text.call_format
    assert isinstance(known, KeyedCalls)
    return known


def said(text: TextModel, *calls: str) -> str:
    """Returns calls, given in Python's form, in the model's form."""
    known = format_of(text)
    if known.pythonic:
        return f"{known.head}{known.between.join(calls)}{known.tail}"
    made = [call.replace("(", "{").replace(")", "}").replace("=", ":").replace('"', known.quote) for call in calls]
    return f"{known.head}{known.between.join(made)}{known.tail}"


def split(text: TextModel, answer: str, size: int, most: int | None = None) -> list[Piece]:
    known, marks = format_of(text), text.calls.marks
    parse = call_parser(known.parser(marks.start), TOOLS)
    splitter = ToolCallSplitter(marks.start, marks.end, parse, most, known.parse(marks, TOOLS).reader)
    pieces = [piece for at in range(0, len(answer), size) for piece in splitter.add(answer[at : at + size])]
    return pieces + splitter.flush()


def found(pieces: list[Piece]) -> tuple[str, list[tuple[str, Any]]]:
    calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_come_in_pieces_however_the_text_is_cut(text: TextModel, size: int):
    answer = "I look. " + said(text, 'one(a="x=1, y", b=-2, c=["p", 3])', "two()", 'on(k="")')
    pieces = split(text, answer, size)
    told = [("one", {"a": "x=1, y" if format_of(text).pythonic else "x:1, y", "b": -2, "c": ["p", 3]})]
    assert found(pieces) == ("I look.", [*told, ("two", {}), ("on", {"k": ""})])
    assert "".join(map(text_of, pieces)) == answer
    for call in (piece for piece in pieces if isinstance(piece, ToolCall)):
        more = [piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.index == call.index]
        assert call.begun and "".join(more) == call.arguments


def test_arguments_come_while_they_are_written(text: TextModel):
    answer = said(text, 'one(a="The quick brown fox")')
    begun = answer[: answer.index("fox")]
    more = "".join(piece.text for piece in split(text, begun, 1) if isinstance(piece, CallArguments))
    assert more == '{"a": "The quick brown '


def test_at_most_so_many_calls(text: TextModel):
    pieces = split(text, said(text, "one(a=1)", "two()") + "More.", 1, 1)
    assert found(pieces) == ("", [("one", {"a": 1})])


@pytest.mark.parametrize("answer", ["See [1] and [x](y), [one] (a).", "[ones(a=1)]", "[", "a[0] = {", "call:one{}"])
def test_what_is_no_call_is_text_at_once(text: TextModel, answer: str):
    assert found(split(text, answer, 1)) == (answer, [])
    shown = split(text, answer, 1)
    if len(answer) > 20:
        early = "".join(piece for piece in split(text, answer + " word" * 9, 1)[:-3] if isinstance(piece, str))
        assert early.startswith(answer[:20]) and shown


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_call_is_found_behind_what_only_begins_as_one(tmp_path: Path, size: int):
    text = load_text_model(write_family(tmp_path, "llama, pythonic"))
    assert found(split(text, "[o [on [one(a=1)]", size)) == ("[o [on", [("one", {"a": 1})])


def test_a_call_that_is_cut_keeps_what_came(text: TextModel):
    answer = said(text, 'one(a="The quick", b=1)')
    (call,) = [piece for piece in split(text, answer[: answer.index("quick")], 2) if isinstance(piece, ToolCall)]
    assert (call.name, call.arguments) == ("one", '{"a": "The ')


PYTHONS = {
    "one(a='it''s')": None,
    "one(a='it\\'s \"x\"')": {"a": 'it\'s "x"'},
    'one(a="tab\\t \\x41 \\u00e9 \\U0001F600 \\q \\/")': {"a": "tab\t A é 😀 \\q /"},
    'one(a="\\ud83d\\ude00")': {"a": "😀"},
    "one(a=True, b=False, c=None, d=true, e=null)": {"a": True, "b": False, "c": None, "d": True, "e": None},
    "one( a = 1 ,\n b = { 'x' : [ 1 , 2 ] , \"y\" : {} } , )": {"a": 1, "b": {"x": [1, 2], "y": {}}},
    "one(a=1e3, b=-0.5, c=00, d=1_000, e=value one)": {"a": 1e3, "b": -0.5, "c": "00", "d": "1_000", "e": "value one"},
}


@pytest.mark.parametrize("call", PYTHONS)
def test_what_python_writes(call: str):
    known = KeyedCalls("[", "(", "=", ", ", '"', ")", ", ", "]")
    if (arguments := PYTHONS[call]) is None:
        with pytest.raises(ValueError, match="no calls"):
            known.parser("[")(f"{call}]", TOOLS)
    else:
        assert known.parser("[")(f"{call}]", TOOLS) == [{"name": "one", "arguments": arguments}]


@pytest.mark.parametrize("family", [*GEMMA, "pythonic"])
def test_what_is_deep_is_read_as_the_template_writes_it(family: str, tmp_path: Path):
    text = load_text_model(write_family(tmp_path, family), name=family)
    call = {"id": "1", "type": "function", "function": {"name": "one", "arguments": DEEP}}
    rendered = text.template.render(
        [{"role": "assistant", "content": "", "tool_calls": [call]}], generation_prompt=False
    )
    written = rendered[rendered.index(text.calls.marks.start) : rendered.rindex("<|im_end|>")]
    assert found(split(text, written, 5))[1] == [("one", DEEP)]
    free = ModelGrammars(text, 2**20).grammar(
        Thought.NONE, None, ConstrainedCalls([ConstrainedTool("one", {}, "tools[0]")], forced=True)
    )
    assert takes(text, free, written)


def takes(text: TextModel, grammar: str, answer: str) -> bool:
    matcher = GrammarCompiler(text.tokenizer.json(), text.tokenizer.end_tokens).matcher(grammar)
    tokens = text.tokenizer.encode(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def bound(text: TextModel, schema: dict[str, Any], *, strict: bool = True) -> str:
    tool = ConstrainedTool("one", {"type": "object", **schema}, "tools[0]", strict)
    return ModelGrammars(text, 2**20).grammar(Thought.NONE, None, ConstrainedCalls([tool], forced=True))


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}},
        ["one()", "one(a=1)", 'one(b="x")', "one(a=1, b=\"\")", 'one(a=1, b="x")'],
        ['one(b="x", a=1)', "one(a=1, a=1)", "one(, a=1)", "one(a=1, )", "one(d=1)"],
    ),
    (
        {"properties": {"a": {"enum": ["x", "y z", 3]}, "b": {"const": "k"}}, "required": ["a", "b"]},
        ['one(a="x", b="k")', 'one(a=3, b="k")', 'one(a="y z", b="k")'],
        ['one(a="z", b="k")', 'one(a="x", b="l")', 'one(a="x")'],
    ),
    (
        {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "b": {"type": ["null", "number"]}}},
        ["one(a=1)", 'one(a="x", b=1.5)', "one(b=2)"],
        ["one(a=[])", "one(a=1.5)", 'one(b="x")'],
    ),
    (
        {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}}},
        ["one(a=[1])", "one(a=[1, 2])"],
        ["one(a=[])", "one(a=[1, 2, 3])", 'one(a=["x"])'],
    ),
    (
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        ['one(a="abc")', 'one(a="")'],
        ['one(a="abcd")', "one(a=1)"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_schema_binds_keys_and_values(text: TextModel, case: tuple[dict[str, Any], list[str], list[str]]):
    schema, right, wrong = case
    grammar = bound(text, schema)

    def form(call: str) -> str:
        return said(text, call if format_of(text).pythonic else call.replace(", ", ","))

    assert [call for call in right if not takes(text, grammar, form(call))] == []
    assert [call for call in wrong if takes(text, grammar, form(call))] == []


def test_schemas_that_refer_to_themselves(text: TextModel, gemma: TextModel):
    grammar = bound(text, {"properties": {"n": {"$ref": "#/$defs/node"}}, "required": ["n"], "$defs": {"node": NODE}})
    if format_of(text).pythonic:
        assert takes(text, grammar, said(text, 'one(n={"v": 1, "next": {"v": 2}})'))
        assert not takes(text, grammar, said(text, 'one(n={"v": 1, "next": 2})'))
    else:
        assert takes(text, grammar, said(text, "one(n={v:1,next:{v:2}})"))
        assert not takes(text, grammar, said(text, "one(n={v:1,next:2})"))


def test_calls_that_the_template_leaves_out_are_in_the_prompt(tmp_path: Path):
    text = load_text_model(write_family(tmp_path, "pythonic, not shown"))
    calls = [{"type": "function", "function": {"name": "one", "arguments": {"a": "x", "b": [1, True], "c": None}}}]
    said = [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "Well.", "tool_calls": calls * 2}]
    call = 'one(a="x", b=[1, true], c=None)'
    assert f"Well.<|tool_call_start|>[{call}, {call}]<|tool_call_end|><|im_end|>" in text.template.render(said)


def test_strict_refuses_what_this_form_cannot_follow(gemma: TextModel):
    schema = {"properties": {"a": {"type": "string", "pattern": "^x$"}}}
    with pytest.raises(InvalidRequest, match="'pattern' is not supported"):
        bound(gemma, schema)
    assert takes(gemma, bound(gemma, schema, strict=False), said(gemma, 'one(a="y")'))


async def test_a_chat_streams_a_call(api: Chat, backend: FakeBackend, text: TextModel, tmp_path: Path):
    backend.text = load_text_model(write_family(tmp_path / "family", text.name), name=text.name)
    folder = str(tmp_path / "family")
    backend.served[0] = served_model(folder=folder)
    backend.say(said(text, 'one(a="The quick", b=3)'))
    choice = (await api.chat(tools=TOOLS)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("one", {"a": "The quick", "b": 3})
    chunks = [
        each["choices"][0]["delta"] for each in await api.stream(tools=TOOLS) if each != "[DONE]" and each["choices"]
    ]
    deltas = [call["function"]["arguments"] for delta in chunks for call in delta.get("tool_calls", ())]
    assert len(deltas) > 3 and json.loads("".join(deltas)) == {"a": "The quick", "b": 3}
    assert not any(delta.get("content") for delta in chunks)
