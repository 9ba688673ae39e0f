"""Calls whose arguments are text between tags (Qwen3-Coder, GLM), read while they are written."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import CallArguments, Piece, ToolCall, text_of
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.formats.tagged_calls import TaggedCalls
from tests.worlds.models.call_templates import write_family

TEXT, ANY = {"type": "string"}, {"type": ["string", "null"]}
PROPERTIES = {"path": TEXT, "content": TEXT, "count": {"type": "integer"}, "more": {"type": "object"}, "any": ANY}
NAMES = ("write", "writes", "now")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in NAMES
]


@pytest.fixture(scope="module", params=["qwen3_coder", "glm"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_family(tmp_path_factory.mktemp("family"), request.param), name=request.param)


def format_of(text: TextModel) -> TaggedCalls:
    known = text.call_format
    assert isinstance(known, TaggedCalls)
    return known


def written(text: TextModel, *calls: tuple[str, dict[str, Any]]) -> str:
    known = format_of(text)
    each: list[str] = []
    for name, arguments in calls:
        pieces = [name, known.opening]
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            pieces += [known.before, key, known.after, shown, known.end]
        each.append("".join([*pieces, known.closing]))
    return known.head + known.between.join(each)


def split(text: TextModel, pieces: list[str], most: int | None = None, *, cut: bool = False) -> list[Piece]:
    marks = text.calls.marks
    reader = format_of(text).parse(marks, TOOLS).reader
    assert marks.parser is not None and reader is not None
    splitter = ToolCallSplitter(marks.start, marks.end, call_parser(marks.parser, TOOLS), most, reader)
    splitter.cut = cut
    return [found for piece in pieces if piece for found in splitter.add(piece)] + splitter.flush()


def told(pieces: list[Piece]) -> tuple[str, list[tuple[str, str, bool]], list[str]]:
    """Returns the text, the complete calls, and their arguments as they came in pieces."""
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    parts = [
        "".join(piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.index == call.index)
        for call in calls
    ]
    shown = "".join(piece for piece in pieces if isinstance(piece, str))
    return shown, [(call.name, call.arguments, call.begun) for call in calls], parts


def is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def test_arguments_come_while_they_are_written(text: TextModel):
    answer = written(text, ("write", {"path": "/a b", "count": 3, "content": "The quick brown fox"}))
    _, calls, parts = told(split(text, list(answer[: answer.index("fox")]), cut=True))
    assert parts[0].rstrip() == '{"path": "/a b", "count": 3, "content": "The quick brown'
    assert [call[0] for call in calls] == ["write"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_come_in_pieces_however_the_text_is_cut(text: TextModel, size: int):
    more = {
        "more": {"a": [1, "x"]},
        "any": "words",
        "content": 'if "x" < 3 & é:\n\treturn </p> \\n',
        "path": "nullable",
    }
    asked = [("writes", {"path": "3", "count": -2}), ("now", {}), ("write", more)]
    answer = "I look. " + written(text, *asked)
    pieces = split(text, [answer[at : at + size] for at in range(0, len(answer), size)])
    shown, calls, parts = told(pieces)
    assert shown == "I look." and "".join(map(text_of, pieces)) == answer
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls if name != "now"] == [asked[0], asked[2]]
    for (_, arguments, begun), part in zip(calls, parts, strict=True):
        assert part == (arguments if begun else "")
    assert [begun for name, _, begun in calls if name != "now"] == [True, True]


def test_text_is_what_the_models_parser_makes_of_it(text: TextModel):
    """White space around it, and text that may mean null."""
    for value in ("", "null", "NULL", "nul", "nullx", " null", "  x ", "\n\nx\n", "true", "3"):
        answer = written(text, ("write", {"path": value, "count": 1}))
        _, ((name, arguments, begun),), (part,) = told(split(text, list(answer)))
        assert text.calls.marks.parser is not None
        body = answer.removeprefix(text.calls.marks.start).removesuffix(text.calls.marks.end)
        assert json.loads(arguments) == text.calls.marks.parser(body, TOOLS)["arguments"]
        assert (name, begun, part) == ("write", True, arguments)


TAGS = ("tool_call", "function", "parameter", "arg_key", "arg_value")
FRAGMENTS = [*"\n> =", "write", "path", "3", "null", *(f"<{tag}>" for tag in TAGS), *(f"</{tag}>" for tag in TAGS)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_otherwise_is_a_call_all_the_same(text: TextModel, data: st.DataObject):
    """Calls with random changes, whose values may differ from those of the model's parser. All calls that the parser
    finds are found, except those inside a value without an end and one that ends before its first argument, and cuts
    change nothing."""
    arguments = data.draw(st.dictionaries(st.sampled_from(list(PROPERTIES)), st.sampled_from(["", "x", "3", "a\nb "])))
    answer = written(text, (data.draw(st.sampled_from([*NAMES, "other"])), arguments)) * data.draw(st.integers(1, 2))
    for _ in range(data.draw(st.integers(0, 3))):
        at, gone = data.draw(st.integers(0, len(answer))), data.draw(st.integers(0, 12))
        answer = answer[:at] + data.draw(st.sampled_from(["", *FRAGMENTS])) + answer[at + gone :]
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    outs = [split(text, [answer[a:b] for a, b in pairwise([0, *sorted(cuts), len(answer)])]), split(text, list(answer))]
    assert told(outs[0]) == told(outs[1])
    assert all("".join(map(text_of, out)) == answer for out in outs)
    whole = ToolCallSplitter(
        text.calls.marks.start, text.calls.marks.end, call_parser(text.calls.marks.parser or (lambda *_: None), TOOLS)
    )
    # GLM's parser turns any text into a call of "unknown", or of what stands before a tag that is broken.
    found = [call for call in told([*whole.add(answer), *whole.flush()])[1] if call[0] != "unknown"]
    found = [call for call in found if not {*"<>"} & {*call[0]}]
    if found and found[-1][1] == "{}" and answer.rfind(text.calls.marks.start) > answer.rfind(text.calls.marks.end):
        found.pop()
    expected = [name for name, _, _ in found]
    _, calls, parts = told(outs[0])
    names = iter(name for name, _, _ in calls)
    endless = bool(calls) and not is_json(calls[-1][1])
    assert endless or all(name in names for name in expected), "in their order, and perhaps others between them"
    for (_, arguments, begun), part in zip(calls, parts, strict=True):
        assert part == (arguments if begun else "")


def test_after_as_many_calls_as_may_be_the_answer_is_over(text: TextModel):
    answer = written(text, ("write", {"path": "a"}), ("write", {"path": "b"}))
    _, calls, _ = told(split(text, list(answer + "More."), 1))
    assert [json.loads(arguments) for _, arguments, _ in calls] == [{"path": "a"}]


def test_a_parser_that_makes_something_else_of_text_is_given_the_whole(text: TextModel):
    def parse(text: str, tools: Any) -> dict[str, Any]:
        return {"name": "name", "arguments": {"key": text.upper()}}

    marks = text.calls.marks
    assert format_of(text).parse(replace(marks, parser=parse), TOOLS).reader is None
    many = TaggedCalls("<tool_call>", "", "<k>", "</k><v>", "</v>", "</call>", "<call>")
    assert marks.parser is not None and many.parse(marks, TOOLS).reader is None
