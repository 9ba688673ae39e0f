"""A script gives the replies in its file, and calls the tool that the caller has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.source import EMBEDDED
from satchel.api.text.model import load_text_model
from satchel.api.text.script import FILE, Script, ScriptedReply, answer_tokens, token_grammar
from satchel.cluster.errors import InvalidRequest, ModelLoadError

ASKED = {"role": "user", "content": "Please read the file /tmp/a.txt and say what is in it."}
CALLED = {"role": "assistant", "content": "", "tool_calls": []}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def shipped() -> Script:
    script = Script.read(EMBEDDED / "script")
    assert script is not None
    return script


@pytest.mark.parametrize(
    ("offered", "call"),
    [
        (["Bash", "Read"], ("Read", {"file_path": "/tmp/a.txt", "filepath": "/tmp/a.txt"})),
        (["shell"], ("shell", {"command": ["cat", "/tmp/a.txt"]})),
        (["Write"], None),
        ([], None),
    ],
)
def test_the_first_tool_of_a_rule_that_is_offered_is_called(offered: list[str], call: object):
    assert shipped().reply([ASKED], [tool(name) for name in offered]).calls == (() if call is None else (call,))


def test_a_call_has_those_arguments_that_its_tool_has():
    reader = {"function": {"name": "read_file", "parameters": {"properties": {"path": {"type": "string"}}}}}
    assert shipped().reply([ASKED], [reader]).calls == (("read_file", {"path": "/tmp/a.txt"}),)


def test_results_of_tools_are_answered_whatever_the_user_says_beside_them():
    result = {"role": "tool", "content": [{"type": "text", "text": " a heron\nsleeps"}]}
    later = {"role": "user", "content": "Say 'no'"}
    assert shipped().reply([ASKED, CALLED, result, later], [tool("Read")]) == ScriptedReply("It says: a heron\nsleeps")
    assert shipped().reply([ASKED, CALLED, later], []) == ScriptedReply("no")
    both = [{"role": "tool", "content": text} for text in ("one", "two", "three")]
    assert shipped().reply([ASKED, CALLED, *both], []).text == "It says: one\ntwo\nthree"
    system = {"role": "system", "content": "Say 'yes'"}
    assert shipped().reply([ASKED, CALLED, later, system], []) == ScriptedReply("no")
    assert shipped().reply([{"role": "user", "content": None}], []).text.startswith("I only say")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"rules": [{}], "otherwise": ""}', '{"rules": [{"after": "user", "pattern": "("}]}']
)
def test_a_malformed_script_is_refused(text: str, tmp_path: Path):
    assert Script.read(tmp_path) is None
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelLoadError, match="script"):
        Script.read(tmp_path)


def test_an_answer_is_what_the_template_writes_after_its_prompt():
    model = load_text_model(EMBEDDED / "script")
    assert model.script is not None
    said = [{"role": "user", "content": "Hi"}]
    prompt = model.template.render(said)
    whole = model.template.render([*said, {"role": "assistant", "content": "Hello there"}], generation_prompt=False)
    tokens = answer_tokens(model.tokenizer, prompt, whole)
    assert model.tokenizer.encode("Hello there") == tokens
    assert token_grammar(tokens) == "start: " + " ".join(f"<[{token}]>" for token in tokens)
    with pytest.raises(InvalidRequest, match="cannot be scripted"):
        answer_tokens(model.tokenizer, prompt, "something else")


def test_the_scripted_model_has_the_tokenizer_of_the_other_one():
    """`training.script` copies it."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (EMBEDDED / "script" / name).read_bytes() == (EMBEDDED / "recall" / name).read_bytes()
    assert json.loads((EMBEDDED / "script" / "config.json").read_text())["max_position_embeddings"] == 131_072
