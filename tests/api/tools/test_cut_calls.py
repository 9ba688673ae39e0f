"""Answers that end within a call: by a limit, a stop string or token, or the model itself. At every place and in every
call format, only calls that were completely written are reported as complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.api.text.answers.sequence_text import SequenceText, TextDelta
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import ToolCall
from satchel.api.tools.call_finder import CallFinder
from satchel.api.tools.formats.harmony_splitter import HarmonySplitter
from tests.worlds.models.call_templates import FAMILIES, UNKNOWN, write_family
from tests.worlds.models.harmony import write_harmony

PROPERTIES = {"path": {"type": "string"}, "content": {"type": "string"}, "count": {"type": "integer"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("write", "note")
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write", {"content": "one {two} [three]", "count": 1234, "path": "/tmp/abc-def"}),
    ("note", {"path": "/tmp/other"}),
]
SHOWN = [family for family in {**FAMILIES, **UNKNOWN} if family not in ("odd", "pythonic, not shown", "llama, bare")]


@pytest.fixture(scope="module", params=[*SHOWN, "harmony"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = tmp_path_factory.mktemp("family")
    if request.param == "harmony":
        return load_text_model(write_harmony(folder), name="harmony")
    return load_text_model(write_family(folder, request.param), name=request.param)


def written(text: TextModel) -> str:
    """Returns the template's text for the calls, as many as it supports at once."""
    if text.template.is_harmony:
        name, given = CALLS[0]
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
    ids = ("abcdefgh1", "abcdefgh2")
    said = [
        {"id": f"functions.{name}:{index}" if text.name == "kimi" else ids[index], "type": "function",
         "function": {"name": name, "arguments": given}}
        for index, (name, given) in enumerate(CALLS[: 1 if text.name == "llama" else 2])
    ]  # fmt: skip
    rendered = text.template.render([{"role": "assistant", "content": "", "tool_calls": said}], generation_prompt=False)
    return rendered.removeprefix("<|im_start|>assistant\n").partition("<|im_end|>")[0].lstrip("\n")


class Told:
    """The result of an answer.

    Args:
        cut: whether a limit ended it.
        sequence: the arguments of `SequenceText`.
    """

    def __init__(self, text: TextModel, answer: str, *, cut: bool = False, **sequence: Any) -> None:
        finder = CallFinder(text.calls, text.tokenizer, TOOLS, text.call_format)
        harmony = HarmonySplitter(TOOLS) if text.template.is_harmony else None
        made = SequenceText(
            text.tokenizer, text.tokenizer.detokenizer(), calls=finder.stage(harmony), harmony=harmony, **sequence
        )
        events = []
        for token in [*text.tokenizer.encode(answer), *sequence.get("stop_tokens", ())]:
            if not made.stopped:
                events += made.add([token])
        events += made.finish(cut=cut)
        self.called = made.called
        self.calls = [event for event in events if isinstance(event, ToolCall)]
        self.whole = [(call.name, call.given) for call in self.calls if call.given is not None]
        self.content = "".join(event.text for event in events if isinstance(event, TextDelta))


def expected(text: TextModel) -> list[tuple[str, dict[str, Any]]]:
    return CALLS[:1] if text.template.is_harmony or text.name == "llama" else CALLS


def test_whole_answers_are_called(text: TextModel):
    told = Told(text, written(text))
    assert (told.whole, told.called) == (expected(text), True)


def test_what_a_limit_cuts_is_no_whole_call(text: TextModel):
    answer = written(text)
    for end in range(0, len(answer), 3):
        told = Told(text, answer[:end], cut=True)
        assert told.whole == expected(text)[: len(told.whole)], answer[:end]
        assert not told.called or told.calls[-1].given is not None


def test_no_value_is_made_up_where_the_model_itself_ends(text: TextModel):
    """Only brackets are added: a call may then have fewer arguments, but no different ones."""
    answer = written(text)
    for end in range(0, len(answer), 3):
        told = Told(text, answer[:end])
        for (name, given), (right, whole) in zip(told.whole, expected(text), strict=False):
            assert name == right and given is not None
            assert all(value in (whole[key], int(str(whole[key])[:len(str(value))]) if key == "count" else None)
                       for key, value in given.items()), answer[:end]  # fmt: skip


@pytest.mark.parametrize("stop", ["abc", "two", "234"])
def test_a_stop_string_within_a_call_leaves_it_out(text: TextModel, stop: str):
    told = Told(text, written(text), stops=[stop])
    if text.template.is_harmony:
        assert told.whole == expected(text), "stop strings are looked for in what is said to the user"
    else:
        assert not told.called and not told.calls


def test_a_stop_string_within_the_second_call_leaves_the_first(text: TextModel):
    if len(expected(text)) < 2:
        return
    told = Told(text, written(text), stops=["oth"])
    assert told.whole == expected(text)[: len(told.calls)] and len(told.calls) < 2
    told = Told(text, written(text) + "\nNow STOP it", stops=["STOP"])
    assert not told.calls or (told.called and told.whole == expected(text))


def test_a_stop_token_within_a_call_leaves_it_out(text: TextModel):
    answer = written(text)
    end = answer.index("abc")
    told = Told(text, answer[:end], stop_tokens=text.tokenizer.encode("\ue000")[:1])
    assert not told.called and not told.calls
