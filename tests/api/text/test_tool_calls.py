"""Tool-call laws: splitting does not depend on the pieces, and nothing that is not a call gets lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.api.text.pipeline import Piece, ToolCall, text_of
from satchel.api.text.tool_calls import ToolCallSplitter, call_parser

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
