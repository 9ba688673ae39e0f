"""Where calls may be in an answer. The result does not depend on how the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.api.tools.answer_pieces import Piece, ToolCall, text_of
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.call_stage import CallLimit, CallStage
from satchel.api.tools.lenient.declared import DeclaredTools
from satchel.api.tools.lenient.loose_reader import LooseReader
from satchel.api.tools.lenient.stage import HELD_CHARACTERS_MAX, LenientCalls, OwnMarks

OPEN = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
DECLARED = DeclaredTools([{"function": {"name": "open", "parameters": OPEN}}, {"function": {"name": "ring"}}])
START, END = "<tool_call>", "</tool_call>"
BODIES = LooseReader(DECLARED, (START, END))
CALL = '{"name": "open", "arguments": {"room": "hall"}}'
RING = '{"name": "ring", "arguments": {}}'
TAGGED = f"{START}\n{CALL}\n{END}"
ONE = [("open", {"room": "hall"})]


def stage(
    *, own: bool = True, forced: bool = False, most: int | None = None, marks: OwnMarks | None = None
) -> CallStage:
    limit = CallLimit(forced=forced, calls_max=most)
    lenient = LenientCalls(BODIES, OwnMarks((START,)), forced=forced, enough=limit.ended_by)

    def parse(body: str) -> list[tuple[str, str]]:
        return call_parser(lambda text, tools: json.loads(text), [])(body)

    splitter = ToolCallSplitter(START, END, parse, most, forced=forced) if own else None
    return CallStage(splitter, lenient, limit)


def run(pieces: list[str], *, cut: bool = False, **how: Any) -> list[Piece]:
    made = stage(**how)
    out: list[Piece] = []
    for piece in pieces:
        if piece and not made.full:
            out += made.add(piece)
    made.end(cut=cut)
    return [*out, *made.flush()]


def told(out: list[Piece]) -> tuple[str, list[tuple[str, Any]]]:
    calls = [(piece.name, json.loads(piece.arguments)) for piece in out if isinstance(piece, ToolCall)]
    return "".join(piece for piece in out if isinstance(piece, str)), calls


CALLED = [
    (CALL, ""),
    (f"\n\n{CALL}\n", ""),
    (f"```json\n{CALL}\n```", ""),
    (f"```\n{CALL}\n```\n", ""),
    (f"```json\n{CALL}", ""),
    (f"I look.\n```json\n{CALL}\n```", "I look."),
    (f"I look.\n\n{CALL}", "I look."),
    (f"I look.\n\n[{CALL}]", "I look."),
    (f"I look.\n<tools>\n{CALL}\n</tools>", "I look."),
    ("I look.\n<function=open>\n<parameter=room>\nhall\n</parameter>\n</function>\n</tool_call>", "I look."),
    ('open(room="hall")', ""),
    ('```tool_code\nopen(room="hall")\n```', ""),
    (f"So:\n\n```xml\n{TAGGED}\n```", "So:"),
    (f"It is\n\n```python\nx = 1\n```\n\n{CALL}", "It is\n\n```python\nx = 1\n```"),
    (f"```json\n{{}}\n```\n\n```json\n{CALL}\n```", "```json\n{}\n```"),
]

TEXTS = [
    f"I look: {CALL}",
    f"I look.\n{CALL}",
    f"`{CALL}`",
    f"So:\n\n```json\n{CALL}\n```\n\nSay so.",
    f"So:\n\n```xml\n{TAGGED}\n```\n\nSay so.",
    f"{CALL}\n\nSay so.",
    f"```python\n{CALL}\n```",
    f"```python\n\n{CALL}\n```",
    f"```python\n{TAGGED}\n```",
    'I call open(room="hall")',
    'Well.\n\nopen(room="hall")',
    '```json\n{"name": "fold", "version": "1"}\n```',
    '```json\n{"name": "open", "arguments": {}}\n```',
    '{"name": "shut", "arguments": {}}',
    "<function=shut>\n</function>",
    "<tool_call> is a tag.",
    "\n\n  spaces \n\n",
]


@pytest.mark.parametrize(("text", "shown"), CALLED)
@pytest.mark.parametrize("own", [True, False])
def test_where_a_call_may_stand(text: str, shown: str, own: bool):
    assert told(run([text], own=own)) == (shown, ONE)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("own", [True, False])
def test_elsewhere_it_is_text(text: str, own: bool):
    assert told(run([text], own=own)) == (text, [])


PARTS = [
    CALL,
    RING,
    TAGGED,
    START,
    END,
    "```",
    "```json\n",
    "```python\n",
    "\n",
    "\n\n",
    " ",
    "word",
    "{",
    "[",
    ",",
    "open(",
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.lists(st.sampled_from([*PARTS, *TEXTS, *(text for text, _ in CALLED)]), max_size=6).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    cut=st.booleans(),
    how=st.sampled_from([{}, {"own": False}, {"forced": True}, {"forced": True, "most": 1}, {"most": 1}]),
)
def test_the_result_does_not_depend_on_the_pieces(text: str, cuts: list[int], cut: bool, how: dict[str, Any]):
    edges = [0, *sorted(at for at in cuts if at <= len(text)), len(text)]
    outs = [run(pieces, cut=cut, **how) for pieces in ([text[a:b] for a, b in pairwise(edges)], [text], list(text))]
    assert told(outs[0]) == told(outs[1]) == told(outs[2])
    for out in outs:
        assert all(map(text_of, (piece for piece in out if not isinstance(piece, ToolCall))))
        assert text.startswith("".join(map(text_of, out)))
        if not how.get("forced") and not how.get("most") and len(told(out)[1]) < 3:
            assert "".join(map(text_of, out)) == text


def test_a_repeated_call_ends_a_forced_answer_whatever_calls_follow():
    text = f"{RING}{RING}```json\n{CALL}\n``` {CALL}"
    for pieces in ([text], list(text)):
        assert told(run(pieces, forced=True)) == ("", [("ring", {})])


def test_text_is_not_held_longer_than_it_may_be_a_call():
    made = stage()
    assert made.add("Hello") == ["Hello"]
    assert made.add(" wor") == [" wor"]
    assert made.add("\n\n") == [] and made.add('{"na') == []
    assert made.add('me": "fold"') == ['\n\n{"name": "fold"']
    assert made.add("\n```js") == [] and made.add("on\n") == []
    assert made.add("Say") == ["\n```json\nSay"]


def test_what_is_too_long_is_no_call():
    long = json.dumps({"name": "open", "arguments": {"room": "x" * HELD_CHARACTERS_MAX}})
    assert told(run([long])) == (long, [])
    made = stage()
    assert "".join(map(str, made.add(long))) != "", "it is not held any more"


def test_a_call_that_is_cut_is_text_and_the_whole_ones_before_it_are_calls():
    assert told(run([CALL[:30]], cut=True)) == (CALL[:30], [])
    assert told(run([CALL[:-1]], cut=True)) == (CALL[:-1], []), "nothing is mended of what is cut"
    assert told(run([f"{CALL}\n{RING[:9]}"], cut=True)) == ("", ONE)
    assert told(run([f"{TAGGED}\n{START}\n{RING[:9]}"], cut=True)) == ("", ONE)


@pytest.mark.parametrize("text", [CALL[:12], f"{START}\n{CALL[:12]}", START, START[:6], "```json\n{"])
def test_where_a_call_is_forced_the_beginning_of_one_is_no_text(text: str):
    assert told(run([text], cut=True, forced=True)) == ("", [])


def test_a_forced_answer_ends_with_its_first_repetition():
    for text in (f"{TAGGED}\n" * 5, f"{CALL}\n" * 5, f"[{CALL}, {CALL}, {RING}]"):
        assert told(run([text], forced=True)) == ("", ONE)
    other = CALL.replace(" ", "")
    assert told(run([f"{CALL}\n{RING}\n{other}\n{RING}"], forced=True)) == ("", [*ONE, ("ring", {})])
    assert told(run([f"{CALL}\n{RING}\n{other}"], forced=True, most=1)) == ("", ONE)


def test_the_third_equal_call_in_a_row_ends_an_answer():
    assert told(run([f"{TAGGED}\n" * 5 + "more"])) == ("", ONE * 3)
    assert told(run([f"{CALL}\n" * 5 + "more"])) == ("", ONE * 3)
    mixed = f"{CALL}\n{CALL}\n{RING}\n{CALL}\n{CALL}"
    assert len(told(run([mixed]))[1]) == 5


def test_a_call_behind_a_familys_own_mark_is_one_whatever_follows():
    certain = OwnMarks(("[CALLS]",), certain=True)
    bodies = LooseReader(DECLARED, ("[CALLS]",))
    for pieces in ([f"[CALLS][{CALL}]\n\nI wait."], list(f"[CALLS][{CALL}]\n\nI wait.")):
        made = CallStage(None, LenientCalls(bodies, certain), CallLimit())
        assert told([*(found for piece in pieces for found in made.add(piece)), *made.flush()]) == ("I wait.", ONE)
