"""Laws of tool calls: the result does not depend on the pieces, and no text that is not a call gets lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.api.tools.answer_pieces import CallArguments, CallBegun, Piece, ToolCall, text_of
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.formats.call_format import CallFormat, CallMarks
from satchel.api.tools.formats.json_calls import JsonCalls, JsonReader
from satchel.api.tools.formats.tagged_calls import TaggedCalls
from satchel.api.tools.formats.untold_calls import UntoldCalls
from satchel.api.tools.readers import Reader

START, END = "<tool_call>", "</tool_call>"
GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
BAD = '<tool_call>\n{"name": }\n</tool_call>'

parse = call_parser(lambda text, tools: json.loads(text), [])


def run(pieces: list[str], *, end: str = END) -> list[Piece]:
    splitter = ToolCallSplitter(START, end, parse)
    return [item for piece in pieces if piece for item in splitter.add(piece)] + splitter.flush()


def split(pieces: list[str], *, end: str = END) -> tuple[str, list[tuple[int, str, str]]]:
    out = run(pieces, end=end)
    text = "".join(item for item in out if isinstance(item, str))
    return text, [(item.index, item.name, item.arguments) for item in out if isinstance(item, ToolCall)]


fragments = st.lists(
    st.sampled_from([GOOD, BAD, START, END, "<tool", "_call>", " ", "\n", "word", "<", ">", "{}"]), max_size=8
).map("".join)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=fragments, cuts=st.lists(st.integers(0, 200), max_size=10))
def test_the_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    assert split([text[a:b] for a, b in pairwise(edges)]) == split([text]) == split(list(text))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(alphabet="<tool_cal>/ \n{}x", max_size=60))
def test_text_without_a_whole_call_comes_out_unchanged(text: str):
    shown, calls = split(list(text))
    assert shown == text
    assert calls == []


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=fragments, cuts=st.lists(st.integers(0, 200), max_size=10))
def test_shown_and_skipped_text_together_are_the_text(text: str, cuts: list[int]):
    """Every character comes out once and in order, and no piece is empty."""
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    out = [item for item in run([text[a:b] for a, b in pairwise(edges)]) if not isinstance(item, ToolCall)]
    assert "".join(map(text_of, out)) == text
    assert all(map(text_of, out))


def test_calls_are_numbered_and_the_white_space_around_them_is_theirs():
    text, calls = split([f"I look.\n{GOOD}\n{GOOD}\n\nDone."])
    assert text == "I look.Done."
    assert calls == [(0, "f", '{"x": 1}'), (1, "f", '{"x": 1}')]
    assert split([f"\n{GOOD}\n"])[0] == ""


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "[]",
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": {"x": NaN}}',
    ],
)
def test_a_malformed_call_is_given_back_as_it_was(body: str):
    text = f"before {START}{body}{END} after"
    assert split(list(text)) == (text, [])


def test_an_unfinished_call_is_given_back_as_text():
    text = f'Look {START}{{"name": "f"'
    assert split(list(text)) == (text, [])


def test_without_an_end_marker_a_call_lasts_to_the_end():
    text, calls = split(list(f'{START}{{"name": "f", "arguments": "{{}}"}}'), end="")
    assert (text, calls) == ("", [(0, "f", "{}")])


def test_plain_text_is_not_delayed():
    splitter = ToolCallSplitter(START, END, parse)
    assert splitter.add("Hello") == ["Hello"]
    assert splitter.add(" wo<b") == [" wo<b"]
    assert splitter.add("<too") == []
    assert splitter.add("th") == ["<tooth"]


def test_call_ids_are_unique():
    splitter = ToolCallSplitter(START, END, parse)
    ids = {item.id for item in splitter.add(GOOD * 5) if isinstance(item, ToolCall)}
    assert len(ids) == 5
    assert all(one.startswith("call_") for one in ids)


# Calls that come in pieces.

HERMES = JsonCalls(
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    tail="}\n</tool_call>",
)
LONG = '<tool_call>\n{"name": "f", "arguments": {"x": {"a": "}\\"{"}, "y": [1, {}]}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "f", "arguments": {"x": nothing}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'
TWISTED = '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>'


def reader_of(known: CallFormat, *names: str, end: str = END) -> Callable[[], Reader] | None:
    marks = CallMarks(START, end, lambda text, tools: json.loads(text))
    return known.parse(marks, [{"function": {"name": name}} for name in names]).reader


def read(pieces: list[str], calls_max: int | None = None, *, cut: bool = False) -> list[Piece]:
    splitter = ToolCallSplitter(START, END, parse, calls_max, reader_of(HERMES, "f", "g"))
    splitter.cut = cut
    return [item for piece in pieces if piece for item in splitter.add(piece)] + splitter.flush()


def told(out: list[Piece]) -> tuple[str, list[tuple[int, str, str, bool]], dict[int, str]]:
    """Returns the text, the complete calls, and the arguments that came in pieces."""
    begun: dict[int, CallBegun] = {}
    arguments: dict[int, str] = {}
    for item in out:
        if isinstance(item, CallBegun):
            assert item.index not in begun
            begun[item.index], arguments[item.index] = item, ""
        elif isinstance(item, CallArguments):
            assert item.text
            arguments[item.index] += item.text
        elif isinstance(item, ToolCall) and item.begun:
            assert (begun[item.index].id, begun[item.index].name) == (item.id, item.name)
    text = "".join(item for item in out if isinstance(item, str))
    calls = [(each.index, each.name, each.arguments, each.begun) for each in out if isinstance(each, ToolCall)]
    return text, calls, arguments


written = st.lists(
    st.sampled_from([LONG, GOOD, BAD, WRONG, OTHER, TWISTED, START, END, "<tool", " ", "\n", "word", '{"name": "f"']),
    max_size=6,
).map("".join)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=written, cuts=st.lists(st.integers(0, 400), max_size=10))
def test_calls_in_pieces_do_not_depend_on_the_cuts(text: str, cuts: list[int]):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    outs = [read([text[a:b] for a, b in pairwise(edges)]), read([text]), read(list(text))]
    assert told(outs[0]) == told(outs[1]) == told(outs[2])
    for out in outs:
        assert "".join(map(text_of, out)) == text


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_call_in_pieces_is_the_call(chunk: int):
    text = f"Well. {LONG}\n{GOOD}"
    shown, calls, arguments = told(read([text[at : at + chunk] for at in range(0, len(text), chunk)]))
    assert shown == "Well." and [call[3] for call in calls] == [True, True]
    for index, name, whole, _ in calls:
        assert name == "f" and json.loads(whole) == json.loads(arguments[index])


def test_the_name_comes_before_the_arguments_are_complete():
    splitter = ToolCallSplitter(START, END, parse, None, reader_of(HERMES, "f"))
    kinds = [type(item) for item in splitter.add('<tool_call>\n{"name": "f", "arguments": {"x": "lon')]
    assert kinds[-2:] == [CallBegun, CallArguments]
    assert splitter.add("g")[-1] == CallArguments(0, "g")


def test_what_is_not_written_as_the_template_does_is_read_as_a_whole():
    assert told(read(list(TWISTED))) == ("", [(0, "f", '{"x": 1}', False)], {})
    assert told(read(list(OTHER)))[1] == [(0, "unknown", "{}", False)]


def test_a_call_that_has_begun_stays_a_call():
    """If it is cut, it has its arguments so far. If the model ends too early, missing brackets are added, but nothing
    else."""
    assert told(read(list(LONG[:45]), cut=True))[1] == [(0, "f", LONG[39:44], True)]
    assert told(read(list(WRONG)))[1] == [(0, "f", '{"x": "nothing"}', True)]
    whole = {"x": {"a": '}"{'}, "y": [1, {}]}
    for end in range(40, len(LONG)):
        (call,) = [piece for piece in read(list(LONG[:end])) if isinstance(piece, ToolCall)]
        if call.given is None:
            assert call.name == "f" and LONG[39:].startswith(call.arguments)
        else:
            assert call.given in (whole, {"x": whole["x"]}, {**whole, "y": [1]})


@pytest.mark.parametrize("text", [LONG + GOOD, TWISTED + GOOD])
def test_an_answer_is_over_after_as_many_calls_as_may_be(text: str):
    splitter = ToolCallSplitter(START, END, parse, 1, reader_of(HERMES, "f"))
    out = [item for character in text for item in splitter.add(character)]
    assert splitter.full and [item.index for item in out if isinstance(item, ToolCall)] == [0]
    assert not splitter.flush()
    assert [item.index for item in read([text], 1) if isinstance(item, ToolCall)] == [0]


def test_formats_whose_calls_are_read_as_a_whole():
    for known in (
        UntoldCalls(),
        JsonCalls("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", ""),
        JsonCalls("<tool_call>", "\ue000", "</tool_call><tool_call>", "</tool_call>"),
        JsonCalls("<tool_call>[", ":", ", ", "]</tool_call>"),
        TaggedCalls("<tool_call>", "", "<k>", "</k><v>", "</v>", "</tool_call>", "<tool_call>"),
    ):
        end = "" if known.parts.startswith("[") else END
        assert reader_of(known, "f", end=end) is None


def test_a_name_without_an_end_is_given_up():
    reader = JsonReader("{", "}", {"f"})
    assert not reader.add("{" + "n" * 200) and reader.lost
