"""OpenAI's messages become the messages that the rest takes."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.generation.conversation import with_arguments
from satchel.api.openai.messages import read_messages
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
        ({"role": "assistant"}, "messages[1].content is missing (only an assistant message with tool_calls may"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[1].content[0]: this model takes no files"),
        ({"role": "user", "content": [{"type": "image"}]}, "messages[1].content[0].image is missing"),
    ],
)
def test_a_wrong_message_is_refused_in_words(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages([{"role": "user", "content": "x"}, message])
    assert caught.value.message.startswith(complaint)
