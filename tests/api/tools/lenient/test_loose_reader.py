"""Calls in the forms that models write. Every beginning of a call counts as a possible call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from satchel.api.tools.lenient.declared import DeclaredTools
from satchel.api.tools.lenient.loose_reader import LooseReader, State

TEXT = {"type": "string"}
OPEN = {"type": "object", "properties": {"room": TEXT, "count": {"type": "integer"}}, "required": ["room"]}
DECLARED = DeclaredTools([{"function": {"name": "open", "parameters": OPEN}}, {"function": {"name": "ring"}}])
MARKS = ("<|begin|>", "<|sep|>", "<|id|>", "<|end|>", "<|begin|>calls<|sep|>")
BODIES = LooseReader(DECLARED, MARKS, quote='<|"|>')

CALL = '{"name": "open", "arguments": {"room": "hall"}}'
RING = '{"name": "ring"}'
BLOCK = "<function=open>\n<parameter=room>\nhall\n</parameter>\n</function>"
ONE, TWO = [("open", {"room": "hall"})], [("open", {"room": "hall"}), ("ring", {})]

FORMS: dict[str, list[tuple[str, Any]]] = {
    CALL: ONE,
    CALL.replace("arguments", "parameters").replace('"name"', '"tool_name"'): ONE,
    '{"type": "function", "id": "a", ' + CALL[1:]: ONE,
    '{"type": "function", "function": ' + CALL + "}": ONE,
    '{"tool_calls": [' + CALL + "]}": ONE,
    '{"name": "open", "arguments": "{\\"room\\": \\"hall\\"}"}': ONE,
    '{"name": "functions.open", "arguments": {"room": "hall",},}': ONE,
    "{'name': 'open', 'arguments': {'room': 'hall'}}": ONE,
    "{{" + CALL[1:-2] + "}}}": ONE,
    CALL[:-1]: ONE,
    CALL + "}": ONE,
    f"{CALL}\n{RING}": TWO,
    f"{CALL}; {RING}": TWO,
    f"[{CALL}, {RING}]": TWO,
    f"functools[{CALL}]": ONE,
    f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{RING}\n</tool_call>": TWO,
    f"<tool_call>\n{CALL[:-1]}\n</tool_call>": ONE,
    f"<tools>{CALL}</tools>": ONE,
    f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>": ONE,
    f"```json\n{CALL}\n```\n</tool_call>": ONE,
    f"{CALL}\n</tool_call>": ONE,
    BLOCK: ONE,
    BLOCK + BLOCK.replace("open", "ring").replace("<parameter=room>\nhall\n</parameter>\n", ""): TWO,
    BLOCK.replace("\n", ""): ONE,
    BLOCK.replace("</parameter>\n", ""): ONE,
    BLOCK.replace("</function>", "</tool_call>"): ONE,
    BLOCK.replace("=room", ' name="room"').replace("=open", ' name="open"'): ONE,
    BLOCK.replace("hall\n</parameter>", "hall\n<parameter=count>\n2\n</parameter>"): [
        ("open", {"room": "hall", "count": 2})
    ],
    '<function=open>{"room": "hall"}</function>': ONE,
    '<invoke name="open"><parameter name="room">hall</parameter></invoke>': ONE,
    '<a:invoke name="open">\n<a:parameter name="room" string="true">hall</a:parameter>\n</a:invoke>': ONE,
    '[open(room="hall"), ring()]': TWO,
    'open(room="hall")': ONE,
    "open(room='''a \"b\"\nc''', count=2)": [("open", {"room": 'a "b"\nc', "count": 2})],
    '<tool_call>default_api.open(room="hall")</tool_call>': ONE,
    'call:open{room:<|"|>hall<|"|>,count:2}': [("open", {"room": "hall", "count": 2})],
    'call:open(room=<|"|>hall<|"|>)': ONE,
    '<|begin|>open<|id|>abc123<|sep|>{"room": "hall"}<|end|>': ONE,
    '<|begin|>abc123<|sep|>open<|sep|>{"room": "hall"}<|end|><|begin|>ring<|sep|>{}<|end|>': TWO,
    '<|begin|>calls<|sep|>\n<|begin|>function<|sep|>open\n```json\n{"room": "hall"}\n```<|end|>': ONE,
    'functions.open:0<|sep|>{"room": "hall"}': ONE,
    "<tool_call>open\n<arg_key>room</arg_key>\n<arg_value>hall</arg_value>\n</tool_call>": ONE,
}

NONE = [
    *("Hello", '"open"', "{}", "[]", "[1]", "{", '{"name": "open"}', '{"name": "shut", "arguments": {}}'),
    '{"name": "open", "arguments": {"room": "hall"}, "version": 1}',
    '{"name": "open", "arguments": {"room": "hall"}, "parameters": {}}',
    '{"name": "open", "arguments": {"room": 3}}',
    CALL[:-3] + " and more",
    f"{CALL} and more",
    f"[{CALL}, 3]",
    'open("hall")',
    "open(room=hall)",
    'open(room="hall").close()',
    'print(open(room="hall"))',
    "<function=shut>\n</function>",
    "<function=open>\n</function>",
    f"```python\n{CALL}\n```",
    '{"open": {"room": "hall"}}',
]


@pytest.mark.parametrize("text", FORMS)
def test_a_form_is_read(text: str):
    reading = BODIES.read(text, final=True)
    assert reading.state is State.WHOLE and text[reading.end :].strip() == ""
    assert [(name, json.loads(arguments)) for name, arguments in reading.calls] == FORMS[text]


@pytest.mark.parametrize("text", FORMS)
def test_no_beginning_of_a_call_is_given_up(text: str):
    for end in range(1, len(text)):
        assert BODIES.read(text[:end], final=False).state is not State.OTHER, text[:end]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_call(text: str):
    reading = BODIES.read(text, final=True)
    assert not (reading.calls and reading.state is State.WHOLE)


@pytest.mark.parametrize(
    "text", ['{"version"', '{"name": "shut"', "Hello ", "opening", "<function=shut>", '[{"a"', "open(3"]
)
def test_what_cannot_become_a_call_is_known_at_once(text: str):
    assert BODIES.read(text, final=False).state is State.OTHER


def test_of_what_is_cut_the_whole_calls_are_read():
    for text in (f"[{CALL}, {RING[:8]}", f"{CALL}\n{RING[:8]}", f"<tool_call>{CALL}</tool_call><tool_call>{RING[:8]}"):
        reading = BODIES.read(text, final=False)
        assert [name for name, _ in reading.calls] == ["open"] and reading.state is State.MORE


def test_what_follows_calls_is_told_apart():
    reading = BODIES.read(f"[{CALL}]\n\nI wait.", final=True)
    assert reading.state is State.OTHER and len(reading.calls) == 1 and reading.end == len(CALL) + 4


def test_a_name_may_be_the_key_where_a_template_writes_it_so():
    keyed = LooseReader(DECLARED, keyed_by_name=True)
    assert keyed.read('[{"open": {"room": "hall"}}, {"ring": {}}]', final=True).calls == [
        ("open", '{"room": "hall"}'),
        ("ring", "{}"),
    ]
