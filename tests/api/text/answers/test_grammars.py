"""A grammar accepts a model's template's text for valid calls, and refuses that for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler
from satchel.api.pipeline.constrained_answers import ModelGrammars
from satchel.api.text.answers.grammars import AnswerForm, Thought
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import ToolCall
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.formats.call_format import ConstrainedCalls, ConstrainedTool
from satchel.api.tools.formats.keyed_calls import KeyedCalls
from satchel.cluster.errors import InvalidRequest
from tests.worlds.models.call_templates import FAMILIES, write_family

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"enum": ["in", "out"]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LISTED = {
    "type": "object",
    "properties": {"items": {"$ref": "#/$defs/all"}},
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {"all": {"type": "array", "items": {"type": "boolean"}}},
}
TOOLS = [ConstrainedTool("weather", WEATHER, "tools[0]"), ConstrainedTool("listed", LISTED, "tools[1]")]
OBJECT = AnswerForm("json", {"type": "object", "additionalProperties": {"type": "integer"}}, "form")

ONE = [("weather", {"city": 'O"slo {', "days": 3})]
MORE = [("weather", {"city": "Ré\nrë", "days": -3, "where": "out"}), ("listed", {"items": [True, False]})]
BOUND = [family for family in FAMILIES if family not in ("odd", "pythonic, not shown", "llama, bare")]


@pytest.fixture(scope="module", params=BOUND)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_family(tmp_path_factory.mktemp("family"), request.param), name=request.param)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_family(tmp_path_factory.mktemp("thinker"), "hermes", thinking=True))


def written(text: TextModel, calls: list[tuple[str, Any]]) -> str:
    """Returns the template's text for the calls in an assistant's message."""
    said = [
        {"id": f"functions.{name}:{index}" if text.name == "kimi" else "abcdefgh1", "type": "function",
         "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    rendered = text.template.render([{"role": "assistant", "content": "", "tool_calls": said}], generation_prompt=False)
    return rendered[rendered.index(text.calls.marks.start) : rendered.rindex("<|im_end|>")]


def takes(text: TextModel, grammar: str, answer: str) -> bool:
    """Returns whether the grammar accepts the answer, and allows it to end there."""
    matcher = GrammarCompiler(text.tokenizer.json(), text.tokenizer.end_tokens).matcher(grammar)
    tokens = text.tokenizer.encode(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(
    text: TextModel, calls: ConstrainedCalls | None, thought: Thought = Thought.NONE, form: Any = None
) -> str:
    return ModelGrammars(text, 2**20).grammar(thought, form, calls)


def parsed(text: TextModel, answer: str, tools: list[ConstrainedTool]) -> list[tuple[str, Any]]:
    given = [{"type": "function", "function": {"name": each.name, "parameters": each.parameters}} for each in tools]
    assert text.calls.marks.parser is not None
    known, parser = text.call_format, text.calls.marks.parser
    if isinstance(known, KeyedCalls):
        parser = known.parser(text.calls.marks.start)
    splitter = ToolCallSplitter(text.calls.marks.start, text.calls.marks.end, call_parser(parser, given))
    pieces = [*splitter.add(answer), *splitter.flush()]
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]


@pytest.mark.parametrize("calls", [ONE, MORE])
def test_right_calls_are_taken_as_the_template_writes_them(family: TextModel, calls: list[tuple[str, Any]]):
    grammar = grammar_of(family, ConstrainedCalls(TOOLS, forced=True))
    answer = written(family, calls)
    assert parsed(family, answer, TOOLS) == calls
    assert takes(family, grammar, answer)


@pytest.mark.parametrize(
    "calls",
    [
        [("whether", {"city": "Oslo", "days": 3})],
        [("weather", {"city": "Oslo", "days": "three"})],
        [("weather", {"city": "Oslo"})],
        [("weather", {"city": "Oslo", "days": 3, "where": "inn"})],
        [("weather", {"city": "Oslo", "days": 3, "why": "in"})],
        [("listed", {"items": [1]})],
        [*ONE, ("listed", {"items": [1]})],
    ],
)
def test_wrong_calls_are_not_taken(family: TextModel, calls: list[tuple[str, Any]]):
    for forced in (True, False):
        assert not takes(family, grammar_of(family, ConstrainedCalls(TOOLS, forced)), written(family, calls))


def test_forced_means_at_least_one_and_without_parallel_at_most_one(family: TextModel):
    forced = grammar_of(family, ConstrainedCalls(TOOLS, forced=True))
    assert not takes(family, forced, "") and not takes(family, forced, "No.")
    single = grammar_of(family, ConstrainedCalls(TOOLS, forced=True, parallel=False))
    assert takes(family, single, written(family, ONE))
    assert not takes(family, single, written(family, MORE))


def test_free_text_may_stand_before_calls_or_instead_of_them(family: TextModel):
    free = grammar_of(family, ConstrainedCalls(TOOLS, forced=False))
    for answer in ("", "No {tools} < here.\n", f"Well.\n{written(family, ONE)}", written(family, MORE)):
        assert takes(family, free, answer), answer


def test_a_form_and_calls_are_alternatives(family: TextModel):
    both = grammar_of(family, ConstrainedCalls(TOOLS, forced=False), form=OBJECT)
    assert takes(family, both, '{"a": 1}') and takes(family, both, written(family, ONE))
    assert not takes(family, both, '{"a": "b"}') and not takes(family, both, "Well.")


def test_a_tool_without_parameters_takes_any_arguments(family: TextModel):
    grammar = grammar_of(family, ConstrainedCalls([ConstrainedTool("any", {}, "tools[0]")], forced=True))
    for arguments in ({}, {"a": "b"}, {"a_1": "b", "c": "d e"}):
        assert takes(family, grammar, written(family, [("any", arguments)]))


def test_reasoning_comes_first_where_the_prompt_opens_it(thinker: TextModel):
    calls = written(thinker, ONE)
    for bound, form, answer in (
        (ConstrainedCalls(TOOLS, forced=True), None, calls),
        (None, OBJECT, '{"a": 1}'),
        (ConstrainedCalls(TOOLS, forced=False), None, "Well."),
        (None, AnswerForm("grammar", 'start: "x" | "y"', "form"), "y"),
    ):
        opened = grammar_of(thinker, bound, Thought.OPEN, form)
        assert takes(thinker, opened, f"Hm, {{}} is\n\nhard.\n</think>\n\n{answer}")
        assert takes(thinker, opened, f"</think>{answer}")
        assert not takes(thinker, opened, answer)
        assert not takes(thinker, opened, "Hm.")
        possible = grammar_of(thinker, bound, Thought.POSSIBLE, form)
        assert takes(thinker, possible, answer) and takes(thinker, possible, f"<think>\nHm.\n</think>\n\n{answer}")
        assert takes(thinker, grammar_of(thinker, bound, Thought.NONE, form), answer)


def test_a_template_opens_or_closes_reasoning(thinker: TextModel):
    assert thinker.template.ends_in_thought(thinker.template.render([{"role": "user", "content": "?"}]))
    assert thinker.template.may_think("<|im_start|>assistant\n")
    assert not thinker.template.may_think("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_family_whose_calls_are_not_understood_is_forced_in_json_or_refused_by_name(tmp_path: Path):
    text = load_text_model(write_family(tmp_path, "odd"), name="odd")
    assert text.calls.known
    with pytest.raises(InvalidRequest, match="how the model 'odd' writes tool calls is not known"):
        grammar_of(text, ConstrainedCalls(TOOLS, forced=False, chosen=True))
    assert grammar_of(text, ConstrainedCalls(TOOLS, forced=False)) == ""
    forced = grammar_of(text, ConstrainedCalls(TOOLS, forced=True))
    assert takes(text, forced, '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}')
    assert not takes(text, forced, '{"name": "weather", "arguments": {"city": "Oslo"}}')


def test_a_name_is_written_as_it_is(family: TextModel):
    grammar = grammar_of(family, ConstrainedCalls([ConstrainedTool("a.b-c", {}, "tools[0]")], forced=True))
    assert takes(family, grammar, written(family, [("a.b-c", {})]))


LAYOUTS = {
    "one line": lambda value: json.dumps(value, ensure_ascii=False),
    "no spaces": lambda value: json.dumps(value, separators=(",", ":")),
    "indented": lambda value: json.dumps(value, indent=2),
    "behind a space": lambda value: f" {json.dumps(value)}",
    "before a line break": lambda value: f"{json.dumps(value)}\n",
}
VALUE = {"list": [1, [], {}], "deep": {"a": {"b": None}}, "text": "a, b: c\n", "const": {"x": [1, 2]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {},
        {"type": "object", "properties": {**{key: {} for key in VALUE}, "const": {"const": VALUE["const"]}}},
        {"anyOf": [{"type": "array"}, {"type": "object", "patternProperties": {"^[a-z]": {}}}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"type": "object"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("strict", [True, False])
def test_json_has_one_layout(thinker: TextModel, schema: Any, strict: bool):
    grammar = grammar_of(thinker, None, form=AnswerForm("json", schema, "form", strict))
    taken = [name for name, write in LAYOUTS.items() if takes(thinker, grammar, write(VALUE))]
    assert taken == ["one line"]


def test_arguments_of_forced_calls_have_the_same_layout(family: TextModel):
    tool = ConstrainedTool("listed", {"type": "object", "properties": {"items": {"type": "array"}}}, "tools[0]")
    grammar = grammar_of(family, ConstrainedCalls([tool], forced=True))
    (call,) = [written(family, [("listed", {"items": [1, 2]})])]
    assert takes(family, grammar, call)
    if "[1, 2]" in call:
        for other in ("[1,2]", "[1,  2]", "[1,\n2]", "[ 1, 2]"):
            assert not takes(family, grammar, call.replace("[1, 2]", other))


def test_a_callers_own_grammar_has_its_own_white_space(thinker: TextModel):
    form = AnswerForm("grammar", 'start: "a" / +/ "b"', "form")
    assert takes(thinker, grammar_of(thinker, None, form=form), "a    b")
    assert takes(thinker, grammar_of(thinker, None, form=AnswerForm("regex", r"\{ *\}", "form")), "{   }")
