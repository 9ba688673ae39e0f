"""OpenAI's messages are converted to the internal messages."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.protocols.openai.messages import read_messages
from satchel.api.requests.conversation import with_arguments
from satchel.cluster.errors import InvalidRequest


def test_what_is_null_or_unknown_is_left_out_and_texts_are_joined() -> None:
    call = {"id": None, "function": {"name": "f", "strict": True}, "index": 0}
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "input_text", "text": "b"}]
    given = [
        {"role": "developer", "content": parts, "name": None, "invented": 1, "tool_calls": "ignored"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "content": "c", "tool_calls": [], "reasoning_content": "d"},
        {"role": "tool", "content": [], "tool_call_id": "e"},
    ]
    called = {"type": "function", "function": {"name": "f", "arguments": ""}}
    assert read_messages(given) == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
        {"role": "tool", "content": "", "tool_call_id": "e"},
    ]
    assert given[1]["tool_calls"] == [call] and "name" in given[0]


def test_what_other_servers_and_older_clients_write_is_understood() -> None:
    function = {"name": "f", "arguments": None}
    given = [
        {"role": "assistant", "content": "c", "reasoning": "d", "refusal": None},
        {"role": "assistant", "content": None, "reasoning": "d", "reasoning_content": None},
        {"role": "assistant", "content": "c", "reasoning_content": "d", "reasoning": "not this"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "tool_calls": [{"id": "e", "type": None, "function": function}], "function_call": None},
        {"role": "assistant", "content": None, "tool_calls": None, "function_call": {**function, "arguments": "{}"}},
        {"role": "function", "name": "f", "content": None},
    ]
    called = {"name": "f", "arguments": ""}
    assert read_messages(given) == [
        *[{"role": "assistant", "content": text, "reasoning_content": "d"} for text in ("c", "", "c")],
        *[{"role": "assistant", "content": "No."}] * 2,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "e", "type": "function", "function": called}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "function-6", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "name": "f", "content": "", "tool_call_id": "function-6"},
    ]


@pytest.mark.parametrize(("arguments", "shown"), [('{"a":  1}', {"a": 1}), ("[1]", "[1]"), ("{", "{")])
def test_templates_get_arguments_as_a_mapping_and_transcripts_as_written(arguments: str, shown: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}])
    assert with_arguments([message])[0]["tool_calls"][0]["function"]["arguments"] == shown
    assert message.get("tool_calls", [])[0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "robot"}, "messages[1].role is 'robot'; known are system, developer, user, assistant, tool"),
        (5, "messages[1] must be an object with role and content"),
        ({"role": "user", "content": 5}, "messages[1].content must be a string or a list of parts"),
        ({"role": "user"}, "messages[1].content: Field required"),
        ({"role": "function", "content": "x"}, "messages[1].name: Field required"),
        ({"role": "assistant", "function_call": {}}, "messages[1].function_call.name: Field required"),
        (
            {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]},
            "messages[1].function_call: the message has tool_calls already",
        ),
        ({"role": "assistant", "content": 5}, "messages[1].content must be a string or a list of parts"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[1].content[0]: this model does not support files"),
        ({"role": "user", "content": [{"type": "image"}]}, "messages[1].content[0].image is missing"),
    ],
)
def test_a_wrong_message_is_refused_in_words(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages([{"role": "user", "content": "x"}, message])
    assert caught.value.message.startswith(complaint)
