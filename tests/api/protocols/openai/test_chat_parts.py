"""`/v1/chat/completions`: parts of content that clients of other servers send back. Supported ones are shown to the
model, others are left out and named; in the user's newest message they are an error."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.worlds.api.remembering import Remembering

AND_NOW = {"role": "user", "content": "And now?"}
PAGE = base64.b64encode(b"%PDF").decode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def answered(*parts: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": list(parts), **fields}, AND_NOW]


async def shown(api: Any, backend: Any, messages: list[dict[str, Any]], left_out: str = "") -> str:
    """Returns the prompt; it is the same whole, streamed and tokenized."""
    prompts: list[str] = []
    for stream in (False, True):
        response = await api.post({"messages": messages, "stream": stream})
        assert response.status_code == 200, response.text
        assert response.headers.get("x-satchel-left-out", "") == left_out
        prompts.append(backend.prompt)
    tokens = await api.post({"messages": messages}, path="tokenize")
    assert tokens.headers.get("x-satchel-left-out", "") == left_out
    assert prompts[0] == prompts[1] and tokens.json()["tokens"] == backend.requests[-1]["prompt"]
    return prompts[0]


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "thinking", "thinking": "hm, well"},
        {"type": "thinking", "thinking": [text("hm, "), text("well")], "closed": True},
        {"type": "thinking", "thinking": "hm, well", "signature": "s"},
        {"type": "reasoning", "text": "hm, well"},
        {"type": "reasoning", "reasoning": "hm, well", "summary": []},
        {"type": "reasoning_text", "text": "hm, well"},
    ],
)
async def test_thoughts_among_the_parts_are_the_messages_reasoning(api, thinker, thinking):
    whole = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "reasoning_content": "hm, well"}]
    await api.post({"messages": [*whole, AND_NOW]})
    assert "hm, well" in thinker.prompt
    expected = thinker.prompt
    assert await shown(api, thinker, answered(thinking, text("a"))) == expected
    # The separate field counts.
    assert await shown(api, thinker, answered({**thinking}, text("a"), reasoning_content="hm, well")) == expected


async def test_thoughts_that_nobody_can_read_say_nothing(api, thinker):
    sealed = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking"}, {"type": "thinking", "thinking": ""}]
    expected = await shown(api, thinker, answered(text("a")))
    assert await shown(api, thinker, answered(*sealed, text("a"))) == expected


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "thinking", "thinking": 5}, "thinking"),
        ({"type": "thinking", "thinking": [5]}, "thinking[0]"),
        ({"type": "thinking", "thinking": [{"type": "text"}]}, "thinking[0]"),
        ({"type": "reasoning", "text": {}}, "text"),
        ({"type": "file", "file": 5}, "file"),
        ({"type": "file", "file": {"file_data": 5}}, "file.file_data"),
        ({"type": "text"}, "text"),
        ({"type": 5}, "type"),
    ],
)
async def test_known_parts_that_are_broken_are_refused_by_their_place(api, backend, part, where):
    response = await api.post({"messages": answered(part)})
    assert response.status_code == 400 and response.json()["error"]["param"] == f"messages[1].content[0].{where}"
    assert backend.requests == []


async def test_the_user_does_not_think(api):
    thinking = {"type": "thinking", "thinking": "hm"}
    response = await api.post({"messages": [{"role": "user", "content": [thinking]}]})
    assert response.json()["error"]["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,b25l"}},
            "File a.txt:\none",
        ),
        ({"type": "input_file", "file_data": "data:application/json,%5B1%5D"}, "File:\n[1]"),
        ({"type": "document", "source": {"type": "text", "data": "one"}}, "Document:\none"),
        ({"type": "tool_reference", "tool_name": "grep"}, "Tool found: grep"),
    ],
)
async def test_what_is_text_is_shown_as_text(api, backend, part, words):
    prompt = await shown(api, backend, [{"role": "user", "content": [part]}])
    assert f"user\n{words}<|im_end|>" in prompt
    prompt = await shown(api, backend, [*answered(text("a")), {"role": "tool", "content": [part]}])
    assert f"tool\n{words}<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PAGE}"}},
            "files other",
        ),
        ({"type": "file", "file": {"filename": "a.pdf", "file_id": "f"}}, "files other"),
    ],
)
async def test_a_file_that_cannot_be_read_is_refused_once_and_ends_no_conversation(api, backend, part, why):
    asked = {"role": "user", "content": [part, text("What is it?")]}
    response = await api.post({"messages": [asked]})
    assert response.status_code == 400 and why in response.json()["error"]["message"]
    # The client asks again, with the earlier messages.
    prompt = await shown(api, backend, [asked, AND_NOW], part["type"])
    assert "cannot be shown here.]What is it?" in prompt
    tool = {"role": "tool", "content": [part], "tool_call_id": "t"}
    assert "cannot be shown here.]<|im_end|>" in await shown(api, backend, [*answered(text("a")), tool], part["type"])


async def test_unknown_parts_of_earlier_messages_are_left_out_and_named(api, backend):
    unknown = {"type": "brain_wave", "x": 1}
    for messages in (
        answered(unknown, text("a")),
        [{"role": "user", "content": [unknown, text("a")]}, AND_NOW],
        [*answered(text("b")), {"role": "tool", "content": [unknown, text("a")]}],
    ):
        assert "a<|im_end|>" in await shown(api, backend, messages, "brain_wave")
    for newest in ({"role": "user", "content": [unknown]}, {"role": "system", "content": [unknown]}):
        response = await api.post({"messages": [*answered(text("a")), newest]})
        assert response.json()["error"]["param"] == "messages[3].content[0].type"


async def test_what_is_left_out_is_named_where_messages_are_put_into_a_memory(backend, config):
    endpoint = Remembering(backend, config)
    messages = answered({"type": "brain_wave"}, text("a"))
    response = await endpoint.client.post("/v1/agents/ada/inject", json={"messages": messages})
    assert response.status_code == 200 and response.headers["x-satchel-left-out"] == "brain_wave"
    await endpoint.client.aclose()


ARGUMENTS = ({"city": "Köln", "days": 2}, '{"city": "Köln", "days": 2}')


@pytest.mark.parametrize("arguments", ARGUMENTS)
async def test_the_arguments_of_earlier_calls_may_be_an_object_or_text(api, client, backend, arguments):
    function = {"name": "weather", "arguments": arguments}
    for called in (
        {"tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"function_call": function},
    ):
        await api.post({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **called}, AND_NOW]})
        assert '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}' in backend.prompt
    call = {"type": "function_call", "call_id": "c", **function}
    response = await client.post("/v1/responses", json={"input": [{"role": "user", "content": "Hi"}, call, AND_NOW]})
    assert response.status_code == 200 and '{"city": "Köln", "days": 2}' in backend.prompt


@pytest.mark.parametrize("arguments", [5, [5], True])
async def test_arguments_that_are_neither_are_refused(api, client, arguments):
    function = {"name": "weather", "arguments": arguments}
    where = {
        "tool_calls[0].function.arguments": {"tool_calls": [{"function": function}]},
        "function_call.arguments": {"function_call": function},
    }
    for place, called in where.items():
        response = await api.post({"messages": [{"role": "assistant", **called}, AND_NOW]})
        assert response.status_code == 400 and response.json()["error"]["param"] == f"messages[0].{place}"
    item = {"type": "function_call", "call_id": "c", **function}
    response = await client.post("/v1/responses", json={"input": [item]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input[0].arguments"
