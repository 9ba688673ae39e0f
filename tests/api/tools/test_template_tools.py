"""What chat templates do with tools, and the texts that describe tools if a template has no place for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.template_tools import TemplateTools
from tests.worlds.models.call_templates import write_family
from tests.worlds.models.tiny_tokenizers import write_folder

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Hi"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CALLED: list[dict[str, Any]] = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "It rains."},
]

_SAY = "{{- '[' + message.role + ']' + (message.content or '') }}"
_ASK = "{%- if add_generation_prompt %}{{- '[assistant]<think>' }}{%- endif %}"
_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + '<args>' + X + '</call>' }}"
    "{%- endfor %}"
)
_TOOLS = "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
_ROLES = "{%- if message.role not in ('user', 'assistant') %}{{- raise_exception('role') }}{%- endif %}"


def _template(calls: str, *, tools: str = _TOOLS, say: str = _SAY) -> str:
    return f"{tools}{{%- for message in messages %}}{say}{calls}{{%- endfor %}}{_ASK}"


AS_JSON = _CALLS.replace("X", "(call.function.arguments | tojson)")
AS_TEXT = _CALLS.replace("X", "call.function.arguments")
TEMPLATES: dict[str, tuple[str, TemplateTools]] = {
    "all of it, but not without tools": (_template(AS_JSON), TemplateTools()),
    "arguments as text": (_template(AS_TEXT), TemplateTools(arguments_as_text=True)),
    "no tools": (_template(AS_JSON, tools=""), TemplateTools(shows_tools=False)),
    "no calls": (_template(""), TemplateTools(shows_calls=False)),
    "no results": (
        _template(AS_JSON, say="{%- if message.role != 'tool' %}" + _SAY + "{%- endif %}"),
        TemplateTools(shows_results=False),
    ),
    "no system": (
        _template(
            "",
            tools="",
            say=_ROLES + _SAY,
        ),
        TemplateTools(shows_tools=False, shows_calls=False, shows_results=False, takes_system=False),
    ),
    "tools that it cannot take": (
        _template(AS_JSON, tools="{%- for tool in tools %}{{- tool.parameter_definitions + 1 }}{%- endfor %}"),
        TemplateTools(shows_tools=False),
    ),
}


def model(folder: Path, template: str) -> TextModel:
    tokenizer = load_text_model(write_family(folder / "family", "llama")).tokenizer.backend
    return load_text_model(write_folder(folder / "model", tokenizer, template))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_tried(name: str, tmp_path: Path):
    template, expected = TEMPLATES[name]
    text = model(tmp_path, template)
    found = text.template.tools
    assert found is not None
    assert {**vars(found), "example": ""} == {**vars(expected), "example": ""}
    # Whatever the template does, the model is shown everything.
    assert "weather" in text.template.render([ASKED], [TOOL])
    shown = text.template.render(CALLED, [TOOL])
    assert '"city": "Köln"' in shown.replace("\\", "") and "It rains." in shown
    assert "Hi" in text.template.render([ASKED]), "without tools too"


def test_a_call_is_read_from_a_template_whose_prompts_end_in_a_thought(tmp_path: Path):
    text = model(tmp_path, TEMPLATES["all of it, but not without tools"][0])
    assert text.call_format.constrains and "<args>" in text.calls.shown and "<think>" not in text.calls.shown


def test_tools_are_told_in_the_system_message_or_the_first_one():
    tools = TemplateTools(shows_tools=False)
    system = {"role": "system", "content": "Be brief."}
    first, asked = tools.with_tools([system, ASKED], [TOOL])
    assert first["content"].startswith("Be brief.\n\n") and json.dumps(TOOL["function"]) in first["content"]
    assert asked == ASKED
    first, asked = tools.with_tools([ASKED], [TOOL])
    assert first["role"] == "system" and asked == ASKED
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    (only,) = TemplateTools(shows_tools=False, takes_system=False).with_tools([parts], [TOOL])
    assert only["content"][0]["text"] == first["content"] and only["content"][1:] == parts["content"]


def test_results_of_several_calls_are_one_message_of_the_users():
    tools = TemplateTools(shows_results=False)
    second = {**CALL, "id": "call00002", "function": {"name": "time", "arguments": {}}}
    called = {**CALLED[1], "tool_calls": [CALL, second]}
    result = {"role": "tool", "tool_call_id": "call00002", "content": "Noon."}
    *_, said = tools.shown([ASKED, called, CALLED[2], result, ASKED])
    assert said == {"role": "user", "content": "The result of weather:\nIt rains.\n\nThe result of time:\nNoon.\n\nHi"}


def test_messages_of_the_users_are_joined_with_results_alone():
    """A conversation without tools is rendered as if the template was never tested with tools."""
    way = TemplateTools(shows_results=False)
    twice = [ASKED, {"role": "user", "content": "Are you there?"}]
    assert way.shown(twice) == twice
    shown = way.shown([*CALLED, *twice])
    assert [message["role"] for message in shown] == ["user", "assistant", "user", "user"]
    assert shown[2]["content"] == "The result of weather:\nIt rains.\n\nHi" and shown[3] == twice[1]
