"""A model's call format is recognised by its template; if mlx-lm has no parser for it, the format parses the calls
itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler
from satchel.api.pipeline.constrained_answers import ModelGrammars
from satchel.api.text.answers.grammars import Thought
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import ToolCall
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.formats.call_format import CallFormat, ConstrainedCalls, ConstrainedTool
from satchel.api.tools.formats.harmony_calls import HarmonyCalls
from satchel.api.tools.formats.json_calls import JsonCalls
from satchel.api.tools.formats.keyed_calls import KeyedCalls
from satchel.api.tools.formats.tagged_calls import TaggedCalls
from satchel.api.tools.formats.untold_calls import UntoldCalls
from tests.worlds.api.fake_backend import Chat, FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.call_templates import UNKNOWN, write_family
from tests.worlds.models.harmony import write_harmony
from tests.worlds.models.tiny_tokenizers import write_folder

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two")]
CALLS = [("one", {"a": '}"]', "b": [1, {}]}), ("two", {})]


RECOGNISED: dict[str, CallFormat] = {
    "hermes": JsonCalls(
        '<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>"
    ),
    "mistral, ARGS": JsonCalls("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", ""),
    "llama": JsonCalls('{"name": "', '", "parameters": ', "", "}"),
    "glm": TaggedCalls(
        "<tool_call>",
        "",
        "\n<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>",
        "\n</tool_call>",
        "\n<tool_call>",
    ),
    "llama, pythonic": KeyedCalls("[", "(", "=", ", ", '"', ")", ", ", "]"),
    "gemma4": KeyedCalls(
        "<|tool_call>call:", "{", ":", ",", '<|"|>', "}", "<tool_call|><|tool_call>call:", "<tool_call|>"
    ),
}


@pytest.fixture(params=UNKNOWN)
def text(request: pytest.FixtureRequest, tmp_path: Path) -> TextModel:
    return load_text_model(write_family(tmp_path / "family", request.param), name=request.param)


def written(text: TextModel, calls: list[tuple[str, Any]]) -> str:
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    rendered = text.template.render([{"role": "assistant", "content": "", "tool_calls": made}], generation_prompt=False)
    return rendered[rendered.index(text.calls.marks.start) : rendered.rindex("<|im_end|>")]


def split(text: TextModel, answer: str) -> tuple[str, list[tuple[str, Any]]]:
    assert text.calls.marks.parser is not None
    splitter = ToolCallSplitter(
        text.calls.marks.start, text.calls.marks.end, call_parser(text.calls.marks.parser, TOOLS)
    )
    pieces = [piece for character in answer for piece in splitter.add(character)] + splitter.flush()
    calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


@pytest.mark.parametrize("family", RECOGNISED)
def test_a_format_is_told_by_what_the_template_writes(tmp_path: Path, family: str):
    text = load_text_model(write_family(tmp_path, family), name=family)
    assert text.call_format == RECOGNISED[family] and text.call_format.constrains
    assert text.template.bare.writes is None, "the template takes calls as they are"


def test_a_format_that_the_template_does_not_tell(tmp_path: Path):
    text = load_text_model(write_family(tmp_path, "odd"), name="odd")
    assert text.call_format == UntoldCalls(text.calls.shown) and not text.call_format.constrains
    harmony = load_text_model(write_harmony(tmp_path / "harmony"), name="harmony")
    assert isinstance(harmony.call_format, HarmonyCalls) and harmony.call_format.constrains
    assert harmony.calls.channels(TOOLS) is not None and text.calls.channels(TOOLS) is None


def test_calls_are_read_as_the_template_writes_them(text: TextModel):
    calls = CALLS[: 1 if text.name == "llama" else 2]
    assert split(text, "I look. " + written(text, calls)) == ("I look.", calls)


def test_what_is_no_call_is_text(text: TextModel):
    said = written(text, CALLS[:1])
    for other in (said.replace("one", "three"), said[: len(said) // 2], text.calls.marks.start, "Hello"):
        assert split(text, other) == (other, [])


def test_json_may_be_laid_out_otherwise(tmp_path: Path):
    text = load_text_model(write_family(tmp_path / "family", "llama"))
    assert split(text, '{"name":"one","parameters":{"a":1}}; {"name": "two", "arguments": {}}') == (
        "",
        [("one", {"a": 1}), ("two", {})],
    )


def test_calls_are_forced_in_that_form(text: TextModel):
    tool = ConstrainedTool(
        "one", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "tools[0]"
    )
    grammar = ModelGrammars(text, 2**20).grammar(Thought.NONE, None, ConstrainedCalls([tool], forced=True))

    def takes(answer: str) -> bool:
        matcher = GrammarCompiler(text.tokenizer.json(), text.tokenizer.end_tokens).matcher(grammar)
        tokens = text.tokenizer.encode(answer)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert takes(written(text, [("one", {"a": 5})]))
    assert not takes(written(text, [("one", {"a": "5"})])) and not takes("Hello")


def test_a_template_without_calls_has_none(tmp_path: Path):
    plain = "{%- for message in messages %}{{- message.role + message.content + '<|im_end|>' }}{% endfor %}{#- tools #}"
    other = load_text_model(write_family(tmp_path / "other", "llama"))
    text = load_text_model(write_folder(tmp_path / "plain", other.tokenizer.backend, plain))  # type: ignore[arg-type]
    assert not text.calls.known and text.calls.from_template is None


async def test_a_chat_calls_a_tool(api: Chat, backend: FakeBackend, text: TextModel, tmp_path: Path):
    backend.text = text
    folder = str(tmp_path / "family")
    backend.served[0] = served_model(folder=folder)
    backend.say(written(text, CALLS[:1]))
    choice = (await api.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == CALLS[0]
    (last,) = [chunk for chunk in await api.stream(tools=TOOLS) if chunk != "[DONE]" and _ends(chunk)]
    assert last["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_model_that_writes_calls_in_another_way_must_write_json(
    api: Chat, backend: FakeBackend, tmp_path: Path
):
    folder = write_family(tmp_path / "family", "odd")
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder)
    said = '{"name": "one", "arguments": {"a": 1}}'
    for how in ("required", "auto"):
        marked = said if how == "required" else f"<tool_call>{said}</tool_call>"
        backend.say(marked)
        (call,) = (await api.chat(tools=TOOLS, tool_choice=how)).json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("one", {"a": 1})


def _ends(chunk: dict[str, Any]) -> bool:
    return bool(chunk["choices"]) and chunk["choices"][0]["finish_reason"] is not None
